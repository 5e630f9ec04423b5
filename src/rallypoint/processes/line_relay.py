"""How blocks of bytes become whole lines, and what is shown of them.

A pipe gives bytes in blocks that begin and end anywhere, and several workers write to one console. Lines of different
workers must not mix, so a block is shown only up to its last line end, and the rest waits for its own. All of this works
on blocks, never line by line, which is what makes it as fast as it is; and on bytes, because a worker may write anything.

A carriage return ends a line too, or a progress bar would never show. Nothing here does I/O.
"""

from __future__ import annotations

__all__ = ["InterruptFilter", "LineCutter", "LinePrefixer", "matching_lines"]

MAX_LINE_BYTES = 1 << 20
MAX_TRACEBACK_BYTES = 1 << 18
LINE_ENDS = (b"\n", b"\r")


class LineCutter:
    """Gives out whole lines, however the blocks were cut; a line that grows beyond `max_line_bytes` comes in pieces."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._held: list[bytes] = []  # joined only once, so that a long line of tiny blocks costs no quadratic time
        self._held_bytes = 0

    def feed(self, block: bytes) -> bytes:
        newline = block.rfind(b"\n")
        cut = max(newline, block.rfind(b"\r", newline + 1)) + 1
        if not cut:
            self._hold(block)
            return self.rest() if self._held_bytes >= self._max_line_bytes else b""
        if cut == len(block) and not self._held:
            return block
        lines = b"".join((*self._held, memoryview(block)[:cut]))
        self._held.clear()
        self._held_bytes = 0
        self._hold(block[cut:])
        return lines

    def rest(self) -> bytes:
        """What has been held back so far; it is no longer held."""
        rest = b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        return rest

    def _hold(self, block: bytes) -> None:
        if block:
            self._held.append(block)
            self._held_bytes += len(block)


class LinePrefixer:
    """Puts the prefix before every line; it remembers where the last text ended, since that may be inside a line."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._last = b"\n"

    @property
    def is_inside_line(self) -> bool:
        return self._last not in LINE_ENDS

    def feed(self, text: bytes) -> bytes:
        if not text:
            return b""
        opening = self._prefix if self._begins_line(text) else b""
        self._last = text[-1:]
        if not self._prefix:
            return text
        if b"\r" in text:
            return opening + self._prefix.join(text.splitlines(keepends=True))
        prefixed = text.replace(b"\n", b"\n" + self._prefix)
        begun_too_early = len(self._prefix) if self._last == b"\n" else 0  # the line that comes next
        return b"".join((opening, memoryview(prefixed)[: len(prefixed) - begun_too_early]))

    def end_line(self) -> bytes:
        """The newline that is missing, if it is, so that whatever comes next starts on its own line."""
        missing = b"" if self._last == b"\n" else b"\n"
        self._last = b"\n"
        return missing

    def _begins_line(self, text: bytes) -> bool:
        if self._last == b"\r":
            return not text.startswith(b"\n")  # the two together are one line end, which happened to be cut
        return self._last == b"\n"


def matching_lines(lines: bytes, needles: tuple[bytes, ...], prefix: bytes) -> bytes:
    """Those lines that contain one of the needles, each with the prefix before it."""
    if not any(needle in lines for needle in needles):
        return b""
    found = [line for line in lines.splitlines(keepends=True) if any(needle in line for needle in needles)]
    text = b"".join(prefix + line for line in found)
    return text + b"\n" if text and not text.endswith(LINE_ENDS) else text


class InterruptFilter:
    """Leaves out tracebacks that end in KeyboardInterrupt: somebody pressed Ctrl-C and knows why the program ended.

    A traceback is held back until its last line tells what it is; also while another one may follow it ("During handling of
    the above exception …"), for they are one story. What grows too long to hold is shown after all.
    """

    _TRACEBACK = b"Traceback (most recent call last)"
    _INTERRUPTED_START = (b"Fatal Python error: init_", b"Python runtime state: ")  # before the first line of the program
    _OPENERS = (_TRACEBACK, b"Exception ignored ", _INTERRUPTED_START[0])
    _LINKS = (b"During handling of the above exception", b"The above exception was the direct cause")

    def __init__(self, max_held_bytes: int = MAX_TRACEBACK_BYTES) -> None:
        self._max_held_bytes = max_held_bytes
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._has_ended = False  # the held traceback has its last line, which names no interrupt
        self._is_linked = False  # and another one is announced

    def feed(self, lines: bytes) -> bytes:
        if not self._held and not any(opener in lines for opener in self._OPENERS):
            return lines
        return b"".join([self._step(line) for line in lines.splitlines(keepends=True)])

    def rest(self) -> bytes:
        """What has been held back so far; it is no longer held."""
        rest = b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        self._has_ended = self._is_linked = False
        return rest

    def _step(self, line: bytes) -> bytes:
        if not self._held:
            return self._hold(line) if line.startswith(self._OPENERS) else line
        if line.startswith(self._LINKS):
            self._is_linked = True
            return self._hold(line)
        if line.startswith(self._TRACEBACK) and (self._is_linked or not self._has_ended):
            self._has_ended = self._is_linked = False
            return self._hold(line)
        if line.isspace() or line.startswith((b" ", b"\t")):
            return self._hold(line)
        if line.startswith(self._INTERRUPTED_START) and not self._has_ended:
            return self._hold(line)
        if self._has_ended:
            return self.rest() + self._step(line)
        if line.startswith(b"KeyboardInterrupt"):
            self.rest()
            return b""
        self._has_ended = True
        return self._hold(line)

    def _hold(self, line: bytes) -> bytes:
        self._held.append(line)
        self._held_bytes += len(line)
        return self.rest() if self._held_bytes > self._max_held_bytes else b""
