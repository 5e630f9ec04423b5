"""What a worker of these tests can be ordered to do with its store."""

from __future__ import annotations

CONNECT = """
from rallypoint.store.tcp_store import TCPStore
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=10)
"""
EXCHANGE = """
store.set(f"from {rank}", rank)
keys = [f"from {other}" for other in range(int(os.environ["WORLD_SIZE"]))]
heard = " ".join(value.decode() for value in store.multi_get(keys))
os.write(1, f"HEARD {heard}\\n".encode())
"""
SET_LATE = "store.set('late', 'yes')\nos.write(1, b'LATE ' + store.get('late') + b'\\n')"
BOOM = "raise ValueError('boom')"
