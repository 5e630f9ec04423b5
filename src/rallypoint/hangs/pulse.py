"""The two ends of the pages in which workers give signs of life (`hangs.pulse_page` says what is where).

The agent has one page for each worker, in one file that exists only in memory. A worker opens the file by its path under /proc of
the agent, if the agent asks for signs of life. So nothing is left behind on any disk, however the agent ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import sys

from rallypoint.hangs import pulse_page as layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from rallypoint.worker import section

__all__ = ["DrainBoard", "PulseBoard", "PulseMapping", "open_mapping"]

_STEP_MAX = 2**63 - 2
_WEIGHT = 8  # of the average over the last steps: a new one counts an eighth


class PulseBoard:
    """The agent's end: the pages of `size` workers. Whoever looks after `close` finds nothing there."""

    def __init__(self, size: int, fd: int | None = None) -> None:
        """With `fd`, which is the board's from now on, workers may have written there already."""
        self._fd = os.memfd_create("rallypoint-pulse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) if fd is None else fd
        os.truncate(self._fd, size * layout.PAGE_BYTES)
        # A file that a worker made shorter would end whoever reads it.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._memory = mmap.mmap(self._fd, size * layout.PAGE_BYTES)
        self._view = memoryview(self._memory)
        self._known: list[layout.Pulse | None] = [None] * size
        for rank in range(size) if fd is None else ():
            self.clear(rank)

    def fileno(self) -> int:
        return self._fd

    def place(self, rank: int) -> str:
        """Where a worker finds its page."""
        return f"{rank * layout.PAGE_BYTES}:/proc/{os.getpid()}/fd/{self._fd}"

    def clear(self, rank: int) -> None:
        """Forget what the worker of this rank said, for another that takes its place."""
        self._page(rank)[:] = layout.blank()
        self._known[rank] = None

    def read(self, rank: int, now: float) -> layout.Pulse | None:
        """What the worker says; None if it never said anything."""
        self._known[rank] = layout.read(self._page(rank), now, self._known[rank])
        return self._known[rank]

    def read_all(self, now: float) -> list[layout.Pulse]:
        """What those say that ever said anything."""
        try:
            found = [self.read(rank, now) for rank in range(len(self._known))]
        except ValueError:  # closed, while another thread was about to read
            found = list(self._known)
        return [pulse for pulse in found if pulse is not None]

    def _page(self, rank: int) -> memoryview:
        return self._view[rank * layout.PAGE_BYTES : (rank + 1) * layout.PAGE_BYTES]

    def close(self) -> None:
        if self._fd >= 0:
            self._view.release()
            self._memory.close()
            os.close(self._fd)
            self._fd = -1


class DrainBoard:
    """The agent's end for what concerns a node that has to leave. The pages stay, whatever becomes of `fd`."""

    def __init__(self, fd: int, size: int) -> None:
        self._memory = mmap.mmap(fd, size * layout.PAGE_BYTES)
        self._size = size

    def hold(self, ends_at: float) -> None:
        """Let workers wait where they ask whether to save next; there is time until `ends_at`."""
        self._write(layout.SAVE_AT, layout.HOLD)
        self.tell_end(ends_at)

    def tell_end(self, ends_at: float) -> None:
        times = memoryview(self._memory).cast("d")
        for first in self._first_words():
            times[first + layout.DRAIN_ENDS_AT] = ends_at
        times.release()

    def let_go(self, step: int) -> None:
        """They save at this step."""
        self._write(layout.SAVE_AT, step + 1)

    def _write(self, word: int, value: int) -> None:
        numbers = memoryview(self._memory).cast("q")
        for first in self._first_words():
            numbers[first + word] = value
        numbers.release()

    def answers(self) -> list[tuple[int, bool, bool]]:
        """Of each worker: one more than the step that it has asked for last, whether it was told to save, and whether it has."""
        numbers = memoryview(self._memory).cast("q")
        words = (layout.ASKED, layout.TOLD_TO_SAVE, layout.SAVED)
        told = [[numbers[first + word] for word in words] for first in self._first_words()]
        numbers.release()
        return [(min(max(asked, 0), _STEP_MAX), bool(was_told), bool(has_saved)) for asked, was_told, has_saved in told]

    def _first_words(self) -> range:
        words = layout.PAGE_BYTES // 8
        return range(0, self._size * words, words)

    def close(self) -> None:
        self._memory.close()


class PulseMapping:
    """A worker's end: its page, mapped. All but `beat` and `tell_step`, single stores, are called by one thread at a time."""

    def __init__(self, memory: mmap.mmap, at_end: Callable[[], None], folder: str = "") -> None:
        """`folder` is where the agent's open files are."""
        self._bytes = memoryview(memory)
        self._numbers: memoryview[int] = self._bytes.cast("q")
        self._times: memoryview[float] = self._bytes.cast("d")
        self._open: list[section] = []
        self._last_step = 0, 0.0  # and when it was done
        self._is_running = False
        self._at_end = at_end
        self._folder = folder

    @property
    def owner(self) -> int:
        return self._numbers[layout.OWNER]

    def is_a_page(self) -> bool:
        return self._numbers[layout.VERSION] == layout.MAGIC

    def claim(self, now: float) -> None:
        """Be the one who speaks for this worker."""
        self._begin_change()
        for word in (layout.SIGN_AT, layout.STEP, layout.BASE, layout.NAME_LENGTH, layout.STEP_S, layout.STEPS):
            self._numbers[word] = 0
        self._times[layout.ANNOUNCED_AT] = now
        self._numbers[layout.OWNER] = os.getpid()
        self._end_change()

    def beat(self, now: float) -> None:
        self._times[layout.SIGN_AT] = now
        if not self._is_running:
            self._run()

    def tell_step(self, step: int, now: float) -> None:
        self._numbers[layout.STEP] = min(max(step, 0), _STEP_MAX) + 1
        (before, then), self._last_step = self._last_step, (step, now)
        if not then:
            self._ring()
        elif step > before:
            self._measure((now - then) / (step - before))

    def _ring(self) -> None:
        """Whoever waits for workers that tell of steps need not look until there is one. What is no pipe is not written to."""
        bell = self._numbers[layout.BELL]
        if bell <= 0:
            return
        try:
            fd = os.open(f"{self._folder}/{bell}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # the agent is gone, or has no more than that to say
            return
        try:
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.write(fd, b"\0")
        except OSError:  # enough others have rung
            pass
        finally:
            os.close(fd)

    def _measure(self, step_s: float) -> None:
        """The first is what else there was to do; an average over fewer than its weight counts all alike."""
        count = self._numbers[layout.STEPS]
        if count:
            self._times[layout.STEP_S] += (step_s - self._times[layout.STEP_S]) / min(count, _WEIGHT)
        self._numbers[layout.STEPS] = count + 1

    def drain_left(self, now: float) -> float | None:
        """How much time there is to save, if some node has to leave."""
        ends_at = self._times[layout.DRAIN_ENDS_AT]
        return max(0.0, ends_at - now) if ends_at else None

    def asks_to_save(self, step: int) -> int:
        """The worker is about to pass this step. What the agent says: zero while there is nothing to say."""
        self._numbers[layout.ASKED] = min(max(step, 0), _STEP_MAX) + 1
        return self._numbers[layout.SAVE_AT]

    def wait_for_agents(self, now: float) -> int:
        """The same, while the worker waits for an answer: it does not hang, and does not begin to give signs of life either."""
        if self._is_running:
            self._times[layout.SIGN_AT] = now
        return self._numbers[layout.SAVE_AT]

    @property
    def is_told_to_save(self) -> bool:
        return bool(self._numbers[layout.TOLD_TO_SAVE])

    def note_told(self) -> None:
        self._numbers[layout.TOLD_TO_SAVE] = 1

    def note_saved(self, now: float) -> None:
        """Nothing that was done until now is lost."""
        if not self._numbers[layout.SAVED]:
            self._times[layout.CHECKPOINT_AT] = now
            self._numbers[layout.SAVED] = 1

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
            memory = mmap.mmap(fd, layout.PAGE_BYTES, offset=int(offset))
            page = PulseMapping(memory, at_end, os.path.dirname(path))
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
