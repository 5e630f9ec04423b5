"""A worker that notes when it started, under the size of its world, and waits to be ended."""

import os
import signal
import sys
import time

started_at = time.monotonic()
name = f"{os.environ['WORLD_SIZE']}.{os.environ['RANK']}.{os.getpid()}"
path = os.path.join(sys.argv[1], name)
with open(f"{path}.new", "w") as file:
    file.write(str(started_at))
os.rename(f"{path}.new", path)
signal.pause()
