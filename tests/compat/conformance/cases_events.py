"""Events: what is in them, how they travel, where they go."""

from __future__ import annotations

import json
import logging
from typing import Any
from unittest import mock

from tests.compat.conformance.harness import case, outcome, plain


@case
def an_event_and_its_text() -> dict[str, Any]:
    from torch.distributed.elastic.events import Event, EventSource

    event = Event(
        name="start",
        source=EventSource.WORKER,
        timestamp=5,
        metadata={"rank": 3, "ratio": 0.5, "name": "a", "none": None, "yes": True},
    )
    text = event.serialize()
    bare = Event("n", EventSource.AGENT)
    return {
        "text": json.loads(text),
        "str": outcome(lambda: str(event) == text),
        "back": outcome(lambda: Event.deserialize(text) == event),
        "an event is its own": outcome(lambda: Event.deserialize(event) is event),
        "defaults": plain([bare.timestamp, bare.metadata]),
        "source of text": plain(Event.deserialize(text).source),
        "bad text": outcome(Event.deserialize, "{"),
        "repr": repr(bare),
        "equal": Event("n", EventSource.AGENT) == bare,
        "hash": outcome(hash, bare),
        "lacks": outcome(Event),
    }


@case
def the_sources_and_states() -> dict[str, Any]:
    from torch.distributed.elastic.events.api import EventSource, NodeState

    return {
        "sources": plain(list(EventSource)),
        "states": plain(list(NodeState)),
        "is text": [EventSource.AGENT == "AGENT", NodeState.FAILED == "FAILED"],
        "str": [str(EventSource.AGENT), str(NodeState.INIT)],
        "by value": outcome(EventSource, "WORKER"),
        "unknown": outcome(EventSource, "worker"),
    }


@case
def a_rendezvous_event_and_its_text() -> dict[str, Any]:
    from torch.distributed.elastic.events import NodeState, RdzvEvent

    event = RdzvEvent(name="n", run_id="r", message="m", hostname="h", pid=1, node_state=NodeState.RUNNING)
    text = event.serialize()
    return {
        "text": json.loads(text),
        "back": RdzvEvent.deserialize(text) == event,
        "itself": RdzvEvent.deserialize(event) is event,
        "state of text": plain(RdzvEvent.deserialize(text).node_state),
        "defaults": plain([event.master_endpoint, event.rank, event.local_id, event.error_trace]),
        "lacks": outcome(RdzvEvent, name="n"),
    }


class Collecting(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@case
def record_writes_to_the_handler_of_the_destination() -> dict[str, Any]:
    from torch.distributed.elastic import events
    from torch.distributed.elastic.events import Event, EventSource, record

    handler = Collecting()
    logging.disable(logging.NOTSET)
    try:
        with mock.patch("torch.distributed.elastic.events.get_logging_handler", return_value=handler) as asked:
            answer = record(Event("first", EventSource.AGENT, metadata={"a": 1}), "conformance-1")
            events.record(Event("second", EventSource.AGENT), "conformance-1")
        asked_for = [plain(call.args) for call in asked.call_args_list]
    finally:
        logging.disable(logging.CRITICAL)
    return {
        "answer": plain(answer),
        "asked for": asked_for,
        "messages": [json.loads(message)["name"] for message in handler.messages],
        "metadata": json.loads(handler.messages[0])["metadata"] if handler.messages else None,
        "default": outcome(record, Event("x", EventSource.AGENT)),
    }


@case
def handlers_of_events() -> dict[str, Any]:
    from torch.distributed.elastic.events import get_logging_handler
    from torch.distributed.elastic.events.handlers import get_logging_handler as home

    return {
        "same": get_logging_handler is home,
        "null": plain(isinstance(get_logging_handler(), logging.NullHandler)),
        "null by name": plain(isinstance(get_logging_handler("null"), logging.Handler)),
        "console": plain(isinstance(get_logging_handler("console"), logging.StreamHandler)),
        "unknown": outcome(get_logging_handler, "no such handler"),
    }


@case
def rendezvous_events_are_recorded() -> dict[str, Any]:
    from torch.distributed.elastic.events import NodeState, RdzvEvent, construct_and_record_rdzv_event, record_rdzv_event

    target = "torch.distributed.elastic.events.record_rdzv_event"
    with mock.patch(target) as recorded, mock.patch("torch.distributed.elastic.events.get_logging_handler") as handler:
        handler.return_value = logging.StreamHandler()
        first = outcome(construct_and_record_rdzv_event, run_id="r", message="m", node_state=NodeState.RUNNING)
        construct_and_record_rdzv_event(
            "r2", "m2", NodeState.FAILED, name="n", hostname="h", pid=7, master_endpoint="e", local_id=2, rank=3
        )
    calls = [call.args[0] for call in recorded.call_args_list]
    with mock.patch("torch.distributed.elastic.events.get_logging_handler") as nobody:
        nobody.return_value = logging.NullHandler()
        with mock.patch(target) as silent:
            construct_and_record_rdzv_event(run_id="r", message="m", node_state=NodeState.RUNNING)
    event = RdzvEvent(name="n", run_id="r", message="m", hostname="h", pid=1, node_state=NodeState.INIT)
    return {
        "answer": first,
        "how often": len(calls),
        "fields": [
            plain([one.run_id, one.message, one.node_state, one.master_endpoint, one.rank, one.local_id]) for one in calls
        ],
        "given": [plain([one.name, one.hostname, one.pid]) for one in calls[1:]],
        "found out": [[bool(one.hostname), one.pid > 0] for one in calls[:1]],
        "not to null": silent.call_count,
        "record": outcome(record_rdzv_event, event),
    }


@case
def a_failed_rendezvous_event_has_its_trace() -> dict[str, Any]:
    from torch.distributed.elastic.events import NodeState, construct_and_record_rdzv_event

    target = "torch.distributed.elastic.events.record_rdzv_event"
    with mock.patch(target) as recorded, mock.patch("torch.distributed.elastic.events.get_logging_handler") as handler:
        handler.return_value = logging.StreamHandler()
        try:
            raise RuntimeError("broken here")
        except RuntimeError:
            construct_and_record_rdzv_event("r", "m", NodeState.FAILED)
            construct_and_record_rdzv_event("r", "m", NodeState.SUCCEEDED)
    traces = [call.args[0].error_trace for call in recorded.call_args_list]
    return {"failed": ["broken here" in trace for trace in traces[:1]], "else": traces[1:]}
