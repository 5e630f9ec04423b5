"""Calls that nobody can interrupt, made by a thread of their own, so that whoever asked for them need not wait for ever.

What a third party's back end does with a call is its own affair: it may wait for minutes. The thread makes one call after the
other; who asked gives up when its time is over, and the call goes on without it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from rallypoint.store.coordination import UnreachableError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.store.cell import Change

__all__ = ["CellCall", "CellCaller"]

STOP_S = 1.0  # how long a call under way is waited for at the end


class CellCall:
    """One call: under way, or done with a result or an error."""

    def __init__(self, function: Callable[[], Change], began_at: float) -> None:
        self.began_at = began_at
        self._function = function
        self._done = threading.Event()
        self._result: Change | None = None
        self._error: BaseException | None = None

    def make(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # it is raised again where the result is asked for
            self._error = error
        self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def result(self, deadline: float) -> Change:
        """What came of it; UnreachableError if nothing has until `deadline`."""
        if not self._done.wait(max(0.0, deadline - time.monotonic())):
            raise UnreachableError(f"the back end has not answered for {time.monotonic() - self.began_at:.1f} s")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class CellCaller:
    """The thread; it begins with the first call. `on_done` is called in it after each."""

    def __init__(self, on_done: Callable[[], None]) -> None:
        self._on_done = on_done
        self._calls: SimpleQueue[CellCall | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def begin(self, function: Callable[[], Change]) -> CellCall:
        """Let `function` be called when those before it are done."""
        call = CellCall(function, time.monotonic())
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rallypoint-cell", daemon=True)
            self._thread.start()
        self._calls.put(call)
        return call

    def close(self) -> None:
        """No further call, also of those that were asked for; a thread that is stuck in one ends with the process."""
        self._is_closed = True
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None and not self._is_closed:
            call.make()
            self._on_done()
