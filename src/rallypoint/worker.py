"""For a worker's program: tell the agent that it lives, how far it is, and what it is about.

    from rallypoint import worker

    for step, batch in enumerate(batches):
        train(batch)
        worker.progress(step)
        if step % 1000 == 0:
            with worker.section("checkpoint", limit_s=600):
                save()

The first sign of life ends the phase *starting*; from then on the agent expects another within ``--hang-timeout``. A
section has a limit of its own, or none. To give a sign is a store into memory that the agent sees, and no system call. Any thread
may do so; a child that was forked may call all of this too, but does not speak for its parent. Without the agent, or
where it does not ask for it, all of it does nothing.
"""

from __future__ import annotations

import os
from _thread import RLock  # a signal's handler may enter a section while one is being entered
from time import monotonic

from rallypoint.base import defaults, environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, TypeVar

    from rallypoint.checkpoint import client as checkpoint
    from rallypoint.hangs.pulse import PulseMapping

    _Called = TypeVar("_Called", bound=Callable[..., Any])

__all__ = ["announce", "checkpoint", "heartbeat", "progress", "ready", "section"]

_page: PulseMapping | None = None  # None: nobody asks, or this process is not the worker
_lock = RLock()


def heartbeat() -> None:
    """Give a sign of life."""
    page = _page
    if page is not None:
        page.beat(monotonic())


def progress(step: int) -> None:
    """Give a sign of life, and say which step was done; steps count from 0, or from where a job is resumed."""
    page = _page
    if page is not None:
        page.tell_step(step)
        page.beat(monotonic())


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

        return client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


announce()
