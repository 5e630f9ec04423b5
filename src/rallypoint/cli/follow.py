"""``rallypoint explain --follow``: what happens in a run, as it happens, until it is over.

The files are looked at four times a second. What happens on several nodes is told by one after the other, and how a worker failed
is often told of its neighbours too, a little later. So something is told when it has been known for a moment, and once only; a
generation when it runs.
"""

from __future__ import annotations

import os
import select
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from rallypoint.base.records import Record, field
from rallypoint.story.event_records import ENDED
from rallypoint.story.story import Entry, Kind, NodeRun, Story

__all__ = ["Teller", "follow", "is_over"]

LOOK_S = 0.25
LOOK_ANYWAY_S = 2.0  # at who lives: one that was killed writes nothing more
SETTLED_S = 1.0
LAST_WORD_S = 5.0  # after the end of some, for agents of other hosts, of which nobody here can know whether they live


class Teller(Record):
    """What was told, and since when the rest is known."""

    told: Counter[object] = field(factory=Counter)
    known_since: dict[object, float] = field(factory=dict)

    def news(self, entries: Iterable[Entry], now: float, is_all: bool) -> list[Entry]:
        """What is to be told now; at the end, all that is left."""
        found: list[Entry] = []
        counted: Counter[object] = Counter()
        for entry in entries:
            key = _identity(entry)
            counted[key] += 1
            if counted[key] <= self.told[key]:
                continue
            since = self.known_since.setdefault((key, counted[key]), now)
            if is_all or (now - since >= SETTLED_S and _is_whole(entry)):
                self.told[key] += 1
                found.append(entry)
        return found


def _identity(entry: Entry) -> object:
    """What does not change of an entry when more is told of it."""
    return (entry.kind, *(entry.facts.get(name) for name in ("generation", "rank", "pid", "why", "name")))


def _is_whole(entry: Entry) -> bool:
    return entry.kind != Kind.SILENT and (entry.kind != Kind.GENERATION or "ready_s" in entry.facts)


def is_over(runs: Sequence[NodeRun], quiet_s: float) -> bool:
    """Whether nothing more will come, as far as this host can tell."""
    unknown = [run for run in runs if run.first(ENDED) is None and run.hostname != os.uname().nodename]
    if any(run.runs_at_ms is not None for run in runs):
        return False
    return not unknown or (len(unknown) < len(runs) and quiet_s >= LAST_WORD_S)


def follow(paths: Sequence[str], read: Callable[[bool], Story], tell: Callable[[Story, list[Entry]], object]) -> Story:
    """Tell what happens until it is over, and give the whole story; `read` looks at the files again, or only at who lives."""
    teller, changed_at, looked_at = Teller(), time.monotonic(), time.monotonic()
    story = read(True)
    stamp = _stamp(paths, story)
    while True:
        now = time.monotonic()
        over = is_over(story.runs, now - changed_at)
        tell(story, teller.news(story.entries, now, is_all=over))
        if over or _reader_goes(LOOK_S):
            return story
        now, before, stamp = time.monotonic(), stamp, _stamp(paths, story)
        if stamp != before:
            story, changed_at, looked_at = read(True), now, now
        elif now - looked_at >= LOOK_ANYWAY_S:
            story, looked_at = read(False), now


def _reader_goes(within_s: float) -> bool:
    """Wait a while; whether there is nobody left who reads what we print, as after ``| head``."""
    stdout = select.poll()
    stdout.register(1, 0)
    return bool(stdout.poll(within_s * 1000))


def _stamp(paths: Sequence[str], story: Story) -> list[object]:
    """What changes when there is something to be read."""
    return [_mark(path) for path in [*paths, *(run.path for run in story.runs)]]


def _mark(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
