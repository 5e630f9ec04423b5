"""The agent's end of the line to its warden: ask for workers, hear how they end.

A warden that does not read what it is sent is stopped or stuck: it is killed, and with it, by the kernel, its workers.

Starting a warden costs the time of a bare interpreter. So the command line starts it before anything else is imported, and
a group of workers that is restarted gets the warden of the one before: at most one idle warden stands on the *shelf*.

Ctrl-Z: the terminal stops the launcher, in its foreground; the workers, in sessions of their own, would not hear of it. So the
launcher passes it on to its wardens before it stops, and tells them when it goes on. A signal is enough for that: it comes
through whatever the launcher, or the line to the warden, is busy with. A launcher that stands still says nothing to its job
either: in one of several nodes its workers are killed when their licence is over, and it joins anew when it is continued.
"""

from __future__ import annotations

import _socket  # see frames
import os
import select
import signal
import threading
import time

from rallypoint.base import limits, report
from rallypoint.base.records import Value
from rallypoint.errors import worker_start_error
from rallypoint.processes.frames import MAX_FDS, FrameReader, send_frame
from rallypoint.processes.warden_start import start_warden

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType
    from typing import Any

__all__ = [
    "Exited",
    "Expired",
    "FailedToStart",
    "Kept",
    "Launch",
    "Lost",
    "Report",
    "Rest",
    "Started",
    "WardenClient",
    "exit_status",
    "have_ignored",
    "keep_wardens",
    "prepare",
    "stop_alone",
    "stop_with_us",
]  # fmt: skip

START_TIMEOUT_S = 60.0  # one that forks functions may still be importing them
READ_TIMEOUT_S = 5.0  # for what is short, and has room in the line until nobody has read for long
WARDENS_FILES = 16  # of its own
NO_CHILD_PAUSE_S = 1.0  # between one warden and the next there may be no child to wait for


class Launch(Value):
    """One worker to be started: its rank, its command, its whole environment, and which file it finds at which number.

    With `cpus` it is bound to these; should that fail, it does not start, unless it may run unbound.
    """

    local_rank: int
    argv: tuple[str, ...]
    env: dict[str, str]
    fds: dict[int, int]  # number in the worker -> our file descriptor
    cpus: tuple[int, ...] = ()
    may_run_unbound: bool = False


class Started(Value):
    local_rank: int
    pid: int


class FailedToStart(Value):
    local_rank: int
    errno: int
    reason: str


class Exited(Value):
    local_rank: int
    pid: int
    exitcode: int  # negative for a signal, as everywhere in Python
    at: float  # wall clock, for people to read


class Rest(Value):
    """What the workers have left behind: processes whose parents have ended."""

    pids: tuple[int, ...]


class Expired(Value):
    """The licence was over at that time, of time.monotonic(): all workers are killed, or none was started."""

    at: float


class Kept(Value):
    """How the keeper of warm workers is: ready, rebuilt, or refused, for that reason, so that workers are fresh."""

    state: str
    why: str
    module: str = ""  # on account of which it was refused, if it was one of them


class Disowned(Value):
    """It has no licence any more."""


class Lost(Value):
    """The warden itself has ended, and with it every worker."""


Report = Started | FailedToStart | Exited | Rest | Expired | Kept | Disowned | Lost


def _of_keeper(news: list[Report]) -> list[Report]:
    return [one for one in news if isinstance(one, Kept)]


def _to_reports(kind: str, *fields: Any) -> list[Report]:
    if kind == "spawned":
        started, failed = fields
        return [*(Started(*one) for one in started), *(FailedToStart(*one) for one in failed)]
    if kind == "rest":
        return [Rest(tuple(fields[0]))]
    if kind == "kept":
        return [Kept(*fields)]
    if kind == "disowned":
        return [Disowned()]
    return [Expired(*fields) if kind == "expired" else Exited(*fields)]


