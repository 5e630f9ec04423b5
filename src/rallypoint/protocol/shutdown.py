"""Who is told to stop, with which signal, and when: told, then killed, then given up.

Each *target* is a worker, which stands for the process group that it leads, or a process that a worker has left behind. Every
target has its own clock, and all clocks run beside each other: it is told once, with the signal that was asked
for, as soon as it is seen; killed once, when its grace is over; and given up once it has survived SIGKILL for the kill wait, as a
process that is stuck in the kernel does. A grace of zero means SIGKILL at once.

`step` is level-triggered: it is given who is there now, and answers what to send, when to look again, and whether it is over. So
a report that is late, or comes twice, cannot confuse it.

Invariants: a target is told at most once and killed at most once; nobody is killed before the grace is over, unless hurried;
the end is reached at most grace + kill wait after the last target appeared.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

from rallypoint.base.records import Value

__all__ = ["Decision", "GaveUp", "Gone", "Send", "Stop", "Target", "Waiting", "begin", "hurry", "pass_on", "step"]


class Target(Value):
    """A worker by its local rank, or a process left behind by its process id; `name` is what people are told, if it is known."""

    is_worker: bool
    number: int
    name: str = ""

    def __str__(self) -> str:
        if self.name:
            return self.name
        return f"worker {self.number}" if self.is_worker else f"process {self.number}"


class Clock(Value):
    """What has been sent to one target, and when."""

    told_at: float | None = None
    killed_at: float | None = None


class Stop(Value):
    """A shutdown under way."""

    signal: int
    grace_s: float
    kill_wait_s: float
    clocks: dict[Target, Clock]


class Send(Value):
    target: Target
    signal: int
    why: str


class Gone(Value):
    """Nobody is left."""


class Waiting(Value):
    """Some are left; look again when something happens, or at `wake_at`."""

    wake_at: float


class GaveUp(Value):
    """Those that are left have survived SIGKILL."""

    stuck: tuple[Target, ...]


class Decision(Value):
    stop: Stop
    sends: tuple[Send, ...]
    outcome: Gone | Waiting | GaveUp


def begin(signal_number: int, grace_s: float, kill_wait_s: float) -> Stop:
    """SIGKILL as the first signal leaves nothing to be graceful about."""
    return Stop(signal_number, 0.0 if signal_number == signal.SIGKILL else grace_s, kill_wait_s, {})


def hurry(stop: Stop) -> Stop:
    """No more grace: whoever is left is killed at the next step."""
    return stop.replace(grace_s=0.0)


def pass_on(signal_number: int, present: Iterable[Target]) -> tuple[Send, ...]:
    """A signal that comes while they are being stopped is for them too; they may end on it sooner. Their time does not change."""
    return tuple(Send(target, signal_number, f"{target} is sent the signal that came") for target in present)


def step(stop: Stop, present: Iterable[Target], now: float) -> Decision:
    """What to do about those that are present now."""
    clocks: dict[Target, Clock] = {}
    sends: list[Send] = []
    for target in sorted(present, key=lambda target: (target.is_worker, target.number)):
        clock, send = _step_one(stop, target, stop.clocks.get(target, Clock()), now)
        clocks[target] = clock
        if send is not None:
            sends.append(send)
    stop = stop.replace(clocks=clocks)
    return Decision(stop, tuple(sends), _outcome(stop, now))


def _step_one(stop: Stop, target: Target, clock: Clock, now: float) -> tuple[Clock, Send | None]:
    if clock.killed_at is not None:
        return clock, None
    told_at = now if clock.told_at is None else clock.told_at
    if now >= told_at + stop.grace_s:
        why = f"{target} is killed: it did not end within {stop.grace_s:g} s" if stop.grace_s else f"{target} is killed at once"
        return Clock(told_at, now), Send(target, signal.SIGKILL, why)
    if clock.told_at is None:
        return Clock(told_at), Send(target, stop.signal, f"{target} is asked to stop, with {stop.grace_s:g} s to do so")
    return clock, None


def _outcome(stop: Stop, now: float) -> Gone | Waiting | GaveUp:
    if not stop.clocks:
        return Gone()
    ends = [_next_change(stop, clock) for clock in stop.clocks.values()]
    pending = [end for end in ends if end > now]
    return Waiting(min(pending)) if pending else GaveUp(tuple(stop.clocks))


def _next_change(stop: Stop, clock: Clock) -> float:
    if clock.killed_at is not None:
        return clock.killed_at + stop.kill_wait_s
    return (clock.told_at or 0.0) + stop.grace_s
