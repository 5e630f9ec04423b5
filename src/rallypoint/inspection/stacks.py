"""What workers of this machine do at this moment, by whichever way there is.

A worker is asked over its control socket. One that has none, but was prepared for a watch over hangs, is asked by the signal that
its agent would use. Of any other, py-spy shows the stacks where it is installed and allowed, and else the kernel shows where its
threads are.
"""

from __future__ import annotations

import glob
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from rallypoint.base import defaults
from rallypoint.errors import RallypointError, UsageError
from rallypoint.hangs.stacks import PY_SPY, StackDesk, kernel_view, prepared_at, spy_on
from rallypoint.inspection.log_rules import has_rank
from rallypoint.inspection.stack_view import BY_KERNEL, BY_PY_SPY, BY_SIGNAL, BY_SOCKET, ProcessDump, WorkerDump
from rallypoint.inspection.view import NodeView
from rallypoint.net.private_socket import peer_of
from rallypoint.processes.activity import families_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import http.client

    from rallypoint.base.text import Run

__all__ = ["ask", "dump_place", "dump_workers", "is_place"]

ANSWER_S = 5.0
ANSWER_BYTES_MAX = 16 * 1024 * 1024
ENVIRONMENT_BYTES_MAX = 4 * 1024 * 1024
PY_SPY_S = 30.0
ASKED_AT_ONCE = 16
LATE = "it was not asked in time"


_HOW_TO_PREPARE = (
    "start the job with --hang-timeout SECONDS, or run its work inside worker_main(). "
    "For this one, `py-spy dump --pid PID` shows them, where py-spy is installed and allowed"
)


class NoSocketError(UsageError):
    """There is a process, but none below it has a control socket."""


# --- who is asked ----------------------------------------------------------------------------------------------------------


def is_place(word: str) -> bool:
    """Whether it may be a process or the path of a socket, and not only the name of a job."""
    return os.path.exists(f"/proc/{word}" if word.isdecimal() else word)


def dump_place(word: str) -> WorkerDump:
    """A process with those below it, or whoever answers at a socket. UsageError: there is none, or none that could be asked."""
    host, error = os.uname().nodename, ""
    if not word.isdecimal():
        asked = _by_socket(word)
        return WorkerDump("", host, None, asked.pid, (asked,))
    processes: list[ProcessDump] = []
    try:
        processes, error = _by_sockets(int(word))
    except NoSocketError as none:
        prepared = find_prepared(int(word))
        if prepared:
            processes, error = _by_signal(prepared)
        elif shutil.which(PY_SPY) is None:
            raise none from None
        else:
            processes = [_from_outside(int(word), time.monotonic() + PY_SPY_S)]
    return WorkerDump("", host, None, int(word), tuple(processes), error)


def dump_workers(nodes: Iterable[NodeView], ranks: Sequence[Run] | None, deadline: float | None = None) -> list[WorkerDump]:
    """The workers of these nodes, which are on this machine, that have these ranks, or all. They are asked beside each other."""
    blank = [
        WorkerDump(node.job, node.node, worker.rank, worker.pid)
        for node in nodes
        for worker in node.workers
        if has_rank(ranks, worker.rank)
    ]
    until = time.monotonic() + PY_SPY_S + ANSWER_S if deadline is None else deadline
    return sorted(_beside_each_other(lambda one: _dump_worker(one, until), blank, until), key=lambda one: one.rank or 0)


def _beside_each_other(
    work: Callable[[WorkerDump], WorkerDump], blank: Sequence[WorkerDump], deadline: float
) -> list[WorkerDump]:
    """Some at a time; who is not done by then was not asked."""
    done: dict[int, WorkerDump] = {}
    left = iter(list(enumerate(blank)))
    taking = threading.Lock()

    def take() -> None:
        while time.monotonic() < deadline:
            with taking:
                place, one = next(left, (-1, None))
            if one is None:
                return
            done[place] = work(one)

    threads = [
        threading.Thread(target=take, name="rallypoint-stacks", daemon=True) for _ in range(min(ASKED_AT_ONCE, len(blank)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [done.get(place) or one.replace(error=LATE) for place, one in enumerate(blank)]


def _dump_worker(worker: WorkerDump, deadline: float) -> WorkerDump:
    error = ""
    try:
        try:
            processes, error = _by_sockets(worker.pid)
        except NoSocketError:
            prepared = find_prepared(worker.pid)
            processes, error = _by_signal(prepared) if prepared else ([_from_outside(worker.pid, deadline)], "")
    except (RallypointError, OSError) as trouble:
        return worker.replace(error=str(trouble))
    return worker.replace(processes=tuple(processes), error=error)


# --- how -------------------------------------------------------------------------------------------------------------------


def _by_sockets(pid: int) -> tuple[list[ProcessDump], str]:
    """Those that have answered, and why others have not."""
    found: list[ProcessDump] = []
    troubles: list[str] = []
    for path in find_sockets(pid):
        try:
            found.append(_by_socket(path))
        except RallypointError as error:
            troubles.append(str(error))
    return found, "; ".join(troubles)


def _by_socket(path: str) -> ProcessDump:
    pid, text = ask(path, "dump_traceback")
    return ProcessDump(pid, BY_SOCKET, text, socket=path)


def _by_signal(workers: dict[int, str]) -> tuple[list[ProcessDump], str]:
    found: list[ProcessDump] = []
    troubles: list[str] = []
    for worker, place in workers.items():
        try:
            desk = StackDesk.of_another(place)
        except OSError as error:
            troubles.append(f"process {worker} cannot be asked: {error.strerror}")
            continue
        try:
            processes = desk.ask({0: worker}, {})[0].processes
        finally:
            desk.close()
        found += [ProcessDump(one.pid, BY_SIGNAL, one.text, one.command, why=one.why_none) for one in processes]
    return found, "; ".join(troubles)


def _from_outside(pid: int, deadline: float) -> ProcessDump:
    """Of a process that was not prepared for it."""
    why = "it was not prepared to show them; install py-spy, or start the job with --hang-timeout SECONDS"
    if program := shutil.which(PY_SPY):
        text, why = spy_on(program, pid, min(PY_SPY_S, max(deadline - time.monotonic(), 0.0)))
        if not why:
            return ProcessDump(pid, BY_PY_SPY, text)
    return ProcessDump(pid, BY_KERNEL, "\n".join(kernel_view(pid, time.monotonic() + ANSWER_S)), why=why)


# --- control sockets -------------------------------------------------------------------------------------------------------


def ask(path: str, handler: str) -> tuple[int, str]:
    """Which process answers at the socket, and what. UsageError: nobody can; RallypointError: it does not."""
    import http.client

    connection = http.client.HTTPConnection("localhost", timeout=ANSWER_S)
    try:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(ANSWER_S)
        connection.sock.connect(path)
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
    import http.client

    connection.request("POST", f"/handler/{handler}", headers={"Connection": "close"})
    response = connection.getresponse()
    text = response.read(ANSWER_BYTES_MAX).decode(errors="replace")
    if response.status != http.client.OK:
        raise http.client.HTTPException(f"{response.status} {response.reason}: {text.strip()}")
    return text


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
    found: dict[str, tuple[int, str]] = {}
    for one in families_of([pid])[pid]:
        file, place = prepared_at(one)
        if file:
            found.setdefault(file, (one, place))  # the worker itself comes before its children, which have the same
    return dict(found.values())


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
    path = _variable(pid, defaults.ENV_CONTROL_SOCKET)
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
