"""A worker's end of its page: see `hangs.pulse_page` for what is where. Loaded only where an agent asks for signs of life."""

from __future__ import annotations

import mmap
import os
import sys

from rallypoint.hangs import pulse_page as layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from rallypoint.worker import section

__all__ = ["PulseMapping", "open_mapping"]

_STEP_MAX = 2**63 - 2


class PulseMapping:
    """The page, mapped. All but `beat` and `tell_step`, which are single stores, are called by one thread at a time."""

    def __init__(self, memory: mmap.mmap, at_end: Callable[[], None]) -> None:
        self._bytes = memoryview(memory)
        self._numbers: memoryview[int] = self._bytes.cast("q")
        self._times: memoryview[float] = self._bytes.cast("d")
        self._open: list[section] = []
        self._is_running = False
        self._at_end = at_end

    @property
    def owner(self) -> int:
        return self._numbers[layout.OWNER]

    def is_a_page(self) -> bool:
        return self._numbers[layout.VERSION] == layout.MAGIC

    def claim(self, now: float) -> None:
        """Be the one who speaks for this worker."""
        self._begin_change()
        for word in (layout.SIGN_AT, layout.STEP, layout.BASE, layout.NAME_LENGTH):
            self._numbers[word] = 0
        self._times[layout.ANNOUNCED_AT] = now
        self._numbers[layout.OWNER] = os.getpid()
        self._end_change()

    def beat(self, now: float) -> None:
        self._times[layout.SIGN_AT] = now
        if not self._is_running:
            self._run()

    def tell_step(self, step: int) -> None:
        self._numbers[layout.STEP] = min(max(step, 0), _STEP_MAX) + 1

    def _run(self) -> None:
        """The first sign of life ends the phase of starting. From now on its end is awaited, ahead of what others do at exit."""
        self._is_running = True
        self._numbers[layout.BASE] = layout.BASES.index(layout.RUNNING)
        _call_at_end_of_main(self._at_end)

    def exit(self, now: float) -> None:
        self._open.clear()
        self._is_running = True  # a late beat changes the phase no more
        self._begin_change()
        self._numbers[layout.BASE] = layout.BASES.index(layout.EXITING)
        self._numbers[layout.NAME_LENGTH] = 0
        self._times[layout.SIGN_AT] = now
        self._end_change()

    def enter(self, entered: section, now: float) -> None:
        self._open.append(entered)
        self._show_section(now)

    def leave(self, left: section, now: float, is_complete: bool) -> None:
        """Sections of several threads may end in any order; what counts is the last of those that are open."""
        for place in reversed(range(len(self._open))):
            if self._open[place] is left:
                del self._open[place]
                break
        if is_complete and left.name == layout.CHECKPOINT:
            self._times[layout.CHECKPOINT_AT] = now
        self._show_section(now)

    def _show_section(self, now: float) -> None:
        inner = self._open[-1] if self._open else None
        name = layout.cut_name(inner.name) if inner is not None else b""
        self._begin_change()
        self._times[layout.SIGN_AT] = now
        self._times[layout.LIMIT_S] = inner.limit_s or 0.0 if inner is not None else 0.0
        self._numbers[layout.NAME_LENGTH] = len(name)
        self._bytes[layout.NAME_AT : layout.NAME_AT + len(name)] = name
        self._end_change()

    def _begin_change(self) -> None:
        self._numbers[layout.SEQUENCE] |= 1

    def _end_change(self) -> None:
        self._numbers[layout.SEQUENCE] = (self._numbers[layout.SEQUENCE] & 0xFFFFFFFFFFFF) + 1


def open_mapping(place: str, now: float, at_end: Callable[[], None]) -> PulseMapping | None:
    """The page at a place that the agent named; None if it cannot be had, or if another process speaks for this worker."""
    try:
        offset, _, path = place.partition(":")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            page = PulseMapping(mmap.mmap(fd, layout.PAGE_BYTES, offset=int(offset)), at_end)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"rallypoint.worker: the agent cannot be told that this worker lives: {error}\n")
        return None
    if not page.is_a_page() or (page.owner not in (0, os.getpid()) and _is_alive(page.owner)):
        return None
    page.claim(now)
    return page


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is there, and another user's
        pass
    return True


def _call_at_end_of_main(function: Callable[[], None]) -> None:
    """Have it called when the main thread ends. atexit would be later: after threads, and after what was registered since."""
    import threading

    register = getattr(threading, "_register_atexit", None)
    if register is not None:  # it is not a public name
        try:
            register(function)
        except RuntimeError:  # the main thread has ended already
            return
