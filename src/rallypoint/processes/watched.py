"""One worker under the watch for hangs: what it says of itself, what the kernel shows of it, and until when it has time."""

from __future__ import annotations

from rallypoint.core import hangs, stillness
from rallypoint.core.hangs import HangLimits, Suspect
from rallypoint.core.pulse_page import RUNNING
from rallypoint.processes.activity import Family, ProcessSight, look_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.core.pulse_page import Pulse

__all__ = ["SILENT", "Watched"]

SILENT = "silent"  # the phase of a worker that says nothing of itself
LOOKS_IN_A_LIMIT = 5  # thorough ones, at a worker that is still


class Watched:
    """One worker; `look` sees how it is, the rest tells of what was seen."""

    def __init__(self, local_rank: int, global_rank: int, pid: int, limits: HangLimits, now: float) -> None:
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.pid = pid
        self.is_there = True
        self.is_stopped = False
        self.due_at: float | None = None  # None: it may be silent for as long as it likes
        self.sign_at = now
        self._limits = limits
        self._family = Family(pid)
        self._pulse: Pulse | None = None
        self._stillness: stillness.Stillness | None = None
        self._looked_at = now
        self._stopped_at: float | None = None
        self._not_before = now  # signs of life count from here: what was before is not held against it

    @property
    def phase(self) -> str:
        return self._pulse.phase if self._pulse is not None else SILENT

    @property
    def step(self) -> int | None:
        return self._pulse.step if self._pulse is not None else None

    def is_overdue(self, now: float) -> bool:
        return self.is_there and self.due_at is not None and now >= self.due_at

    def is_suspect(self, now: float) -> bool:
        """Whether others that are overdue may wait for it: it is overdue too, or stopped, or half of its time is over."""
        if not self.is_there or self.due_at is None:
            return False
        is_at_work = self.phase in (RUNNING, SILENT)
        return self.is_stopped or now >= self.due_at or (is_at_work and now - self.sign_at >= (self.due_at - self.sign_at) / 2)

    def look(self, pulse: Pulse | None, planned_at: float, now: float) -> None:
        """See how the worker is; `planned_at` is when this was to be done."""
        worker = look_at(self.pid)
        self.is_there = worker is not None and not worker.is_gone
        if worker is None or not self.is_there:
            return
        speaker = worker if pulse is None or pulse.owner == self.pid else look_at(pulse.owner)
        if speaker is None or speaker.is_gone:  # as a program does that a shell runs before another
            pulse, speaker = None, worker
        self._pulse = pulse
        self._make_up_for_lost_time(planned_at, now)
        self._note_stop(worker, speaker, now)
        limit_s = self._judge_signs(pulse, now) if pulse is not None else self._judge_stillness(now)
        ends = [self.sign_at + limit_s] if limit_s is not None else []
        if self._stopped_at is not None:
            ends.append(self._stopped_at + self._limits.running_s)
        self.due_at = min(ends, default=None)

    def _make_up_for_lost_time(self, planned_at: float, now: float) -> None:
        self._not_before = max(self._not_before, hangs.regain(self.sign_at, planned_at, now))
        if self._stopped_at is not None:
            self._stopped_at = hangs.regain(self._stopped_at, planned_at, now)

    def _note_stop(self, worker: ProcessSight, speaker: ProcessSight, now: float) -> None:
        states = worker.state + speaker.state
        if "t" in states:  # held by a debugger
            self._not_before = now
        self._stopped_at = (self._stopped_at or now) if "T" in states else None
        self.is_stopped = self._stopped_at is not None

    def _judge_signs(self, pulse: Pulse, now: float) -> float | None:
        self._stillness = None
        self.sign_at = max(pulse.sign_at or pulse.announced_at, self._not_before)
        return hangs.limit_of(pulse, self._limits)

    def _judge_stillness(self, now: float) -> float:
        """Only a worker that looks still is looked at thoroughly: at once, now and then, and before the verdict."""
        seen = self._family.look(now) if self._stillness is None else self._family.glance(now)
        still = stillness.follow(self._stillness, seen)
        limit_s = self._limits.running_s
        look_again_at = min(self._looked_at + limit_s / LOOKS_IN_A_LIMIT, still.since + limit_s)
        if still.since < now and (self._looked_at <= still.since or now >= look_again_at):
            self._looked_at, seen = now, self._family.look(now)
            still = stillness.follow(still, seen)
        self._stillness = still
        self.is_stopped = self.is_stopped or seen.is_stopped
        self.sign_at = max(still.since, self._not_before)
        return limit_s

    def why(self, now: float) -> str:
        """What is wrong with it, in a few words."""
        still_s = now - self.sign_at
        if self.is_stopped:
            return f"it was stopped by a signal (state T) at least {now - (self._stopped_at or self.sign_at):.1f} s ago"
        if self._pulse is None:
            return f"asleep for {still_s:.1f} s, without processor time, input or output (limit {self._limits.running_s:g} s)"
        limit_s = hangs.limit_of(self._pulse, self._limits)
        last = f", its last step was {self.step}" if self.step is not None else ""
        return f"no heartbeat for {still_s:.1f} s in phase {self.phase!r} (limit {limit_s or 0:g} s){last}"

    def suspect(self, standing: object, now: float) -> Suspect:
        return Suspect(self.local_rank, self.sign_at, self.is_stopped, self.step, standing, self.is_overdue(now))
