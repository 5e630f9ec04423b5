"""Whether a process that says nothing of itself is still doing something, judged from what the kernel shows of it.

A worker is seen as a *family*: its process and all that descend from it. It is active if since the last time that it was
- its processes have used more processor time than the background threads of a library do, or
- its processes have read or written anything, output included, or
- processes were added to it, or have ended,

or if now

- one of its threads waits for a disk (D), or a debugger holds it (t), or
- a thread is ready to run (R), and was so when looked at before: it gets no processor, which is no fault of its own. Once is
  not enough: a background thread that wakes for a moment may be met in it.

What cannot be seen counts as activity, so that nobody is called hung on a guess.
"""

from __future__ import annotations

from rallypoint.base.records import Value

__all__ = ["Sample", "Stillness", "activity", "follow"]

IDLE_CPU_SHARE = 0.005  # of a processor: threads that wake a few times a second use less
IDLE_CPU_S = 0.02  # two ticks of the clock by which the kernel tells of processor time


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
