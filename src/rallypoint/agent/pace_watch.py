"""How quick an agent's workers are, for as long as they tell of steps: measured here, compared over the whole job, and said once.

The agent's own thread looks every few seconds. Where other nodes have workers, what it sees goes to them, if it is something new,
and what comes back is the same on all nodes, so each says who is slow, wherever that is. A node alone compares for itself. Who is
slow is decided in `protocol.pace`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

from rallypoint.agent.records import RunRecord
from rallypoint.base import report
from rallypoint.processes.activity import busy_s
from rallypoint.protocol import pace
from rallypoint.protocol.pace import Effort, JobPace, NodePace, Pace, Scores

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.agent.peers import NoJob
    from rallypoint.hangs.pulse_page import Pulse
    from rallypoint.rendezvous.coordinated import CoordinatedHandler

    ReadPulses = Callable[[], list[tuple[int, Pulse]]]  # of the workers here that say anything, with their ranks

__all__ = ["PaceWatch"]


class PaceWatch:
    """Of the workers of one generation. `look` and `take_word` are the agent's; the rest is for any thread."""

    def __init__(
        self,
        read_pulses: ReadPulses,
        record: RunRecord,
        generation: int = 0,
        nodes: int = 1,
        job: CoordinatedHandler | NoJob | None = None,
    ) -> None:
        """`job` is there where other nodes have workers too."""
        self._read_pulses = read_pulses
        self._record = record
        self._generation = generation
        self._nodes = nodes
        self._job = job
        self._efforts: dict[int, Effort] = {}
        self._told: NodePace | None = None
        self._seen: dict[int, int] = {}
        self._named: set[int] = set()
        self._found: JobPace | None = None

    def paces(self) -> list[Pace]:
        """How long each worker takes for a step: by what was seen lately, or else by its own word."""
        return [one for rank, pulse in self._read_pulses() if (one := _pace_of(rank, pulse, self._efforts.get(rank))) is not None]

    def scores(self) -> Scores:
        return pace.scores(self.paces(), self._found)

    def look(self, now: float) -> float:
        """Measure, and have it compared; how long to wait for the next look."""
        self._efforts = {
            rank: pace.measure(self._efforts.get(rank), now, pulse.steps, busy_s(pulse.owner))
            for rank, pulse in self._read_pulses()
        }
        paces = self.paces()
        if self._job is None:
            self._compare_here(paces)
        elif pace.is_other(self._told, told := pace.told_of("", paces)) and self._job.tell_pace(self._generation, paces):
            self._told = told
        return pace.pause_of(self._nodes)

    def _compare_here(self, paces: list[Pace]) -> None:
        self._seen, found = pace.follow(self._seen, pace.slow_ones(paces))
        self._name(found)

    def take_word(self, words: deque[tuple[int, bytes]]) -> None:
        """What all nodes have found; the last word counts."""
        while words:
            generation, found = words.popleft()
            if generation == self._generation:
                with suppress(ValueError):
                    self._found = pace.decode_job(found)
                    self._name(self._found.slow)

    def _name(self, slow: tuple[pace.Slow, ...]) -> None:
        """Each is told of once."""
        for one in slow:
            if one.rank not in self._named:
                self._named.add(one.rank)
                where = f" (node {one.node})" if one.node else ""
                report.warn(f"rank {one.rank}{where} is slow: it {one.text}")
                facts = {"rank": one.rank, "step_s": round(one.step_s, 6), "median_s": round(one.median_s, 6)}
                self._record.note(
                    "worker.slow",
                    generation=self._record.board.status.generation,
                    **facts,
                    holds_up=one.holds_up,
                    node=one.node,
                    message=f"it {one.text}",
                )


def _pace_of(rank: int, pulse: Pulse, effort: Effort | None) -> Pace | None:
    if effort is not None and effort.step_s is not None:
        return Pace(rank, effort.step_s, pulse.steps, effort.share)
    return None if pulse.step_s is None else Pace(rank, pulse.step_s, pulse.steps)