class WardenClient:
    """A running warden, as the agent sees it."""

    def __init__(self, sock: _socket.socket, pid: int) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._frames = FrameReader(sock)
        self.pid = pid
        self.is_lost = False
        self._told_loss = False
        self._is_dismissed = False
        self._put_off: list[Report] = []  # until somebody is interested
        self._ignored: tuple[int, ...] = ()  # as it was told
        limits.restore_for(pid)

    @classmethod
    def start(cls) -> WardenClient:
        try:
            return cls(*start_warden())
        except OSError as error:
            why = limits.explain(error.errno) or str(error)
            raise worker_start_error(error.errno or 0, f"the process that starts workers could not be started: {why}") from error

    def fileno(self) -> int:
        return self._sock.fileno()

    def spawn(self, launches: list[Launch], licence_fd: int | None = None) -> None:
        """Ask for these workers; each answers with Started or FailedToStart, or all together with Expired.

        They may run as long as the page behind `licence_fd` says, for ever without one.
        """
        batch: list[Launch] = []
        most_fds = min(MAX_FDS, (limits.limit_for_workers() - WARDENS_FILES) * 2 // 3)  # and a pipe for each worker
        for launch in launches:
            if batch and sum(len(one.fds) for one in [*batch, launch]) >= most_fds:
                self._spawn_batch(batch, licence_fd)
                batch = []
            batch.append(launch)
        self._spawn_batch(batch, licence_fd)

    def _spawn_batch(self, batch: list[Launch], licence_fd: int | None) -> None:
        self._tell_ignored()
        fds: list[int] = []
        requests, cwd = [], _working_folder()
        for launch in batch:
            places = [(len(fds) + position, target) for position, target in enumerate(launch.fds)]
            fds.extend(launch.fds.values())
            requests.append({**vars(launch), "fds": places, "cwd": cwd})
        if licence_fd is not None:
            fds.append(licence_fd)
        self._send(("spawn", requests, licence_fd is not None), fds, START_TIMEOUT_S)

    def keep(self, launch: Launch, modules: tuple[str, ...]) -> None:
        """From now on, workers with this command are forks of an interpreter that has imported these modules, if they can be."""
        from rallypoint.processes.warm_rules import head_of

        self._tell_ignored()
        what = {"argv": launch.argv, "head": len(head_of(launch.argv)), "env": launch.env, "cwd": _working_folder()}
        self._send(("keep", {**what, "modules": modules, "may_run_unbound": True}))

    def _tell_ignored(self) -> None:
        if self._ignored != _shelf.ignored:
            self._ignored = _shelf.ignored
            self._send(("ignore", self._ignored))

    def entrust(self, licence_fd: int) -> None:
        """Let it testify for us, should we be killed before we have a worker."""
        self._send(("licence",), [licence_fd])

    def license(self, licence_fd: int) -> None:
        """Those whom it has started without may run as long as this page says."""
        self._send(("license",), [licence_fd])

    def disown(self, timeout_s: float = READ_TIMEOUT_S) -> bool:
        """Whether it is certain that it will not testify for this node any more; it has no worker."""
        self._send(("disown",))
        give_up_at = time.monotonic() + timeout_s
        news: list[Report] = []
        while not self.is_lost and Disowned() not in news and (left_s := give_up_at - time.monotonic()) > 0:
            news += self.receive(left_s)
        self._put_off = _of_keeper(news)
        return self.is_lost or Disowned() in news

    def is_idle(self) -> bool:
        """Whether it lives and has nobody; what became of its keeper meanwhile is for whoever has workers of it."""
        news = self.receive()
        self._put_off = _of_keeper(news)
        return all(isinstance(one, Kept | Disowned) or one == Rest(()) for one in news)  # that nobody is left may be told twice

    def signal_worker(self, local_rank: int, number: int) -> None:
        self._send(("signal", local_rank, int(number)))

    def signal_rest(self, pid: int, number: int) -> None:
        self._send(("signal_rest", pid, int(number)))

    def watch_rest(self) -> None:
        """Ask to be told, now and at every change, what is left besides the workers."""
        self._send(("watch_rest",))

    def _send(self, message: tuple[Any, ...], fds: list[int] | None = None, timeout_s: float = READ_TIMEOUT_S) -> None:
        try:
            send_frame(self._sock, message, fds or [], time.monotonic() + timeout_s)
        except (BrokenPipeError, ConnectionResetError):  # receive() reports it as Lost
            self.is_lost = True
        except TimeoutError:
            self.give_up()

    def receive(self, timeout_s: float | None = 0.0) -> list[Report]:
        """All that has been reported, after waiting for the first at most `timeout_s` (None: for ever)."""
        reports, self._put_off = self._put_off, []
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if not self.is_lost and poll.poll(0 if reports else None if timeout_s is None else timeout_s * 1000):
            reports += self._read()
        if self.is_lost and not self._told_loss:
            self._told_loss = True
            reports.append(Lost())
        return reports

    def _read(self) -> list[Report]:
        reports: list[Report] = []
        try:
            while (frame := self._frames.read()) is not None:
                reports += _to_reports(*frame[0])
        except EOFError:
            self.is_lost = True
        return reports

    def kill(self) -> None:
        """End it at once; the kernel kills the workers with it. One that is lost may be reaped, and its id a stranger's."""
        if not self.is_lost:
            _kill(self.pid, signal.SIGKILL)

    def give_up(self) -> None:
        """Kill it, and hear no more of it."""
        self.kill()
        self.is_lost = True

    def dismiss(self) -> None:
        """Hang up, without waiting: the warden kills whatever is left and ends, without a word to anybody."""
        if self._is_dismissed:
            return
        self._is_dismissed = True
        if not self.is_lost:
            self._send(("dismiss",), timeout_s=0.0)
        try:
            self._sock.shutdown(_socket.SHUT_RDWR)  # closing alone is no hang-up while some fork of ours has a copy
        except OSError:  # the warden is gone already
            pass
        self._sock.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """Dismiss it, and wait for its end."""
        if self.pid:
            self.dismiss()
            _reap(self.pid, timeout_s)
            self.pid = 0


def _working_folder() -> str:
    """Where workers are started; empty if it was deleted: the warden is in what is left of it, as we are."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        report.warn("the working folder was deleted: workers start in what is left of it, and find no files there")
        return ""


def _reap(pid: int, timeout_s: float) -> None:
    """Wait for the warden's end, and do not leave it as a zombie; one that is stuck with its workers is left behind."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    ended = poll.poll(timeout_s * 1000)
    os.close(pidfd)
    try:
        os.waitpid(pid, 0 if ended else os.WNOHANG)
    except ChildProcessError:  # somebody in this process reaps every child
        pass


class _Shelf:
    """At most one idle warden, and whether a used one may be put back. A fork of this process begins with an empty one."""

    def __init__(self) -> None:
        self.idle: WardenClient | None = None
        self.keepers = 0
        self.launched_at: float | None = None  # None: this process is no launcher
        self.ignored: tuple[int, ...] = ()  # signals that workers are to ignore, unless they do something about them

    def change_keepers(self, by: int) -> int:
        with _shelf_lock:
            self.keepers += by
            return self.keepers

    def swap(self, new: WardenClient | None) -> WardenClient | None:
        """Put one there, or nothing, and take what was there; agents in several threads may do so at once."""
        with _shelf_lock:
            old, self.idle = self.idle, new
            return old


_shelf_lock = threading.Lock()
_shelf = _Shelf()
os.register_at_fork(after_in_child=_shelf.__init__)  # type: ignore[misc]


def prepare(line: _socket.socket, pid: int) -> None:
    """Have a warden that was started already used first. For a process that is a launcher and nothing else.

    As process 1 of a container it also owes to reap every orphan, for nobody else can. Descendants of workers go to the warden;
    others, such as what ``docker exec`` leaves behind, come to us. A thread that does nothing but wait reaps them; whoever waits
    for a child of ours finds it reaped already, and knows why.
    """
    _shelf.launched_at = time.monotonic()
    _shelf.swap(WardenClient(line, pid))
    if os.getpid() == 1:
        threading.Thread(target=_reap_for_ever, name="rallypoint-orphans", daemon=True).start()


_reaped: dict[int, int] = {}


def _reap_for_ever() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(NO_CHILD_PAUSE_S)
        else:
            _reaped[pid] = status


def exit_status(pid: int) -> int:
    """How a child ended that is said to be reaped already. The thread that has done so may be about to note it."""
    give_up_at = time.monotonic() + READ_TIMEOUT_S
    while pid not in _reaped and time.monotonic() < give_up_at:
        time.sleep(0.001)
    return _reaped.pop(pid, 0)


def launched_at() -> float | None:
    """When this process began to be a launcher; None if it is a program of its own, in which agents run.

    A launcher has no children but ours, so that it may adopt orphans, and may kill whom it adopted.
    """
    return _shelf.launched_at


def take() -> WardenClient:
    """An idle warden that still lives, or a new one."""
    idle = _shelf.swap(None)
    if idle is not None and idle.is_idle():
        return idle
    if idle is not None:
        idle.close()
    return WardenClient.start()


def put_back(client: WardenClient) -> None:
    """Keep a warden that has no process left for the next group, if there may be one; else end it."""
    surplus = _shelf.swap(client) if _shelf.keepers and not client.is_lost else client
    if surplus is not None:
        surplus.close()


def entrust(licence_fd: int) -> None:
    """Let the idle warden, if there is one, know the page by which it can testify that this node is gone."""
    idle = _shelf.swap(None)
    if idle is not None:
        idle.entrust(licence_fd)
        put_back(idle)


def have_ignored(numbers: Iterable[int]) -> None:
    """Workers that are started from now on ignore these signals at first."""
    _shelf.ignored = tuple(sorted(map(int, numbers)))


def disown_idle() -> None:
    """Another warden has the workers from now on: what the idle one would testify, that nobody is left, need not be true."""
    idle = _shelf.swap(None)
    if idle is not None and idle.disown():
        put_back(idle)
    elif idle is not None:
        idle.close()


class keep_wardens:
    """While this is entered, an idle warden is kept for the next group; afterwards there is none.

    Its end takes some milliseconds. Who knows that no group will come says so (`dismiss`), and does other things meanwhile.
    """

    def __init__(self) -> None:
        self._ending: WardenClient | None = None
        self._keeps = False

    def __enter__(self) -> keep_wardens:
        self._keeps = True
        _shelf.change_keepers(+1)
        return self

    def dismiss(self) -> None:
        """The idle warden is needed no more, unless by another agent of this process."""
        if self._keeps:
            self._keeps = False
            self._ending = None if _shelf.change_keepers(-1) else _shelf.swap(None)
            if self._ending is not None:
                self._ending.dismiss()

    def __exit__(self, *_: object) -> None:
        self.dismiss()
        if self._ending is not None:
            self._ending.close()


_stopped_with_us: set[int] = set()
os.register_at_fork(after_in_child=_stopped_with_us.clear)


def stop_with_us(warden: int) -> None:
    """From now on this warden's workers are stopped by Ctrl-Z as we are, if nobody else cares for that signal."""
    _stopped_with_us.add(warden)
    if _may_change_handlers() and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
        signal.signal(signal.SIGTSTP, _suspend)


def stop_alone(warden: int) -> None:
    """It is no longer of any concern to this warden."""
    _stopped_with_us.discard(warden)
    if not _stopped_with_us and _may_change_handlers() and signal.getsignal(signal.SIGTSTP) is _suspend:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def _may_change_handlers() -> bool:
    return threading.current_thread() is threading.main_thread()


def _suspend(_number: int, _frame: FrameType | None) -> None:
    """The handler: stop the workers, then ourselves, as if there were no handler; go on here when we are continued."""
    _tell_wardens(signal.SIGTSTP)
    report.step_aside()
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, _suspend)
    _tell_wardens(signal.SIGCONT)


def _tell_wardens(number: signal.Signals) -> None:
    for warden in list(_stopped_with_us):
        _kill(warden, number)


def _kill(warden: int, number: signal.Signals) -> None:
    try:
        os.kill(warden, number)
    except ProcessLookupError:  # as process 1 we have a thread that reaps whatever ends
        pass
