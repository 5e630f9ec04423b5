"""Where the time of a run went, counted anew from the events that tell of it.

Every change of phase tells which phase it ends and how long that lasted, so that a file of which lines are missing still gives
the rest. Time that no line speaks for is *untold*; seconds of all phases, and those, add up to the wall time. An agent that ends
by itself tells its own totals, and those count then; a file without them is counted up to its last event.

*Goodput* is the part of the wall time in which workers ran and what they did was kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rallypoint.base.records import Record, Value, field
from rallypoint.story import phases
from rallypoint.story.event_records import ENDED, PHASE, STARTED, Told, as_seconds, seconds, words

__all__ = ["Account", "add_up", "replay", "settle"]

_CLOSE_S = 0.01  # a gap below this is no gap


class Account(Value):
    """The seconds of a run by phase, of its whole wall time."""

    seconds: dict[str, float]
    wall_s: float

    @property
    def untold_s(self) -> float:
        """What the phases do not account for; a run of which everything is told has none."""
        gap_s = self.wall_s - sum(self.seconds.values())
        return gap_s if abs(gap_s) > max(_CLOSE_S, self.wall_s / 10_000) else 0.0

    @property
    def goodput(self) -> float:
        """Between 0 and 1; of a run that took no time it is 0."""
        return min(1.0, self.seconds[phases.RUNNING] / self.wall_s) if self.wall_s > 0 else 0.0


class _Replay(Record):
    """The count so far: everything before `until` is counted, and `phase` is the one since then."""

    phase: str = phases.STARTING
    until: float = 0.0
    seconds: dict[str, float] = field(factory=lambda: dict.fromkeys(phases.PHASES, 0.0))

    def change(self, told: Told, now: float) -> None:
        """A phase ends, and with it perhaps a gap of which nothing is told."""
        previous = words(told, "previous") or self.phase
        lasted_s = seconds(told, "lasted_s")
        since = self.until if lasted_s is None else min(max(self.until, now - lasted_s), now)
        if since - self.until < _CLOSE_S:
            since = self.until
        self._add(previous, now - since, seconds(told, "kept_s"))
        self.phase, self.until = words(told, "phase"), now

    def finish(self, now: float) -> None:
        self._add(self.phase, now - self.until, None)
        self.until = now

    def _add(self, phase: str, lasted_s: float, kept_s: float | None) -> None:
        if phase not in self.seconds:
            return
        kept_s = lasted_s if kept_s is None or phase != phases.RUNNING else min(kept_s, lasted_s)
        self.seconds[phase] += kept_s
        self.seconds[phases.LOST] += lasted_s - kept_s


def replay(run: Sequence[Told]) -> Account:
    """Count the phases of one run on one node, up to its last event; its beginning may be missing."""
    begin = next((_begin(told) for told in run if told.t is not None), 0.0)
    count = _Replay(until=begin)
    now = begin
    for told in run:
        now = max(now, told.t or 0.0)  # lines that were tampered with cannot turn the time back
        if told.name == PHASE:
            count.change(told, now)
    if count.phase != phases.DONE:
        count.finish(now)
    return Account(count.seconds, count.until - begin)


def _begin(first: Told) -> float:
    """When the run began, as far as the first event knows that."""
    if first.name == STARTED:
        return 0.0
    lasted_s = seconds(first, "lasted_s") if first.name == PHASE else None
    return max(0.0, (first.t or 0.0) - (lasted_s or 0.0))


def settle(run: Sequence[Told]) -> Account:
    """What the agent said at its end, if it did; else what the phases tell."""
    last = next((told for told in reversed(run) if told.name == ENDED), None)
    wall_s = seconds(last, "wall_s") if last else None
    said = _said(last.metadata.get("seconds")) if last else None
    return replay(run) if wall_s is None or said is None else Account(said, wall_s)


def _said(value: object) -> dict[str, float] | None:
    """The seconds of all phases; None if one is missing or is no duration."""
    if not isinstance(value, Mapping):
        return None
    found = {phase: as_seconds(value.get(phase)) for phase in phases.PHASES}
    durations = {phase: lasted_s for phase, lasted_s in found.items() if lasted_s is not None}
    return durations if len(durations) == len(found) else None


def add_up(accounts: Iterable[Account]) -> Account:
    """All nodes together: seconds of nodes, not of the clock on the wall."""
    total = Account(dict.fromkeys(phases.PHASES, 0.0), 0.0)
    for one in accounts:
        total = Account({phase: total.seconds[phase] + one.seconds[phase] for phase in phases.PHASES}, total.wall_s + one.wall_s)
    return total
