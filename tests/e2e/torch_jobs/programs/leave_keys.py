"""Looks at the store that it finds, fills it as programs with torch do, tells both, and stays until the test has seen enough.

The worker of rank 0 looks before any other of its generation writes, so all that it finds was left by an earlier one.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from telling import is_over, tell
from torch.distributed.distributed_c10d import _get_default_store

rank, generation = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=60))
found = store.list_keys() if rank == 0 else []
if rank == 0:
    store.set("has looked", generation)
assert store.get("has looked") == generation.encode()

dist.init_process_group("gloo")
dist.all_reduce(torch.tensor([rank]))
_get_default_store().set(f"left by {rank}", generation)
store.set(f"left by {rank}", generation)
assert store.get(f"left by {rank}") == generation.encode()  # a write is not answered: it is there for all once it can be read
dist.barrier()
tell(found=found, left=store.list_keys())

may_end = torch.zeros(1)
while not may_end.item():
    may_end[0] = is_over(sys.argv[1])
    dist.all_reduce(may_end, dist.ReduceOp.MAX)
dist.destroy_process_group()
