"""One program as one worker, started and stopped directly: what ``SubprocessHandler`` is to programs that use it.

rallypoint's own workers are started by a warden (`subprocesses`), which leaves nobody behind; a handler is for programs that look
after a single process themselves.
"""

from __future__ import annotations

import os
import signal
from subprocess import Popen

from rallypoint.base import environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO, Any

__all__ = ["SubprocessHandler", "get_subprocess_handler"]


class SubprocessHandler:
    """A program in a session of its own, with its output in files. `proc` is the process."""

    def __init__(
        self,
        entrypoint: str,
        args: tuple[Any, ...],
        env: dict[str, str],
        stdout: str | None,
        stderr: str | None,
        local_rank_id: int,
        numa_options: Any,
    ) -> None:
        self.local_rank_id = local_rank_id
        self._cpus = _cpus_of(numa_options, local_rank_id, env)
        self._stdout = _open(stdout)
        self._stderr = _open(stderr)
        try:
            self.proc = self._popen((entrypoint, *map(str, args)), {**environment.own, **env})
        except BaseException:  # raised again, but the files are closed
            self._close_files()
            raise

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Popen[bytes]:
        """Start the program; subclasses may start it in another way."""
        process = Popen(args=args, env=env, stdout=self._stdout, stderr=self._stderr, start_new_session=True)
        if self._cpus:
            os.sched_setaffinity(process.pid, self._cpus)
        return process

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Signal the program and all in its process group, SIGTERM where nothing else is asked for, and close the files."""
        try:
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)
        except ProcessLookupError:  # all of them have ended
            pass
        finally:
            self._close_files()

    def _close_files(self) -> None:
        for file in (self._stdout, self._stderr):
            if file is not None:
                file.close()


def get_subprocess_handler(
    entrypoint: str,
    args: tuple[Any, ...],
    env: dict[str, str],
    stdout: str,
    stderr: str,
    local_rank_id: int,
    numa_options: Any = None,
) -> SubprocessHandler:
    """Start a program under a handler."""
    return SubprocessHandler(entrypoint, args, env, stdout, stderr, local_rank_id, numa_options)


def _open(path: str | None) -> IO[str] | None:
    return open(path, "w", encoding="utf-8") if path else None


def _cpus_of(numa_options: Any, local_rank: int, env: dict[str, str]) -> tuple[int, ...]:
    if numa_options is None:
        return ()
    from rallypoint.affinity import cpus_of_workers

    return cpus_of_workers(numa_options, dict.fromkeys(range(local_rank + 1), env)).get(local_rank, ())
