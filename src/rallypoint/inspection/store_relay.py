"""What nodes show to whoever asks them through the job's store: put there for a moment, and taken away by who asked.

A question has its number, and each answer to it a key of its own. What a node says is packed, and small beside what the job
itself keeps there. A node has a few answers of a kind at a time: a new one takes the place of one that nobody has fetched.
"""

from __future__ import annotations

import binascii
import time
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

from rallypoint.base.json_text import from_json, to_json
from rallypoint.coordination.engine import Coordination, CoordinationError
from rallypoint.coordination.model import Delete, Item, Put, Transaction
from rallypoint.inspection import asking
from rallypoint.protocol import job_records as job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["MOST_BYTES", "Shelf", "collect", "packed", "unpacked"]

MOST_BYTES = 96 * 1024  # of one answer, packed; a value of an embedded store is at most 160 KB
UNPACKED_BYTES = 64 * 1024 * 1024


def collect(engine: Coordination, asked: job.Asked, node_ids: Sequence[str], deadline: float) -> dict[str, bytes]:
    """Put the question; what these nodes have answered by then, packed, by their ids."""
    prefix = _prefix(asking.ask(engine, asked))
    found: dict[str, bytes] = {}

    def take(items: Iterable[Item]) -> None:
        told = {item.key.removeprefix(prefix): item.value for item in items}
        found.update((node_id, told[node_id]) for node_id in node_ids if node_id in told)

    try:
        asking.follow(engine, prefix, take, lambda: found.keys() >= set(node_ids), deadline)
    finally:
        with suppress(CoordinationError):  # the next generation takes away what is left
            engine.transact(Transaction((), (Delete(prefix, is_prefix=True),)), time.monotonic() + asking.CALL_S)
    return found


class Shelf:
    """Where one node puts its answers of one kind, so many at a time; for one thread at a time."""

    def __init__(self, size: int = 1) -> None:
        self._size = size
        self._keys: deque[str] = deque()

    def put(self, node_id: str, number: int, told: bytes) -> Transaction:
        replaced = (Delete(self._keys.popleft()),) if len(self._keys) == self._size else ()
        self._keys.append(f"{_prefix(number)}{node_id}")
        return Transaction((), (*replaced, Put(self._keys[-1], told)))


def _prefix(number: int) -> str:
    return f"{job.SHOWN}{number}/"


def packed(document: object) -> bytes:
    return binascii.b2a_base64(zlib.compress(to_json(document).encode()), newline=False)


def unpacked(value: bytes) -> Any:
    """ValueError: it cannot be read."""
    try:
        return from_json(zlib.decompressobj().decompress(binascii.a2b_base64(value), UNPACKED_BYTES))
    except zlib.error as error:
        raise ValueError(str(error)) from None
