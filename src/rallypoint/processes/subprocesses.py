"""Workers that are programs: scripts, modules, binaries, shell scripts. And the function that starts any group of workers."""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.base import defaults
from rallypoint.output.log_specs import LogsSpecs
from rallypoint.processes.context import PContext
from rallypoint.processes.warden_client import Launch
from rallypoint.processes.warden_context import WardedContext

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.processes.learning import Learner
    from rallypoint.processes.standby import Standby

__all__ = ["SubprocessContext", "start_processes", "warm_up"]


class SubprocessContext(WardedContext):
    """Runs `entrypoint`, the path or name of a program, once for each local rank."""

    def _launch_of(self, local_rank: int, env: dict[str, str]) -> Launch:
        return Launch(local_rank, (str(self.entrypoint), *map(str, self.args[local_rank])), env, {})

    def start_standby(self) -> Standby:
        """The same program, once more for each local rank, to wait in `rallypoint.worker.ready`."""
        from rallypoint.processes.standby import Standby
        from rallypoint.processes.warm_rules import environment_ahead

        launches = [
            self._launch_of(rank, self._environment_of(environment_ahead(env))).replace(
                fds={fd: fd for fd in _slots_of(env)}, cpus=self.cpus.get(rank, ()), may_run_unbound=self._may_run_unbound
            )
            for rank, env in sorted(self.envs.items())
        ]
        return Standby(launches, self._keep_warm)


def _slots_of(env: dict[str, str]) -> tuple[int, ...]:
    """The files in which a worker with this environment keeps snapshots."""
    place = env.get(defaults.ENV_CHECKPOINT)
    if place is None:
        return ()
    from rallypoint.checkpoint.layout import read_place

    return read_place(place).files


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: dict[int, str] | None = None,
    start_method: str = defaults.START_METHOD,
    numa_options: Any = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
    *,
    licence_fd: int | None = None,
    preload: tuple[str, ...] = (),
    learner: Learner | None = None,
    kept_files: dict[int, tuple[int, ...]] | None = None,
    standby: Standby | None = None,
    on_long_wait: Callable[[], None] | None = None,
) -> PContext:
    """Start one process for each local rank, running a program or a function, and return them as a group.

    With `licence_fd` they may run as long as that page of memory says (`processes.licence`). With `preload` they find these
    modules imported, where that can be (`processes.keeper`); a `learner` is told what the first of them imports. `kept_files` are
    ours, by local rank: those workers have them too. With `standby` they are processes that have waited for this. If it takes
    long, `on_long_wait` is called.

    >>> from rallypoint import DefaultLogsSpecs, start_processes
    >>> group = start_processes("trainer", abs, {0: (-7,), 1: (-8,)}, {0: {}, 1: {}}, DefaultLogsSpecs(log_dir="logs"))
    >>> group.wait().return_values
    {0: 7, 1: 8}
    >>> group.close()
    """
    rest = (log_line_prefixes, numa_options, duplicate_stdout_filters, duplicate_stderr_filters)
    context = _make_context(name, entrypoint, args, envs, logs_specs, start_method, *rest)
    context.licence_fd = licence_fd
    context.preload = preload
    context.learner = learner
    context.kept_files = kept_files or {}
    context.standby = standby
    context.on_long_wait = on_long_wait or context.on_long_wait
    context.start()
    return context


def warm_up(
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs,
    start_method: str,
    numa_options: Any,
    preload: tuple[str, ...],
) -> None:
    """Have these modules imported for processes that will be started, with what is known of them before."""
    context = _make_context("", entrypoint, args, envs, logs_specs, start_method, None, numa_options)
    context.preload = preload
    context.warm_up()


def _make_context(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs,
    start_method: str,
    *rest: Any,
) -> WardedContext:
    if isinstance(entrypoint, str):
        return SubprocessContext(name, entrypoint, args, envs, logs_specs, *rest)
    from rallypoint.processes.functions import MultiprocessContext

    return MultiprocessContext(name, entrypoint, args, envs, start_method, logs_specs, *rest)
