"""What happened in the job, as structured records for machines to read.

An event goes to a *sink*, chosen by name: ``null`` forgets it, ``console`` writes it to stderr as one line of JSON, ``file``
appends that line to the event file of the run, where the agent's own events go in any case, ``otel`` makes spans of them, and
others can be added by `register_sink` or as entry points of the group ``rallypoint.event_sinks``. Most jobs have the null sink,
so an event that nobody will see costs a lookup: nothing is serialised, and neither ``json`` nor ``logging`` is imported. Other
programs replace `get_logging_handler` in this module, so it is looked up anew for each event, and a replaced one is asked.

A sink may hang, and the job does not wait for it: while an agent is at work, each sink gets its events in a thread of its own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from enum import Enum

from rallypoint.base import defaults, report
from rallypoint.base.outbox import Outbox
from rallypoint.base.records import Record, field
from rallypoint.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from importlib.metadata import EntryPoint

__all__ = [
    "Event",
    "EventMetadataValue",
    "EventSource",
    "NodeState",
    "RdzvEvent",
    "check_sink",
    "construct_and_record_rdzv_event",
    "get_logging_handler",
    "is_recorded",
    "record",
    "record_rdzv_event",
    "register_sink",
]

NULL = defaults.EVENT_LOG_HANDLER
FILE = "file"
OTEL = "otel"
RENDEZVOUS_SINK = "dynamic_rendezvous"

EventMetadataValue = str | int | float | bool | None


class EventSource(str, Enum):
    """Who tells."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(str, Enum):
    """How a node stands in a rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


class UnknownSinkError(UsageError, KeyError):
    """Nobody knows a sink of this name; a KeyError too, as callers of `get_logging_handler` know it."""

    __str__ = Exception.__str__  # a KeyError would put the sentence into quotes


class _Serializable:
    """What the events have in common."""

    def __str__(self) -> str:
        return self.serialize()

    def serialize(self) -> str:
        """One line of JSON."""
        import json

        return json.dumps(vars(self))


class Event(_Serializable, Record):
    """Something that happened; the timestamp is in milliseconds since 1970."""

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = field(factory=dict)

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        """The event that was serialised; an event is given back as it is."""
        if isinstance(data, Event):
            return data
        import json

        fields = json.loads(data)
        return Event(**{**fields, "source": EventSource[fields["source"]]})


class RdzvEvent(_Serializable, Record):
    """Something that happened while nodes were meeting."""

    name: str
    run_id: str
    message: str
    hostname: str
    pid: int
    node_state: NodeState
    master_endpoint: str = ""
    rank: int | None = None
    local_id: int | None = None
    error_trace: str = ""

    @staticmethod
    def deserialize(data: str | RdzvEvent) -> RdzvEvent:
        """The event that was serialised; an event is given back as it is."""
        if isinstance(data, RdzvEvent):
            return data
        import json

        fields = json.loads(data)
        return RdzvEvent(**{**fields, "node_state": NodeState[fields["node_state"]]})


def _null_sink() -> logging.Handler:
    import logging

    return logging.NullHandler()


def _console_sink() -> logging.Handler:
    import logging

    return logging.StreamHandler()


def _file_sink() -> logging.Handler:
    from rallypoint.story.event_file import make_sink

    return make_sink()


def _otel_sink() -> logging.Handler:
    from rallypoint.telemetry.sink import OtelHandler

    return OtelHandler()


_sinks: dict[str, Callable[[], logging.Handler]] = {
    NULL: _null_sink,
    "console": _console_sink,
    FILE: _file_sink,
    OTEL: _otel_sink,
    RENDEZVOUS_SINK: _null_sink,
}
_handlers: dict[str, logging.Handler] = {}  # those that were needed so far
_attached: dict[str, tuple[logging.Handler, object]] = {}  # which handler of ours each sink's logger has, and who gave it
_outboxes: dict[str, Outbox] = {}


def register_sink(name: str, create_handler: Callable[[], logging.Handler]) -> None:
    """Let events for `name` go to the handler that `create_handler` makes when the first one comes."""
    _sinks[name] = create_handler
    _handlers.pop(name, None)
    if name in _attached:
        _attached[name] = (_attached[name][0], None)  # to be asked for anew


def check_sink(name: str) -> None:
    """Refuse a sink that nobody knows, before anything is started."""
    if get_logging_handler is _own_get_logging_handler:
        _require(name)
        if name == OTEL:
            from rallypoint.telemetry.sink import require

            require()


def _require(name: str) -> None:
    if name not in _sinks:
        plugins = _find_plugins()
        if name not in plugins:
            known = ", ".join(sorted({*_sinks, *plugins} - {RENDEZVOUS_SINK}))
            raise UnknownSinkError(f"event_log_handler: there is no event sink {name!r}; available: {known}")
        _sinks[name] = _load(name, plugins[name])


def _find_plugins() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points

    return {plugin.name: plugin for plugin in entry_points(group=defaults.ENTRY_POINTS_EVENT_SINKS)}


def _load(name: str, plugin: EntryPoint) -> Callable[[], logging.Handler]:
    try:
        create_handler: Callable[[], logging.Handler] = plugin.load()
    except Exception as error:  # a plug-in is somebody else's code, and may fail in any way
        raise UsageError(f"event_log_handler: {name!r} ({plugin.value}) cannot be loaded: {error!r}") from error
    return create_handler


def get_logging_handler(destination: str = NULL) -> logging.Handler:
    """The handler of a sink, the same each time."""
    _require(destination)
    if destination not in _handlers:
        _handlers[destination] = _sinks[destination]()
    return _handlers[destination]


_own_get_logging_handler = get_logging_handler


def is_recorded(destination: str) -> bool:
    """Whether anybody would see an event that is sent there; if not, it need not be made."""
    if get_logging_handler is _own_get_logging_handler:
        return _sinks.get(destination) is not _null_sink
    import logging

    return not isinstance(get_logging_handler(destination), logging.NullHandler)


def record(event: Event, destination: str = NULL) -> None:
    """Send an event to a sink; one without a time gets the present one."""
    if get_logging_handler is not _own_get_logging_handler or is_recorded(destination):  # a replaced one is asked once only
        event.timestamp = event.timestamp or int(time.time() * 1000)
        _send(event.serialize(), destination)


def record_rdzv_event(event: RdzvEvent) -> None:
    """Send an event to the sink for rendezvous events."""
    if get_logging_handler is not _own_get_logging_handler or is_recorded(RENDEZVOUS_SINK):
        _send(event.serialize(), RENDEZVOUS_SINK)


def _send(text: str, destination: str) -> None:
    if destination == FILE:  # which has an outbox itself
        _hand_over((text, destination))
        return
    import logging  # noqa: F401  # here and not in the thread, which a fork must not find in the middle of that

    if destination not in _outboxes:
        complain = report.warning_once(f"events are lost, because the sink {destination}")
        _outboxes[destination] = Outbox(_hand_over, is_foreign=True, on_error=complain)
    _outboxes[destination].put((text, destination))


def _hand_over(sent: tuple[str, str]) -> None:
    text, destination = sent
    _get_or_create_logger(destination).info(text)


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Make a rendezvous event and send it; it is named by the caller's file and `name`, or the calling function."""
    if not is_recorded(RENDEZVOUS_SINK):
        return
    caller = sys._getframe(1).f_code
    event = RdzvEvent(
        name=f"{os.path.basename(caller.co_filename)}:{name or caller.co_name}",
        run_id=run_id,
        message=message,
        hostname=hostname or os.uname().nodename,
        pid=pid or os.getpid(),
        node_state=node_state,
        master_endpoint=master_endpoint,
        rank=rank,
        local_id=local_id,
        error_trace=_current_traceback() if node_state == NodeState.FAILED else "",
    )
    record_rdzv_event(event)


def _current_traceback() -> str:
    import traceback

    return traceback.format_exc()


def _get_or_create_logger(destination: str = NULL) -> logging.Logger:
    """The logger of a sink, apart from all others, so that an event is seen once."""
    import logging

    logger = logging.getLogger(f"torchelastic-events-{destination}")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    before, giver = _attached.get(destination, (None, None))
    if giver is not get_logging_handler:
        handler = get_logging_handler(destination)
        if before is not None:
            logger.removeHandler(before)
        logger.addHandler(handler)
        _attached[destination] = (handler, get_logging_handler)
    return logger
