"""Between a worker and its agent, where copies of what the worker saves go to another node: one byte at a time, over a socket.

    agent  → r  your slots are as they are to be: until then a worker neither loads nor saves
    worker → s  I have saved
    agent  → c  what you saved is copied, or cannot be: until then a worker does not save again
    agent  → x  nothing is copied any more

So when any rank saves step m, all have saved m-1, and the copies of m-2 are complete. Each rank keeps three snapshots, of m-2
too, and so does its partner: whichever node is lost then, there is one moment of which all ranks have a snapshot somewhere.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

__all__ = ["COPIED", "OVER", "READY", "SAVED", "Line", "say"]

READY, SAVED, COPIED, OVER = b"r", b"s", b"c", b"x"
ORPHAN_S = 60.0


class Line:
    """The worker's end.

    An agent that hangs up without a word is dead, and its worker about to be killed by the warden: what it would still do in that
    moment has no copy, so it does nothing.
    """

    def __init__(self, fd: int) -> None:
        self._sock = socket.socket(fileno=fd)
        self._is_open, self._is_ready, self._saves = True, False, 0  # of which it is not known whether they are copied

    def wait_until_ready(self) -> None:
        self._wait(lambda: self._is_ready)

    def wait_until_copied(self) -> None:
        self._wait(lambda: self._saves == 0)

    def tell_saved(self) -> None:
        if self._is_open:
            self._saves += 1
            say(self._sock, SAVED)

    def _wait(self, is_so: Callable[[], bool]) -> None:
        while self._is_open and not is_so():
            try:
                words = self._sock.recv(64)
            except ConnectionError:
                words = b""
            if not words:
                time.sleep(ORPHAN_S)
            self._is_open = bool(words) and OVER not in words
            self._is_ready = self._is_ready or READY in words
            self._saves -= words.count(COPIED)


def say(line: socket.socket, words: bytes) -> bool:
    """Whether it could be said: nobody waits for one who does not listen."""
    try:
        return line.send(words, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) == len(words)
    except OSError:
        return False
