"""Why workers ended: what the kernel says of memory, what whoever ended one on purpose says, and what they left behind."""

from __future__ import annotations

import os
import signal

from rallypoint.failures.memory_kills import MemoryKills
from rallypoint.output.log_specs import LogsDest
from rallypoint.output.outlets import Outlets
from rallypoint.processes.warden_client import Exited

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.failures.process_failure import ProcessFailure

__all__ = ["Causes"]


class Causes:
    """Made when the workers are started: from then on kills for want of memory are counted."""

    def __init__(self) -> None:
        self._memory_kills = MemoryKills()
        self._memory_kills.snapshot()
        self._reasons: dict[int, tuple[str, float]] = {}  # pid -> why it is being ended, and how long ago it failed

    def explain(self, pid: int, why: str, ago_s: float) -> None:
        """Say in advance why a worker is about to be ended; the first reason counts."""
        self._reasons.setdefault(pid, (why, ago_s))

    def describe(self, ended: Exited, logs: LogsDest, outlets: Outlets, tail: str) -> ProcessFailure:
        """All that can be known of a worker that failed; `tail` is the last that it wrote to stderr, unless that is in a file."""
        from rallypoint.failures.process_failure import ProcessFailure

        rank = ended.local_rank
        error_file, log_file = logs.error_files[rank], logs.stderrs.get(rank, "")
        if log_file in ("", os.devnull):
            log_file = outlets.keep_tail(os.path.dirname(error_file), tail)
        else:
            tail = tail or outlets.file_tail(log_file)
        why, ago_s = self._reasons.get(ended.pid, ("", 0.0)) if ended.exitcode < 0 else ("", 0.0)
        return ProcessFailure(
            local_rank=rank,
            pid=ended.pid,
            exitcode=ended.exitcode,
            error_file=error_file,
            hostname=os.uname().nodename,
            stderr_tail=tail,
            log_file=log_file,
            ended_at=ended.at - ago_s,
            killed_for_memory="" if why else self._why_killed(ended),
            ended_on_purpose=why,
        )

    def _why_killed(self, ended: Exited) -> str:
        return self._memory_kills.explain(ended.pid) if ended.exitcode == -signal.SIGKILL else ""
