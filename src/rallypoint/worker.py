"""For a worker's program: tell the agent that it lives, how far it is, and what it is about.

    from rallypoint import worker

    for step, batch in enumerate(batches):
        train(batch)
        worker.progress(step)
        if step % 1000 == 0:
            with worker.section("checkpoint", limit_s=600):
                save()

Where a node has to leave the job (``--drain-grace``), all workers save at the same step before it does:

        if worker.save_point(step):
            save()

The first sign of life ends the phase *starting*; from then on the agent expects another within ``--hang-timeout``. A
section has a limit of its own, or none. To give a sign is a store into memory that the agent sees, and no system call. Any thread
may do so; a child that was forked may call all of this too, but does not speak for its parent. Without the agent, or
where it does not ask for it, all of it does nothing.

A program that knows why it fails can say so, and what is to be done about it (`fail`, `exclude_node`).
"""

from __future__ import annotations

import os
import sys
from _thread import RLock  # a signal's handler may enter a section while one is being entered
from time import monotonic, sleep

from rallypoint.base import defaults, environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, NoReturn, TypeVar

    from rallypoint.checkpoint import client as checkpoint
    from rallypoint.hangs.pulse import PulseMapping

    _Called = TypeVar("_Called", bound=Callable[..., Any])

__all__ = [
    "announce", "checkpoint", "draining", "exclude_node", "fail", "heartbeat", "on_drain", "progress", "ready", "save_point",
    "saved", "section",
]  # fmt: skip

HELD_LOOK_S = 0.002

_page: PulseMapping | None = None  # None: nobody asks, or this process is not the worker
_lock = RLock()
_steps_asked = 0


def heartbeat() -> None:
    """Give a sign of life."""
    page = _page
    if page is not None:
        page.beat(monotonic())


def progress(step: int) -> None:
    """Give a sign of life, and say which step was done; steps count from 0, or from where a job is resumed."""
    page = _page
    if page is not None:
        now = monotonic()
        page.tell_step(step, now)
        page.beat(now)


class section:  # used like a function
    """Part of the program with a limit of its own, as ``with section("checkpoint", 600):`` or as a decorator.

    Without `limit_s` the agent's limit for that name holds, and where it has none, no limit. While sections are nested, the
    inner one counts. The name "checkpoint" is known: when a group fails, the work since the last such section is what was lost.
    """

    def __init__(self, name: str, limit_s: float | None = None) -> None:
        if limit_s is not None and not limit_s > 0:
            raise ValueError(f"limit_s must be a number of seconds above zero, not {limit_s!r}")
        self.name = name
        self.limit_s = limit_s
        self._pages: list[PulseMapping | None] = []

    def __enter__(self) -> section:
        page = _page
        self._pages.append(page)
        if page is not None:
            with _lock:
                page.enter(self, monotonic())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        page = self._pages.pop()
        if page is not None and page is _page:  # it is not in a child that was forked inside of the section
            with _lock:
                page.leave(self, monotonic(), is_complete=kind is None)

    def __call__(self, function: _Called) -> _Called:
        from functools import wraps

        @wraps(function)
        def within(*args: Any, **kwargs: Any) -> Any:
            with section(self.name, self.limit_s):
                return function(*args, **kwargs)

        return within  # type: ignore[return-value]


def draining() -> float | None:
    """How many seconds are left before a node of the job leaves, which may be this one; None: none has to, as far as is known.

    It reads a word of memory, so a program may ask at every step.
    """
    page = _page
    return page.drain_left(monotonic()) if page is not None else None


def save_point(step: int | None = None) -> bool:
    """Whether to save now, because a node has to leave: true on all ranks at the same step, and once.

    Every rank calls it once for each step, at the same place, with the number of the step; or without, if all begin to count at
    the same one. While the step is not known yet, the call waits for the agents, which takes milliseconds; it waits for no other
    rank. The next call says that this rank has saved, as `saved` does at once.
    """
    global _steps_asked
    page = _page
    if page is None:
        return False
    _steps_asked += 1
    step = _steps_asked - 1 if step is None else step
    return bool(page.asks_to_save(step)) and _is_time_to_save(page, step)


