"""The command ``rallypoint stacks``: what a worker does at this moment.

It is asked over its control socket. One that has none, but was prepared for a watch over hangs, is asked by the signal that its
agent would use.
"""

from __future__ import annotations

import glob
import http.client
import os
import socket
import sys
from collections.abc import Sequence

from rallypoint.base import defaults, report
from rallypoint.control_plane import TORCH_WORKER_SERVER_SOCKET
from rallypoint.errors import ExitCode, RallypointError, UsageError
from rallypoint.net.private_socket import peer_of
from rallypoint.processes.activity import families_of

__all__ = ["NoSocketError", "ask", "find_prepared", "find_sockets", "stacks_main"]

ANSWER_S = 5.0
ANSWER_BYTES_MAX = 16 * 1024 * 1024
ENVIRONMENT_BYTES_MAX = 4 * 1024 * 1024
USAGE = f"""\
usage: rallypoint stacks SOCKET|PID ...

Print the Python stacks of all threads of a worker that runs inside worker_main(), or of a job with --hang-timeout.
SOCKET  path of its control socket, as in {TORCH_WORKER_SERVER_SOCKET}
PID     a worker, or the launcher for all of its workers
"""


_HOW_TO_PREPARE = (
    "start the job with --hang-timeout SECONDS, or run its work inside worker_main(). "
    "For this one, `py-spy dump --pid PID` shows them, where py-spy is installed and allowed"
)


class NoSocketError(UsageError):
    """There is a process, but none below it has a control socket."""


def stacks_main(argv: Sequence[str]) -> int:
    """Returns the exit code: that of a failure, if any one of those who were asked did not answer."""
    if not argv or any(word in ("-h", "--help") for word in argv):
        (sys.stdout if argv else sys.stderr).write(USAGE)
        return ExitCode.SUCCESS if argv else ExitCode.USAGE
    code = ExitCode.SUCCESS
    for word in argv:
        try:
            paths = find_sockets(int(word)) if word.isdecimal() else [word]
        except NoSocketError as error:
            code = _show_by_signal(int(word), error) or code
            continue
        except UsageError as error:
            code = _complain(error, ExitCode.USAGE)
            continue
        for path in paths:
            code = _show(path) or code
    return code


def _show_by_signal(pid: int, why_no_socket: NoSocketError) -> int:
    from rallypoint.hangs.stacks import StackDesk

    code, workers = ExitCode.SUCCESS, find_prepared(pid)
    for worker, place in workers.items():
        try:
            desk = StackDesk.of_another(place)
        except OSError as error:
            code = _complain(RallypointError(f"process {worker} cannot be asked: {error.strerror}"), ExitCode.WORKER_FAILED)
            continue
        try:
            processes = desk.ask({0: worker}, {})[0].processes
        finally:
            desk.close()
        for one in processes:
            _print_stacks(f"process {one.pid} {one.command}".rstrip(), one.text or f"no stacks: {one.why_none}")
    return code if workers else _complain(why_no_socket, ExitCode.USAGE)


def _print_stacks(of: str, text: str) -> None:
    print("\n".join(map(report.escaped, [f"=== {of}", *text.split("\n")])), flush=True)


def _show(path: str) -> int:
    try:
        pid, stacks = ask(path, "dump_traceback")
    except RallypointError as error:
        return _complain(error, ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.WORKER_FAILED)
    _print_stacks(f"process {pid} at {path}", stacks)
    return ExitCode.SUCCESS


def _complain(error: RallypointError, code: int) -> int:
    print(f"rallypoint stacks: error: {error}", file=sys.stderr)
    return code


# --- asking ----------------------------------------------------------------------------------------------------------------


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect(self._path)


def ask(path: str, handler: str) -> tuple[int, str]:
    """Which process answers at the socket, and what. UsageError: nobody can; RallypointError: it does not."""
    connection = _UnixConnection(path)
    try:
        connection.connect()
        pid, _ = peer_of(connection.sock)
    except OSError as error:
        connection.close()
        raise UsageError(f"there is no worker at {path!r}: {error.strerror or error}") from error
    try:
        return pid, _ask(connection, handler)
    except TimeoutError:
        raise RallypointError(
            f"process {pid} at {path!r} does not answer within {ANSWER_S:g} s:"
            " it is stopped, or in native code that lets no Python code run"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise RallypointError(f"process {pid} at {path!r} did not answer, as to one of another user: {error}") from error
    finally:
        connection.close()


def _ask(connection: http.client.HTTPConnection, handler: str) -> str:
    connection.request("POST", f"/handler/{handler}", headers={"Connection": "close"})
    response = connection.getresponse()
    text = response.read(ANSWER_BYTES_MAX).decode(errors="replace")
    if response.status != http.client.OK:
        raise http.client.HTTPException(f"{response.status} {response.reason}: {text.strip()}")
    return text


# --- finding ---------------------------------------------------------------------------------------------------------------


def find_sockets(pid: int) -> list[str]:
    """The control sockets at which a process and those below it listen; NoSocketError if there are none."""
    if not os.path.exists(f"/proc/{pid}"):
        raise UsageError(f"there is no process {pid}")
    tree = families_of([pid])[pid]
    named = dict.fromkeys(path for one in tree if (path := _named_by(one)))
    found = [path for path in dict.fromkeys(one for path in named for one in _places(path)) if _listener_at(path) in tree]
    if not found:
        why = f"nothing listens at {', '.join(named)}; is the work inside worker_main()?" if named else _HOW_TO_PREPARE
        raise NoSocketError(f"neither process {pid} nor one below it was prepared to show its stacks: {why}")
    return found


def find_prepared(pid: int) -> dict[int, str]:
    """The workers among a process and those below it whose interpreters answer their agent's signal, and where to."""
    found: dict[str, int] = {}
    for one in families_of([pid])[pid]:
        if place := _variable(one, defaults.ENV_STACKS):
            found.setdefault(place, one)  # the worker itself comes before its children, which have the same
    return {one: place for place, one in found.items()}


def _places(path: str) -> list[str]:
    """The path itself, and where it is one for several workers, those that the launcher made of it."""
    numbered = [one for one in glob.glob(f"{glob.escape(path)}.*") if one[len(path) + 1 :].isdecimal()]
    return [path, *sorted(numbered, key=lambda one: int(one[len(path) + 1 :]))]


def _listener_at(path: str) -> int | None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(ANSWER_S)
        try:
            probe.connect(path)
            return peer_of(probe)[0]
        except OSError:  # nobody, or another's
            return None


def _named_by(pid: int) -> str | None:
    """The socket in the environment with which a process was started, as its folder would have it."""
    path = _variable(pid, TORCH_WORKER_SERVER_SOCKET)
    try:
        return os.path.join(os.readlink(f"/proc/{pid}/cwd"), path) if path else None
    except OSError:  # it has ended
        return None


def _variable(pid: int, name: str) -> str:
    """As the process was started with it; empty if it was not, has ended, or belongs to another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read(ENVIRONMENT_BYTES_MAX).split(b"\0")
    except OSError:
        return ""
    prefix = f"{name}=".encode()
    return next((os.fsdecode(one[len(prefix) :]) for one in variables if one.startswith(prefix)), "")
