"""Who is to be told, and what is made of an attempt to tell them.

An attempt that was answered is over. One that surely was not taken is made again, a few times. One that was sent whole and not
answered is not: whoever is slow to answer may have taken it, and nobody is to be told the same thing twice.

A web address may be as good as a password, as those of chat services are. So none is shown beyond its host.
"""

from __future__ import annotations

import shlex

from rallypoint.base.records import Value

__all__ = ["Attempt", "Command", "Target", "Webhook", "after_exit", "after_status", "read_lines", "read_target"]

_SCHEMES = ("http://", "https://")
_RETRIED_STATUSES = (408, 425, 429)  # beside those of 500 and more: come again later


class Webhook(Value):
    """Gets what is told by POST; `login` is what stands before the host, as in ``user:password@``."""

    url: str
    name: str
    login: str = ""


class Command(Value):
    """Gets it on its stdin."""

    argv: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.argv[0]


Target = Webhook | Command


class Attempt(Value):
    """What came of it; `why` is empty if they were told."""

    why: str = ""
    may_retry: bool = False


def read_target(text: str) -> Target:
    """Whom the words mean; ValueError, without a word that could be a secret, for what means nobody."""
    text = text.strip()
    if text.lower().startswith(_SCHEMES):
        return _read_webhook(text)
    if "://" in text.partition(" ")[0]:
        raise ValueError(f"{text.partition('://')[0]}:// is none of http:// and https://")
    try:
        argv = shlex.split(text)
    except ValueError as problem:
        raise ValueError(f"a command that no shell could read ({problem})") from None
    if not argv:
        raise ValueError("an empty text is neither a web address nor a command")
    return Command(tuple(argv))


def _read_webhook(url: str) -> Webhook:
    scheme, _, rest = url.partition("://")
    authority = rest.partition("/")[0].partition("?")[0].partition("#")[0]
    login, at, host = authority.rpartition("@")
    name = f"{scheme.lower()}://{host}"
    if not host or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("a web address needs a host, and no blanks or characters beyond ASCII")
    port = host.rpartition("]")[2].partition(":")[2]
    if ":" in host.rpartition("]")[2] and not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"{name} names a port that is none")
    return Webhook(f"{name}{rest[len(authority) :].partition('#')[0]}" if at else url.partition("#")[0], name, login)


def read_lines(text: str) -> list[str]:
    """What a file names: one a line, without empty lines and comments."""
    lines = map(str.strip, text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def after_status(status: int, reason: str) -> Attempt:
    """The attempt that was answered with this status."""
    if 200 <= status < 300:
        return Attempt()
    why = f"it answered {status} {reason}".rstrip()
    return Attempt(why, may_retry=status >= 500 or status in _RETRIED_STATUSES)


def after_exit(code: int, last_line: str) -> Attempt:
    """The attempt of a command that ended so; `last_line` is of its stderr."""
    if code == 0:
        return Attempt()
    how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
    return Attempt(f"it {how}: {last_line}" if last_line else f"it {how}", may_retry=True)