def _is_time_to_save(page: PulseMapping, step: int) -> bool:
    from rallypoint.hangs.pulse_page import HOLD

    if page.is_told_to_save:
        page.note_saved(monotonic())
        return False
    while (save_at := page.wait_for_agents(monotonic())) == HOLD:
        if not draining():
            return False
        sleep(HELD_LOOK_S)
    if step + 1 < save_at:
        return False
    page.note_told()
    return True


def saved() -> None:
    """This rank has saved: nothing is lost if its node leaves now. While none has to, it says nothing."""
    page = _page
    if page is not None and draining() is not None:
        page.note_saved(monotonic())


def _saved_as_told() -> bool:
    """Whether a snapshot in memory is the one that `save_point` asked for: it is `saved` once it outlives this node."""
    page = _page
    return page is not None and page.is_told_to_save


def on_drain(call: Callable[[float], object]) -> None:
    """Have this called, in a thread of its own, with the seconds that are left, when a node of the job has to leave.

    It needs ``--drain-grace`` on this node too. Whoever calls this after the notice is called at once.
    """
    place = environment.own.get(defaults.ENV_DRAIN)
    if place is None or _page is None:
        return
    try:
        bell = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        sys.stderr.write(f"rallypoint.worker: the agent cannot tell this worker that a node leaves: {error}\n")
        return
    import threading

    threading.Thread(target=_await_notice, args=(bell, call), name="rallypoint-drain", daemon=True).start()


def _await_notice(bell: int, call: Callable[[float], object]) -> None:
    """Until the pipe has something to read, which nobody does; or until the agent, its only writer, is gone."""
    import select

    poll = select.poll()
    poll.register(bell, select.POLLIN)
    poll.poll()
    os.close(bell)
    if (left_s := draining()) is not None:
        call(left_s)


def announce() -> None:
    """Tell the agent, if it asks for it, that this worker gives signs of life; done when this module is imported."""
    global _page
    place = environment.own.get(defaults.ENV_PULSE)
    if place is not None and _page is None:
        from rallypoint.hangs.pulse import open_mapping

        _page = open_mapping(place, monotonic(), at_end=_exit)
        if _page is not None:
            import atexit

            atexit.register(_exit)
            os.register_at_fork(after_in_child=_forget)


def ready() -> None:
    """Say that all is prepared that does not depend on this worker's place in the job: imports, model, a context on its GPU.

    With ``--standby`` another process waits here, for each worker, to take its place if the group is restarted. So call it before
    anything is read of the environment but LOCAL_RANK and LOCAL_WORLD_SIZE, and before processes meet. Without, it does nothing.
    """
    place = environment.take(defaults.ENV_STANDBY)
    if place is not None:
        from rallypoint.processes.standby_worker import take_place

        take_place(place)
        announce()


def fail(message: str, retry: bool = True) -> NoReturn:
    """End this worker as failed, with `message` as the reason that everybody is told; its exit code is 1.

    With ``retry=False`` the job ends without another restart, whatever is left of its budget, because none could help: bad
    arguments, a data set that is not there. It is a SystemExit that ends it; call this in the main thread.
    """
    from rallypoint.failures import error_files

    error_files.fail(message, "" if retry else "no_retry")


def exclude_node(why: str) -> NoReturn:
    """End this worker as failed because its machine is bad: the job goes on without that node, if the others are enough.

    The node is left out for an hour, and then let in again; `why` is told on all nodes. Where it cannot be spared, the job is
    restarted with it, as after any failure. It is a SystemExit that ends the worker; call this in the main thread.
    """
    from rallypoint.failures import error_files

    error_files.fail(why, "exclude_node")


def _exit() -> None:
    """The program is over: what it still does takes as long as it takes."""
    page = _page
    if page is not None:
        with _lock:
            page.exit(monotonic())


def _forget() -> None:
    """Do not speak for the parent, nor wait for a lock that one of its threads had."""
    global _page, _lock
    _page = None
    _lock = RLock()


def __getattr__(name: str) -> Any:
    """What keeps snapshots is loaded when it is asked for."""
    if name == "checkpoint":
        from rallypoint.checkpoint import client

        client.ask_and_tell(_saved_as_told, saved)
        return client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


announce()
