"""An answer over HTTP that is given in pieces, by any thread, while the server's own thread goes on with other peers.

So can be told what takes its time, and what has no end. Nobody who gives a piece waits for the peer: what the peer has not taken
is kept, up to a limit beyond which it has lost its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rallypoint.net.http import Response

__all__ = ["Stream"]

WAITING_BYTES = 16 << 20  # the most that is kept for one peer


class Stream:
    """The head of an answer, whose body is what is sent until it is ended. `on_over` is called once, when no more can be told:
    on the server's thread, or on the one that has ended the stream before the server knew of it.
    """

    def __init__(self, head: Response, on_over: Callable[[], None] = lambda: None) -> None:
        self.head = head
        self._on_over = on_over
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._is_complete = False
        self._is_over = False
        self._ring: Callable[[], None] = lambda: None

    # --- for whoever gives the answer --------------------------------------------------------------------------------------

    def send(self, piece: bytes) -> bool:
        """One more piece of the body; False: nobody hears it any more."""
        with self._lock:
            if self._is_over or self._is_complete:
                return False
            self._waiting += piece
            is_kept = len(self._waiting) <= WAITING_BYTES
        if not is_kept:
            self.give_up()
        self._ring()
        return is_kept

    def end(self, piece: bytes = b"") -> None:
        """The last piece: the connection is closed after it."""
        self.send(piece)
        with self._lock:
            self._is_complete = True
        self._ring()

    @property
    def is_behind(self) -> bool:
        """Whether the peer has still to take what was sent before: then it may be spared what is soon out of date."""
        return bool(self._waiting)

    # --- for the server ----------------------------------------------------------------------------------------------------

    def attach(self, ring: Callable[[], None]) -> None:
        """From now on, `ring` is called when there is something to take."""
        self._ring = ring

    def take(self) -> bytes:
        """What there is to tell by now."""
        with self._lock:
            taken, self._waiting = bytes(self._waiting), bytearray()
        return taken

    @property
    def is_told(self) -> bool:
        """Whether all has been taken, and nothing more will come."""
        return self._is_complete and not self._waiting

    @property
    def is_over(self) -> bool:
        return self._is_over

    def give_up(self) -> None:
        """Nobody hears it any more. Twice is once."""
        with self._lock:
            was_over, self._is_over = self._is_over, True
            self._waiting.clear()
        if not was_over:
            self._on_over()
