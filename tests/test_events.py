"""Events: what they look like, and that one which nobody sees costs nothing."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from rallypoint import events
from rallypoint.errors import UsageError
from rallypoint.events import Event, EventSource, NodeState, RdzvEvent


class Recorder(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture(autouse=True)
def own_sinks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sinks of the test's own, as of a process that has just begun."""
    attached: dict[str, tuple[logging.Handler, object]] = {}
    monkeypatch.setattr(events, "_sinks", dict(events._sinks))
    monkeypatch.setattr(events, "_handlers", {})
    monkeypatch.setattr(events, "_attached", attached)
    yield
    for destination, (handler, _) in attached.items():
        logging.getLogger(f"torchelastic-events-{destination}").removeHandler(handler)


GROUP = "rallypoint.event_sinks"
EVENT = Event("torchelastic.worker.status.FAILED", EventSource.WORKER, 17, {"run_id": "job", "rank": 3, "f": 1.5, "n": None})
RDZV_EVENT = RdzvEvent("file:name", "job", "message", "host", 1, NodeState.RUNNING, "host:1", 3, 4, "trace")


@pytest.mark.parametrize("event", [EVENT, Event("e", EventSource.AGENT), RDZV_EVENT])
def test_an_event_survives_being_written(event: Event | RdzvEvent) -> None:
    assert event.deserialize(event.serialize()) == event  # type: ignore[arg-type]
    assert event.deserialize(event) is event  # type: ignore[arg-type]
    assert str(event) == event.serialize() == json.dumps(asdict(event))


def test_what_is_read_again_has_its_types() -> None:
    assert Event.deserialize(EVENT.serialize()).source is EventSource.WORKER
    assert RdzvEvent.deserialize(RDZV_EVENT.serialize()).node_state is NodeState.RUNNING


def test_an_event_for_nobody_is_not_even_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """P38"""
    monkeypatch.setattr(Event, "serialize", lambda self: pytest.fail("serialised for nobody"))
    events.record(EVENT)
    events.record(EVENT, "null")
    assert not events.is_recorded("null")
    assert not events.is_recorded("dynamic_rendezvous")
    assert events.is_recorded("console")


def test_the_console_gets_one_line_of_json(capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "from rallypoint import events\n"
        "for number in range(2):\n"
        "    events.record(events.Event(f'e{number}', events.EventSource.AGENT), 'console')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30, env={**os.environ, "LOGLEVEL": "ERROR"})
    out, err = capfd.readouterr()
    assert out == ""
    assert [Event.deserialize(line).name for line in err.splitlines()] == ["e0", "e1"]


def test_a_registered_sink_gets_events_once_and_can_be_replaced() -> None:
    first, second = Recorder(), Recorder()
    events.register_sink("mine", lambda: first)
    events.check_sink("mine")
    events.record(EVENT, "mine")
    events.record(EVENT, "mine")
    events.register_sink("mine", lambda: second)
    events.record(EVENT, "mine")
    assert (first.lines, second.lines) == ([EVENT.serialize()] * 2, [EVENT.serialize()])


def test_an_event_does_not_reach_other_logs() -> None:
    root = Recorder()
    logging.getLogger().addHandler(root)
    try:
        events.register_sink("mine", Recorder)
        events.record(EVENT, "mine")
    finally:
        logging.getLogger().removeHandler(root)
    assert root.lines == []


def test_the_handler_of_a_sink_is_the_same_each_time() -> None:
    assert events.get_logging_handler() is events.get_logging_handler("null")
    assert isinstance(events.get_logging_handler(), logging.NullHandler)
    assert isinstance(events.get_logging_handler("console"), logging.StreamHandler)


def test_an_unknown_sink_is_refused_with_the_known_ones() -> None:
    for refuse in (events.check_sink, events.get_logging_handler, lambda name: events.record(EVENT, name)):
        with pytest.raises(UsageError, match="'syslog'; available: console, file, null"):
            refuse("syslog")


def test_a_replaced_get_logging_handler_is_asked_for_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Recorder(), Recorder()
    for handler in (first, second):
        monkeypatch.setattr(events, "get_logging_handler", lambda destination="null", handler=handler: handler)
        assert events.is_recorded("null")
        events.check_sink("whatever")
        events.record(EVENT)
    assert (first.lines, second.lines) == ([EVENT.serialize()], [EVENT.serialize()])


def test_a_replaced_one_may_stay_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "get_logging_handler", lambda destination: logging.NullHandler())
    assert not events.is_recorded("console")


