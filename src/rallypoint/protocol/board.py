"""What is posted for all nodes, under ``down/``, as one of them has seen it so far.

A board is filled from one read and kept up by the changes that follow it. It may lag behind the store, but never shows a
state that the store was not in: whoever acts on it lets the store compare revisions, and looks again if they differ.
"""

from __future__ import annotations

from contextlib import suppress

from rallypoint.coordination.model import Event, Item, Snapshot
from rallypoint.protocol import job_records as job

__all__ = ["Board"]


class Board:
    """The last known state of everything under ``down/``."""

    def __init__(self) -> None:
        self.is_loaded = False
        self._read_at = 0
        self.leader: Item | None = None
        self.generation: job.Generation | None = None
        self.generation_revision = 0
        self.generation_at = 0.0
        self.closed: job.Closed | None = None
        self.signals: dict[int, job.Signal] = {}
        self.signal_at: dict[int, float] = {}
        self.refusals: dict[str, str] = {}
        self.expelled: dict[str, str] = {}

    def load(self, snapshot: Snapshot, now: float) -> None:
        """Begin anew with what was read; what was known already keeps the time at which it was seen."""
        self.leader = None
        for item in snapshot.items:
            self._put(item, now)
        self._read_at = snapshot.revision
        self.is_loaded = True

    def post(self, item: Item, now: float) -> None:
        """What this node has just written itself; the change that tells of it follows, and changes nothing."""
        self._put(item, now)

    def apply(self, event: Event, now: float) -> None:
        """Take in one change; one that is older than what was read is known already."""
        if event.revision <= self._read_at:
            return
        if event.item is not None:
            self._put(event.item, now)
        elif event.key == job.LEADER and (self.leader is None or event.revision > self.leader.mod_revision):
            self.leader = None  # unless it is the end of an earlier one, which an answer has overtaken

    def _put(self, item: Item, now: float) -> None:
        """Take in what was written; what nobody can read is not there."""
        with suppress(ValueError):
            self._read(item, now)

    def _read(self, item: Item, now: float) -> None:
        head, _, tail = item.key.rpartition("/")
        if item.key == job.LEADER:
            if self.leader is None or item.mod_revision >= self.leader.mod_revision:  # else an answer has overtaken it
                self.leader = item
        elif item.key == job.GENERATION:
            self._put_generation(item, now)
        elif item.key == job.CLOSED:
            self.closed = self.closed or job.decode(job.Closed, item.value)
        elif head == "down/signal":
            number = int(tail)
            self.signals.setdefault(number, job.decode(job.Signal, item.value))
            self.signal_at.setdefault(number, now)
        elif head == "down/refused":
            self.refusals[tail] = item.value.decode(errors="replace")
        elif head == "down/expelled":
            self.expelled[tail] = item.value.decode(errors="replace")

    def _put_generation(self, item: Item, now: float) -> None:
        if item.mod_revision <= self.generation_revision:
            return
        self.generation = job.decode(job.Generation, item.value)
        self.generation_revision = item.mod_revision
        self.generation_at = now
        for number in [number for number in self.signals if number < self.generation.number]:
            del self.signals[number], self.signal_at[number]

    @property
    def number(self) -> int:
        """The generation that counts; 0 before the first."""
        return self.generation.number if self.generation else 0

    def signal(self) -> job.Signal | None:
        """How the generation that counts ends, if it does."""
        return self.signals.get(self.number)
