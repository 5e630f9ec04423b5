"""Sums up the ranks in the workers' store without torch: by the same protocol, at the same address."""

import os
import sys
import time

from telling import is_over, tell

from rallypoint.store.tcp_store import TCPStore

store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=60)
store.add("sum", int(os.environ["RANK"]))
if store.add("workers", 1) == int(os.environ["WORLD_SIZE"]):
    store.set("all are here", "")
store.wait(["all are here"])
tell(sum=store.add("sum", 0))
while not is_over(sys.argv[1]):
    time.sleep(0.02)
store.close()
