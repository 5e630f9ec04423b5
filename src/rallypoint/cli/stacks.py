"""The command ``rallypoint stacks``: what workers do at this moment.

A worker is asked over its control socket. One that has none, but was prepared for a watch over hangs, is asked by the signal that
its agent would use. Of any other, py-spy shows the stacks where it is installed and allowed, and else the kernel shows where its
threads are.
"""

from __future__ import annotations

import glob
import http.client
import os
import shutil
import socket
import sys
from collections.abc import Sequence

from rallypoint.base import defaults, report
from rallypoint.base.text import plural, ranges, runs, who_of
from rallypoint.control_plane import TORCH_WORKER_SERVER_SOCKET
from rallypoint.errors import ExitCode, RallypointError, UsageError
from rallypoint.inspection.log_rules import parse_ranks
from rallypoint.net.private_socket import peer_of
from rallypoint.processes.activity import families_of

__all__ = ["NoSocketError", "ask", "find_prepared", "find_sockets", "stacks_main"]

ANSWER_S = 5.0
ANSWER_BYTES_MAX = 16 * 1024 * 1024
ENVIRONMENT_BYTES_MAX = 4 * 1024 * 1024
PY_SPY, PY_SPY_S = "py-spy", 30.0
USAGE = f"""\
usage: rallypoint stacks [JOB|PID|SOCKET ...] [--rank RANKS]

Print the Python stacks of all threads of workers on this machine. A worker that runs inside worker_main(), or in a job with
--hang-timeout, answers by itself; for others, py-spy has to be installed.
JOB     all workers of the job, by its ID or the beginning of it; can be left out where one job runs
PID     a worker, or the launcher for all of its workers
SOCKET  path of a worker's control socket, as in {TORCH_WORKER_SERVER_SOCKET}

  --rank      only these of the job's ranks, such as 3,8-11
  --help      show this help and exit
"""


_HOW_TO_PREPARE = (
    "start the job with --hang-timeout SECONDS, or run its work inside worker_main(). "
    "For this one, `py-spy dump --pid PID` shows them, where py-spy is installed and allowed"
)


class NoSocketError(UsageError):
    """There is a process, but none below it has a control socket."""


def stacks_main(argv: Sequence[str]) -> int:
    """Returns the exit code: that of a failure, if any one of those who were asked did not answer."""
    if any(word in ("-h", "--help") for word in argv):
        sys.stdout.write(USAGE)
        return ExitCode.SUCCESS
    try:
        words, ranks = _read_arguments(argv)
    except UsageError as error:
        return _complain(error, ExitCode.USAGE)
    code = ExitCode.SUCCESS
    for word in words or [""]:
        try:
            code = (_show_job(word, ranks) if ranks is not None or not _is_place(word) else _show_place(word)) or code
        except RallypointError as error:
            code = _complain(error, ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.WORKER_FAILED)
    return code


def _show_place(word: str) -> int:
    """A process, or whoever answers at a socket."""
    try:
        paths = find_sockets(int(word)) if word.isdecimal() else [word]
    except NoSocketError as error:
        is_spied = not find_prepared(int(word)) and shutil.which(PY_SPY) is not None
        return _show_from_outside(int(word)) if is_spied else _show_by_signal(int(word), error)
    return max([_show(path) for path in paths])


def _read_arguments(argv: Sequence[str]) -> tuple[list[str], set[int] | None]:
    """The words, and which ranks are asked for."""
    words: list[str] = []
    ranks: set[int] | None = None
    rest = iter(argv)
    for word in rest:
        name, _, value = word.partition("=")
        if name == "--rank":
            chosen = parse_ranks(value or next(rest, ""))
            ranks = {rank for first, last in chosen for rank in range(first, last + 1)}
        elif word.startswith("-"):
            raise UsageError(f"unknown flag {name}; there are --rank and --help")
        else:
            words.append(word)
    return words, ranks


def _is_place(word: str) -> bool:
    """Whether it is a process or the path of a socket, and not the name of a job, which may be a number too."""
    if word.isdecimal():
        return os.path.exists(f"/proc/{word}") or not _jobs_named(word)
    return os.path.exists(word) or ("/" in word and not _jobs_named(word))


def _jobs_named(word: str) -> bool:
    from rallypoint.inspection import client

    return any(agent.node.job.startswith(word) for agent in client.list_agents()[0])


def _show_job(name: str, ranks: set[int] | None) -> int:
    """The workers of a job, as far as they are on this machine."""
    from rallypoint.inspection import client

    present, troubles = client.list_agents()
    agents = client.find_job(present, name, troubles).agents
    workers = {worker.rank: worker.pid for agent in agents for worker in agent.node.workers}
    if not workers:
        node = agents[0].node
        raise RallypointError(
            f"no worker of {node.job} runs on this machine: it is {node.phase}{f', {node.why}' if node.why else ''}"
        )
    wanted = sorted(workers) if ranks is None else sorted(ranks)
    if missing := [rank for rank in wanted if rank not in workers]:
        here = f"here are {ranges(workers)}" if workers else "here are none"
        who = f"{who_of(runs(missing))} of {agents[0].node.job}"
        raise UsageError(f"{who} {plural(len(missing), 'is', 'are')} not on this machine; {here}")
    code = ExitCode.SUCCESS
    for rank in wanted:
        code = _show_worker(rank, workers[rank]) or code
    return code


def _show_worker(rank: int, pid: int) -> int:
    """By whichever way there is."""
    print(f"--- rank {rank}", flush=True)
    try:
        for path in find_sockets(pid):
            if (code := _show(path)) != ExitCode.SUCCESS:
                return code
    except NoSocketError as error:
        return _show_by_signal(pid, error) if find_prepared(pid) else _show_from_outside(pid)
    except UsageError as error:
        return _complain(error, ExitCode.WORKER_FAILED)
    return ExitCode.SUCCESS


def _show_from_outside(pid: int) -> int:
    """Of a process that was not prepared for it."""
    import subprocess
    import time

    why = "it was not prepared to show them; install py-spy, or start the job with --hang-timeout SECONDS"
    if program := shutil.which(PY_SPY):
        try:
            dump = [program, "dump", "--pid", str(pid)]
            found = subprocess.run(dump, capture_output=True, text=True, timeout=PY_SPY_S, check=False)
            if found.returncode == 0:
                _print_stacks(f"process {pid}, by py-spy", found.stdout.rstrip())
                return ExitCode.SUCCESS
            why = f"py-spy says: {' '.join(found.stderr.split())}"
        except (OSError, subprocess.TimeoutExpired) as error:
            why = f"py-spy failed: {error}"
    from rallypoint.hangs.stacks import kernel_view

    lines = kernel_view(pid, time.monotonic() + ANSWER_S)
    _print_stacks(f"process {pid}, as the kernel sees it; its Python stacks are not known: {why}", "\n".join(lines))
    return ExitCode.SUCCESS


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
