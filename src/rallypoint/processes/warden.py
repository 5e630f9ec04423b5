"""The warden: a small process between the agent and its workers, so that nothing outlives the agent, or its time.

The agent can be killed at any moment, with SIGKILL, by anybody. Whatever is to clean up after it must therefore be another
process, and to find every descendant, even one that has daemonised itself twice, it must be their ancestor. So the warden, not
the agent, is the parent of all workers. It is a *subreaper*: the kernel makes it the parent of every process below it
whose own parent has ended. It does five things:

- it starts workers as the agent asks, each in a session of its own, each to be killed by the kernel if the warden dies;
- it reports how each of them ended, and passes signals on to them;
- where they have a `licence`, it kills them, and all that is below it, once that is over: the agent may be stopped, or hang;
- while the agent is suspended by Ctrl-Z, it keeps them stopped;
- when the agent is gone, in whatever way, it kills all that is left, testifies to that where it was entrusted with it, and ends.

It signals only its own children and the groups that they lead: nobody else can reap those, so no process id can have passed
to a stranger. To kill a whole tree it kills its children and, as theirs come to it, those too, until it has none.

It never waits for anything but the next event. A message that has come in part, reports that the agent does not read, or a worker
that hangs before it has become its program, cannot hold up the licence's end.

The agent runs it as a program of its own, without site-packages, so that it is up in a few milliseconds and stays small.
"""

from __future__ import annotations

import _socket  # see frames
import marshal
import os
import select
import sys
import time

from rallypoint.coordination.testimony import testify
from rallypoint.processes.frames import FrameQueue, FrameReader
from rallypoint.processes.kernel import (
    WARDEN_NAME,
    adopt_orphans,
    children,
    has_children,
    kill_children,
    kill_if_allowed,
    set_name,
)
from rallypoint.processes.licence import FOREVER, read_testimony, read_until
from rallypoint.processes.newborn import NOT_STARTED, bind, leave_home, place_files

TYPE_CHECKING = False  # to import typing would take longer than all else here
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any

    from rallypoint.processes.keeping import Keeping
else:
    import _signal as signal  # what signal is made of, without its enums, which take half of the time to start

__all__ = ["Warden", "main"]

KILLING_ENDS_S = 60.0  # a process that is still there by then is stuck in the kernel
DEATH_SHOWS_S = 1.0  # an agent that dies hangs up a little before it is seen to be dead
LONGEST_SLEEP_S = 3600.0


def exec_program(request: dict[str, Any]) -> None:
    """What a worker that is a program does after the fork: become that program."""
    if request["cwd"]:
        os.chdir(request["cwd"])
    os.execvpe(request["argv"][0], request["argv"], request["env"])


