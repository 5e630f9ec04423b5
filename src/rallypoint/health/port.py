"""Opening the port of the health endpoint, before anything is started, and saying what to do where that cannot be done."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

from rallypoint.base import defaults, environment
from rallypoint.errors import UsageError
from rallypoint.net.listening import hold_port

__all__ = ["open_listeners_or_explain", "resolve_health_port"]

SETTING = "--health-port or TORCHELASTIC_HEALTH_CHECK_PORT"
ADDRESS_SETTING = "--health-addr for --health-port"
PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)  # all others are of the address
HIGHEST_PORT, PORT_DIGITS = 65_535, 5
LISTENS = "0A"  # the state of a socket, in the kernel's tables
NAMES_LISTED = 3


def open_listeners_or_explain(address: str, port: int) -> list[socket.socket]:
    """Sockets that listen at `port` on every local address of `address`; port 0 is any that is free. UsageError: why not."""
    _parse_port(port)
    host = address.strip("[]")
    try:
        if not host:
            raise OSError(errno.EADDRNOTAVAIL, "an address has to be named")
        return [socket.socket(fileno=sock.detach()) for sock in hold_port(host, (port,))]
    except UnicodeError:
        raise UsageError(f"{ADDRESS_SETTING}: {address!r} is no address") from None
    except OSError as error:
        setting = SETTING if error.errno in PORT_ERRORS else ADDRESS_SETTING
        raise UsageError(
            f"{setting}: the health endpoint cannot listen at {address} port {port}: {_explain(error, port)}"
        ) from error


def resolve_health_port(given: int | None) -> int:
    """The port as given, else as the environment says it; 0, any that is free, where neither does."""
    return _parse_port((environment.text(defaults.ENV_HEALTH_CHECK_PORT) or 0) if given is None else given)


def _parse_port(value: str | int) -> int:
    text = str(value).strip()
    if not (text.isascii() and text.isdecimal()) or len(text) > PORT_DIGITS or int(text) > HIGHEST_PORT:
        raise UsageError(f"{SETTING}: {value!r:.40} is no port; they are from 0, which means any that is free, to {HIGHEST_PORT}")
    return int(text)


def _explain(error: OSError, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            holders = ", ".join(_holders(port))
            return f"the port is taken{f' by {holders}' if holders else ''}; name another, or 0 for any that is free"
        case errno.EACCES:
            return f"it is below {_first_unprivileged_port()}, where only root may listen; name a higher one"
        case errno.EADDRNOTAVAIL:
            return "that is no address of this machine; 127.0.0.1 is for itself only, 0.0.0.0 is every address that it has"
    return error.strerror or str(error)


def _first_unprivileged_port() -> int:
    try:
        with open("/proc/sys/net/ipv4/ip_unprivileged_port_start", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 1024


def _holders(port: int) -> list[str]:
    """The processes that listen at a port, as far as we may know."""
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")) if wanted else ():
        if wanted.intersection(_open_files(pid)):
            found.append(f"process {pid} ({_command(pid)})")
    return found[:NAMES_LISTED]


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{table}", encoding="ascii") as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        yield from (row[9] for row in rows if row[3] == LISTENS and int(row[1].rpartition(":")[2], 16) == port)


def _open_files(pid: str) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    try:
        for fd in os.listdir(folder):
            yield os.readlink(f"{folder}/{fd}")
    except OSError:  # it is not ours to look at, or it has ended
        return


def _command(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "ended meanwhile"
