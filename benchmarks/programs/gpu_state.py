"""A worker with 10 GiB of tensors on a GPU, which it saves, and finds again when it is restarted.

``gpu_state.py GIB``. Each line: what, when on the machine's monotonic clock, how long it took, and the process.
"""

import os
import sys
import time
from functools import partial

import torch

from rallypoint import worker
from rallypoint.worker import checkpoint

BYTES_EACH = 1 << 28


def tell(what: str, took_s: float) -> None:
    print(what, time.monotonic(), f"{took_s:.4f}", os.getpid(), flush=True)


def timed(what: str, call: object) -> object:
    assert callable(call)
    torch.cuda.synchronize()
    began_at = time.monotonic()
    result = call()
    torch.cuda.synchronize()
    tell(what, time.monotonic() - began_at)
    return result


torch.ones(64, 64, device="cuda").sum().item()
worker.ready()
began_at = time.monotonic()
found = checkpoint.load(device="cuda")
if found is None:
    count = int(float(sys.argv[1]) * (1 << 30)) // BYTES_EACH
    state = {f"layer {number}": torch.randn(BYTES_EACH // 4, device="cuda") for number in range(count)}
    sums = [one.sum().item() for one in state.values()]
    for step in range(5):
        timed("save", partial(checkpoint.save, step, {"tensors": state, "sum": sums}))
else:
    total = sum(one.sum() for one in found.state["tensors"].values()).item()
    tell("back", time.monotonic() - began_at)
    assert [one.sum().item() for one in found.state["tensors"].values()] == found.state["sum"]
    assert all(one.is_cuda for one in found.state["tensors"].values())
    tell("same", 0.0)
time.sleep(600)