class Warden:
    """The loop of the warden; `become` is what a new worker process does once its session and files are in place."""

    def __init__(self, sock: _socket.socket, agent_pid: int, become: Callable[[dict[str, Any]], None]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._become = become
        self._requests, self._reports = FrameReader(sock), FrameQueue(sock)
        self._ignored: tuple[int, ...] = ()
        self._workers: dict[int, int] = {}  # pid -> local rank, of those not yet reaped
        self._starting: dict[int, int] = {}  # what tells why one did not start, and is closed when it did -> its pid
        self._started: list[tuple[int, int]] = []  # of those that are being started, how it went so far
        self._failed: list[tuple[int, int, str]] = []
        self._early_ends: list[tuple[Any, ...]] = []  # to be reported after the starts
        self._licence_fd = -1
        self._until = FOREVER  # when to look at the licence; infinite where there is none, or nobody to be killed
        self._is_expired = False
        self._is_suspended = False
        self._is_dismissed = False
        self._rest_is_watched = False
        self._keeping: Keeping | None = None  # where workers are to be warm
        self._unknown_ends: dict[int, int] = {}  # of children, while the keeper may not have said yet that they are workers
        self._agent_fd = os.pidfd_open(agent_pid)
        self._poll = select.poll()
        self._wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> None:
        """Serve the agent until it is gone, then leave nothing behind."""
        self._catch_signals()
        adopt_orphans()
        for fd in (self._sock.fileno(), self._agent_fd, self._wakeup[0]):
            self._poll.register(fd, select.POLLIN)
        while self._serve_once():
            pass
        kill_children(KILLING_ENDS_S)
        self._testify()

    def _catch_signals(self) -> None:
        """Wake the loop when a child ends, and outlive the agent's signals; a handler, unlike SIG_IGN, ends at exec."""
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTSTP, signal.SIGCONT):
            signal.signal(number, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTSTP, signal.SIGCONT))  # see warden_start

    def _serve_once(self) -> bool:
        """Wait for the next event and act on it; False once the agent is gone."""
        ready = {fd for fd, _ in self._poll.poll(self._patience_ms())}
        if time.monotonic() >= self._until:
            self._look_at_licence()
        if self._wakeup[0] in ready:
            self._heed(os.read(self._wakeup[0], 65536))
        if self._keeping is not None:
            self._serve_keeping(self._keeping, ready)
        for fd in ready & self._starting.keys():
            self._note_start(fd)
        if self._agent_fd in ready:
            return False
        return self._sock.fileno() not in ready or self._converse()

    def _patience_ms(self) -> int | None:
        next_at = self._until
        if self._keeping is not None and not self._is_suspended:
            next_at = min(next_at, self._keeping.give_up_at)
        if next_at == FOREVER:
            return None
        return int(min(max(0.0, next_at - time.monotonic()), LONGEST_SLEEP_S) * 1000) + 1  # not before its time

    # --- the agent ---------------------------------------------------------------------------------------------------------

    def _converse(self) -> bool:
        """Send what waits, and do what is asked; False once the agent has hung up."""
        self._reports.flush()
        self._poll_for_room()
        try:
            while (frame := self._requests.read()) is not None:
                (command, *arguments), fds = frame
                self._obey(command, arguments, fds)
        except EOFError:
            return False
        return True

    def _obey(self, command: str, arguments: list[Any], fds: list[int]) -> None:
        if command == "spawn":
            self._spawn_all(arguments[0], arguments[1], fds)
        elif command == "signal":
            self._signal_worker(*arguments)
        elif command == "signal_rest":
            self._signal_child(*arguments)
        elif command == "watch_rest":
            self._rest_is_watched = True
            self._report_rest()
        elif command == "licence":
            self._take_licence(fds.pop())
            self._until = FOREVER  # there is nobody to be killed
        elif command == "license":  # those who have waited are workers from now on
            self._take_licence(fds.pop())
            if time.monotonic() >= self._until:
                self._expire()
        elif command == "disown":
            self._take_licence(-1)
            self._report("disowned")
        elif command == "keep":
            self._keep(arguments[0])
        elif command == "ignore":
            self._ignore(arguments[0])
        elif command == "dismiss":
            self._is_dismissed = True

    def _ignore(self, numbers: tuple[int, ...]) -> None:
        """Whoever is started from now on ignores these signals, unless it does something about them."""
        for number in self._ignored:
            signal.signal(number, lambda *_: None)
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        self._ignored = numbers

    def _report(self, *message: Any) -> None:
        self._reports.put(message)
        self._poll_for_room()

    def _poll_for_room(self) -> None:
        self._poll.modify(self._sock.fileno(), select.POLLIN | (select.POLLOUT if self._reports else 0))

    # --- starting workers --------------------------------------------------------------------------------------------------

    def _spawn_all(self, requests: list[dict[str, Any]], has_licence: bool, fds: list[int]) -> None:
        """Fork all first, then learn whether each could start, so that they start beside each other. None without a licence."""
        self._rest_is_watched = self._is_expired = False
        self._unknown_ends.clear()
        self._take_licence(fds.pop() if has_licence else -1)
        if time.monotonic() >= self._until:
            self._expire()
        elif self._keeping is None or not self._keeping.take(requests, fds):
            self._fork_all(requests, fds)
        for fd in fds:
            os.close(fd)
        if self._is_suspended:
            self._signal_all(signal.SIGSTOP)

    def _fork_all(self, requests: list[dict[str, Any]], fds: list[int]) -> None:
        for request in requests:
            try:
                pid, error_read = self._fork(request, fds)
            except OSError as error:  # there may be no more processes, or files, or memory
                self._failed.append((request["local_rank"], error.errno or 0, str(error)))
            else:
                self._watch_start(request["local_rank"], pid, error_read)
        self._tell_starts()

    def _take_licence(self, fd: int) -> None:
        if self._licence_fd >= 0:
            os.close(self._licence_fd)
        self._licence_fd = fd
        self._until = read_until(fd) if fd >= 0 else FOREVER

    def _fork(self, request: dict[str, Any], fds: list[int]) -> tuple[int, int]:
        """Its process id, and where it says why it did not become its program."""
        error_read, error_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
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
        return pid, error_read

    def _watch_start(self, local_rank: int, pid: int, error_fd: int) -> None:
        self._workers[pid] = local_rank
        self._starting[error_fd] = pid
        self._poll.register(error_fd, select.POLLIN)

    def _note_start(self, error_fd: int) -> None:
        """One has become its program, or could not; when that is known of all, the agent is told."""
        error = _read_last_words(error_fd)
        self._poll.unregister(error_fd)
        os.close(error_fd)
        pid = self._starting.pop(error_fd)
        if error:
            self._failed.append((self._workers.pop(pid), *marshal.loads(error)))
        else:
            self._started.append((self._workers[pid], pid))
        self._tell_starts()

    def _tell_starts(self) -> None:
        """Once it is known of all."""
        if self._is_starting():
            return
        self._report("spawned", self._started, self._failed)
        for ended in self._early_ends:
            self._report(*ended)
        self._started, self._failed, self._early_ends = [], [], []

    def _is_starting(self) -> bool:
        return bool(self._starting) or (self._keeping is not None and self._keeping.is_busy)

    def _run_child(self, request: dict[str, Any], fds: list[int], warden_pid: int, error_fd: int) -> None:
        """The new process, up to the point where it is the worker; it never returns."""
        code = NOT_STARTED
        try:
            leave_home(warden_pid)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python itself ignores these two
                signal.signal(number, signal.SIG_DFL)
            error_fd, kept = place_files(request, fds, error_fd)
            bind(request)
            self._become({**request, "error_fd": error_fd, "fds_of_others": self._own_fds(fds) - kept})
            code = 0
        except (OSError, ValueError) as error:  # ValueError: a NUL in an argument or in the environment
            os.write(error_fd, marshal.dumps((getattr(error, "errno", 0) or 0, str(error))))
        finally:
            os._exit(code)

    def _own_fds(self, fds: list[int]) -> set[int]:
        """What is the warden's and the neighbours', for a worker without exec to close."""
        licence = () if self._licence_fd < 0 else (self._licence_fd,)
        return {self._sock.fileno(), self._agent_fd, *self._wakeup, *self._starting, *licence, *fds}

    # --- their ends, and signals -------------------------------------------------------------------------------------------

    def _heed(self, signals: bytes) -> None:
        """Children have ended, or the agent is suspended by Ctrl-Z, or it goes on."""
        for number in signals:
            if number in (signal.SIGTSTP, signal.SIGCONT) and self._is_suspended != (number == signal.SIGTSTP):
                self._is_suspended = number == signal.SIGTSTP
                self._signal_all(signal.SIGSTOP if self._is_suspended else signal.SIGCONT)
                if self._keeping is not None:
                    self._keeping.be_patient()
        self._reap()

    def _reap(self) -> None:
        """Collect everyone who has ended, and tell the agent of its workers; what comes to us after a licence's end is killed."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._until = FOREVER
                break
            if pid == 0:
                if self._only_keeper_is_left():
                    self._until = FOREVER
                break
            self._note_end(pid, status)
        if self._is_expired:
            self._signal_all(signal.SIGKILL)
        if self._rest_is_watched:
            self._report_rest()

    def _note_end(self, pid: int, status: int) -> None:
        if self._keeping is not None and pid == self._keeping.pid:
            self._keeping.note_end(os.waitstatus_to_exitcode(status))
            return
        for error_fd in [fd for fd, one in self._starting.items() if one == pid]:
            self._note_start(error_fd)  # all that it had to say about that is there
        if pid not in self._workers and self._keeping is not None and self._keeping.is_busy:
            self._unknown_ends[pid] = status
        if pid in self._workers:
            ended = ("exited", self._workers.pop(pid), pid, os.waitstatus_to_exitcode(status), time.time())
            if self._is_starting():
                self._early_ends.append(ended)
            else:
                self._report(*ended)

    def _report_rest(self) -> None:
        """Those too of which it is not known yet that they are workers."""
        known = self._workers.keys() - set(self._starting.values())
        if self._keeping is not None:
            known |= {self._keeping.pid}
        self._report("rest", [pid for pid in children() if pid not in known])

    def _signal_worker(self, local_rank: int, number: int) -> None:
        """Signal the whole group that a worker leads; it is ours as long as we have not reaped the leader."""
        for pid in [pid for pid, one in self._workers.items() if one == local_rank]:
            kill_if_allowed(pid if pid in self._starting.values() else -pid, number)

    def _signal_child(self, pid: int, number: int) -> None:
        if pid in children():
            kill_if_allowed(pid, number)

    def _signal_all(self, number: int) -> None:
        """Every child, and the group that it leads, if it leads one."""
        for pid in children():
            kill_if_allowed(-pid, number)
            kill_if_allowed(pid, number)

    # --- the keeper of warm workers ----------------------------------------------------------------------------------------

    def _keep(self, order: dict[str, Any]) -> None:
        from rallypoint.processes.keeping import Keeping

        if self._keeping is None:
            self._keeping = Keeping(self._poll, self._fork_keeper, self._adopt, self._note_failed, self._fork_all, self._report)
        self._keeping.keep(order)

    def _fork_keeper(self, request: dict[str, Any], fds: list[int]) -> int:
        pid, error_read = self._fork(request, fds)
        os.close(error_read)  # if it does not start, no worker does, and that one says why
        return pid

    def _serve_keeping(self, keeping: Keeping, ready: set[int]) -> None:
        if keeping.fileno() in ready:
            keeping.listen()
        if not self._is_suspended:  # else it is stopped too
            keeping.look()

    def _adopt(self, local_rank: int, pid: int, word: _socket.socket) -> None:
        """A worker that the keeper has forked goes on when it has our word."""
        try:
            word.send(b"\n")
        except (BrokenPipeError, ConnectionResetError):  # it has ended already, which will show
            pass
        word.setblocking(False)
        self._watch_start(local_rank, pid, word.detach())
        if (status := self._unknown_ends.pop(pid, None)) is not None:
            self._note_end(pid, status)

    def _note_failed(self, local_rank: int, errno: int, why: str) -> None:
        self._failed.append((local_rank, errno, why))
        self._tell_starts()

    def _only_keeper_is_left(self) -> bool:
        return self._keeping is not None and not self._is_starting() and children() == [self._keeping.pid]

    # --- the licence -------------------------------------------------------------------------------------------------------

    def _look_at_licence(self) -> None:
        self._until = read_until(self._licence_fd)
        if time.monotonic() >= self._until:
            self._expire()

    def _expire(self) -> None:
        """Kill first; then say so."""
        self._is_expired, self._until = True, FOREVER
        self._signal_all(signal.SIGKILL)
        if self._keeping is not None:
            self._keeping.end()
        self._report("expired", time.monotonic())

    def _testify(self) -> None:
        """Tell the store that all is over here, if it is, and if that was entrusted to us. Never beside an agent that lives."""
        if self._is_dismissed or self._licence_fd < 0 or has_children():
            return
        death = select.poll()
        death.register(self._agent_fd, select.POLLIN)
        if (testimony := read_testimony(self._licence_fd)) is not None and death.poll(DEATH_SHOWS_S * 1000):
            testify(*testimony)


def _read_last_words(fd: int) -> bytes:
    """Why a worker did not start, which is written in one piece; one that was killed has said nothing."""
    try:
        return os.read(fd, 65536)
    except (BlockingIOError, ConnectionResetError):
        return b""


def _close_all_but(keep: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != keep:
            try:
                os.close(int(name))
            except OSError:  # the listing itself was open
                pass


def main() -> None:
    """Run as a program: the last two arguments are the socket's number and the agent's process id.

    The agent waits for its end, and there is nothing to be put away that the kernel would not: so it skips the interpreter's own.
    """
    sock_fd, agent_pid = map(int, sys.argv[-2:])
    set_name(WARDEN_NAME)
    _close_all_but(sock_fd)
    os.set_inheritable(sock_fd, False)
    try:
        warden = Warden(_socket.socket(fileno=sock_fd), agent_pid, exec_program)
    except ProcessLookupError:  # the agent is gone already
        return
    warden.run()
    os._exit(0)
