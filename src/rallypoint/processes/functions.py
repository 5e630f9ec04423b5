"""Workers that are Python functions, by each of multiprocessing's three start methods.

- ``spawn``: each worker is a fresh interpreter under the usual warden; it is sent the function and its arguments.
- ``forkserver``: one fresh interpreter is sent the function, becomes a warden itself, and forks the workers.
- ``fork``: this very process is forked once; the copy becomes a warden and forks the workers, which share our memory.

So in every case the workers' parent is a warden, and nothing outlives the agent. What is sent is pickled as multiprocessing
does it, so its queues, locks and pipes can be arguments. A return value comes back in a memory file, so it may be of any size.
"""

from __future__ import annotations

import _socket  # see frames
import os
import sys
from collections.abc import Callable
from typing import Any

from rallypoint.base import defaults
from rallypoint.base.outbox import Deputy
from rallypoint.errors import UsageError
from rallypoint.output.log_specs import LogsSpecs
from rallypoint.processes import function_worker
from rallypoint.processes.function_worker import Parcel, pack
from rallypoint.processes.warden_client import Launch, WardenClient
from rallypoint.processes.warden_context import WardedContext

__all__ = ["MultiprocessContext"]

FLUSH_TIMEOUT_S = 1.0
_BOOTSTRAP = (
    "import marshal,os,sys; parcel=os.fdopen({parcel},'rb'); sys.path[:]=marshal.load(parcel); "
    "from rallypoint.processes import function_worker; function_worker.{role}(parcel,{argument})"
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

    def _launch_of(self, local_rank: int, env: dict[str, str]) -> Launch:
        result_fd = self._results[local_rank] = os.memfd_create(f"result-{local_rank}", os.MFD_CLOEXEC)
        if self.start_method != "spawn":
            return Launch(local_rank, ("",), env, {result_fd: result_fd})
        parcel = self._pack((self._function, self.args[local_rank]))
        command = _python_command(parcel, "run_spawned", result_fd)
        return Launch(local_rank, command, env, {fd: fd for fd in (result_fd, *parcel.fds)})

    def _pack(self, content: Any) -> Parcel:
        parcel = pack(content, name=self.name)
        self._parcels.append(parcel)
        return parcel

    def _open_warden(self) -> WardenClient:
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


def _python_command(parcel: Parcel, role: str, argument: object) -> tuple[str, ...]:
    from multiprocessing import spawn, util

    bootstrap = _BOOTSTRAP.format(parcel=parcel.fd, role=role, argument=argument)
    flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]  # multiprocessing itself starts children with it
    return (os.fsdecode(spawn.get_executable()), *flags, "-c", bootstrap)


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
    command = _python_command(parcel, "serve_spawned", f"{theirs.fileno()},{os.getpid()}")
    pid = util.spawnv_passfds(os.fsencode(command[0]), command, fds)
    theirs.close()
    return WardenClient(ours, pid)
