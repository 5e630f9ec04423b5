"""How long each regroup took on a node, hop by hop: from what made it necessary until workers ran again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rallypoint.base.records import Value
from rallypoint.story import phases
from rallypoint.story.event_records import ENDED, FAILED, PHASE, Told, seconds, words

__all__ = ["HOPS", "NOTICING", "Regroup", "regroups"]

NOTICING = "noticing"  # from the end of the worker that failed first to the decision to stop the others
HOPS = (NOTICING, phases.STOPPING, phases.WAITING, phases.STARTING)


class Regroup(Value):
    """One of them, on the node's own clock."""

    begun_t: float
    why: str
    seconds: dict[str, float]  # by hop

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def regroups(events: Sequence[Told]) -> Iterator[Regroup]:
    """Those that came to their end. A file of which lines are missing tells of fewer, or of less."""
    failed_t: float | None = None  # the first failure of the generation that runs
    open_one: Regroup | None = None
    for told in events:
        if told.name == FAILED and told.t is not None and failed_t is None:
            failed_t = told.t - (seconds(told, "ago_s") or 0.0)
        elif told.name == ENDED:
            open_one = None
        elif told.name == PHASE and told.t is not None:
            phase, previous = words(told, "phase"), words(told, "previous")
            if previous == phases.RUNNING:
                begun_t = told.t if failed_t is None else min(failed_t, told.t)
                open_one = Regroup(begun_t, words(told, "why"), {**dict.fromkeys(HOPS, 0.0), NOTICING: told.t - begun_t})
            elif open_one is not None and previous in open_one.seconds:
                lasted_s = open_one.seconds[previous] + (seconds(told, "lasted_s") or 0.0)
                open_one = open_one.replace(seconds={**open_one.seconds, previous: lasted_s})
            if phase == phases.RUNNING:
                if open_one is not None:
                    yield open_one
                failed_t = open_one = None
