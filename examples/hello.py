"""The smallest job: every worker says who it is. ``rallyrun --standalone --nproc-per-node 4 examples/hello.py``"""

from __future__ import annotations

import os

rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
print(f"worker {rank} of {world_size}")
