"""What the live line says, for each kind of wait, moment and width."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.output.waits import (
    BackOff,
    Counted,
    ForNodes,
    ForOthers,
    Running,
    Starting,
    Stopping,
    Wait,
    line,
    rows_apart,
)
from rallypoint.protocol import shutdown
from rallypoint.protocol.shutdown import Target

NOW = 1000.0
TOLD = "3 of 4 nodes; here: node0, node1, node3; missing: rank 2"


def stopping(*left: Target, since: float = NOW - 9, killed_at: float | None = None, may_hurry: bool = False) -> Stopping:
    """Eight workers were told to stop at that time, with 30 s to do so; these are left."""
    stop = shutdown.step(shutdown.begin(15, 30.0, 20.0), left, since).stop
    if killed_at is not None:
        stop = shutdown.step(shutdown.hurry(stop), left, killed_at).stop
    return Stopping(stop, 8, since, may_hurry)


RANKS = [Target(True, rank, f"rank {rank} (pid {4000 + rank})") for rank in range(5)]
LEFT_BEHIND = Target(False, 77)
LINES: list[tuple[Wait, int, str]] = [
    (ForNodes(NOW - 3), 80, "waiting for the other nodes · 3 s"),
    (ForNodes(NOW - 3), 20, "waiting for the oth…"),
    (
        ForNodes(NOW - 12, TOLD, NOW + 588),
        120,
        "waiting: 3 of 4 nodes; missing: rank 2; here: node0, node1, node3 · 12 s · gives up in 9 min 48 s",
    ),
    (ForNodes(NOW - 12, TOLD, NOW + 588), 79, "waiting: 3 of 4 nodes; missing: rank 2 · 12 s · gives up in 9 min 48 s"),
    (ForNodes(NOW - 12, TOLD, NOW + 588), 60, "waiting: 3 of 4 nodes · 12 s · gives up in 9 min 48 s"),
    (ForNodes(NOW - 12, TOLD, NOW + 588), 39, "waiting: 3 of 4 nodes · 12 s"),
    (ForNodes(NOW - 12, TOLD, NOW + 588), 25, "waiting: 3 of 4 nodes"),
    (ForNodes(NOW - 4000, TOLD), 60, "waiting: 3 of 4 nodes; missing: rank 2 · 1 h 6 min"),  # a spare, for example
    (ForNodes(NOW, "1 of 2 nodes; here: \x1b[2J日"), 79, "waiting: 1 of 2 nodes; here: \\x1b[2J\\u65e5 · 0 s"),
    (ForOthers("all are done", NOW - 61, NOW + 0.2), 79, "all are done · 1 min 1 s · gives up in 1 s"),
    (ForOthers("all are done", NOW - 61, NOW - 5), 79, "all are done · 1 min 1 s · gives up in 0 s"),
    (ForOthers("all are done", NOW - 61, NOW), 25, "all are done · 1 min 1 s"),
    (BackOff(2, 3, NOW + 3.4), 79, "restart 2 of 3 in 4 s"),
    (Starting(8, (), NOW - 1), 79, "starting 8 workers · 1 s"),
    (Starting(1, ("torch", "numpy"), NOW - 7), 79, "importing torch, numpy for 1 worker · 7 s"),
    (Starting(1, ("torch", "numpy"), NOW - 7), 39, "importing modules for 1 worker · 7 s"),
    (Running(4, NOW - 75), 79, "4 workers running · 1 min 15 s"),
    (stopping(), 79, "stopping 8 workers · 9 s"),  # what there is besides them is asked for
    (stopping(*RANKS), 79, "stopping 8 workers: 5 left · 9 s · SIGKILL in 21 s"),
    (
        stopping(*RANKS, may_hurry=True),
        79,
        "stopping 8 workers: 5 left · 9 s · SIGKILL in 21 s · Ctrl-C again kills at once",
    ),
    (stopping(*RANKS, may_hurry=True), 70, "stopping 8 workers: 5 left · SIGKILL in 21 s"),
    (stopping(*RANKS), 39, "stopping: 5 left · SIGKILL in 21 s"),
    (stopping(*RANKS), 20, "stopping: 5 left"),
    (
        stopping(RANKS[4], LEFT_BEHIND),
        79,
        "stopping 8 workers: 2 left, rank 4 (pid 4004), process 77 · SIGKILL in 21 s",
    ),
    (stopping(RANKS[0], killed_at=NOW - 2), 79, "stopping 8 workers: 1 left after SIGKILL, rank 0 (pid 4000) · gives up in 18 s"),
    (Counted("merging", 30.0, 120.0, NOW - 10, NOW), 79, "merging: 25% · 10 s · about 30 s left"),
    (Counted("merging", 30.0, 120.0, NOW - 10, NOW), 25, "25% · about 30 s left"),
    (Counted("merging", 30.0, 120.0, NOW - 14, NOW - 4), 79, "merging: 25% · 14 s · about 26 s left"),  # nothing new for 4 s
    (Counted("seeds", 1, 300, NOW - 10, NOW, "seeds"), 79, "seeds: 1 of 300 seeds · 10 s"),  # it is too soon to tell
    (Counted("seeds", 300, 300, NOW - 10, NOW, "seeds"), 79, "seeds: 300 of 300 seeds · 10 s · about 0 s left"),
    (Counted("reading", 0.0, 0.0, NOW - 10, NOW), 79, "reading: 0% · 10 s"),
]


@pytest.mark.parametrize(("wait", "width", "text"), LINES)
def test_the_line(wait: Wait, width: int, text: str) -> None:
    assert line(wait, NOW, width) == text


@given(st.sampled_from([wait for wait, _, _ in LINES]), st.floats(NOW, NOW + 1e6), st.integers(0, 200))
def test_it_always_fits_and_is_one_line_of_plain_characters(wait: Wait, now: float, width: int) -> None:
    told = line(wait, now, width)
    assert len(told) <= width
    assert told.replace("·", "").replace("…", "").isascii()
    assert told.isprintable()


def test_only_where_workers_may_write_is_it_away_from_the_cursor() -> None:
    """A row for each that is left, and two more; not more than a screen has."""
    assert {rows_apart(wait) for wait, _, _ in LINES if not isinstance(wait, Stopping)} == {0}
    assert [rows_apart(stopping(*RANKS[:count])) for count in (0, 1, 5)] == [2, 3, 7]
    assert rows_apart(stopping(*(Target(True, rank) for rank in range(64)))) == 12
