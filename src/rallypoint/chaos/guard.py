"""The line to the guardian, from ``rallypoint chaos``; and what is left to do where the guardian itself was killed."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from rallypoint.base.records import Value
from rallypoint.chaos.faults import CUT
from rallypoint.chaos.guardian import ANSWER_BYTES, FDS_MAX, PROGRAM
from rallypoint.chaos.holds import go_on, heal
from rallypoint.errors import RallypointError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Guard", "Word"]

_ANSWERS = ("on", "failed")
ANSWER_S = 30.0  # it may have to start first
CLOSE_S = 10.0
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Word(Value):
    """What the guardian says of a hold: it is ``on``, has ``news``, ``failed``, or is ``off``."""

    number: int
    what: str
    text: str = ""


class _Own(Value):
    """Our own copies of what the guardian holds."""

    do: str
    pidfds: Sequence[int]
    pids: Sequence[int]


class Guard:
    """A guardian that was started. It is closed in the end: then nothing is held any more."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._own: dict[int, _Own] = {}
        command = [sys.executable, "-I", "-S", "-c", PROGRAM, _ROOT, str(theirs.fileno())]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=[theirs.fileno()]
                )
            except OSError as error:
                self._sock.close()
                raise RallypointError(f"the process that undoes what lasts could not be started: {error}") from error
        self.is_lost = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._sock.fileno()

    def hold(
        self, number: int, do: str, seconds: float, pidfds: Sequence[int] = (), pids: Sequence[int] = (), **more: object
    ) -> list[Word]:
        """Begin it, and give all that was said until it was on, the last word being about it. The descriptors stay the caller's.

        RallypointError: it could not be done, or there is no guardian to undo it.
        """
        self._own[number] = _Own(do, [os.dup(fd) for fd in pidfds], pids)
        asked = json.dumps({"number": number, "do": do, "seconds": seconds, "pids": list(pids), **more}).encode()
        try:
            rest = list(pidfds)
            while len(rest) > FDS_MAX:
                socket.send_fds(self._sock, [b"{}"], rest[:FDS_MAX])
                del rest[:FDS_MAX]
            socket.send_fds(self._sock, [asked], rest)
        except OSError:
            self._lose()
        words = self._await(number)
        answer = next((word for word in words if word.number == number and word.what in _ANSWERS), None)
        if answer is None:
            self._lose()
            raise RallypointError("the process that would undo it does not answer")
        if answer.what == "failed":
            self._forget(number)
            raise RallypointError(answer.text)
        return [*(word for word in words if word is not answer), answer]

    def _await(self, number: int) -> list[Word]:
        words: list[Word] = []
        ends_at = time.monotonic() + ANSWER_S
        while not self.is_lost and (left_s := ends_at - time.monotonic()) > 0:
            words += self.hear(left_s)
            if any(word.number == number and word.what in _ANSWERS for word in words):
                break
        return words

    def release(self, number: int) -> None:
        """Undo it now; it is off when the guardian says so."""
        try:
            self._sock.send(json.dumps({"number": number, "do": "undo"}).encode())
        except OSError:
            self._lose()

    def hear(self, timeout_s: float = 0.0) -> list[Word]:
        """What it has said since; where it is gone, that everything is off, for it was undone here."""
        words: list[Word] = []
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while not self.is_lost and poll.poll(0 if words else max(0.0, timeout_s) * 1000):
            try:
                data = self._sock.recv(ANSWER_BYTES)
            except OSError:
                data = b""
            if not data:
                words += self._lose()
                break
            told = json.loads(data)
            words.append(Word(told["number"], told["is"], told["text"]))
            if words[-1].what == "off":
                self._forget(words[-1].number)
        return words

    def _lose(self) -> list[Word]:
        """Somebody has killed or stopped it: it does nothing more, and what it has held is ours to undo."""
        self.is_lost = True
        self._process.kill()
        self._process.wait()
        held = list(self._own)
        for number in held:
            self._undo(number)
        return [Word(number, "off", "the process that held it is gone") for number in held]

    def _undo(self, number: int) -> None:
        own = self._own.get(number)
        if own is not None and own.do == CUT:
            heal(list(zip(own.pidfds, own.pids, strict=True)))
        elif own is not None:
            go_on(own.pidfds)
        self._forget(number)

    def _forget(self, number: int) -> None:
        own = self._own.pop(number, None)
        for fd in own.pidfds if own is not None else ():
            os.close(fd)

    def close(self) -> None:
        """Have everything undone, and see that it is."""
        self._sock.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self._process.kill()
            self._process.wait()
        for number in list(self._own):
            self._undo(number)
