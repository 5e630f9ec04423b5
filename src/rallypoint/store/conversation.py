"""Questions and answers over a node's line to its store.

An answer has the number of its question. A long one comes in parts, which are put together here. What was asked on a connection
that broke is never answered: whoever asked notices by `is_over`.
"""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.store.coordination import CompactedError, CoordinationError, LeaseLostError
from rallypoint.store.frames import LARGE_FRAME_BYTES, SEAL_BYTES, FrameError
from rallypoint.store.line import Line
from rallypoint.store.wire import decode, encode

__all__ = ["Conversation", "checked_answer"]

ANSWER_BYTES = 256 * 1024 * 1024  # of an answer in many parts
IN_PARTS = ("part", "outcome", "snapshot", "events", "past")
ERRORS: dict[object, type[Exception]] = {
    "lease": LeaseLostError,
    "compacted": CompactedError,
    "full": CoordinationError,
    "invalid": ValueError,
}

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    Handler = Callable[[str, list[object]], None]  # what the answer is, and its fields

    class Listener(Protocol):
        def on_open(self, now: float) -> None: ...
        def on_break(self, since: float) -> None: ...
        def on_news(self, what: str, fields: list[object]) -> None: ...


class Conversation:
    """What is said on `line`. The listener is told when it opens and breaks, and what the store tells unasked."""

    def __init__(self, line: Line, listener: Listener) -> None:
        self.line = line
        self._listener = listener
        self._openings = 0
        self._asked = 0
        self._handlers: dict[int, Handler] = {}
        self._parts: list[object] = []
        self._parts_bytes = 0

    def ask(self, handler: Handler, *request: object) -> int:
        """Send a question, while the line is open; its number."""
        body = encode([self._asked + 1, *request])
        if len(body) + SEAL_BYTES > LARGE_FRAME_BYTES:
            raise ValueError(f"a request of {len(body)} bytes, which is more than a store takes")
        self._asked += 1
        self._handlers[self._asked] = handler
        self.line.send(body)
        return self._asked

    def is_over(self, question: int) -> bool:
        """Whether it will not be answered any more, or has been."""
        return question not in self._handlers

    def forget(self, question: int) -> None:
        """Nobody waits for the answer any more."""
        self._handlers.pop(question, None)

    def pump(self, now: float) -> None:
        """Send and take in what can be now. RefusedError and StoreGoneError: there is no store for us any more."""
        bodies = self.line.pump(now)
        self._note_line(now)
        try:
            for body in bodies:
                self._receive(body)
        except FrameError as error:
            self.break_off(str(error), now)

    def flush(self, now: float) -> None:
        self.line.flush(now)
        self._note_line(now)

    def break_off(self, reason: str, now: float) -> None:
        self.line.break_off(reason, now)
        self._note_line(now)

    def _note_line(self, now: float) -> None:
        is_new = self.line.openings != self._openings
        if self.line.is_open and not is_new:
            return
        self._handlers.clear()
        self._parts, self._parts_bytes = [], 0
        if self.line.unreachable_since is not None:
            self._listener.on_break(self.line.unreachable_since)
        else:
            self._openings = self.line.openings
            self._listener.on_open(now)

    def _receive(self, body: bytes) -> None:
        number, what, *fields = decode(body)
        if what in IN_PARTS:
            fields = self._put_together(what, fields, len(body))
        if what == "part":
            return
        if not number:
            self._listener.on_news(what, fields)
        elif (handler := self._handlers.pop(number, None)) is not None:  # else nobody waits for it any more
            handler(what, fields)

    def _put_together(self, what: str, fields: list[object], size: int) -> list[object]:
        """The fields, and the things in the list that is the last of them, with those of the parts before."""
        last = fields.pop() if fields else None
        if type(last) is not list:
            raise FrameError("an answer without its list")
        self._parts += last
        self._parts_bytes += size
        if self._parts_bytes > ANSWER_BYTES:
            raise FrameError("an answer without end")
        if what == "part":
            return []
        whole, self._parts, self._parts_bytes = [*fields, *self._parts], [], 0
        return whole


def checked_answer(expected: str, what: str, fields: list[object]) -> list[object]:
    """The fields of the answer that was expected; an error is raised."""
    if what == "error" and len(fields) == 2:
        raise ERRORS.get(fields[0], CoordinationError)(str(fields[1]))
    if what != expected:
        raise CoordinationError(f"the store answered {what!r} where {expected!r} was due")
    return fields
