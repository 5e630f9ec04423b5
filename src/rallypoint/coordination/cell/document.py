"""A job's whole keyspace as one document, for a store that has no more than one cell of bytes, with a version.

Whoever wants to change something reads the cell, does here what `coordination.keyspace` says, and writes the cell if nobody else
has written it meanwhile. A lease is a number that its owner adds to: nobody's clock is written down. Who has added nothing for
how long, is for each observer to say by its own clock.

The document is JSON. Values that are UTF-8 stand in it as they are, others as a list of one text with a character for each byte.
The latest changes stand in it too, for those who look only now and then; a change that an item still shows is told by its
revision and key alone. `writer` makes each document unlike any other, so that who wrote it can recognise it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping

from rallypoint.base.json_text import from_json, reader
from rallypoint.base.records import Value
from rallypoint.coordination.keyspace import Keyspace
from rallypoint.coordination.model import Event, Item

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.coordination.model import Cause

__all__ = [
    "DOCUMENT_BYTES", "LONGEST_GAP_S", "CellDocument", "DocumentTooLarge", "NotOurDocument", "Pulse", "Sightings", "decode",
    "encode",
]  # fmt: skip

FORMAT = "rallypoint-cell-1"
DOCUMENT_BYTES = 4 << 20
HISTORY_EVENTS = 400
HISTORY_BYTES = 1 << 20
CAUSES = ("put", "deleted", "expired", "vouched")
BYTES_AS_TEXT = "latin-1"  # one character for each byte
LONGEST_GAP_S = 2.0


class NotOurDocument(ValueError):
    """The cell holds something that is no such document."""


class DocumentTooLarge(ValueError):
    """The change would make the document larger than any cell need be able to hold."""


class Pulse(Value):
    """How long the owner of a lease may be silent, and how often it has been heard."""

    ttl_s: float
    count: int


class CellDocument(Keyspace):
    """A keyspace whose leases are pulses. `identity` tells it from any other that was ever in the cell."""

    def __init__(self, identity: str) -> None:
        super().__init__(HISTORY_EVENTS, HISTORY_BYTES)
        self.identity = identity
        self.granted = 0  # leases, ever
        self.writer = ""
        self.pulses: dict[int, Pulse] = {}

    def grant(self, ttl_s: float, now: float = 0.0) -> int:
        """A new lease; its time begins when somebody has seen it."""
        if not 0 < ttl_s < math.inf:
            raise ValueError(f"a lease must live for a time, not for {ttl_s!r} s")
        self.granted += 1
        self._take_up(self.granted, Pulse(ttl_s, 0))
        return self.granted

    def beat(self, lease: int) -> bool:
        """Its owner lives; False if the lease has ended."""
        pulse = self.pulses.get(lease)
        if pulse is not None:
            self.pulses[lease] = pulse.replace(count=pulse.count + 1)
        return pulse is not None

    def expire(self, lease: int, count: int) -> bool:
        """End a lease whose owner was heard so often and no more; whether that is still so."""
        is_so = lease in self.pulses and self.pulses[lease].count == count
        if is_so:
            self._end(lease, "expired")
        return is_so

    @property
    def oldest_change(self) -> int:
        """The first revision whose changes are all remembered."""
        return self._history.oldest

    def _delete_bound(self, lease: int, cause: Cause) -> None:
        self.pulses.pop(lease, None)
        super()._delete_bound(lease, cause)

    def _take_up(self, lease: int, pulse: Pulse) -> None:
        self.pulses[lease] = pulse
        self._leases.take_up(lease, pulse.ttl_s)

    # --- as a document -----------------------------------------------------------------------------------------------------

    def fields(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "identity": self.identity,
            "writer": self.writer,
            "revision": self.revision,
            "granted": self.granted,
            "leases": {str(number): [pulse.ttl_s, pulse.count] for number, pulse in self.pulses.items()},
            "items": [_item_fields(self._items[key]) for key in self._keys],
            "oldest": self._history.oldest,
            "history": [self._event_fields(event) for event in self._history.events],
        }

    def _event_fields(self, event: Event) -> list[Any]:
        if event.item is None:
            return [event.revision, event.key, event.cause]
        if self._items.get(event.key) == event.item:
            return [event.revision, event.key]
        return [event.revision, event.key, _item_fields(event.item)]

    def fill(self, fields: dict[str, Any]) -> None:
        """The opposite of `fields`, for an empty document. What is wrong with them is a ValueError, or a sibling of it."""
        self.writer, self.granted = _text(fields["writer"]), _count(fields["granted"])
        self.revision = _count(fields["revision"])
        for number, (ttl_s, count) in fields["leases"].items():
            if not 0 < int(number) <= self.granted:
                raise ValueError(f"lease {number} was never granted")
            self._take_up(int(number), Pulse(_seconds(ttl_s), _count(count)))
        for item in map(_item, fields["items"]):
            self._items[item.key] = item
            self._leases.bind(item.key, item.lease)
        self._keys = sorted(self._items)
        self.size_bytes = self.measured_bytes()
        self._history.add([self._event(event) for event in fields["history"]])
        self._history.oldest = max(self._history.oldest, _count(fields["oldest"]))

    def _event(self, fields: list[Any]) -> Event:
        revision, key, *rest = fields
        match rest:
            case []:
                return Event(_count(revision), _text(key), self._items[key], "put")
            case [str() as cause] if cause in CAUSES:
                return Event(_count(revision), _text(key), None, cause)  # type: ignore[arg-type]  # it is one of them
            case [list() as item]:
                return Event(_count(revision), _text(key), _item(item), "put")
        raise ValueError("a change is neither a put nor an end")


def encode(document: CellDocument, writer: str) -> bytes:
    """The document as bytes, marked as written by `writer`."""
    document.writer = writer
    data = json.dumps(document.fields(), ensure_ascii=False, separators=(",", ":")).encode()
    if len(data) > DOCUMENT_BYTES:
        raise DocumentTooLarge(f"the job's state would have {len(data)} bytes, and one cell may hold {DOCUMENT_BYTES}")
    return data


def decode(data: bytes) -> CellDocument:
    """The document that `data` is; NotOurDocument if it is none, or one that contradicts itself."""
    if len(data) > DOCUMENT_BYTES:
        raise NotOurDocument(f"it has {len(data)} bytes, more than the {DOCUMENT_BYTES} that it may have")
    try:
        fields = from_json(data)
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise NotOurDocument(f"it is not of the format {FORMAT}")
        document = CellDocument(_text(fields["identity"]))
        document.fill(fields)
        document.check()
    except NotOurDocument:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
        raise NotOurDocument(f"it cannot be read: {error}") from None
    return document


def _item_fields(item: Item) -> list[Any]:
    return [item.key, _written(item.value), item.create_revision, item.mod_revision, item.lease]


def _item(fields: list[Any]) -> Item:
    key, value, created, changed, lease = fields
    return Item(_text(key), _value(value), _count(created), _count(changed), _count(lease))


def _written(value: bytes) -> str | list[str]:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return [value.decode(BYTES_AS_TEXT)]


def _value(written: object) -> bytes:
    match written:
        case str():
            return written.encode()
        case [str() as text]:
            return text.encode(BYTES_AS_TEXT)
    raise ValueError("a value is neither a text nor a list of one")


_text: Callable[[object], str] = reader(lambda value: type(value) is str, "a text is expected")
_count: Callable[[object], int] = reader(lambda value: type(value) is int and value >= 0, "a whole number is expected")


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError("a time in seconds is expected")
    return float(value)


class _Sighting(Value):
    count: int
    silent_s: float
    ttl_s: float


class Sightings:
    """Who has gone silent, as one observer saw it on its own clock: the pulses of the others, and how long each has not moved.

    A pulse that has not moved for the time to live of its lease, while this observer looked, is silent. It cannot have been seen
    before its owner sent it; so the owner, which counts from when it sent its last one, always gives up before it is given up.

    Time in which the observer did not look does not count beyond `LONGEST_GAP_S`: it was stopped, or the cell could not be read,
    and then its owner could not write it either.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Sighting] = {}
        self._looked_at: float | None = None

    def look(self, pulses: Mapping[int, Pulse], now: float) -> list[tuple[int, int]]:
        """These are the pulses now: the leases that have been silent for too long, each with the count that it is stuck at."""
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, LONGEST_GAP_S)
        self._looked_at = now
        self._seen = {number: self._sighting(number, pulse, passed_s) for number, pulse in pulses.items()}
        return [(number, one.count) for number, one in self._seen.items() if one.silent_s >= one.ttl_s]

    def look_at(self) -> float | None:
        """When the next one can be silent for too long; None while there is none."""
        if self._looked_at is None or not self._seen:
            return None
        return self._looked_at + max(0.0, min(one.ttl_s - one.silent_s for one in self._seen.values()))

    def _sighting(self, number: int, pulse: Pulse, passed_s: float) -> _Sighting:
        before = self._seen.get(number)
        silent_s = before.silent_s + passed_s if before is not None and before.count == pulse.count else 0.0
        return _Sighting(pulse.count, silent_s, pulse.ttl_s)
