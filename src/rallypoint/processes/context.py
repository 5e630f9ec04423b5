"""A group of worker processes that start together, and what became of them.

`PContext` is the interface that agents use and that others may implement. It waits with an eye on the signal inbox, so
that a signal ends any wait. Whoever waits for a group and is told of a failure finds the group ended; an agent ends it itself.
"""

from __future__ import annotations

import select
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from rallypoint.base import defaults, outbox
from rallypoint.base.records import Record, field
from rallypoint.base.signals import inbox
from rallypoint.errors import RankError, signal_exception
from rallypoint.output.log_specs import LogsDest, LogsSpecs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.failures.process_failure import ProcessFailure

__all__ = ["PContext", "RunProcsResult", "wait_readable"]


class RunProcsResult(Record):
    """How a group of processes ended, by local rank."""

    return_values: dict[int, Any] = field(factory=dict)
    failures: dict[int, ProcessFailure] = field(factory=dict)
    stdouts: dict[int, str] = field(factory=dict)
    stderrs: dict[int, str] = field(factory=dict)

    def is_failed(self) -> bool:
        return len(self.failures) > 0


class OutputTail:
    """What shows the output of a group of processes, as callers know it: they ask whether it is done."""

    def __init__(self, context: PContext) -> None:
        self._context = context

    def stopped(self) -> bool:
        """Whether the processes have a result, or were closed; all that those wrote who have ended has been shown by then."""
        return self._context._has_ended


class PContext(ABC):
    """Processes of one entry point, one for each local rank in `args` and `envs`."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        _check_ranks(args, envs)
        self.name = name
        self.entrypoint = entrypoint
        self.args = args
        self.envs = envs
        self.nprocs = len(args)
        self._logs_specs = logs_specs
        self._log_line_prefixes = log_line_prefixes
        self._duplicate_stdout_filters = tuple(duplicate_stdout_filters or ())
        self._duplicate_stderr_filters = tuple(duplicate_stderr_filters or ())
        self._is_open = False
        self._is_watching = False
        self._has_ended = False
        self.ends_with_failure = True  # False: whoever waits closes it then, by rules of its own
        self._reified: LogsDest | None = None

    @property
    def stdouts(self) -> dict[int, str]:
        """The file of each local rank's stdout; empty for one that has the launcher's own."""
        return self._destinations().stdouts

    @property
    def stderrs(self) -> dict[int, str]:
        return self._destinations().stderrs

    @property
    def error_files(self) -> dict[int, str]:
        return self._destinations().error_files

    @property
    def filtered_stdout(self) -> str:
        return self._destinations().filtered_stdout

    @property
    def filtered_stderr(self) -> str:
        return self._destinations().filtered_stderr

    @property
    def _tail_logs(self) -> list[OutputTail]:
        """One for each way of the workers' output to the console or to a file with filters."""
        ways = 2 + bool(self._duplicate_stdout_filters) + bool(self._duplicate_stderr_filters)
        return [OutputTail(self)] * ways

    def _destinations(self) -> LogsDest:
        """Where the output goes; what that needs on the disk is made when it is first asked for."""
        if self._reified is None:
            self._reified = self._logs_specs.reify(self.envs)
        return self._reified

    def start(self) -> None:
        """Start all processes; from now on the signals to handle end our waits instead of us."""
        self._is_watching = inbox.begin(self.envs[0].get(defaults.ENV_SIGNALS_TO_HANDLE, defaults.SIGNALS_TO_HANDLE))
        self._is_open = True
        outbox.begin_duty()
        try:
            self._start()
        except BaseException:  # whatever it was, a signal included, nobody may be left; it is raised again
            self.close(signal.SIGKILL)
            raise

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """The result once all have ended or one has failed; None after `timeout` seconds (negative: wait for ever; 0: just look).

        After a failure nobody is left, as if it had been closed. `period` matters only to contexts that have to poll.
        """
        deadline = None if timeout < 0 else time.monotonic() + timeout
        while True:
            inbox.raise_pending()
            result = self._poll()
            self._has_ended = self._has_ended or result is not None
            if result is not None and result.is_failed() and self.ends_with_failure:
                self.close()
                result = self._completed(result)
            left = None if deadline is None else deadline - time.monotonic()
            if result is not None or (left is not None and left <= 0):
                return result
            self._wait_for_news(left, period)

    def _completed(self, result: RunProcsResult) -> RunProcsResult:
        """A failed result with what became known while the group was ended: who else had failed by then."""
        return result

    def close(self, death_sig: signal.Signals | None = None, timeout: float = defaults.SHUTDOWN_TIMEOUT_S) -> None:
        """End whatever still runs: `death_sig` first, SIGKILL to those that are there `timeout` seconds later."""
        self._has_ended = True
        if self._is_open:
            self._is_open = False
            try:
                self._close(death_sig or signal.SIGTERM, timeout)
            finally:
                left = inbox.end() if self._is_watching else None
                outbox.end_duty()
            if left is not None:
                raise signal_exception(f"received {left.name} while the processes were being ended", left)

    def news_fd(self) -> int | None:
        """Readable when a process may have ended; None where only polling tells."""
        return None

    def _wait_for_news(self, timeout_s: float | None, period_s: float) -> None:
        fd = self.news_fd()
        if fd is None:
            timeout_s = period_s if timeout_s is None else min(period_s, timeout_s)
        wait_readable([fd, inbox.fileno()], timeout_s)

    @abstractmethod
    def pids(self) -> dict[int, int]:
        """The process id of each local rank."""

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _poll(self) -> RunProcsResult | None: ...

    @abstractmethod
    def _close(self, death_sig: signal.Signals, timeout: float) -> None: ...


def _check_ranks(args: dict[int, tuple[Any, ...]], envs: dict[int, dict[str, str]]) -> None:
    """Local ranks must be 0..n-1, and the same in both."""
    expected = set(range(len(args)))
    if not args:
        raise RankError("args names no local rank: there is nothing to start")
    for field_name, ranks in (("args", set(args)), ("envs", set(envs))):
        if ranks != expected:
            raise RankError(f"{field_name} must name the local ranks 0..{len(args) - 1}, each once; it names {sorted(ranks)}")


def wait_readable(fds: Iterable[int | None], timeout_s: float | None) -> set[int]:
    """Wait until one of these can be read, at most `timeout_s` (None: for ever)."""
    poll = select.poll()
    for fd in fds:
        if fd is not None:
            poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)}
