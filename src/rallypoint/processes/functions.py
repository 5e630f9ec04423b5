"""Workers that are Python functions, by each of multiprocessing's three start methods.

- ``spawn``: each worker is a fresh interpreter under the usual warden; it is sent the function and its arguments.
- ``forkserver``: one fresh interpreter is sent the function, becomes a warden itself, and forks the workers.
- ``fork``: this very process is forked once; the copy becomes a warden and forks the workers, which share our memory.

So in every case the workers' parent is a warden, and nothing outlives the agent. What is sent is pickled as multiprocessing
does it, so its queues, locks and pipes can be arguments. A return value comes back in a memory file, so it may be of any size.

Nobody leaves alone: a worker whose function has returned stays until all have, and their results were read.
"""

from __future__ import annotations

import _socket  # see frames
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

from rallypoint.base import defaults
from rallypoint.base.outbox import Deputy
from rallypoint.errors import UsageError
from rallypoint.output.log_specs import LogsSpecs
from rallypoint.processes import function_worker
from rallypoint.processes.context import RunProcsResult
from rallypoint.processes.function_worker import Parcel, pack
from rallypoint.processes.warden_client import Launch, WardenClient
from rallypoint.processes.warden_context import WardedContext

__all__ = ["MultiprocessContext"]

FLUSH_TIMEOUT_S = 1.0
ROOM_FOR_A_NUMBER = 999_999  # in the command of a keeper, for ps to show those of its forks
# The same for every worker, so that all can be forks of one interpreter that has begun with it: see `keeper`.
_BOOTSTRAP = (
    "import marshal,os,sys; role,*numbers=sys.argv[1:]; parcel,*numbers=map(int,numbers); parcel=os.fdopen(parcel,'rb'); "
    "sys.path[:]=marshal.load(parcel); "
    "from rallypoint.processes import function_worker; getattr(function_worker,role)(parcel,*numbers)"
)


