"""The agent as a state machine: what was observed, in which state, leads to what is done next, and why.

    Gathering ──Joined──▶ Starting ──Started──▶ Running ──Succeeded──▶ Draining ──Drained──▶ Done
        ▲                                          │
        └──────────Stopped────────── Stopping ◀────┤  Failed with a restart left, or peers that wait
                                        │          │
                                        └─▶ Done ◀─┘  Failed with none left: stopped, then done

The shell performs one action at a time and reports what came of it; it decides nothing. Restarting is one action for the shell,
because subclasses override it as one; the machine still sees each of its parts, and accepts a subclass that reports only
the last. A signal ends the agent from any state.

Invariants: a restart is spent only when a failure causes it; nothing is started in Stopping, Draining or Done; every action
says why.
"""

from __future__ import annotations

from rallypoint.records import Value

__all__ = [
    "Abandon", "Action", "CouldNotStop", "Done", "Drain", "Drained", "Draining", "Failed", "Finish", "Gathering", "Initialize",
    "Joined", "LostTrack", "Observation", "PeersWaiting", "Proceed", "Restart", "Running", "Signalled", "Started",
    "Starting", "State", "Stop", "Stopped", "Stopping", "Succeeded", "Watch", "begin", "step",
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
    what: str
    restarts_left: int
    max_restarts: int


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


Observation = (
    Joined | Started | Succeeded | Failed | PeersWaiting | Stopped | CouldNotStop | Drained | LostTrack | Signalled
)


# Actions.


class Initialize(Value):
    """Meet the other nodes, then start the workers."""

    why: str


class Watch(Value):
    """Wait until there is something to look at."""

    why: str


class Restart(Value):
    """Stop the workers, meet, start them again."""

    why: str
    restarts_spent: int


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
        case Signalled(name):
            return Done(False, f"{name} was received"), Abandon(f"{name} was received")
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
            return Starting(rank, size), Proceed(f"this node is {rank} of {size}")
        case _, Started():
            return Running(), Watch("all workers were started")
        case Stopping(why, True), Stopped():
            return Gathering(why), Proceed("the workers of the last attempt are gone")
    return state, Proceed("an attempt is under way")


def _while_running(seen: Observation) -> tuple[State, Action]:
    match seen:
        case Succeeded():
            return Draining(), Drain("all workers of this node succeeded")
        case Failed(what, left, most) if left > 0:
            why = f"{what}; restarting all workers (restart {most - left + 1} of {most})"
            return Stopping(why, True), Restart(why, 1)
        case Failed(what, _, most):
            why = f"{what}; {_none_left(most)}"
            return Stopping(why, False), Stop(why)
        case PeersWaiting(nodes) if nodes > 0:
            why = f"{nodes} node(s) wait to join; restarting all workers in the larger world"
            return Stopping(why, True), Restart(why, 0)
    return Running(), Watch("all workers run")


def _none_left(most: int) -> str:
    return f"all {most} restart(s) are used up" if most else "no restarts were asked for (--max-restarts)"


def _while_draining(seen: Observation) -> tuple[State, Action]:
    if isinstance(seen, Drained):
        why = "all workers succeeded"
        return Done(True, why), Finish(True, why)
    return Draining(), Drain("the other nodes are not done")
