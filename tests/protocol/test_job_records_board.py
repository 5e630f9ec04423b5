"""What is posted for all nodes, as one of them sees it: reads, changes and its own writes, in any order that can happen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.base.records import Value
from rallypoint.coordination.model import Event, Item, Snapshot
from rallypoint.protocol import job_records as job
from rallypoint.protocol.job_records import Board
from rallypoint.protocol.restarts import Purse


def generation(number: int) -> job.Generation:
    return job.Generation(number, 5, 2, 16, "10.0.0.1", 29500, f"generation {number}", Purse())


def stop(why: str = "a worker failed") -> job.Signal:
    return job.Signal("failure", why, "a")


def closed(why: str = "the job has finished") -> job.Closed:
    return job.Closed("finished", why, "a")


def item(key: str, content: Value | bytes, revision: int) -> Item:
    return Item(key, content if isinstance(content, bytes) else job.encode(content), revision, revision)


def put(key: str, content: Value | bytes, revision: int) -> Event:
    return Event(revision, key, item(key, content, revision), "put")


def delete(key: str, revision: int) -> Event:
    return Event(revision, key, None, "deleted")


def loaded(*items: Item, revision: int = 100, now: float = 1.0) -> Board:
    board = Board()
    board.load(Snapshot(revision, items), now)
    return board


def state(board: Board) -> dict[str, object]:
    return {name: value for name, value in board.__dict__.items() if not name.startswith("_")}


FULL = (
    item(job.CLOSED, closed(), 90),
    item(job.GENERATION, generation(7), 60),
    item(job.LEADER, b"a", 50),
    item(job.refusal_key("n9"), b"rank 1 is held by b", 70),
    item(job.signal_key(7), stop(), 80),
)


# --- one read --------------------------------------------------------------------------------------------------------------


def test_nothing_is_known_before_the_first_read() -> None:
    board = Board()
    assert not board.is_loaded
    assert (board.number, board.generation_revision, board.leader, board.generation, board.signal()) == (0, 0, None, None, None)


def test_a_read_of_nothing_is_a_read() -> None:
    board = loaded()
    assert board.is_loaded
    assert (board.number, board.leader, board.closed) == (0, None, None)


def test_everything_that_is_posted_is_read() -> None:
    board = loaded(*FULL, now=3.0)
    assert (board.number, board.generation, board.generation_revision, board.generation_at) == (7, generation(7), 60, 3.0)
    assert (board.leader, board.closed, board.refusals) == (FULL[2], closed(), {"n9": "rank 1 is held by b"})
    assert (board.signal(), board.signals, board.signal_at) == (stop(), {7: stop()}, {7: 3.0})


def test_what_was_known_keeps_the_time_at_which_it_was_seen() -> None:
    board = loaded(*FULL, now=3.0)
    board.load(Snapshot(200, FULL), 9.0)
    assert (board.generation_at, board.signal_at) == (3.0, {7: 3.0})


def test_a_read_that_shows_no_leader_says_that_there_is_none() -> None:
    board = loaded(*FULL)
    board.load(Snapshot(200, FULL[:2]), 9.0)
    assert (board.leader, board.number, board.closed) == (None, 7, closed())


# --- changes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", [1, 99, 100])
def test_a_change_that_is_older_than_what_was_read_says_nothing_new(revision: int) -> None:
    board = loaded(*FULL, revision=100)
    before = state(board) | {"signals": dict(board.signals), "refusals": dict(board.refusals)}
    for event in (
        put(job.LEADER, b"b", revision),
        delete(job.LEADER, revision),
        put(job.GENERATION, generation(8), revision),
        put(job.signal_key(8), stop(), revision),
        put(job.refusal_key("n1"), b"no", revision),
    ):
        board.apply(event, 9.0)
    assert state(board) == before


def test_changes_are_taken_in_as_they_come() -> None:
    board = loaded()
    board.apply(put(job.LEADER, b"a", 101), 2.0)
    board.apply(put(job.GENERATION, generation(1), 102), 3.0)
    assert (board.leader, board.number, board.generation_at, board.signal()) == (item(job.LEADER, b"a", 101), 1, 3.0, None)
    board.apply(put(job.signal_key(1), stop(), 103), 4.0)
    assert (board.signal(), board.signal_at) == (stop(), {1: 4.0})
    board.apply(delete(job.LEADER, 104), 5.0)
    assert board.leader is None


def test_the_next_generation_ends_the_signals_of_those_before_it() -> None:
    board = loaded(*FULL)
    board.apply(put(job.signal_key(9), stop("early"), 101), 2.0)
    board.apply(put(job.GENERATION, generation(8), 102), 3.0)
    assert (board.signal(), board.signals, board.signal_at) == (None, {9: stop("early")}, {9: 2.0})
    board.apply(put(job.GENERATION, generation(9), 103), 4.0)
    assert (board.signal(), board.signal_at) == (stop("early"), {9: 2.0})


def test_the_first_who_said_it_has_said_it() -> None:
    board = loaded()
    for now, why in ((2.0, "first"), (3.0, "second")):
        board.apply(put(job.signal_key(1), stop(why), 100 + int(now)), now)
        board.apply(put(job.CLOSED, closed(why), 110 + int(now)), now)
    assert (board.signals, board.signal_at, board.closed) == ({1: stop("first")}, {1: 2.0}, closed("first"))


@pytest.mark.parametrize("key", [job.GENERATION, job.CLOSED, job.signal_key(7), job.refusal_key("n9"), "down/new"])
def test_what_is_cleared_away_is_remembered(key: str) -> None:
    """All but the leader: a generation counts, a signal was given and a job has ended even when their keys are gone."""
    board, untouched = loaded(*FULL), loaded(*FULL)
    board.apply(delete(key, 101), 2.0)
    assert state(board) == state(untouched)


# --- what this node writes -------------------------------------------------------------------------------------------------


def test_the_change_that_tells_of_our_own_write_changes_nothing() -> None:
    board = loaded()
    writes: list[tuple[str, Value | bytes]] = [(job.LEADER, b"me"), (job.GENERATION, generation(1)), (job.signal_key(1), stop())]
    for revision, (key, content) in enumerate(writes, 101):
        board.post(item(key, content, revision), 2.0)
    posted = state(board) | {"signals": dict(board.signals), "signal_at": dict(board.signal_at)}
    for revision, (key, content) in enumerate(writes, 101):
        board.apply(put(key, content, revision), 9.0)
    assert state(board) == posted
    assert (board.generation_at, board.signal_at) == (2.0, {1: 2.0})


def test_an_earlier_generation_does_not_come_back() -> None:
    board = loaded()
    board.post(item(job.GENERATION, generation(8), 110), 2.0)
    board.apply(put(job.GENERATION, generation(7), 105), 3.0)
    assert (board.number, board.generation_revision, board.generation_at) == (8, 110, 2.0)


def test_the_end_of_an_earlier_leader_is_not_the_end_of_this_one() -> None:
    board = loaded(item(job.LEADER, b"a", 50))
    board.post(item(job.LEADER, b"me", 110), 2.0)
    board.apply(delete(job.LEADER, 105), 3.0)
    assert board.leader == item(job.LEADER, b"me", 110)
    board.apply(delete(job.LEADER, 111), 3.0)
    assert board.leader is None


def test_an_earlier_leader_does_not_come_back() -> None:
    board = loaded()
    board.post(item(job.LEADER, b"me", 110), 2.0)
    board.apply(put(job.LEADER, b"a", 102), 3.0)
    board.apply(delete(job.LEADER, 105), 3.0)
    assert board.leader == item(job.LEADER, b"me", 110)


# --- what nobody can read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (job.GENERATION, b""),
        (job.GENERATION, b'{"number": 8}'),
        (job.GENERATION, job.encode(stop())),
        (job.CLOSED, b"null"),
        (job.signal_key(8), b"\xff"),
        ("down/signal/eight", job.encode(stop())),
        ("down/signal/" + "8" * 5000, job.encode(stop())),
        ("down/signal/", job.encode(stop())),
        ("down/", b""),
        ("down/else", b"what"),
        ("down/signal/7/8", job.encode(stop())),
    ],
    ids=lambda value: repr(value[:24]),
)
def test_what_nobody_can_read_is_not_there(key: str, value: bytes) -> None:
    board = loaded(item(job.GENERATION, generation(7), 60))
    before = state(board) | {"signals": {}}
    board.apply(put(key, value, 101), 2.0)
    board.load(Snapshot(200, (item(key, value, 101),)), 3.0)
    assert state(board) == before
    board.apply(put(job.GENERATION, generation(8), 201), 4.0)
    assert board.number == 8


def test_a_refusal_is_read_whatever_it_says() -> None:
    assert loaded(item(job.refusal_key("n1"), b"caf\xe9", 5)).refusals == {"n1": "caf�"}


# --- every history ---------------------------------------------------------------------------------------------------------

STEPS = st.lists(st.sampled_from(["lead", "resign", "form", "signal", "close", "refuse"]), max_size=30)


def history(steps: list[str]) -> list[Event]:
    """Changes in the order in which a store tells them; each has the next revision."""
    events: list[Event] = []
    number = 0
    for revision, step in enumerate(steps, 1):
        number += step == "form"
        events.append({
            "lead": put(job.LEADER, b"%d" % revision, revision),
            "resign": delete(job.LEADER, revision),
            "form": put(job.GENERATION, generation(number), revision),
            "signal": put(job.signal_key(number), stop(f"at {revision}"), revision),
            "close": put(job.CLOSED, closed(f"at {revision}"), revision),
            "refuse": put(job.refusal_key(f"n{revision % 3}"), b"at %d" % revision, revision),
        }[step])  # fmt: skip
    return events


@settings(max_examples=150)
@given(STEPS, st.integers(0, 30), st.integers(0, 30))
def test_changes_that_are_told_again_make_no_difference(steps: list[str], seen: int, again_from: int) -> None:
    """A watch that is begun anew tells of changes which came before. Old signals may come back; nobody asks for them."""
    events = history(steps)
    once, twice = loaded(revision=0), loaded(revision=0)
    for event in events:
        once.apply(event, 2.0)
    for event in (*events[:seen], *events[min(seen, again_from) :]):
        twice.apply(event, 2.0)
    latest = {name: value for name, value in state(once).items() if name not in ("signals", "signal_at")}
    assert {name: value for name, value in state(twice).items() if name not in ("signals", "signal_at")} == latest
    assert (twice.signal(), twice.number) == (once.signal(), once.number)
