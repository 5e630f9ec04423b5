"""Whose files they are: attempts, their turns and ranks from the events of a run, and the ranks that are asked for."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.errors import UsageError
from rallypoint.inspection.log_rules import attempts_of, has_rank, newest_told, parse_ranks, teller_of, unknown_ranks
from rallypoint.story.event_records import Told


def generation(number: int, folder: str, ranks: list[int]) -> Told:
    return event("generation", generation=number, folder=folder, ranks=ranks)


def event(name: str, **facts: Any) -> Told:
    return Told(f"rallypoint.{name}", 5.0, 0.0, facts)


def test_attempts_have_the_ranks_that_the_events_tell() -> None:
    events = [generation(1, "/logs/x/attempt_0", [2, 3]), generation(4, "/logs/x/attempt_10/", [0, 1])]
    names = ["attempt_10", "attempt_0", "events.jsonl", "attempt_x", "attempt_2"]
    found = attempts_of(events, names, {"attempt_2": [0, 1]}, {})
    assert [(one.number, one.turn, one.ranks, one.is_told) for one in found] == [
        (0, 1, {0: 2, 1: 3}, True),
        (2, 2, {0: 0, 1: 1}, False),
        (10, 4, {0: 0, 1: 1}, True),
    ]
    assert newest_told(found) == 3
    assert newest_told(found[:2]) == 1


def test_turns_rise_where_generations_are_counted_anew() -> None:
    events = [generation(1, "attempt_0", [0]), generation(2, "attempt_1", [0]), generation(1, "attempt_2", [0])]
    assert [one.turn for one in attempts_of(events, ["attempt_0", "attempt_1", "attempt_2"], {}, {})] == [1, 2, 3]


def test_a_node_that_came_late_begins_with_the_generation_that_it_joined() -> None:
    (found,) = attempts_of([generation(3, "attempt_0", [5])], ["attempt_0"], {}, {})
    assert found.turn == 3


def test_what_the_events_do_not_have_yet_the_agent_knows() -> None:
    (found,) = attempts_of([], ["attempt_0"], {"attempt_0": [0, 1]}, {"attempt_0": {0: 4, 1: 5}})
    assert (found.ranks, found.is_told) == ({0: 4, 1: 5}, True)


def test_who_tells() -> None:
    first = [event("run.started", hostname="h", pid=7), event("run.ended")]
    assert (teller_of(first).hostname, teller_of(first).pid, teller_of(first).has_ended) == ("h", 7, True)
    assert not teller_of([*first, event("run.started", hostname="h", pid=8)]).has_ended
    assert teller_of([]).pid is None


@pytest.mark.parametrize(("text", "runs"), [("3", [(3, 3)]), ("8-11,3", [(3, 3), (8, 11)]), (" 1 , 2 - 3", [(1, 3)])])
def test_ranks(text: str, runs: list[tuple[int, int]]) -> None:
    assert parse_ranks(text) == runs


@pytest.mark.parametrize("text", ["", "a", "3-", "5-4", "-1", "1,,2", "99999999", "1;2"])
def test_no_ranks(text: str) -> None:
    with pytest.raises(UsageError, match="not a list of ranks"):
        parse_ranks(text)


def test_chosen_ranks() -> None:
    assert has_rank(None, 7)
    assert [rank for rank in range(6) if has_rank([(1, 2), (4, 4)], rank)] == [1, 2, 4]
    assert unknown_ranks([(7, 9)], [0, 1, 2]) == "there are no logs of rank 7-9; there are those of 0-2"
    assert unknown_ranks([(2, 9)], [0, 1, 2]) == unknown_ranks(None, [0]) == ""
