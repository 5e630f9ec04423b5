"""A server's thread ends once, however it is ended, and a fork keeps nothing of it."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import pytest

from rallypoint.net.service_thread import ServiceThread
from rallypoint.net.wake_fd import WakeFd


class Served:
    """What a thread does, written down; one end of a pipe stands for what a server holds."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.watched, self.held = os.pipe()
        self.thread = ServiceThread("test", WakeFd(), self._serve, self._let_go)

    def _serve(self) -> None:
        while not self.thread.is_ending:
            select.select([self.thread.wake_fd], [], [], 10)
            self.thread.wake_fd.clear()
        self.said.append("served")

    def _let_go(self) -> None:
        self.said.append("let go")
        os.close(self.held)


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    if "let go" not in one.said:
        one.thread.stop()
    os.close(one.watched)


def test_what_is_handed_over_wakes_it_until_it_ends(served: Served) -> None:
    served.thread.start()
    assert served.thread.hand_over(lambda: served.said.append("taken"))
    served.thread.stop()
    assert not served.thread.hand_over(lambda: served.said.append("too late"))
    served.thread.stop()
    assert served.said == ["taken", "served", "let go"]


def test_one_that_was_never_started_lets_go_all_the_same(served: Served) -> None:
    served.thread.stop()
    assert served.said == ["let go"]


def test_a_fork_closes_its_copies(served: Served) -> None:
    """So whoever is connected sees the end when the server ends, and not when the fork does."""
    served.thread.start()
    ends, holds = os.pipe()
    if (child := os.fork()) == 0:
        os.close(holds)
        os.read(ends, 1)  # until the test is over
        os._exit(0)
    served.thread.stop()
    assert select.select([served.watched], [], [], 10)[0], "the fork still holds what the server has closed"
    assert os.read(served.watched, 1) == b""
    for fd in (ends, holds):
        os.close(fd)
    assert os.waitpid(child, 0)[1] == 0
