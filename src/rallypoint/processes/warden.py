"""The warden: a small process between the agent and its workers, so that nothing outlives the agent.

The agent can be killed at any moment, with SIGKILL, by anybody. Whatever is to clean up after it must therefore be another
process, and to find every descendant, even one that has daemonised itself twice, it must be their ancestor. So the warden, not
the agent, is the parent of all workers. It is a *subreaper*: the kernel makes it the parent of every process below it
whose own parent has ended. It does three things:

- it starts workers as the agent asks, each in a session of its own, each to be killed by the kernel if the warden dies;
- it reports how each of them ended, and passes signals on to them;
- when the agent is gone, in whatever way, it kills all that is left and ends.

It signals only its own children and the groups that they lead: nobody else can reap those, so no process id can have passed
to a stranger. To kill a whole tree it kills its children and, as theirs come to it, those too, until it has none.

The agent runs it as a program of its own, without site-packages, so that it is up in a few milliseconds and stays small.
"""

from __future__ import annotations

import _socket  # see frames
import errno
import fcntl
import marshal
import os
import select
import sys
import time

from rallypoint.processes.frames import receive_frame, send_frame
from rallypoint.processes.kernel import adopt_orphans, children, die_with_parent, kill_children, kill_if_allowed, set_name

TYPE_CHECKING = False  # to import typing would take longer than all else here
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any
else:
    import _signal as signal  # what signal is made of, without its enums, which take half of the time to start

__all__ = ["Warden", "main"]

KILLING_ENDS_S = 60.0  # a process that is still there by then is stuck in the kernel


def exec_program(request: dict[str, Any]) -> None:
    """What a worker that is a program does after the fork: become that program."""
    if request["cwd"]:
        os.chdir(request["cwd"])
    os.execvpe(request["argv"][0], request["argv"], request["env"])


