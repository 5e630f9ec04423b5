"""Two of the ways to tell an agent that its node has to leave: a file that appears, and a request to its health endpoint.

The kernel says when something appears in a folder (inotify), so that nobody has to look. It does not know what another machine
does in a folder that both have mounted: there the file is looked for once a second, by the agent that was asked to watch it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from rallypoint.base.text import host_port
from rallypoint.errors import bad_field
from rallypoint.net.http import Request, Response
from rallypoint.web.rules import NO_TOKEN, PRIVATE, given_token

__all__ = ["PATH", "Door", "FileWatch"]

PATH = "/drain"
TOKEN_BYTES = 16
LOOK_EVERY_S = 1.0
# Created, moved there, or the folder itself gone; what is written into other files is of no interest.
IN_MOVED_TO, IN_CREATE, IN_DELETE_SELF, IN_ONLYDIR = 0x80, 0x100, 0x400, 0x1000000
EVENT_BYTES = 64 * 1024
SHARED_KINDS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "virtiofs", "afs", "pvfs", "fuse.")


class FileWatch:
    """Waits for a file to appear. UsageError: it is there already, or cannot appear."""

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)
        folder = os.path.dirname(self._path)
        if not os.path.isdir(folder):
            raise bad_field("drain_file", f": there is no folder {folder}, in which {path} could appear")
        self._fd = -1 if _is_shared(folder) else _watch(folder)
        if os.path.lexists(self._path):
            self.close()
            raise bad_field("drain_file", f" {path} is there already; it gives notice when it appears, so remove it first")

    def fileno(self) -> int | None:
        """Readable when something has appeared in its folder; None where nobody says so."""
        return self._fd if self._fd >= 0 else None

    def next_look_at(self) -> float | None:
        return None if self._fd >= 0 else time.monotonic() + LOOK_EVERY_S

    def has_appeared(self) -> bool:
        if self._fd >= 0:
            try:
                os.read(self._fd, EVENT_BYTES)
            except BlockingIOError:
                return False
        return os.path.lexists(self._path)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _watch(folder: str) -> int:
    """A descriptor of the kernel's; -1 where it has none left, and somebody has to look instead."""
    import ctypes

    libc = ctypes.CDLL(None)
    fd: int = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if fd >= 0 and libc.inotify_add_watch(fd, os.fsencode(folder), IN_CREATE | IN_MOVED_TO | IN_DELETE_SELF | IN_ONLYDIR) < 0:
        os.close(fd)
        return -1
    return fd


def _is_shared(folder: str) -> bool:
    """Whether other machines may put something there, as far as the kind of its file system tells."""
    device = os.stat(folder).st_dev
    named = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            mounts = [line.partition(" - ") for line in file if line.split()[2] == named]
    except OSError:
        return False
    return any(kind.startswith(SHARED_KINDS) for _, _, kind in mounts)


class Door:
    """Answers at `PATH` of the health endpoint, for whoever has the token; `give_notice` says how many seconds there are."""

    def __init__(self, give_notice: Callable[[str], float | None], token: str = "") -> None:
        self.path = PATH
        self._give_notice = give_notice
        self.token = token or os.urandom(TOKEN_BYTES).hex()

    def how_to_ask(self, host: str, port: int) -> str:
        return f"curl -X POST -H 'Authorization: Bearer {self.token}' http://{host_port(host.strip('[]'), port)}{PATH}"

    def answer(self, request: Request) -> Response:
        from hmac import compare_digest

        if not compare_digest(given_token(request).encode(), self.token.encode()):
            return Response(401, NO_TOKEN, headers=(*PRIVATE, ("WWW-Authenticate", "Bearer")))
        if request.method != "POST":
            return Response(405, "this path takes POST\n", headers=(*PRIVATE, ("Allow", "POST")))
        left_s = self._give_notice("the health endpoint was asked to drain this node")
        if left_s is None:
            return Response(409, "no workers run on this node\n", headers=PRIVATE)
        return Response(202, f"this node leaves within {left_s:.1f} s, when all workers have saved\n", headers=PRIVATE)
