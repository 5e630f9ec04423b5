"""Whatever became of a file of events, explaining it never fails, and what is told adds up."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.story.agent_log import AgentLog, long_story

from rallypoint.cli.explain import document, render
from rallypoint.story import phases
from rallypoint.story.event_logs import read_log
from rallypoint.story.event_records import read_told
from rallypoint.story.story import EventLog, Story, replay, settle, tell

LONG_STORY = [log.lines for log in long_story()]
lasting = st.floats(0.001, 1e5).map(lambda value: round(value, 3))
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def agent_logs(draw: st.DrawFn) -> AgentLog:
    """A run that is told to its end, after any number of generations."""
    log, now = AgentLog(), 0.0
    for generation in range(1, draw(st.integers(1, 5))):
        took_s = draw(lasting)
        now += took_s
        log.run(now, generation, took_s=took_s)
        ran_s, stopping_s = draw(lasting), draw(lasting)
        log.stop(now + ran_s, draw(st.text(max_size=20)), kept_s=draw(st.floats(0.0, ran_s)), took_s=stopping_s)
        now += ran_s + stopping_s
    log.end(now + draw(lasting), succeeded=draw(st.booleans()))
    return log


def check(story: Story) -> None:
    """It can be printed and written; times never go back; the phases and what is untold are the wall time."""
    assert render(story)
    assert json.loads(json.dumps(document(story), allow_nan=False))["schema"] == 1
    moments = [entry.at_ms for entry in story.entries]
    assert moments == sorted(moments)
    for run in story.runs:
        assert list(run.moments_ms) == sorted(run.moments_ms)
        assert min(run.account.seconds.values()) >= 0
        assert 0 <= run.account.goodput <= 1
    assert all(story.begin_ms <= at_ms for at_ms in moments)


@given(agent_logs())
def test_totals_of_a_whole_file_are_the_wall_time(log: AgentLog) -> None:
    """The count from the phases, what the agent said at its end, and the clock agree."""
    events = log.events()
    counted, said = replay(events), settle(events)
    assert counted.seconds == pytest.approx(log.ledger.seconds, abs=1e-6)
    assert said.seconds == log.ledger.seconds
    assert counted.wall_s == pytest.approx(said.wall_s)
    assert counted.untold_s == said.untold_s == 0
    story = tell([EventLog("events.jsonl", events)])
    check(story)
    assert story.notes == ()


@given(agent_logs(), st.data())
def test_a_file_of_which_lines_are_missing(log: AgentLog, data: st.DataObject) -> None:
    """What is missing is untold, and never counted for another phase."""
    kept = data.draw(st.lists(st.sampled_from(range(len(log.lines))), min_size=1, unique=True).map(sorted))
    events = tuple(log.events()[number] for number in kept)
    check(tell([EventLog("events.jsonl", events)]))
    account = replay(events)
    assert sum(account.seconds.values()) <= account.wall_s + 1e-6
    for phase in (phases.WAITING, phases.STOPPING, phases.RUNNING):
        last = max((number for number in kept if log.lines[number]["name"] == "rallypoint.phase"), default=None)
        is_open = last is None or log.lines[last]["metadata"]["phase"] == phase
        assert is_open or account.seconds[phase] <= log.ledger.seconds[phase] + 0.25 * len(kept) + 1e-6


@given(st.data())
@settings(max_examples=50)
def test_several_nodes_of_which_any_part_is_known(data: st.DataObject) -> None:
    logs = []
    for number, lines in enumerate(LONG_STORY):
        kept = data.draw(st.sets(st.sampled_from(range(len(lines)))).map(sorted))
        logs.append(EventLog(f"{number}/events.jsonl", tuple(read_told(lines[one]) for one in kept)))
    if any(log.events for log in logs):
        check(tell(logs))


@given(st.data())
@settings(max_examples=50)
def test_a_file_that_ends_or_is_damaged_anywhere(data: st.DataObject) -> None:
    whole = "".join(json.dumps(line) + "\n" for line in LONG_STORY[0]).encode()
    begin, end = sorted(data.draw(st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole)))))
    text = whole[:begin] + data.draw(st.binary(max_size=20)) + whole[end:]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "events.jsonl")
        path.write_bytes(text)
        log = read_log(str(path))
    if log.events:
        check(tell([log]))


@given(st.data())
@settings(max_examples=200)
def test_events_that_say_anything_at_all(data: st.DataObject) -> None:
    """Fields of any kind, times in any order."""
    lines: list[dict[str, Any]] = json.loads(json.dumps(LONG_STORY[data.draw(st.integers(0, len(LONG_STORY) - 1))]))
    for number in data.draw(st.lists(st.integers(0, len(lines) - 1), max_size=20)):
        metadata = lines[number]["metadata"]
        metadata[data.draw(st.sampled_from(sorted(metadata) or ["t"]))] = data.draw(anything | st.floats(0, 1e9))
    lines = data.draw(st.permutations(lines)) if data.draw(st.booleans()) else lines
    check(tell([EventLog("events.jsonl", tuple(map(read_told, lines)))], show_all=True))
