"""States with torch's tensors and numpy's arrays."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch

# In a process of its own: see tests.torch_process.
PROGRAM = """
import os
import numpy, torch
from rallypoint.checkpoint.slots import Slots

model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).sum().backward()
    optimizer.step()
kinds = [torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float64]
state = {
    "model": model.state_dict(),
    "optimizer": optimizer.state_dict(),
    "kinds": [torch.ones(3, 5).to(kind) for kind in kinds],
    "odd": [torch.arange(12.0).reshape(3, 4).t(), torch.empty(0, 3), torch.tensor(2.5), torch.arange(10)[::2]],
    "sparse": torch.eye(3).to_sparse(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "arrays": [numpy.arange(6.0).reshape(2, 3), numpy.asfortranarray(numpy.ones((2, 3))), numpy.arange(10)[::3]],
    "random": torch.get_rng_state(),
}
slots = Slots([os.memfd_create("slot") for _ in range(2)], 1 << 26, 0, 1)
slots.save(4, state)

def same(one, other):
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape
        if one.layout is torch.strided:
            assert torch.equal(one, other)
        else:
            assert torch.equal(one.to_dense(), other.to_dense())
    elif isinstance(one, numpy.ndarray):
        assert one.dtype == other.dtype and numpy.array_equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for name in one:
            same(one[name], other[name])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other):
            same(*pair)
    else:
        assert one == other

for copy in (True, False):
    found = slots.load((1, 4), copy=copy)
    same(state, found)
    found["kinds"][0].add_(1)  # it is nobody else's, or is told to be
same(state["model"], slots.load((1, 4), copy=True)["model"])
model.load_state_dict(slots.load((1, 4), copy=True)["model"])
optimizer.load_state_dict(slots.load((1, 4), copy=True)["optimizer"])
print("all the same")
"""


# The way to a device from memory that its driver knows; the device is the CPU here, which has none.
FERRY = """
import mmap, torch
from rallypoint.checkpoint.devices import Ferry

torch.cuda.synchronize = lambda device: None
memory = mmap.mmap(-1, 4096)
kinds = [torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float64]
ferry = Ferry(torch, "cpu", memoryview(memory))
for kind in kinds:
    tensor = torch.arange(15).reshape(3, 5).to(kind)
    size = tensor.numel() * tensor.element_size()
    memory[64 : 64 + size] = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    found = ferry(64, size, kind, (3, 5))
    assert torch.equal(found, tensor), kind
    memory[64 : 64 + size] = bytes(size)
    assert torch.equal(found, tensor), "it is no view"
assert ferry(0, 0, torch.float32, (0, 3)).shape == (0, 3)
assert ferry(64, 4, torch.float32, ()).shape == ()
ferry.close()
print("all there")
"""


def test_what_is_ferried_to_a_device_is_there() -> None:
    ended = subprocess.run([sys.executable, "-c", FERRY], capture_output=True, text=True, timeout=110)
    assert (ended.stdout, ended.returncode) == ("all there\n", 0), ended.stderr


def test_what_comes_out_is_what_went_in() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=110)
    assert (ended.stdout, ended.returncode) == ("all the same\n", 0), ended.stderr
