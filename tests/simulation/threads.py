"""What stands for the kernel under an agent: a thread that sleeps on virtual time, and what wakes it.

The rendezvous driver and the client of the store run here as they are, in a greenlet: where they would sleep they switch to the
world's loop, and go on when their time has come, or something that they wait for. What has a file descriptor there is an object
here that says whether it is `readable`; it is its own `fileno`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from greenlet import GreenletExit, getcurrent, greenlet
from tests.simulation.world import NEVER, Clock, Violation, World

from rallypoint.base import backoff, report
from rallypoint.coordination.embedded import client, dialling
from rallypoint.rendezvous import driver

__all__ = ["Bell", "Poll", "Thread", "virtual_kernel"]

MOST_TURNS = 1000  # without sleeping


class Bell:
    """Stands for a `WakeFd`. `on_set` is called when it is set."""

    __slots__ = ("on_set", "readable")

    def __init__(self) -> None:
        self.readable = False
        self.on_set: Callable[[], None] | None = None

    def set(self) -> None:
        self.readable = True
        if self.on_set is not None:
            self.on_set()

    def clear(self) -> None:
        self.readable = False

    def fileno(self) -> Bell:
        return self

    def close(self) -> None:
        pass


class Poll:
    """Stands for an epoll instance, in which `thread` waits."""

    def __init__(self, thread: Thread) -> None:
        self._thread = thread
        self._files: dict[object, None] = {}

    @property
    def readable(self) -> bool:
        for file in self._files:  # noqa: SIM110  # it is asked very often
            if file.readable:
                return True
        return False

    def register(self, file: object, events: int = 0) -> None:
        self._files[file] = None

    def unregister(self, file: object) -> None:
        del self._files[file]

    def poll(self, timeout_s: float) -> None:
        self._thread.wait((self,), timeout_s)

    def fileno(self) -> Poll:
        return self

    def close(self) -> None:
        self._files.clear()


class Thread:
    """A thread of a simulated process. `can_run` says whether that may go on, and has it look again later if not."""

    def __init__(self, world: World, clock: Clock, can_run: Callable[..., bool]) -> None:
        self._world, self._clock, self._can_run = world, clock, can_run
        self._loop = getcurrent()
        self._greenlet = greenlet(self._run)
        self._files: Sequence[object] | None = None  # what it sleeps on, while it does
        self._wake_at = 0.0
        self._timer_at = NEVER
        self._turns = 0  # since it has slept
        self.on_end: Callable[[], None] = lambda: None

    @property
    def has_ended(self) -> bool:
        return self._greenlet.dead

    def _run(self, run: Callable[[], None]) -> None:
        run()
        self._world.after(0.0, self.on_end)

    # Within it.

    def wait(self, files: Sequence[object], timeout_s: float) -> None:
        """Sleep until one of these can be read, or so long, on the clock of its machine."""
        if timeout_s <= 0 or any([file.readable for file in files]):  # noqa: C419  # it is asked very often
            self._turns += 1
            if self._turns > MOST_TURNS:
                raise Violation(f"a thread spins: it would sleep on {files} for {timeout_s} s")
            return
        self._turns, self._files = 0, files
        self._arm(self._clock.when(self._clock.read(self._world.now) + timeout_s))
        self._loop.switch()

    # For the world's loop.

    def start(self, run: Callable[[], None]) -> None:
        self._greenlet.switch(run)

    def look(self) -> None:
        """Go on, if its time has come or there is something to read."""
        files = self._files
        if files is None:
            return
        if self._world.now < self._wake_at:
            for file in files:
                if file.readable:
                    break
            else:
                return
        if self._can_run(self.look):
            self._files = None
            self._greenlet.switch()

    def kill(self) -> None:
        """It ends where it is. What it holds is closed, as the kernel does for a dead process."""
        self._files = None
        if not self._greenlet.dead:
            self._greenlet.throw(GreenletExit)

    def _arm(self, at: float) -> None:
        self._wake_at = at
        if at < self._timer_at:
            self._timer_at = at
            self._world.at(at, self._on_timer, at)

    def _on_timer(self, planned: float) -> None:
        """What it sleeps for now may be due later than what this was planned for."""
        if planned == self._timer_at:
            self._timer_at = NEVER
            if self._files is not None:
                if self._wake_at > self._world.now:
                    self._arm(self._wake_at)
                else:
                    self.look()


@contextmanager
def virtual_kernel(world: World) -> Iterator[None]:
    """As long as it lasts, whatever is made is made of this; chance is the world's, and nobody says anything."""
    with ExitStack() as stack:
        for module in (client, dialling, driver):
            stack.enter_context(patch.object(module, "WakeFd", Bell))
        stack.enter_context(patch.object(backoff, "random", SimpleNamespace(uniform=world.between)))
        stack.enter_context(patch.object(report, "_say", lambda *_: None))
        yield
