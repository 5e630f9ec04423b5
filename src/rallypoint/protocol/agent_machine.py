"""The agent as a state machine: what was observed, in which state, leads to what is done next, and why.

    Gathering ──Joined──▶ Starting ──Started──▶ Running ──Succeeded──▶ Draining ──Drained──▶ Done
        ▲                                          │                      │
        └──────────Stopped────────── Stopping ◀────┴──────────────────────┘  Failed with a restart left, Regroup, Fenced
                                        │
                                        └─▶ Done   Failed with none left, or the job has failed: stopped, then done

On one node the ruling on a failure comes with it. Where several nodes share one budget, the job rules: the agent reports the
failure, stops its workers and asks for the next generation, which it gets or which is refused for good.

The shell performs one action at a time and reports what came of it; it decides nothing. Restarting is one action for the shell,
because subclasses override it as one; the machine still sees each of its parts, and accepts a subclass that reports only
the last. A signal ends the agent from any state.

Invariants: a restart is spent only when a failure causes it; nothing is started in Stopping or Done, and in Draining only for
a failure elsewhere; every action says why.
"""

from __future__ import annotations

from rallypoint.base.records import Value
from rallypoint.base.text import many
from rallypoint.protocol.restarts import Again, GiveUp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    How = Literal["succeeded", "failed", "closed"]

__all__ = [
    "Abandon", "Action", "CouldNotStop", "Done", "Drain", "Drained", "Draining", "Failed", "Fenced", "Finish", "Gathering",
    "Initialize", "JobEnded", "Joined", "LostTrack", "Observation", "PeersWaiting", "Proceed", "Regroup", "Restart", "Running",
    "Signalled", "Started", "Starting", "State", "Stop", "Stopped", "Stopping", "Succeeded", "Watch", "begin", "step",
]  # fmt: skip


# States, each with only its own data.


class Gathering(Value):
    """Waiting for the nodes of the next generation to meet."""

    why: str


class Starting(Value):
    """Our ranks are known; the workers are being started."""

    group_rank: int
    group_world_size: int


class Running(Value):
    """All our workers have been started and none has been seen to end."""


class Stopping(Value):
    """Our workers are being stopped; afterwards the next generation begins, or the run has failed."""

    why: str
    then_restart: bool


class Draining(Value):
    """Our workers have succeeded; the other nodes may still be busy."""


class Done(Value):
    succeeded: bool
    why: str


State = Gathering | Starting | Running | Stopping | Draining | Done


# Observations.


class Joined(Value):
    group_rank: int
    group_world_size: int


class Started(Value):
    pass


class Succeeded(Value):
    pass


class Failed(Value):
    """Workers of this node failed; `ruling` is None where the job as a whole rules."""

    what: str
    ruling: Again | GiveUp | None


class Regroup(Value):
    """The generation of this number is over, for a reason that lies elsewhere: workers have to go, and a new one may come."""

    why: str
    generation: int = 0
    is_failure: bool = False  # workers failed there
    looks_hopeless: bool = False  # in a way that would strike again, if all workers fail so


class Fenced(Value):
    """The others may take this node for dead: its workers must not run any longer."""

    why: str


class JobEnded(Value):
    """Somebody has declared the end of the job."""

    how: How
    why: str


class PeersWaiting(Value):
    """All workers run, and so many nodes wait to join."""

    nodes: int


class Stopped(Value):
    pass


class CouldNotStop(Value):
    what: str


class Drained(Value):
    pass


class LostTrack(Value):
    """The workers are in a state that nobody can explain."""

    what: str


class Signalled(Value):
    name: str
    meaning: str = ""  # where the signal only stands for that


Observation = (
    Joined | Started | Succeeded | Failed | PeersWaiting | Stopped | CouldNotStop | Drained | LostTrack | Signalled | Regroup
    | Fenced | JobEnded
)  # fmt: skip


# Actions.


class Initialize(Value):
    """Meet the other nodes, then start the workers."""

    why: str


class Watch(Value):
    """Wait until there is something to look at."""

    why: str


