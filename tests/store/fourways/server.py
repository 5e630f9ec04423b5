"""``server.py KIND`` serves a store by the class of that kind (see `outcomes.store_class`), says at which port, and ends when its
stdin does.
"""

from __future__ import annotations

import sys
from datetime import timedelta

from outcomes import HOST, open_as_many_files_as_allowed, store_class

if __name__ == "__main__":
    open_as_many_files_as_allowed()
    store = store_class(sys.argv[1])(HOST, 0, None, True, timedelta(seconds=60), False)
    print(store.port, flush=True)
    sys.stdin.read()
