"""For a worker's program: keep a snapshot of its state in memory that outlives it.

    from rallypoint.worker import checkpoint

    found = checkpoint.load()
    if found is not None:
        model.load_state_dict(found.state["model"])
    for step in range(0 if found is None else found.step + 1, steps):
        train(step)
        checkpoint.save(step, {"model": model.state_dict()})

The memory is the agent's (``--checkpoint-memory``): a worker that is killed, and the whole group that is restarted for it, find
what was saved last. Where there is no such memory, as outside of a launcher, nothing is kept, and nothing found.
"""

from __future__ import annotations

import json
import sys

from rallypoint.base import defaults, environment
from rallypoint.base.records import Value
from rallypoint.checkpoint.layout import newest_common, read_place
from rallypoint.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from rallypoint.checkpoint.ahead import Mapped
    from rallypoint.checkpoint.layout import Moment
    from rallypoint.checkpoint.line import Line
    from rallypoint.checkpoint.slots import Slots

__all__ = ["Snapshot", "adopt", "ask_and_tell", "load", "save", "wait"]

AGREEMENT_TIMEOUT_S = 300.0


class Snapshot(Value):
    """The state after a step, as this rank has saved it; every rank has found the same step."""

    step: int
    state: Any


class _Desk:
    """What this worker has of it."""

    def __init__(self) -> None:
        self.slots: Slots | None = None
        self.line: Line | None = None
        self.pending: Callable[[], None] | None = None  # what completes the latest save
        self.is_open = False
        self.calls = 0  # of load()
        self.mapped: Sequence[Mapped] = ()  # slots that were mapped before this process was a worker
        self.has_warned = False
        self.is_asked_for: Callable[[], bool] = lambda: False  # whether the next snapshot is the last that this node keeps
        self.tell_safe: Callable[[], None] = lambda: None


_desk = _Desk()


def ask_and_tell(is_asked_for: Callable[[], bool], tell_safe: Callable[[], None]) -> None:
    """For `rallypoint.worker`: whether a node has to leave once this is saved, and what to call when it is."""
    _desk.is_asked_for, _desk.tell_safe = is_asked_for, tell_safe


def save(step: int, state: Any, *, blocking: bool = True) -> None:
    """Keep the state as it is after this step. What was saved before that stays until this is complete.

    It is complete when this returns. Without `blocking`, tensors on a GPU are then still on their way, in the order of what the
    GPU is given to do: the program may go on to change them there. It is complete after `wait`, or when the next save begins.

    Ranks must not be more than one snapshot ahead of each other: each keeps its latest, and one that all have is needed. Where
    copies go to another node, that of the one before is waited for.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UsageError(f"step must be a whole number, 0 or more, not {step!r}")
    slots = _slots()
    if slots is not None:
        wait()
        if _desk.line is not None:
            _desk.line.wait_until_copied()
        _desk.pending = slots.begin_save(step, state)
        if blocking:
            wait()
    elif environment.text(defaults.ENV_RUN_ID) and not _desk.has_warned:
        _desk.has_warned = True
        sys.stderr.write("rallypoint: checkpoint.save() keeps nothing: the job was started without --checkpoint-memory\n")


def wait() -> None:
    """Until the latest save is complete; a worker that ends before that leaves the one before."""
    finish, _desk.pending = _desk.pending, None
    if finish is not None:
        finish()
        if _desk.line is not None:
            _desk.line.tell_saved()
        if _desk.is_asked_for():
            if _desk.line is not None:
                _desk.line.wait_until_copied()
            _desk.tell_safe()


def load(*, device: Any = None, copy: bool = True, timeout_s: float = AGREEMENT_TIMEOUT_S) -> Snapshot | None:
    """The newest snapshot of which every rank has its part; None if there is none, and the program begins as it always would.

    All ranks call it, as often as each other: they wait for one another to agree on the step. Tensors that were on a GPU are put
    on `device`, such as "cuda", if it is given, and else are on the CPU. Without `copy`, what is not on a device is a view of the
    kept memory: it changes with the second `save` from then on, and to change it is to change what is kept.
    """
    slots = _slots()
    if slots is None:
        return None
    wait()
    moments = slots.moments()
    world = int(environment.text(defaults.ENV_WORLD_SIZE, "1"))
    newest = newest_common([moments] if world == 1 else _moments_of_all(moments, world, timeout_s))
    slots.begin_from(newest)
    return None if newest is None else Snapshot(newest[1], slots.load(newest, copy, device))


def adopt(mapped: Sequence[Mapped]) -> None:
    """This process has waited for its place, and had these slots mapped meanwhile; they may be others than it has now."""
    _desk.mapped = mapped


def _slots() -> Slots | None:
    if not _desk.is_open:
        _desk.is_open = True
        if place := environment.text(defaults.ENV_CHECKPOINT):
            from rallypoint.checkpoint.slots import Slots

            told = read_place(place)
            if told.line is not None:
                from rallypoint.checkpoint.line import Line

                _desk.line = Line(told.line)
                _desk.line.wait_until_ready()
            rank, world, generation = (
                int(environment.text(name, least))
                for name, least in ((defaults.ENV_RANK, "0"), (defaults.ENV_WORLD_SIZE, "1"), (defaults.ENV_GENERATION, "1"))
            )
            _desk.slots = Slots(told.files, told.most_bytes, rank, world, generation, _desk.mapped)
            _desk.mapped = ()
    return _desk.slots


def _moments_of_all(moments: list[Moment], world: int, timeout_s: float) -> list[list[Moment]]:
    """By way of the workers' store, which is empty at the start of each generation."""
    from rallypoint.store.tcp_store import TCPStore

    if environment.text(defaults.ENV_USE_AGENT_STORE) != "True":
        raise UsageError("checkpoint.load() needs the workers' store, which the agent serves unless --worker-store says rank0")
    rank, port = int(environment.text(defaults.ENV_RANK, "0")), int(environment.text(defaults.ENV_MASTER_PORT, "0"))
    prefix = f"rallypoint/checkpoint/{_desk.calls}"
    _desk.calls += 1
    store = TCPStore(environment.text(defaults.ENV_MASTER_ADDR), port, timeout=timeout_s)
    try:
        store.set(f"{prefix}/{rank}", json.dumps(moments))
        told = store.multi_get([f"{prefix}/{one}" for one in range(world)])
        return [[(generation, step) for generation, step in json.loads(one)] for one in told]
    finally:
        store.close()