class Restart(Value):
    """Stop the workers, without grace if `at_once`; after `delay_s`, meet and start them again."""

    why: str
    restarts_spent: int
    delay_s: float = 0.0
    at_once: bool = False


class Stop(Value):
    why: str


class Drain(Value):
    """Wait for the other nodes to finish."""

    why: str


class Proceed(Value):
    """Go on with the action that is under way."""

    why: str


class Finish(Value):
    succeeded: bool
    why: str


class Abandon(Value):
    """End at once, without another attempt."""

    why: str


Action = Initialize | Watch | Restart | Stop | Drain | Proceed | Finish | Abandon


def begin() -> tuple[State, Action]:
    return Gathering("the run begins"), Initialize("the run begins")


def step(state: State, seen: Observation) -> tuple[State, Action]:
    """The next state and what to do, for anything that can be observed in any state."""
    match seen:
        case Signalled(name, meaning):
            why = meaning or f"{name} was received"
            return Done(False, why), Abandon(why)
        case CouldNotStop(what) | LostTrack(what):
            return Done(False, what), Abandon(what)
    match state:
        case Gathering() | Starting() | Stopping():
            return _while_changing(state, seen)
        case Running():
            return _while_running(seen)
        case Draining():
            return _while_draining(seen)
        case Done(succeeded, why):
            return state, Finish(succeeded, why)


def _while_changing(state: Gathering | Starting | Stopping, seen: Observation) -> tuple[State, Action]:
    match state, seen:
        case Stopping(why, False), _:
            return Done(False, why), Finish(False, why)
        case _, Joined(rank, size):
            return Starting(rank, size), Proceed(f"this is node {rank} of {size}")
        case Starting(), Fenced(why):
            return Stopping(why, True), Restart(why, 0, at_once=True)
        case _, Started():
            return Running(), Watch("all workers were started")
        case Stopping(why, True), Stopped():
            return Gathering(why), Proceed(why)  # which says what is waited for: the workers of the last attempt are gone
        case _, JobEnded(how, why):
            return Done(how == "succeeded", why), Finish(how == "succeeded", why)
    return state, Proceed("an attempt is under way")


def _while_running(seen: Observation) -> tuple[State, Action]:
    match seen:
        case Succeeded():
            return Draining(), Drain("all workers of this node succeeded")
        case Failed(what, ruling):
            return _after_failure(what, ruling)
        case JobEnded("failed", why):
            return Stopping(why, False), Stop(why)
        case PeersWaiting(nodes) if nodes > 0:
            why = f"{many(nodes, 'node')} waiting to join; restarting all workers in the larger world"
            return Stopping(why, True), Restart(why, 0)
        case Regroup(why):
            return Stopping(why, True), Restart(why, 0)
        case Fenced(why):
            return Stopping(why, True), Restart(why, 0, at_once=True)
    return Running(), Watch("all workers run")


def _after_failure(what: str, ruling: Again | GiveUp | None) -> tuple[State, Action]:
    match ruling:
        case GiveUp(reason):
            why = f"{what}; {reason}"
            return Stopping(why, False), Stop(why)
        case Again(_, delay_s, _, reason):
            why = f"{what}; restarting all workers ({reason})"
            return Stopping(why, True), Restart(why, 1, delay_s)
    why = f"{what}; the workers of all nodes are stopped"
    return Stopping(why, True), Restart(why, 0)


def _while_draining(seen: Observation) -> tuple[State, Action]:
    match seen:
        case Drained() | JobEnded("succeeded" | "closed", _):
            why = "all workers succeeded"
            return Done(True, why), Finish(True, why)
        case Fenced(reason):  # the loss of a node that is done is no loss
            why = f"all workers of this node succeeded; what became of the others is not known: {reason}"
            return Done(True, why), Finish(True, why)
        case JobEnded("failed", why):
            return Done(False, why), Finish(False, why)
        case Regroup(why):
            return Stopping(why, True), Restart(why, 0)
    return Draining(), Drain("the other nodes are not done")
