"""Telling everybody who looks at a job how it is, once a second.

One thread looks for all of them, and only while there is somebody. Who comes is told at once what was seen last, if that is new
enough; so neither many viewers nor one who comes again and again cost the job more than a look a second. A job that takes long to
look at, because it is large or a node of it does not answer, is looked at less often.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rallypoint.net.http import Response
from rallypoint.net.http_stream import Stream

__all__ = ["Feed"]

EVERY_S = 1.0
PAUSES = 2.0  # at least so many times as long as a look has taken, nobody looks
CLOSING_S = 0.2


class Feed:
    """What `look` gives, for whoever is added. It is called on a thread of its own, and told whether that has just begun."""

    def __init__(self, look: Callable[[bool], bytes], every_s: float = EVERY_S) -> None:
        self._look = look
        self._every_s = every_s
        self._changed = threading.Condition()
        self._viewers: set[Stream] = set()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._seen = b""
        self._next_at = 0.0

    def add(self, head: Response) -> Stream:
        """A stream with this head for somebody who wants to look."""
        stream = Stream(head, lambda: self._remove(stream))
        with self._changed:
            self._viewers.add(stream)
            if self._is_seen_lately():
                stream.send(self._seen)
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="rallypoint-web", daemon=True)
                self._thread.start()
        return stream

    def close(self, last: bytes) -> None:
        """Look no more, and tell all who are there this. A look that takes long is not waited for."""
        with self._changed:
            self._is_closed = True
            thread, viewers = self._thread, list(self._viewers)
            self._changed.notify()
        for stream in viewers:
            stream.end(last)
        if thread is not None:
            thread.join(CLOSING_S)

    def _remove(self, stream: Stream) -> None:
        with self._changed:
            self._viewers.discard(stream)
            self._changed.notify()

    def _is_seen_lately(self) -> bool:
        return time.monotonic() < self._next_at

    def _is_done(self) -> bool:
        return self._is_closed or not self._viewers

    def _run(self) -> None:
        is_first = True
        while True:
            with self._changed:
                while not self._is_done() and self._is_seen_lately():
                    self._changed.wait(self._next_at - time.monotonic())
                if self._is_done():
                    self._thread = None
                    return
            began_at = time.monotonic()
            seen, is_first = self._look(is_first), False
            took_s = time.monotonic() - began_at
            with self._changed:
                self._seen, self._next_at = seen, began_at + max(self._every_s, (1 + PAUSES) * took_s)
                viewers = list(self._viewers)
            for stream in viewers:
                if not stream.is_behind:
                    stream.send(seen)
