"""Tells that it is there, and ends when a file says so: ``finish`` in the folder, or ``fail.<rank>``, which it takes away."""

import os
import sys
import time

from telling import tell

folder, rank = sys.argv[1], os.environ["RANK"]
tell(master=os.environ["MASTER_PORT"], at=time.monotonic())
while not os.path.exists(f"{folder}/finish"):
    try:
        os.rename(f"{folder}/fail.{rank}", f"{folder}/failed.{rank}")
    except FileNotFoundError:
        time.sleep(0.01)
    else:
        sys.exit(3)
