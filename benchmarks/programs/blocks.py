"""A worker that writes a block of whole lines, COUNT times over, as fast as its pipe takes it.

Usage: blocks.py FOLDER COUNT [RANK]. The block is in FOLDER/block.RANK; the time of the first write goes to FOLDER/start.RANK.
"""

import os
import sys
import time

folder, count = sys.argv[1], int(sys.argv[2])
rank = sys.argv[3] if len(sys.argv) > 3 else os.environ["LOCAL_RANK"]
with open(f"{folder}/block.{rank}", "rb") as source:
    block = source.read()
with open(f"{folder}/start.{rank}", "w") as file:
    file.write(str(time.monotonic()))
for _ in range(count):
    written = 0
    while written < len(block):
        written += os.write(1, block[written:])
