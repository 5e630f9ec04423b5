"""What a story makes of events: merged where nodes agree, apart where they do not, exact about time."""

from __future__ import annotations

import pytest

from rallypoint.story import phases, story
from rallypoint.story.event_records import Told, read_told, seconds, words
from rallypoint.story.story import Entry, EventLog, duration, sentence, tell


def phase(t: float, name: str, previous: str, lasted_s: float, **facts: object) -> Told:
    return Told("rallypoint.phase", 1000 * t, t, {"t": t, "phase": name, "previous": previous, "lasted_s": lasted_s, **facts})


def test_a_gap_in_the_file_is_told_by_nobody() -> None:
    account = story.replay([phase(1.0, "waiting", "starting", 1.0), phase(9.0, "stopping", "running", 5.0, kept_s=2.0)])
    assert account.seconds == {"starting": 1.0, "waiting": 0.0, "running": 2.0, "stopping": 0.0, "lost": 3.0}
    assert (account.wall_s, account.untold_s) == (9.0, 3.0)


def test_a_file_without_its_beginning_is_counted_from_its_first_phase() -> None:
    account = story.replay([phase(9.0, "stopping", "running", 5.0), phase(10.0, "waiting", "stopping", 1.0)])
    assert account.seconds == {**dict.fromkeys(phases.PHASES, 0.0), "running": 5.0, "stopping": 1.0}
    assert (account.wall_s, account.untold_s) == (6.0, 0.0)


def test_the_clock_of_the_node_counts_and_not_the_one_on_the_wall() -> None:
    """Somebody sets the clock back by an hour while the run goes on."""
    events = [Told("x", 5_000_000.0, 0.0, {}), Told("y", 1_400_000.0, 10.0, {}), Told("foreign", 1_400_001.0, None, {})]
    assert story.follow(events) == (5_000_000.0, 5_010_000.0, 5_010_000.0)


def test_nodes_that_give_different_reasons_are_heard_apart() -> None:
    logs = []
    for host, why in (("a", "x was lost"), ("b", "x was lost"), ("c", "y was lost")):
        start = Told("rallypoint.run.started", 0.0, 0.0, {"hostname": host})
        logs.append(EventLog(host, (start, phase(2.0, "stopping", "running", 1.0, why=why))))
    stops = [(entry.nodes, entry.facts["why"]) for entry in tell(logs).entries if entry.kind == story.Kind.STOPPED]
    assert stops == [(("a", "b"), "x was lost"), (("c",), "y was lost")]


def test_a_worker_that_fails_at_once_fails_in_its_generation() -> None:
    """It ended before its agent, or that of another node, had told that the workers run."""
    logs = []
    for host, t in (("a", 5.0), ("b", 5.4)):
        told = [Told("rallypoint.run.started", 0.0, 0.0, {"hostname": host})]
        told.append(Told("rallypoint.generation", 1000 * t, t, {"generation": 1, "group_world_size": 2}))
        told.append(phase(t, "running", "waiting", t))
        logs.append(EventLog(host, tuple(told)))
    failure = Told("rallypoint.worker.failed", 5100.0, 5.1, {"generation": 1, "rank": 0, "ago_s": 0.3})
    entries = tell([logs[0].replace(events=(*logs[0].events, failure)), logs[1]]).entries
    assert [entry.kind for entry in entries] == ["generation", "failed", "silent"]
    assert [entry.at_ms for entry in entries[:2]] == [4800.0, 4800.0]
    assert entries[0].facts["ready_s"] == 5.4


def test_the_node_that_spoke_last_knows_how_it_ended() -> None:
    """A node that was told to leave did not succeed; the run did."""
    left = Told("rallypoint.run.ended", 1000.0, 1.0, {"t": 1.0, "succeeded": False, "why": "SIGTERM was received"})
    stayed = Told("rallypoint.run.ended", 9000.0, 9.0, {"t": 9.0, "succeeded": True, "why": "all workers succeeded"})
    outcome = tell([EventLog("a", (left,)), EventLog("b", (stayed,))]).outcome
    assert (outcome.succeeded, outcome.why) == (True, "all workers succeeded")


@pytest.mark.parametrize(
    ("lasted_s", "text"),
    [
        (0.0, "0.00 s"),
        (9.994, "9.99 s"),
        (59.94, "59.9 s"),
        (60.0, "1 min 0 s"),
        (3599.7, "1 h 0 min 0 s"),
        (90061.0, "25 h 1 min 1 s"),
    ],
)
def test_durations(lasted_s: float, text: str) -> None:
    assert duration(lasted_s) == text


@pytest.mark.parametrize(
    ("kind", "facts", "text"),
    [
        ("failed", {"rank": 1}, "rank 1 (local rank ?, pid ?) failed"),
        ("failed", {"exitcode": -11, "message": "x"}, "rank ? (local rank ?, pid ?) was ended by SIGSEGV: x"),
        ("failed", {"exitcode": -99}, "rank ? (local rank ?, pid ?) was ended by signal 99"),
        ("expired", {}, "a timer of pid ? expired"),
        ("hung", {"rank": 0}, "rank 0 (local rank ?, pid ?) hung: no progress"),
        ("stopped", {}, "the workers are stopped"),
        ("started", {}, "an agent starts here"),
        ("generation", {}, "generation ?: "),
        ("finished", {}, "all workers of this node succeeded"),
    ],
)
def test_facts_that_are_missing_are_missing_from_the_sentence(kind: str, facts: dict[str, object], text: str) -> None:
    assert sentence(Entry(0.0, ("a",), kind, facts)) == text


@pytest.mark.parametrize(
    "line",
    [
        None, [], {}, {"name": 1, "timestamp": 0}, {"name": "x"}, {"name": "x", "timestamp": "now"},
        {"name": "x", "timestamp": True}, {"name": "x", "timestamp": -1}, {"name": "x", "timestamp": 1e18},
        {"name": "x", "timestamp": float("nan")}, {"name": "x", "timestamp": 0, "metadata": []},
    ],
)  # fmt: skip
def test_what_is_no_event_is_refused(line: object) -> None:
    with pytest.raises(ValueError, match="event"):
        read_told(line)


def test_fields_of_the_wrong_kind_are_absent() -> None:
    told = read_told({"name": "x", "timestamp": 0, "metadata": {"t": float("inf"), "lasted_s": "1", "kept_s": -1, "why": ["x"]}})
    assert (told.t, seconds(told, "lasted_s"), seconds(told, "kept_s"), words(told, "why")) == (None, None, None, "")
