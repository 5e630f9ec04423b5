"""A worker whose first line is the time at which it was written."""

import sys
import time

sys.stdout.write(f"{time.monotonic()}\n")
