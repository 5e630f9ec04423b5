"""Which worker hangs: how long each may be silent in its phase, whether one that says nothing is still, and who is to blame.

A worker that gives signs of life has a limit by its phase: while *running* the limit of the job; in a section the one that
was given with it, else the one that the job has for that name, else none; while *starting* or *exiting* only if the job has
one for that. A worker that never gave a sign is judged by its stillness. Whoever is stopped by a signal is told after the
limit of the job in any phase.

Where one worker hangs, the others soon wait for it, and are overdue too; they may be so a little before it. So those who are
silent for half of their time are suspects too, once one is overdue. To blame are, of the suspects,

1. those that are stopped;
2. else those that did the fewest steps;
3. of these, one that stands elsewhere in the program than all others, if there are three or more to compare;
4. else the one that is overdue and has been silent for longest.

Whether a process that says nothing of itself is still doing something is judged from what the kernel shows of it. A worker is
seen as a *family*: its process and all that descend from it. It is active if since the last time that it was
- its processes have used more processor time than the background threads of a library do, or
- its processes have read or written anything, output included, or
- processes were added to it, or have ended,

or if now

- one of its threads waits for a disk (D), or a debugger holds it (t), or
- a thread is ready to run (R), and was so when looked at before: it gets no processor, which is no fault of its own. Once is
  not enough: a background thread that wakes for a moment may be met in it.

What cannot be seen counts as activity, so that nobody is called hung on a guess.

Where several nodes have workers, they find out together who hangs (`protocol.inquiry`). For that it counts whether a worker waits
in a collective: it is the name of one of its innermost functions, of Python or of the library, that tells.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Hashable, Iterable, Sequence
from math import isfinite

from rallypoint.base.records import Value
from rallypoint.errors import UsageError
from rallypoint.hangs.pulse_page import BASES, NAME_BYTES, RUNNING, Pulse
from rallypoint.protocol.inquiry import COLLECTIVE, ELSEWHERE, UNKNOWN

__all__ = [
    "EXCHANGE_S", "OTHER_NODES_S", "HangLimits", "Sample", "Stillness", "Suspect", "activity", "blame", "follow",
    "is_clear", "is_verdict_due", "limit_of", "longest_pause", "may_be_elsewhere", "parse_hang_timeout", "place_of",
    "progress_of", "regain", "shown", "standing_of", "verdict_time",
]  # fmt: skip

LONGEST_PAUSE_S = 0.5
SHORTEST_PAUSE_S = 0.05
LATE_S = 0.5  # what a loaded machine may delay us by
SETTLE_S = 0.4  # from the first that is overdue to the verdict: it may be one that waits for the one that hangs
EXCHANGE_S = 5.0  # that all nodes have to find out together; then each goes by what it sees itself
OTHER_NODES_S = 0.4  # on top of that, where all here may wait for the one that hangs on another node, which is told first then
IDLE_CPU_SHARE = 0.005  # of a processor: threads that wake a few times a second use less
IDLE_CPU_S = 0.02  # two ticks of the clock by which the kernel tells of processor time


class HangLimits(Value):
    """Seconds without a sign of life after which a worker counts as hung."""

    running_s: float
    sections: dict[str, float]  # by name, also "starting" and "exiting"; where there is none, there is no limit


class Suspect(Value):
    """A worker that may hang, and what is known of it."""

    local_rank: int
    sign_at: float  # its last sign of life
    is_stopped: bool = False
    step: int | None = None
    standing: Hashable = None  # where in the program it stands; None: not known
    is_overdue: bool = True


def parse_hang_timeout(text: str) -> HangLimits | None:
    """The limits in a text such as ``60`` or ``60,starting=900,checkpoint=600``; None for 0, which is off."""
    first, *rest = (part.strip() for part in text.split(","))
    if not rest and first in ("", "0"):
        return None
    if "=" in first:
        raise UsageError(f"must begin with a number of seconds, not with {first!r}")
    sections: dict[str, float] = {}
    for part in rest:
        name, equals, seconds = (one.strip() for one in part.partition("="))
        if not equals or not name:
            raise UsageError(f"takes limits for phases as name=seconds, not as {part!r}")
        if name in sections or name == RUNNING:
            raise UsageError(f"gives the limit for {name!r} twice")
        if len(name.encode()) > NAME_BYTES:
            raise UsageError(f"names a phase of more than {NAME_BYTES} bytes: {name!r}")
        sections[name] = _seconds(seconds)
    return HangLimits(_seconds(first), sections)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (isfinite(seconds) and seconds > 0):
        raise UsageError(f"takes a number of seconds above zero, not {text!r}")
    return seconds


def limit_of(pulse: Pulse, limits: HangLimits) -> float | None:
    """How long this worker may be silent in its phase; None: as long as it likes."""
    if pulse.limit_s is not None:
        return pulse.limit_s
    return limits.running_s if pulse.phase == RUNNING else limits.sections.get(pulse.phase)


def progress_of(pulse: Pulse, limits: HangLimits | None, now: float) -> float | None:
    """When this worker last made progress, as far as anybody can say: in a section in which it may be silent, it does so now."""
    if pulse.sign_at is None or pulse.phase in BASES:
        return pulse.sign_at
    limit_s = pulse.limit_s
    if limit_s is None and limits is not None:
        limit_s = limits.sections.get(pulse.phase)
    return now if limit_s is None or now - pulse.sign_at <= limit_s else pulse.sign_at


def longest_pause(limits: HangLimits) -> float:
    """How long to wait between two looks: a section, or being stopped, may begin at any time and has to be seen."""
    return min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, limits.running_s / 10))


def regain(sign_at: float, planned_at: float, now: float) -> float:
    """A sign of life, moved by the time in which we could not look, as when all of a job was suspended for a while."""
    lost_s = now - planned_at
    return min(now, sign_at + lost_s) if lost_s > LATE_S else sign_at


def blame(silent: Iterable[Suspect]) -> tuple[Suspect, ...]:
    """Those of them who hang; the others wait for these. At least one, if there is any."""
    suspects = sorted(silent, key=lambda one: (not one.is_overdue, one.sign_at, one.local_rank))
    if stopped := tuple(one for one in suspects if one.is_stopped):
        return stopped
    behind = _fewest_steps(suspects)
    loner = _loner(suspects)
    if loner in behind:
        behind = [loner]
    return tuple(behind[:1])


def verdict_time(before: float | None, overdue: int, now: float) -> float | None:
    """When it is to be said who hangs: a little after the first was overdue, for those who wait for the one that hangs may have
    been silent before it. None as long as nobody is; `before` is what it was at the last look.
    """
    if not overdue:
        return None
    return now + SETTLE_S if before is None else before


def is_verdict_due(verdict_at: float | None, overdue: int, workers: int, now: float) -> bool:
    """Where all of them are overdue, there is nobody left to wait for."""
    return verdict_at is not None and (now >= verdict_at or overdue == workers)


def may_be_elsewhere(suspects: Sequence[Suspect], workers: int, has_other_nodes: bool) -> bool:
    """Whether all workers here may only wait for one of another node: then that one is to be told first."""
    return has_other_nodes and len(suspects) == workers and not is_clear(suspects)


def is_clear(silent: Iterable[Suspect]) -> bool:
    """Whether anything tells some of them from the others. If not, all of them may wait for somebody on another node."""
    suspects = list(silent)
    is_stopped = any(one.is_stopped for one in suspects)
    return is_stopped or len({one.step for one in suspects}) > 1 or len({one.standing for one in suspects}) > 1


def _fewest_steps(suspects: Sequence[Suspect]) -> list[Suspect]:
    """Those with the lowest step, if all told theirs; else all."""
    steps = [one.step for one in suspects if one.step is not None]
    if len(steps) < len(suspects):
        return list(suspects)
    return [one for one in suspects if one.step == min(steps)]


def _loner(suspects: Sequence[Suspect]) -> Suspect | None:
    """The only one that stands where no other does."""
    standings = [one.standing for one in suspects]
    if len(suspects) < 3 or None in standings:
        return None
    alone = [one for one in suspects if standings.count(one.standing) == 1]
    return alone[0] if len(alone) == 1 else None


SHOWN = 3
INNERMOST = 12  # frames of a thread among which a collective is looked for: libraries wrap theirs several times
_COLLECTIVE_FUNCTION = re.compile(
    r"_*(i|async_?|sync_?|monitored_?|gpu_?|global_?)?"
    r"(barrier|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|bcast|gatherv?|scatterv?|reduce)"
    r"(_?(v|w|coalesced|object|objects|object_list|multigpu|base|single|into_tensor|tensor|params|buffers|bucket|async|op|impl))*_*$",
    re.IGNORECASE,
)
_SHORT_NAMES = ("gather", "gatherv", "scatter", "scatterv", "reduce")  # which may be anything, outside of a library
_LIBRARY_FUNCTIONS = ("send", "recv", "wait", "synchronize", "batch_isend_irecv", "waitall", "sendrecv", "probe")
_LIBRARIES = ("torch/distributed/", "mpi4py/", "horovod/", "deepspeed/comm/", "jax/experimental/multihost_utils")
_NATIVE = re.compile(r"\b(gloo|c10d|nccl|rccl|hccl|ompi|ucp|ucx)\w*::|\b(nccl|P?MPI_|ompi_|mca_|opal_progress|uc[pst]_)\w*")


def place_of(frames: Sequence[str]) -> str:
    """Whether a thread with these frames, the innermost first, waits in a collective."""
    if not frames:
        return UNKNOWN
    return COLLECTIVE if any(map(_is_collective, frames[:INNERMOST])) else ELSEWHERE


def _is_collective(frame: str) -> bool:
    function, _, place = frame.partition(" (")
    name = function.rpartition(".")[2].lower()
    is_library = any(one in place for one in _LIBRARIES)
    if is_library and (name.lstrip("_i") in _LIBRARY_FUNCTIONS or name in _LIBRARY_FUNCTIONS):
        return True
    if _COLLECTIVE_FUNCTION.match(name):
        return is_library or name.lstrip("_") not in _SHORT_NAMES
    return bool(_NATIVE.search(function))


def shown(frames: Sequence[str]) -> str:
    """The innermost of them, in a line, with files by their names alone; where it is in a collective, from that on."""
    begin = max((place for place, frame in enumerate(frames[:INNERMOST]) if _is_collective(frame)), default=0)
    return " < ".join(re.sub(r"\(\S*/", "(", frame) for frame in frames[begin : begin + SHOWN])


def standing_of(frames: Sequence[str]) -> str:
    """Short, and equal on all nodes for those that stand at the same place, wherever the program lies there."""
    if not frames:
        return ""
    names = [re.sub(r"\(\S*/", "(", frame) for frame in frames]
    return f"{zlib.crc32(chr(10).join(names).encode(errors='replace')):08x}"


class Sample(Value):
    """A family as it was at one moment."""

    at: float
    members: frozenset[tuple[int, int]]  # each process, by its id and the time of its start
    cpu_s: float  # of all of them together
    io_bytes: int | None  # read and written by all of them; None: the kernel does not tell
    states: frozenset[str]  # of their main threads, or of all threads
    ready: frozenset[int] | None = None  # the threads that are ready to run; None: not looked at

    @property
    def is_stopped(self) -> bool:
        """By a signal, and not by a debugger."""
        return "T" in self.states and "t" not in self.states


class Stillness(Value):
    """Nothing was done since `base`."""

    base: Sample
    ready: frozenset[int] = frozenset()  # when threads were looked at last

    @property
    def since(self) -> float:
        return self.base.at


def follow(stillness: Stillness | None, seen: Sample) -> Stillness:
    """The stillness after another look: it goes on, or begins anew."""
    if stillness is None or activity(stillness, seen):
        return Stillness(seen, seen.ready or frozenset())
    return Stillness(stillness.base, stillness.ready if seen.ready is None else seen.ready)


def activity(stillness: Stillness, seen: Sample) -> str:
    """What shows that the family is active; empty if nothing does."""
    base = stillness.base
    used_s = seen.cpu_s - base.cpu_s
    if seen.members != base.members:
        return "processes began or ended"
    if not 0 <= used_s <= IDLE_CPU_S + IDLE_CPU_SHARE * (seen.at - base.at):
        return f"{used_s:.2f} s of processor time"
    if seen.io_bytes is None or seen.io_bytes != base.io_bytes:
        return "input or output"
    if "D" in seen.states:
        return "a thread waits for a disk"
    if "t" in seen.states:
        return "a debugger holds it"
    return "a thread is ready to run" if seen.ready is not None and seen.ready & stillness.ready else ""
