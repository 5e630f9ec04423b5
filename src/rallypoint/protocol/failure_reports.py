"""What one node tells the others about its workers that failed: bounded, whatever they wrote and however many they are.

A report names at most `NAMED_MAX` failures, fewer where they are wordy, and counts the rest. A failure that reads like the
*echo* of a lost peer is the first to be left out, because it is never the cause if there is another. It is cut to size once,
by the node that makes it (`bounded`); whoever reads one refuses what is larger.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Mapping
from functools import partial

from rallypoint.base.bounded_json import (
    clip,
    count_fitting,
    read_count,
    read_fields,
    read_integer,
    read_list,
    read_seconds,
    read_text,
    size,
)
from rallypoint.base.records import Value

__all__ = [
    "ECHOES", "NAMED_MAX", "NAME_BYTES_MAX", "NODE_BYTES_MAX", "NodeReport", "WorkerFailure", "bounded", "decode_failure",
    "decode_report", "encode_failure", "encode_report",
]  # fmt: skip

NAMED_MAX = 16
NAME_BYTES_MAX = 64
NODE_BYTES_MAX = 255  # as long as any host's full name
_REPORT_BYTES_MAX = 16_000
_MESSAGE_BYTES_MAX, _MESSAGE_CHARS_MAX = 2_000, 500
_PATH_BYTES_MAX = 600

# What a worker's last words contain, in lower case, when somebody that it talked to has gone away.
ECHOES = (
    "connection reset by peer",  # TCP, as the C library says it
    "connection closed by peer",  # TCP, as collective libraries say it
    "connection was likely closed",  # a store's client whose server has gone
    "remote process exited",
    "broken pipe",
    "sigpipe",
    "socketexception",
    "nccl",  # its own errors, its watchdog and its timeouts all name it
    "heartbeat",
    "watchdog caught collective",
    "collective operation timeout",
    "recv operation to complete",
    "send operation to complete",
    "timed out waiting for clients",
)


class WorkerFailure(Value):
    """One worker that ended badly. `age_s` is how long before its node's report that was, on that node's own clock."""

    rank: int
    local_rank: int
    role: str
    host: str
    pid: int
    exitcode: int  # -N: ended by signal N
    message: str
    age_s: float
    log_file: str = ""
    stopped: bool = False  # it ended only after the launcher had told it to

    @property
    def what(self) -> str:
        """Why it ended, as well as is known."""
        return self.message or (f"exited with code {self.exitcode}" if self.exitcode >= 0 else f"was ended by {self._signal}")

    @property
    def _signal(self) -> str:
        try:
            return signal.Signals(-self.exitcode).name
        except ValueError:
            return f"signal {-self.exitcode}"

    @property
    def is_echo(self) -> bool:
        what = self.what.lower()
        return any(echo in what for echo in ECHOES)


class NodeReport(Value):
    """What failed on one node. `revision` is the store's when it got this node's first report."""

    node: str  # its stable name
    revision: int
    failures: tuple[WorkerFailure, ...]
    unnamed: int = 0  # further failures
    stopped: int = 0  # workers that the launcher stopped, beside any among the failures


def bounded(report: NodeReport) -> NodeReport:
    """The same, small enough for the store, the oldest failure first; a worker that was stopped is only a number."""
    failures = [_bounded_failure(failure) for failure in report.failures if not failure.stopped]
    failures.sort(key=lambda failure: (failure.is_echo, -failure.age_s, failure.rank))
    stopped = report.stopped + len(report.failures) - len(failures)
    empty = report.replace(node=clip(report.node, NODE_BYTES_MAX), failures=(), stopped=stopped)
    named = count_fitting(map(encode_failure, failures[:NAMED_MAX]), _REPORT_BYTES_MAX - size(_record(empty)))
    kept = sorted(failures[:named], key=lambda failure: (-failure.age_s, failure.rank))
    return empty.replace(failures=tuple(kept), unnamed=report.unnamed + len(failures) - named)


def _bounded_failure(failure: WorkerFailure) -> WorkerFailure:
    path = failure.log_file
    return failure.replace(
        role=clip(failure.role, NAME_BYTES_MAX),
        host=clip(failure.host, NAME_BYTES_MAX),
        message=clip(failure.message, _MESSAGE_BYTES_MAX, _MESSAGE_CHARS_MAX),
        age_s=float(failure.age_s) if math.isfinite(failure.age_s) else 0.0,
        log_file=path if clip(path, _PATH_BYTES_MAX) == path else "",  # half a path is of no use
    )


_FAILURE: Mapping[str, Callable[[object], object]] = {
    "rank": read_integer,
    "local_rank": read_integer,
    "role": partial(read_text, NAME_BYTES_MAX),
    "host": partial(read_text, NAME_BYTES_MAX),
    "pid": read_integer,
    "exitcode": read_integer,
    "message": partial(read_text, _MESSAGE_BYTES_MAX),
    "age_s": read_seconds,
    "log_file": partial(read_text, _PATH_BYTES_MAX),
}


def encode_failure(failure: WorkerFailure) -> dict[str, object]:
    """For JSON. One that was stopped is no failure, so that is not said."""
    return {name: getattr(failure, name) for name in _FAILURE}


def decode_failure(data: object) -> WorkerFailure:
    return WorkerFailure(**read_fields(data, _FAILURE))


_REPORT: Mapping[str, Callable[[object], object]] = {
    "node": partial(read_text, NODE_BYTES_MAX),
    "failures": partial(read_list, NAMED_MAX, decode_failure),
    "unnamed": read_count,
    "stopped": read_count,
}


def encode_report(report: NodeReport) -> bytes:
    """As it stands in the store, under 16 KiB if it is bounded. Without the revision, which only the store knows."""
    return json.dumps(_record(report)).encode()


def _record(report: NodeReport) -> dict[str, object]:
    return {**{name: getattr(report, name) for name in _REPORT}, "failures": [encode_failure(one) for one in report.failures]}


def decode_report(data: bytes, revision: int) -> NodeReport:
    """What `encode_report` made; ValueError, with the name of the field, for anything else."""
    return NodeReport(revision=revision, **read_fields(json.loads(data), _REPORT))
