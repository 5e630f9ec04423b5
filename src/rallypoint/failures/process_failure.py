"""What is known about workers that failed: one record each, and the error that carries them all to the user.

A failure is put together from what its process left behind, best source first: the error file, the signal, the traceback in the
tail of its stderr, the bare exit code. Nothing here raises because one of them is missing or broken: this is the failure path.
"""

from __future__ import annotations

import os
import signal
import time

from rallypoint.base.records import Record, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.failures.tracebacks import Traceback

__all__ = ["NOT_AVAILABLE", "ChildFailedError", "ProcessFailure"]

NOT_AVAILABLE = "<N/A>"
_YEAR_10000_S = 253_402_300_800.0


class ProcessFailure(Record):
    """One worker that failed. `message` says why in its own words; `error_file` is NOT_AVAILABLE if it left no readable one."""

    local_rank: int
    pid: int
    exitcode: int  # -N: ended by signal N
    error_file: str
    error_file_data: dict[str, Any] = field(init=False)
    message: str = field(init=False)
    timestamp: int = field(init=False)  # whole seconds; see failed_at
    hostname: str = field(default="", kw_only=True)  # empty: this host
    stderr_tail: str = field(default="", kw_only=True)
    log_file: str = field(default="", kw_only=True)
    ended_at: float | None = field(default=None, kw_only=True)  # wall clock, seconds
    killed_for_memory: str = field(default="", kw_only=True)  # what the kernel said, as a sentence
    ended_on_purpose: str = field(default="", kw_only=True)  # why rallypoint itself ended it, as the end of a sentence
    global_rank: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.hostname = self.hostname or os.uname().nodename
        data = _read(self.error_file, self.pid)
        if data is None:
            self.error_file = NOT_AVAILABLE
        self.error_file_data = data or {}
        self.message = _recorded_text(self.error_file_data) or self._made_up_message()
        if data is None:
            self.error_file_data = {"message": self.message}
        recorded_s = _recorded_s(self.error_file_data)
        self.timestamp = int(recorded_s or self.ended_at or time.time())

    @property
    def failed_at(self) -> float:
        """When it failed, in seconds of this host's clock, as exactly as is known.

        An exception comes before the process's end, by seconds where the teardown is slow. Old error files know only the whole
        second of it, so the end of that second or of the process, whichever came first, is the best guess.
        """
        exact_s = _recorded_exactly_s(self.error_file_data)
        if exact_s is not None:
            return exact_s
        if self.ended_at is None:
            return float(self.timestamp)
        return self.ended_at if self.error_file == NOT_AVAILABLE else min(self.ended_at, self.timestamp + 1.0)

    def signal_name(self) -> str:
        """The name of the signal that ended it; NOT_AVAILABLE if none did, or if that signal has no name."""
        try:
            return signal.Signals(-self.exitcode).name if self.exitcode < 0 else NOT_AVAILABLE
        except ValueError:
            return NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """The local time of the failure, as 2026-01-31_23:59:59."""
        return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(self.timestamp))

    def traceback(self) -> Traceback | None:
        """Where it failed: from the error file; else, if a signal ended it, from the fault handler; else from stderr."""
        from rallypoint.failures import tracebacks

        recorded = _recorded_stack(self.error_file_data)
        if recorded:
            return tracebacks.find_traceback(recorded)
        find = tracebacks.find_fatal_error if self.exitcode < 0 else tracebacks.find_traceback
        return find(self.stderr_tail)

    def _made_up_message(self) -> str:
        if self.ended_on_purpose:
            return f"{self.ended_on_purpose}; rallypoint ended PID {self.pid} with {self.signal_name()}"
        if self.exitcode < 0:
            reason = f": {self.killed_for_memory}" if self.killed_for_memory else ""
            return f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}{reason}"
        traceback = self.traceback()
        return traceback.exception if traceback else f"exited with code {self.exitcode} and left no traceback"


class ChildFailedError(Exception):
    """Workers failed and no restart was left. As text it is a summary that a person can act on, first cause first.

    `failures` maps global ranks to what is known of them.
    """

    def __init__(self, name: str, failures: dict[int, ProcessFailure]) -> None:
        super().__init__(name, failures)  # both, so that the error survives pickling
        self.name = name
        self.failures = failures
        # What the verdict on a job of several nodes says: how the cause ended, and whether it was a worker of another node.
        self.cause_exitcode: int | None = None
        self.is_cause_elsewhere = False

    def __str__(self) -> str:
        return self.format_msg()

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """The rank that failed first, and how; of two at the same instant, the lower rank."""
        if not self.failures:
            from rallypoint.errors import UsageError

            raise UsageError(f"{self.name} failed, but no worker's failure is known")
        rank = min(self.failures, key=lambda rank: (self.failures[rank].failed_at, rank))
        return rank, self.failures[rank]

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        from rallypoint.failures import summary

        return summary.summarize(self, boarder_delim, section_delim)


def _read(path: str, pid: int) -> dict[str, Any] | None:
    """The error file's content, or None, with a line about it if there is a file but it cannot be used."""
    if not os.path.isfile(path):
        return None
    from rallypoint.base import report
    from rallypoint.failures import error_files

    try:
        return error_files.read_error_file(path)
    except (OSError, ValueError) as why:
        report.warn(f"the error file {path} of pid {pid} is not used: {why}")
        return None


def _recorded_text(data: dict[str, Any]) -> str:
    message = data.get("message", "")
    if isinstance(message, dict):
        message = message.get("message", "")
    return message if isinstance(message, str) else str(message)


def _extra_info(data: dict[str, Any]) -> dict[str, Any]:
    message = data.get("message")
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    return extra if isinstance(extra, dict) else {}


def _recorded_stack(data: dict[str, Any]) -> str:
    """Some programs write the stack as one text, some as a list of lines."""
    stack = _extra_info(data).get("py_callstack", "")
    return "".join(map(str, stack)) if isinstance(stack, list) else str(stack)


def _recorded_s(data: dict[str, Any]) -> float | None:
    return _number(_extra_info(data).get("timestamp", data.get("timestamp")), _YEAR_10000_S)


def _recorded_exactly_s(data: dict[str, Any]) -> float | None:
    nanoseconds = _number(_extra_info(data).get("timestamp_ns"), _YEAR_10000_S * 1e9)
    return nanoseconds / 1e9 if nanoseconds is not None else None


def _number(value: object, limit: float) -> float | None:
    """Foreign programs write numbers, texts, or nonsense."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) else -1.0
    except (ValueError, OverflowError):
        return None
    return number if 0 <= number < limit else None
