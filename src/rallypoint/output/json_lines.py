"""Lines for programs that collect logs: one JSON object each, of the workers and of the launcher (``--log-format json``).

Every object has the same first fields: the time, in UTC, at which the line was read here, the host, and who has said it. The text
of a worker's line is what it wrote, without the end of the line, with a mark in place of what is no UTF-8. What ends with a
carriage return, as progress bars do, is a line as well. A part of a line is not shown before the rest has come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from rallypoint.base import defaults
from rallypoint.base.json_text import to_json
from rallypoint.output.console import LinePrefixer
from rallypoint.output.log_specs import Std

__all__ = ["JsonLines", "fields_of_host", "fields_of_worker", "own_line", "utc_now"]

_OPENING = b'{"time": "'
_LEVELS = ((40, "error"), (30, "warning"), (20, "info"), (0, "debug"))


def utc_now() -> str:
    seconds, milliseconds = divmod(time.time_ns() // 1_000_000, 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{milliseconds:03}Z"


def fields_of_worker(local_rank: int, environ: Mapping[str, str], stream: Std) -> str:
    """What does not change from line to line, by what the worker finds in its environment."""
    return _members({
        "host": os.uname().nodename,
        "source": "worker",
        "rank": _number(environ, defaults.ENV_RANK),
        "local_rank": local_rank,
        "role": environ.get(defaults.ENV_ROLE_NAME),
        "generation": _number(environ, defaults.ENV_GENERATION),
        "stream": _name(stream),
    })  # fmt: skip


def fields_of_host(name: str, stream: Std) -> str:
    """The same for what comes from a host by ssh, where that is not such an object itself."""
    return _members({"host": name, "source": "ssh", "stream": _name(stream)})


def own_line(level: int, text: str) -> str:
    """What the launcher says; the summary of a failure is one object with several lines of text."""
    word = next(word for least, word in _LEVELS if level >= least)
    return _line(utc_now(), _members({"host": os.uname().nodename, "source": "rallyrun", "level": word}), text)


class JsonLines(LinePrefixer):
    """Makes objects of lines. With `keeps_objects`, lines that are such objects already stay as they are."""

    def __init__(self, fields: str, keeps_objects: bool = False, now: Callable[[], str] = utc_now) -> None:
        super().__init__(b"")
        self._fields = fields
        self._keeps_objects = keeps_objects
        self._now = now
        self._is_after_return = False  # a newline that follows is the other half of one line end

    def feed(self, text: bytes) -> bytes:
        if not text:
            return b""
        if self._is_after_return and text.startswith(b"\n"):
            text = text[1:]
        self._is_after_return = text.endswith(b"\r")
        return b"".join([self._object(line) for line in text.splitlines()])

    def end_line(self) -> bytes:
        return b""

    def _object(self, line: bytes) -> bytes:
        if self._keeps_objects and line.startswith(_OPENING) and line.endswith(b"}"):
            return line + b"\n"
        return f"{_line(self._now(), self._fields, line.decode(errors='replace'))}\n".encode()


def _line(now: str, fields: str, text: str) -> str:
    return f'{{"time": "{now}", {fields}, "text": {to_json(text)}}}'


def _members(fields: Mapping[str, object]) -> str:
    return to_json(fields)[1:-1]


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else None


def _name(stream: Std) -> str:
    return "stdout" if stream == Std.OUT else "stderr"
