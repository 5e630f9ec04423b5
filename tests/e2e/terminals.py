"""A real terminal in which a command runs, and what is to be seen on it, as pyte reads its bytes."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
from tests.conftest import PATIENCE_S

STILL_S = 0.2  # less than what is drawn every second leaves


class Terminal:
    """A terminal of a certain size, in which the command runs."""

    def __init__(self, master: int, process: subprocess.Popen[bytes], columns: int, lines: int) -> None:
        pyte = pytest.importorskip("pyte")
        self.master, self.process = master, process
        self._screen = pyte.HistoryScreen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.bytes = b""

    @property
    def text(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]

    @property
    def scrollback(self) -> list[str]:
        """What has left the screen at its top."""
        rows = self._screen.history.top
        return ["".join(row[column].data for column in range(self._screen.columns)).rstrip() for row in rows]

    @property
    def cursor(self) -> tuple[int, int]:
        return self._screen.cursor.y, self._screen.cursor.x

    def resize(self, columns: int, lines: int) -> None:
        set_size(self.master, columns, lines)
        self._screen.resize(lines, columns)

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def until(self, condition: Callable[[list[str]], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition(self.text):
            if time.monotonic() > deadline or not self._read():
                pytest.fail("it was not to be seen; the terminal:\n" + "\n".join(self.text))

    def until_shown(self, *texts: str) -> None:
        self.until(lambda shown: all(any(text in line for line in shown) for text in texts))

    def forget(self) -> None:
        """As if something else had been shown meanwhile."""
        while select.select([self.master], [], [], 0)[0]:
            self._read()
        self._screen.reset()

    def rest(self) -> None:
        """Until nothing has come for a moment: what was begun to be drawn is whole then."""
        while select.select([self.master], [], [], STILL_S)[0]:
            self._read()

    def ended(self) -> int:
        """Its exit code; what it has printed last is on the terminal then."""
        while self._read():
            pass
        return self.process.wait(PATIENCE_S)

    def _read(self) -> bool:
        if not select.select([self.master], [], [], PATIENCE_S)[0]:
            pytest.fail("nothing came; the terminal:\n" + "\n".join(self.text))
        try:
            data = os.read(self.master, 65536)
        except OSError:  # nobody has it open any more
            return False
        self.bytes += data
        self._stream.feed(data)
        return bool(data)


def set_size(fd: int, columns: int, lines: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


@contextmanager
def terminal_with(
    command: Sequence[str],
    columns: int,
    lines: int,
    env: Mapping[str, str] | None = None,
    is_controlling: bool = False,
    stdout: int | None = None,
) -> Iterator[Terminal]:
    """With `is_controlling` its keys are those of a shell's: Ctrl-C and the like are signals for the command."""
    master, slave = pty.openpty()
    set_size(slave, columns, lines)
    around = {**os.environ, "TERM": "xterm-256color", **(env or {})}
    for name in ("COLUMNS", "LINES"):  # of another terminal, if any
        around.pop(name, None)
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave if stdout is None else stdout, stderr=slave, env=around, start_new_session=True,
        preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if is_controlling else None,  # noqa: PLW1509  # no thread runs
    )  # fmt: skip
    os.close(slave)
    try:
        yield Terminal(master, process, columns, lines)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        os.close(master)