# --- rendezvous events -----------------------------------------------------------------------------------------------------


def recorded(**given: object) -> RdzvEvent:
    sink = Recorder()
    events.register_sink("dynamic_rendezvous", lambda: sink)
    events.construct_and_record_rdzv_event("job", "hello", **given)  # type: ignore[arg-type]
    (line,) = sink.lines
    return RdzvEvent.deserialize(line)


def test_a_rendezvous_event_tells_where_it_comes_from() -> None:
    event = recorded(node_state=NodeState.INIT, rank=2, local_id=1, master_endpoint="host:1")
    assert event.name == "test_events.py:recorded"
    assert (event.run_id, event.message, event.node_state, event.error_trace) == ("job", "hello", NodeState.INIT, "")
    assert (event.rank, event.local_id, event.master_endpoint, event.pid) == (2, 1, "host:1", os.getpid())
    assert event.hostname


def test_a_rendezvous_event_keeps_what_was_given() -> None:
    event = recorded(node_state=NodeState.RUNNING, name="step", hostname="other", pid=5)
    assert (event.name, event.hostname, event.pid) == ("test_events.py:step", "other", 5)


def test_a_failure_carries_its_traceback() -> None:
    try:
        raise ValueError("the reason")
    except ValueError:
        event = recorded(node_state=NodeState.FAILED)
    assert "ValueError: the reason" in event.error_trace


def test_a_rendezvous_event_goes_through_the_modules_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RdzvEvent] = []
    monkeypatch.setattr(events, "record_rdzv_event", seen.append)
    events.construct_and_record_rdzv_event("job", "nobody listens", NodeState.INIT)
    assert seen == []
    events.register_sink("dynamic_rendezvous", Recorder)
    events.construct_and_record_rdzv_event("job", "hello", NodeState.INIT)
    assert [event.message for event in seen] == ["hello"]


def test_a_rendezvous_event_for_nobody_is_not_even_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RdzvEvent, "serialize", lambda self: pytest.fail("serialised for nobody"))
    events.record_rdzv_event(RDZV_EVENT)


class Plugin:
    """An entry point, as an installed package has it."""

    name, value = "theirs", "their_package:create"

    def __init__(self, create: object) -> None:
        self.create = create

    def load(self) -> object:
        if isinstance(self.create, Exception):
            raise self.create
        return self.create


def test_a_plug_in_is_a_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    """P44"""
    recorder = Recorder()
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Plugin(lambda: recorder)] * (group == GROUP))
    events.check_sink("theirs")
    events.record(EVENT, "theirs")
    assert recorder.lines == [EVENT.serialize()]


def test_f27_an_event_has_the_time_at_which_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """F27: those with torch's names are made without one."""
    recorder = Recorder()
    events.register_sink("f27", lambda: recorder)
    before_ms = int(time.time() * 1000)
    events.record(Event("a", EventSource.AGENT), "f27")
    assert before_ms <= json.loads(recorder.lines[0])["timestamp"] <= time.time() * 1000


def test_a_plug_in_that_cannot_be_loaded_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Plugin(ImportError("no such module"))])
    with pytest.raises(UsageError, match=r"'theirs' \(their_package:create\) cannot be loaded: .*no such module"):
        events.check_sink("theirs")
