"""Tells others of a run while it runs: hears its events, and has what they make delivered, without ever waiting for it.

Each of those who are told has an outbox, whose thread may hang alone. What could not be told is said in one line. Only at the
very end, when all else is done, the launcher waits for the last ones, for a few seconds.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence

from rallypoint.base import defaults, report
from rallypoint.base.json_text import to_json
from rallypoint.base.outbox import Outbox
from rallypoint.base.text import many
from rallypoint.errors import bad_field
from rallypoint.events import Event
from rallypoint.notices.document import HEARD, Teller, hear
from rallypoint.notices.rules import Attempt, Command, Target, Webhook, read_lines, read_target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.notices.delivery import Running

__all__ = ["Notifier", "read_targets"]

MOST_NOTICES = 100  # that wait for one of them
MOST_BYTES = 1 << 16  # of a file that names them


class _Line:
    """To one of those who are told."""

    def __init__(self, target: Target) -> None:
        self.target = target
        complain = report.warning_once(f"telling {target.name}")
        self.outbox = Outbox(self._deliver, most_items=MOST_NOTICES, is_foreign=True, on_error=complain)
        self._taken = self._settled = 0  # notices; each number is changed by one thread alone
        self._running: Running | None = None  # the command that is being told
        self.is_given_up = False

    def put(self, body: str) -> None:
        if self.outbox.put(body, may_wait=False):
            self._taken += 1
        else:
            report.warn(f"a notice was not told to {self.target.name}: {MOST_NOTICES} others wait for it")

    def _deliver(self, body: str) -> None:
        failed = self._try(body)
        self._settled += 1
        if failed.why and not self.is_given_up:
            report.warn(f"a notice could not be told to {self.target.name}: {failed.why}")

    def _try(self, body: str) -> Attempt:
        """The last attempt of a few."""
        from rallypoint.notices.delivery import attempt

        for pause_s in (*defaults.NOTICE_PAUSES_S, None):
            made = attempt(self.target, body, defaults.NOTICE_TIMEOUT_S, self._begun)
            if not made.may_retry or self.is_given_up or pause_s is None:
                break
            time.sleep(pause_s)
        return made

    def _begun(self, running: Running | None) -> None:
        self._running = running

    def give_up(self, waited_s: float) -> None:
        """The launcher ends now."""
        self.is_given_up = True
        self.outbox.abandon()
        if (running := self._running) is not None:
            running.kill()
        left = self._taken - self._settled
        if left > 0:
            what = many(left, "notice")
            report.warn(f"{what} may not have been told to {self.target.name}: no answer within {waited_s:g} s of the end")


class Notifier:
    """For one run of one agent."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._lines = [_Line(target) for target in targets]
        self._teller = Teller()

    @property
    def provisions(self) -> tuple[str, ...]:
        """What will be needed, to be loaded while all is quiet."""
        has_web = any(isinstance(line.target, Webhook) for line in self._lines)
        return ("rallypoint.notices.delivery", "rallypoint.story.story", *(("urllib.request",) if has_web else ()))

    def hear(self, event: Event) -> tuple[dict[str, object], ...]:
        """An event of this run, in the thread that it happened in; what is to be put on record of a notice, if it makes one."""
        if event.name not in HEARD:  # what other threads may tell of
            return ()
        facts: Any = event.metadata
        self._teller, document = hear(self._teller, event.name, event.timestamp, facts)
        if document is None:
            return ()
        body = to_json(document)
        for line in self._lines:
            line.put(body)
        return ({"event": document["event"], "id": document["id"], "to": [line.target.name for line in self._lines]},)

    def close(self, patience_s: float) -> None:
        """Give them so long to take the last of it."""
        until = time.monotonic() + patience_s
        try:
            for line in self._lines:
                line.outbox.flush(max(0.0, until - time.monotonic()))
        finally:
            for line in self._lines:
                if line.outbox.is_busy:
                    line.give_up(patience_s)


def read_targets(given: str | Sequence[str]) -> tuple[Target, ...]:
    """Those who are to be told; UsageError if nobody could be."""
    texts = [given] if isinstance(given, str) else given
    return tuple(target for text in texts for target in _read(text.strip()))


def _read(text: str) -> list[Target]:
    if not text.startswith("@"):
        return [_checked(text, "")]
    path = text[1:]
    lines = read_lines(_content(path))
    if not lines:
        raise bad_field("notify", f": {path} names nobody; write a web address or a command on each line")
    return [_checked(line, f" {path}:") for line in lines]


def _checked(text: str, where: str) -> Target:
    try:
        target = read_target(text)
    except ValueError as problem:
        raise bad_field("notify", f":{where} {problem}") from None
    if isinstance(target, Command) and not any(os.access(path, os.X_OK) and os.path.isfile(path) for path in _paths(target.name)):
        raise bad_field("notify", f":{where} there is no command {target.name!r}; a web address begins with https://")
    return target


def _paths(command: str) -> list[str]:
    return [command] if "/" in command else [os.path.join(folder, command) for folder in os.get_exec_path()]


def _content(path: str) -> str:
    """Of a file; what is none, such as a pipe that nobody writes to, is not waited for."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return _text_of(path, file.fileno())
    except OSError as error:
        raise bad_field("notify", f": {path} cannot be read: {error.strerror}") from None


def _text_of(path: str, fd: int) -> str:
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        raise bad_field("notify", f": {path} is not a regular file")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        report.warn(f"--notify: {path} can be read by other users of this machine; chmod 600 it")
    return os.read(fd, MOST_BYTES).decode(errors="replace")
