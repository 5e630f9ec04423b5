"""A worker that says when it is there, in which attempt and as which process, and then sleeps until it is ended."""

import os
import signal
import time

os.write(1, f"{time.monotonic()} {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.getpid()}\n".encode())
signal.pause()