class MultiprocessContext(WardedContext):
    """Runs a function once for each local rank, and keeps what it returned."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        start_method: str,
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: Any = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        filters = (duplicate_stdout_filters, duplicate_stderr_filters)
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, numa_options, *filters)
        if start_method not in defaults.START_METHODS:
            raise UsageError(f"start_method must be one of {', '.join(defaults.START_METHODS)}, not {start_method!r}")
        self.start_method = start_method
        self._function = entrypoint
        self._results: dict[int, int] = {}  # local rank -> memory file with what was returned
        self._parcels: list[Parcel] = []
        self._values: dict[int, Any] | None = None
        self._line: ExitLine | None = None

    def _launch_of(self, local_rank: int, env: dict[str, str]) -> Launch:
        result_fd = self._results[local_rank] = os.memfd_create(f"result-{local_rank}", os.MFD_CLOEXEC)
        assert self._line is not None
        line_fd = self._line.workers_fd
        if self.start_method != "spawn":
            return Launch(local_rank, ("",), env, {line_fd: line_fd, result_fd: result_fd})
        parcel = self._pack((self._function, self.args[local_rank]))
        command = _python_command("run_spawned", parcel.fd, local_rank, line_fd, result_fd)
        return Launch(local_rank, command, env, {fd: fd for fd in (line_fd, result_fd, *parcel.fds)})

    def _launch_ahead(self, local_rank: int, env: dict[str, str]) -> Launch:
        command = _python_command("run_spawned", *[ROOM_FOR_A_NUMBER] * 4) if self.start_method == "spawn" else ("",)
        return Launch(local_rank, command, env, {})

    def _pack(self, content: Any) -> Parcel:
        parcel = pack(content, name=self.name)
        self._parcels.append(parcel)
        return parcel

    def _open_warden(self) -> WardenClient:
        warden = self._make_warden()
        self._line = ExitLine(warden.fileno())
        return warden

    def _make_warden(self) -> WardenClient:
        match self.start_method:
            case "fork":
                return _fork_warden(self._function, self.args)
            case "forkserver":
                return _spawn_server(self._pack((self._function, self.args)))
            case _:
                return super()._open_warden()

    def _let_go(self, keep_warden: bool) -> None:
        """A warden that holds this very function is of no use to the next group."""
        super()._let_go(keep_warden and self.start_method == "spawn")

    @property
    def staying(self) -> frozenset[int]:
        return frozenset() if self._line is None or self._line.is_hung_up else frozenset(self._line.returned - self._exits.keys())

    def news_fd(self) -> int | None:
        return self._line.fileno() if self._line is not None else None

    def _absorb(self, timeout_s: float = 0.0) -> None:
        super()._absorb(timeout_s)
        if self._line is not None:
            self._line.listen()

    def _poll(self) -> RunProcsResult | None:
        result = super()._poll()
        if result is None and self._line is not None and len(self._line.returned | self._exits.keys()) == self.nprocs:
            self._return_values()
            self._line.hang_up()
        return result

    def _close(self, death_sig: signal.Signals, timeout: float) -> None:
        """Who only stays for the others may be deaf to the signal."""
        if self._line is not None:
            self._line.hang_up()
        super()._close(death_sig, timeout)

    def _return_values(self) -> dict[int, Any]:
        if self._values is None:
            self._values = {rank: function_worker.read_result(rank, fd) for rank, fd in self._results.items()}
        return self._values

    def _release(self) -> None:
        for fd in self._results.values():
            os.close(fd)
        self._results.clear()
        for parcel in self._parcels:
            parcel.close()
        self._parcels.clear()
        if self._line is not None:
            self._line.close()
            self._line = None


class ExitLine:
    """Where the workers of a group say that their function has returned, and wait until we hang up.

    All of them share one end. It can be waited for together with their warden, so whoever waits for news has one descriptor.
    """

    def __init__(self, warden_fd: int) -> None:
        self._ours, self._workers = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self.workers_fd = self._workers.fileno()
        self.returned: set[int] = set()
        self.is_hung_up = False
        self._news = select.epoll()
        for fd in (warden_fd, self._ours.fileno()):
            self._news.register(fd, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when a worker may have returned, or when the warden has something to say."""
        return self._news.fileno()

    def listen(self) -> None:
        while not self.is_hung_up and (local_rank := function_worker.read_rank(self._ours)) is not None:
            self.returned.add(local_rank)

    def hang_up(self) -> None:
        """Shut down rather than closed: forks of ours, and the workers' own children, may have copies."""
        if not self.is_hung_up:
            self.is_hung_up = True
            self._news.unregister(self._ours.fileno())
            self._ours.shutdown(_socket.SHUT_RDWR)

    def close(self) -> None:
        self._news.close()
        self._ours.close()
        self._workers.close()


def _python_command(role: str, *numbers: int) -> tuple[str, ...]:
    from multiprocessing import spawn, util

    flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]  # multiprocessing itself starts children with it
    return (os.fsdecode(spawn.get_executable()), *flags, "-c", _BOOTSTRAP, role, *map(str, numbers))


def _fork_warden(fn: Callable[..., Any], args: dict[int, tuple[Any, ...]]) -> WardenClient:
    ours, theirs = _socket.socketpair()
    agent_pid = os.getpid()
    _flush_streams()
    pid = os.fork()
    if pid == 0:
        ours.close()
        function_worker.serve_forked(theirs, agent_pid, fn, args)
    theirs.close()
    return WardenClient(ours, pid)


def _flush_streams() -> None:
    """What is buffered is to be written once, not by every copy; but a console that takes nothing does not keep us."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()

    try:
        Deputy().do(flush, FLUSH_TIMEOUT_S)
    except TimeoutError:
        return


def _spawn_server(parcel: Parcel) -> WardenClient:
    from multiprocessing import util

    ours, theirs = _socket.socketpair()
    fds = [theirs.fileno(), *parcel.fds]
    command = _python_command("serve_spawned", parcel.fd, theirs.fileno(), os.getpid())
    pid = util.spawnv_passfds(os.fsencode(command[0]), command, fds)
    theirs.close()
    return WardenClient(ours, pid)