class Warden:
    """The loop of the warden; `become` is what a new worker process does once its session and files are in place."""

    def __init__(self, sock: _socket.socket, agent_pid: int, become: Callable[[dict[str, Any]], None]) -> None:
        self._sock = sock
        self._become = become
        self._workers: dict[int, int] = {}  # pid -> local rank, of those not yet reaped
        self._rest_is_watched = False
        self._agent_fd = os.pidfd_open(agent_pid)
        self._poll = select.poll()
        self._wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._error_fds: list[int] = []

    def run(self) -> None:
        """Serve the agent until it is gone, then leave nothing behind."""
        self._catch_signals()
        adopt_orphans()
        for fd in (self._sock.fileno(), self._agent_fd, self._wakeup[0]):
            self._poll.register(fd, select.POLLIN)
        while self._serve_once():
            pass
        kill_children(KILLING_ENDS_S)

    def _catch_signals(self) -> None:
        """Wake the loop when a child ends, and outlive the agent's signals; a handler, unlike SIG_IGN, ends at exec."""
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)

    def _serve_once(self) -> bool:
        """Wait for the next event and act on it; False once the agent is gone."""
        ready = {fd for fd, _ in self._poll.poll()}
        if self._wakeup[0] in ready:
            os.read(self._wakeup[0], 65536)
            self._reap()
        if self._agent_fd in ready:
            return False
        return self._sock.fileno() not in ready or self._obey()

    def _obey(self) -> bool:
        try:
            frame = receive_frame(self._sock)
        except ConnectionResetError:
            return False
        if frame is None:
            return False
        (command, *arguments), fds = frame
        if command == "spawn":
            self._spawn_all(arguments[0], fds)
        elif command == "signal":
            self._signal_worker(*arguments)
        elif command == "signal_rest":
            self._signal_child(*arguments)
        elif command == "watch_rest":
            self._rest_is_watched = True
            self._report_rest()
        return True

    def _report(self, *message: Any) -> None:
        try:
            send_frame(self._sock, message)
        except OSError as error:  # the agent is gone: the loop sees that next
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                raise

    def _spawn_all(self, requests: list[dict[str, Any]], fds: list[int]) -> None:
        """Fork all first, then learn whether each could start, so that they start beside each other."""
        self._rest_is_watched = False
        pending, failed = [], []
        for request in requests:
            try:
                pending.append((request, *self._fork(request, fds)))
            except OSError as error:  # there may be no more processes, or files, or memory
                failed.append((request["local_rank"], error.errno or 0, str(error)))
        for fd in fds:
            os.close(fd)
        self._error_fds.clear()
        for request, pid, error_fd in pending:
            with os.fdopen(error_fd, "rb") as errors:
                told = errors.read()
            if told:
                failed.append((request["local_rank"], *marshal.loads(told)))
            else:
                self._workers[pid] = request["local_rank"]
        self._report("spawned", [(rank, pid) for pid, rank in self._workers.items()], failed)
        self._reap()

    def _fork(self, request: dict[str, Any], fds: list[int]) -> tuple[int, int]:
        error_read, error_write = os.pipe2(os.O_CLOEXEC)
        warden_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os.close(error_read)
            os.close(error_write)
            raise
        if pid == 0:
            os.close(error_read)
            self._run_child(request, fds, warden_pid, error_write)
        os.close(error_write)
        self._error_fds.append(error_read)
        return pid, error_read

    def _run_child(self, request: dict[str, Any], fds: list[int], warden_pid: int, error_fd: int) -> None:
        """The new process, up to the point where it is the worker; it never returns."""
        code = 127
        try:
            os.setsid()
            die_with_parent()
            if os.getppid() != warden_pid:  # the warden died before the line above
                os._exit(code)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python itself ignores these two
                signal.signal(number, signal.SIG_DFL)
            places = [(fds[position], target) for position, target in request["fds"]]
            error_fd = _move_above(error_fd, places)
            _place_fds(places)
            kept = {error_fd, *(target for _, target in places)}
            if request["cpus"]:
                _bind(request)
            self._become({**request, "error_fd": error_fd, "fds_of_others": self._own_fds(fds) - kept})
            code = 0
        except (OSError, ValueError) as error:  # ValueError: a NUL in an argument or in the environment
            os.write(error_fd, marshal.dumps((getattr(error, "errno", 0) or 0, str(error))))
        finally:
            os._exit(code)

    def _own_fds(self, fds: list[int]) -> set[int]:
        """What is the warden's and the neighbours', for a worker without exec to close."""
        return {self._sock.fileno(), self._agent_fd, *self._wakeup, *self._error_fds, *fds}

    def _reap(self) -> None:
        """Collect everyone who has ended, and tell the agent of its workers."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self._workers:
                self._report("exited", self._workers.pop(pid), pid, os.waitstatus_to_exitcode(status), time.time())
        if self._rest_is_watched:
            self._report_rest()

    def _report_rest(self) -> None:
        self._report("rest", [pid for pid in children() if pid not in self._workers])

    def _signal_worker(self, local_rank: int, number: int) -> None:
        """Signal the whole group that a worker leads; it is ours as long as we have not reaped the leader."""
        for pid in [pid for pid, one in self._workers.items() if one == local_rank]:
            kill_if_allowed(-pid, number)

    def _signal_child(self, pid: int, number: int) -> None:
        if pid in children():
            kill_if_allowed(pid, number)


def _bind(request: dict[str, Any]) -> None:
    """Keep the new process on its CPUs, and with it all threads and processes that it will start."""
    try:
        _set_affinity(request["cpus"])
    except OSError as error:
        if not request["may_run_unbound"]:
            raise
        os.write(2, f"rallyrun: worker {request['local_rank']} runs without being bound: {error}\n".encode())


def _set_affinity(cpus: tuple[int, ...]) -> None:
    """All of them or an error: of CPUs that are gone the kernel says nothing as long as one is left."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
        missing = set(cpus) - os.sched_getaffinity(0)
    except OSError:
        missing = set(cpus)
    if missing:
        os.sched_setaffinity(0, before)
        names, gone = (",".join(map(str, sorted(numbers))) for numbers in (cpus, missing))
        raise OSError(errno.EINVAL, f"it cannot be bound to CPUs {names}: {gone} went offline, or may not be used any more")


def _place_fds(pairs: list[tuple[int, int]]) -> None:
    """Put each file descriptor at its number in the worker, whatever numbers they have now."""
    for fd, target in [(_copy_above(fd, pairs), target) for fd, target in pairs]:
        os.dup2(fd, target)
        os.close(fd)


def _copy_above(fd: int, pairs: list[tuple[int, int]]) -> int:
    """A copy under a number that is nobody's target."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 1 + max((target for _, target in pairs), default=2))


def _move_above(fd: int, pairs: list[tuple[int, int]]) -> int:
    copy = _copy_above(fd, pairs)
    os.close(fd)
    return copy


def _close_all_but(keep: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != keep:
            try:
                os.close(int(name))
            except OSError:  # the listing itself was open
                pass


def main() -> None:
    """Run as a program: the last two arguments are the socket's number and the agent's process id."""
    sock_fd, agent_pid = map(int, sys.argv[-2:])
    set_name("rally-warden")
    _close_all_but(sock_fd)
    os.set_inheritable(sock_fd, False)
    try:
        warden = Warden(_socket.socket(fileno=sock_fd), agent_pid, exec_program)
    except ProcessLookupError:  # the agent is gone already
        return
    warden.run()
