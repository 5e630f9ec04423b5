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

__all__ = ["SubprocessContext", "start_processes"]


class SubprocessContext(WardedContext):
    """Runs `entrypoint`, the path or name of a program, once for each local rank."""

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: Any = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        filters = (duplicate_stdout_filters, duplicate_stderr_filters)
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, *filters, numa_options=numa_options)

    def _launch_of(self, local_rank: int, error_file: str) -> Launch:
        command = (str(self.entrypoint), *map(str, self.args[local_rank]))
        env = {**self._inherited_env, **self.envs[local_rank], defaults.ENV_ERROR_FILE: error_file}
        return Launch(local_rank, command, env, {})


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
) -> PContext:
    """Start one process for each local rank, running a program or a function, and return them as a group.

    With `licence_fd` they may run as long as that page of memory says (`processes.licence`).
    """
    common: dict[str, Any] = {
        "name": name,
        "args": args,
        "envs": envs,
        "logs_specs": logs_specs,
        "log_line_prefixes": log_line_prefixes,
        "numa_options": numa_options,
        "duplicate_stdout_filters": duplicate_stdout_filters,
        "duplicate_stderr_filters": duplicate_stderr_filters,
    }
    context: WardedContext
    if isinstance(entrypoint, str):
        context = SubprocessContext(entrypoint=entrypoint, **common)
    else:
        from rallypoint.processes.functions import MultiprocessContext

        context = MultiprocessContext(entrypoint=entrypoint, start_method=start_method, **common)
    context.licence_fd = licence_fd
    context.start()
    return context
