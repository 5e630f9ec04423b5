"""What the kernel is told through prctl, in the way that is quick to import and in the one that every Python has."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT_CALLS = "import _ctypes; del _ctypes.call_function"
SUBREAPER = """
import os
from rallypoint.processes import kernel
kernel.set_name("rally-test")
kernel.adopt_orphans()
if os.fork() == 0:
    if os.fork() == 0:
        while os.getppid() != int(os.environ["ADOPTER"]):
            pass
        os._exit(7)
    os._exit(0)
ends = sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2))
print(open("/proc/self/comm").read().strip(), ends, "ctypes" in sys.modules)
"""
DEATH = """
import os, signal, time
from rallypoint.processes import kernel
kernel.adopt_orphans()
read_fd, write_fd = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        kernel.die_with_parent()
        os.write(write_fd, b"!")
        time.sleep(60)
    os.read(read_fd, 1)
    os.kill(os.getpid(), signal.SIGKILL)
ends = sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2))
print(ends)
"""


def run(program: str) -> str:
    start = "import os, sys; os.environ['ADOPTER'] = str(os.getpid())\n"
    ended = subprocess.run([sys.executable, "-c", start + program], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.mark.parametrize(("prepare", "needs_ctypes"), [("", False), (WITHOUT_CALLS, True)], ids=["quick", "with ctypes"])
def test_orphans_are_adopted(prepare: str, needs_ctypes: bool) -> None:
    assert run(f"{prepare}\n{SUBREAPER}") == f"rally-test [0, 7] {needs_ctypes}"


@pytest.mark.parametrize("prepare", ["", WITHOUT_CALLS], ids=["quick", "with ctypes"])
def test_a_process_dies_with_its_parent(prepare: str) -> None:
    assert run(f"{prepare}\n{DEATH}") == "[-9, -9]"
