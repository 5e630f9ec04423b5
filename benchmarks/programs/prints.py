"""A worker that prints numbered lines through a buffer of the usual size. Usage: prints.py FOLDER COUNT.

Launchers start Python with -u, which would write each line by itself; a program that logs a lot does as this one does.
"""

import io
import os
import sys
import time

folder, count = sys.argv[1], int(sys.argv[2])
rank = os.environ["LOCAL_RANK"]
with open(f"{folder}/start.{rank}", "w") as file:
    file.write(str(time.monotonic()))
with open(1, "w", buffering=io.DEFAULT_BUFFER_SIZE, closefd=False) as buffered:
    for number in range(count):
        print(f"rank {rank} step {number} loss 0.6931471805599453", file=buffered)
