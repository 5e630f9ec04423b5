"""Our clients and servers with those of torch."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rallypoint.timers import FileTimerServer

pytestmark = pytest.mark.torch

OURS, THEIRS = "rallypoint.timers", "torch.distributed.elastic.timer"

WORKER = """
import sys, time
import {package} as timer
timer.configure(timer.FileTimerClient(sys.argv[1], signal=12))
with timer.expires(after=60, scope="outer"):
    with timer.expires(after=20, scope="quick"):
        pass
    with timer.expires(after=1, scope="slow"):
        time.sleep(60)
"""

SERVER = """
import sys
from torch.distributed.elastic.timer import FileTimerServer
FileTimerServer(sys.argv[1], "run", 0.2, log_event=lambda name, request: print(name, flush=True)).start()
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def torch() -> None:
    pytest.importorskip("torch.distributed")


def worker(package: str, pipe: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WORKER.format(package=package), pipe])


def test_their_client_works_with_our_server(tmp_path: Path) -> None:
    pipe = str(tmp_path / "timers")
    reaped: list[Any] = []
    server = FileTimerServer(pipe, "run", 30, on_reaped=lambda *why: reaped.append(why))
    server.start()
    process = worker(THEIRS, pipe)
    assert process.wait(60) == -signal.SIGUSR2
    server.stop()
    assert [(pid, request.scope_id, request.signal) for pid, request in reaped] == [(process.pid, "slow", 12)]


def test_our_client_works_with_their_server(tmp_path: Path, wait_until: Any) -> None:
    """Theirs ends its own process too when it has reaped a worker."""
    pipe = str(tmp_path / "timers")
    server = subprocess.Popen([sys.executable, "-c", SERVER, pipe], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        wait_until(lambda: os.path.exists(pipe), 60)
        process = worker(OURS, pipe)
        assert process.wait(60) == -signal.SIGUSR2
        assert server.wait(20) == -signal.SIGUSR2
        assert server.communicate()[0].splitlines() == [b"watchdog started", b"timer expired", b"kill worker process"]
    finally:
        server.kill()
        server.communicate()


def test_the_same_names_are_exported() -> None:
    ours, theirs = importlib.import_module(OURS), importlib.import_module(THEIRS)
    assert {name for name in ours.__all__ if not hasattr(theirs, name)} == set()
    public = {name for name in dir(theirs) if getattr(getattr(theirs, name), "__module__", "").startswith(THEIRS)}
    assert public == set(ours.__all__)
