"""How many files a process may have open, and which numbers connections get."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rallypoint.base import limits
from rallypoint.errors import UsageError

SOFT = 512


@pytest.fixture
def low_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a shell has it: the soft limit lower than the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * SOFT or len(os.listdir("/proc/self/fd")) > SOFT // 2:
        pytest.skip("the limits of this machine are too low for that")
    monkeypatch.setattr(limits, "_found", None)
    monkeypatch.setattr(limits, "_reserved", limits.OWN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.settimeout(5)
        theirs.sendall(b"hello")
        yield ours
        ours.close()


def test_m11_connections_are_put_where_no_worker_could_have_them(low_limit: None, connection: socket.socket) -> None:
    """M11: numbers that a worker can have too stay free for the files that it is given."""
    assert limits.set_aside(connection) is connection
    assert limits.as_many_as_allowed(2 * SOFT) == 2 * SOFT
    connection.setblocking(False)
    moved = limits.set_aside(connection)
    with moved:
        assert moved.fileno() >= SOFT
        assert connection.fileno() == -1
        assert not moved.getblocking()
        assert not moved.get_inheritable()
        assert moved.recv(5) == b"hello"
        assert limits.set_aside(moved) is moved


def test_m11_the_last_numbers_are_reserved(low_limit: None) -> None:
    """M11: as many as the workers take, but not more than half."""
    assert [limits.is_reserved(fd) for fd in (0, SOFT - limits.OWN_FILES - 1, SOFT - limits.OWN_FILES)] == [
        False, False, True,
    ]  # fmt: skip
    limits.reserve(workers=10_000, least_files=10, files_per_worker=4)
    limit = os.sysconf("SC_OPEN_MAX")
    assert limit > SOFT
    assert [limits.is_reserved(fd) for fd in (limit // 2 - 1, limit - limit // 2)] == [False, True]


def test_m1_a_process_that_is_started_has_the_limit_that_was_found(low_limit: None) -> None:
    """m1: whatever the launcher has made of its own."""
    limits.as_many_as_allowed(2 * SOFT)
    assert limits.limit_for_workers() == SOFT
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with contextlib.ExitStack() as cleaning:
        cleaning.callback(child.communicate, b"\n")
        limits.restore_for(child.pid)
        assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE)[0] == SOFT
    assert os.sysconf("SC_OPEN_MAX") == 2 * SOFT


def test_m1_too_few_files_are_a_usage_error(low_limit: None) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with pytest.raises(UsageError, match=rf"2 workers need at least {hard + 1} open files, and {hard} are allowed here"):
        limits.reserve(workers=2, least_files=hard + 1, files_per_worker=hard)


def test_nothing_is_loaded_where_there_are_enough() -> None:
    """m1: a start does not pay for it."""
    program = "import sys; from rallypoint.base import limits; limits.reserve(8, 50, 4); sys.exit('resource' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
