"""The events that an agent tells of its run, as they are read back: what is in them is checked, and nothing in them is trusted.

A file of events may have been cut short, mixed with other lines, or written by a program that lies. So an event is read field by
field: what is missing or is of the wrong kind reads as absent, text is made one printable line of bounded length, and numbers are
finite and bounded. Whatever works on events can then do without checks of its own.

The names below are the schema, version `SCHEMA`. A later version may add names and fields, which readers skip.
"""

from __future__ import annotations

from rallypoint.base import defaults
from rallypoint.base.json_text import clip
from rallypoint.base.records import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "ENDED", "EXPIRED", "FAILED", "GENERATION", "HUNG", "KNOWN", "PHASE", "RESTART", "SCHEMA", "SLOW", "STARTED", "Told",
    "as_seconds", "count", "integers", "read_told", "seconds", "truth", "words",
]  # fmt: skip

SCHEMA = defaults.EVENT_SCHEMA
STARTED = "rallypoint.run.started"
PHASE = "rallypoint.phase"
GENERATION = "rallypoint.generation"
FAILED = "rallypoint.worker.failed"
HUNG = "rallypoint.worker.hung"
SLOW = "rallypoint.worker.slow"
EXPIRED = "rallypoint.timer.expired"
RESTART = "rallypoint.restart"
ENDED = "rallypoint.run.ended"
KNOWN = frozenset({STARTED, PHASE, GENERATION, FAILED, HUNG, SLOW, EXPIRED, RESTART, ENDED})

_LATEST_MS = 253_402_300_799_000  # the end of the year 9999, the last that calendars of programs know
_SECONDS_MAX = 1e9  # no run takes 30 years
_INTEGER_MAX = 2**53
_LIST_MAX = 65_536
_TEXT_MAX = 4096


class Told(Value):
    """An event; `t` is the time on the node's own clock since the run began there, which other programs' events do not have."""

    name: str
    timestamp_ms: float
    t: float | None
    metadata: dict[str, Any]


def read_told(data: object) -> Told:
    """The event that a line of the file holds; ValueError if it is none."""
    if not isinstance(data, dict):
        raise ValueError("an event is a JSON object")
    name, metadata, timestamp_ms = data.get("name"), data.get("metadata", {}), _as_number(data.get("timestamp"), _LATEST_MS)
    if not isinstance(name, str) or not isinstance(metadata, dict):
        raise ValueError("an event has a name, and metadata that is an object")
    if timestamp_ms is None:
        raise ValueError("the timestamp of an event is in milliseconds since 1970")
    return Told(name, timestamp_ms, as_seconds(metadata.get("t")), metadata)


def as_seconds(value: object) -> float | None:
    """A duration: finite, not negative, and not absurd."""
    return _as_number(value, _SECONDS_MAX)


def seconds(told: Told, key: str) -> float | None:
    return as_seconds(told.metadata.get(key))


def count(told: Told, key: str) -> int | None:
    """A whole number, such as a rank or an exit code."""
    value = told.metadata.get(key)
    return value if _is_integer(value) else None


def integers(told: Told, key: str) -> list[int]:
    """The whole numbers of a list."""
    value = told.metadata.get(key)
    return [one for one in value[:_LIST_MAX] if _is_integer(one)] if isinstance(value, list) else []


def words(told: Told, key: str, most_chars: int = _TEXT_MAX) -> str:
    """One printable line, so that nothing a worker wrote can reach the terminal as a command; empty if there is no text."""
    value = told.metadata.get(key)
    return clip(value, 12 * most_chars, most_chars) if isinstance(value, str) else ""


def truth(told: Told, key: str) -> bool:
    return told.metadata.get(key) is True


def _as_number(value: object, most: float) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value <= most else None  # neither true of NaN


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_INTEGER_MAX <= value <= _INTEGER_MAX
