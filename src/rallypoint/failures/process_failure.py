"""What is known about workers that failed: one record each, and the error that carries them all to the user.

A failure is put together from what its process left behind, best source first: the error file, the signal, the traceback in the
tail of its stderr, the bare exit code. Nothing here raises because one of them is missing or broken: this is the failure path.

The text that the user reads has the first cause first, then what to do, then everybody else. Most users read one line, so the
first line holds the whole story. The text has the same width everywhere and uses nothing beyond ASCII of its own, because it ends
up in terminals, log viewers, mails and tickets. Whatever workers wrote is bounded and stripped of control characters before it is
repeated.
"""

from __future__ import annotations

import os
import signal
import time
from itertools import groupby

from rallypoint.base.records import Record, field
from rallypoint.base.text import failure_kind, ranges, runs, who_of, without_numbers
from rallypoint.errors import UsageError, plainly_told
from rallypoint.failures.error_files import WISH
from rallypoint.failures.hints import hint_for
from rallypoint.failures.tracebacks import (
    Frame,
    Traceback,
    find_fatal_error,
    find_traceback,
    headline,
    outside_traceback,
    plain_lines,
)
from rallypoint.protocol.restarts import WISHES, looks_doubtful, looks_hopeless

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["HUNG", "NOT_AVAILABLE", "ChildFailedError", "ProcessFailure"]

NOT_AVAILABLE = "<N/A>"
HUNG = "it hung: "  # how the reason begins for which a worker that hangs is ended
_YEAR_10000_S = 253_402_300_800.0

_WIDTH = 80
_LINE_CHARS_MAX = 300
_MESSAGE_LINES_MAX = 12
_FRAMES_MAX = 6
_STDERR_LINES_MAX = 20
_OTHER_GROUPS_MAX = 8
_RANK_RANGES_MAX = 8  # a job may have thousands of ranks

_NO_LOG = "none was kept; --log-dir DIR with --tee 3 keeps all that workers write"
_ADVICE_FOR_MEMORY = "give the job more memory, or let it use less: smaller batches, fewer workers or data loaders."
_ADVICE_FOR_FULL_DISK = (
    "the disk of the log folder is full, and what a worker writes there fails: make room, choose another --log-dir, or let "
    "--log-max-size bound the logs."
)
_ADVICE_BY_SIGNAL = {
    "SIGKILL": "SIGKILL, sender unknown: no out-of-memory kill was seen. Who sent it may stand in `dmesg -T | grep -i kill`, or "
    "in the scheduler's log (`sacct -j JOBID`, `kubectl describe pod`).",
    "SIGSEGV": "SIGSEGV: native code (an extension, a driver, a library) touched memory that it must not.",
    "SIGBUS": "SIGBUS: a memory-mapped file could not be read or grown; often /dev/shm is full: see `df -h /dev/shm`.",
    "SIGILL": "SIGILL: native code was built for another kind of CPU than this one.",
    "SIGFPE": "SIGFPE: native code divided an integer by zero.",
    "SIGABRT": "SIGABRT: the program or a library called abort(); its reason is usually the last thing on stderr.",
    "SIGPIPE": "SIGPIPE: it wrote to a pipe or socket whose other end was gone.",
    "SIGXCPU": "SIGXCPU: it used up its CPU time limit: see `ulimit -t`.",
    "SIGXFSZ": "SIGXFSZ: it passed the file size limit: see `ulimit -f`.",
    "SIGSYS": "SIGSYS: it made a system call that a sandbox (seccomp) forbids.",
    "SIGTERM": "SIGTERM: somebody else asked it to stop: often a scheduler, at a time limit or a preemption.",
    "SIGINT": "SIGINT: somebody else interrupted it.",
    "SIGHUP": "SIGHUP: its terminal or session was closed; `nohup` or a terminal multiplexer keeps a job running.",
}
_CRASHES = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT")
_ADVICE_BY_EXIT_CODE = {
    126: "exit code 126: the command was found but may not be executed; see `ls -l` and its first line.",
    127: "exit code 127: a command or a shared library was not found; see PATH and LD_LIBRARY_PATH.",
}


class ProcessFailure(Record):
    """One worker that failed. `message` says why in its own words; `error_file` is NOT_AVAILABLE if it left no readable one.

    >>> from rallypoint import ProcessFailure
    >>> ProcessFailure(local_rank=0, pid=4711, exitcode=-9, error_file="").signal_name()
    'SIGKILL'
    """

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
    no_log_advice: str = field(default="", kw_only=True)  # where there is no log: how to get one
    stacks_file: str = field(default="", kw_only=True)  # what it and the others did when it was found to hang
    ended_at: float | None = field(default=None, kw_only=True)  # wall clock, seconds
    killed_for_memory: str = field(default="", kw_only=True)  # what the kernel said, as a sentence
    ended_on_purpose: str = field(default="", kw_only=True)  # why rallypoint itself ended it, as the end of a sentence
    full_log_folder: str = field(default="", kw_only=True)  # where its log files are, if their disk takes nothing more
    failed_before_s: float = field(default=0.0, kw_only=True)  # how long before its end, if that was on purpose
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
        extra = _extra_info(self.error_file_data)
        recorded_s = _number(extra.get("timestamp", self.error_file_data.get("timestamp")), _YEAR_10000_S)
        self.timestamp = int(recorded_s or self.ended_at or time.time())

    @property
    def failed_at(self) -> float:
        """When it failed, in seconds of this host's clock, as exactly as is known.

        An exception comes before the process's end, by seconds where the teardown is slow. Old error files know only the whole
        second of it, so the end of that second or of the process, whichever came first, is the best guess.
        """
        exact_ns = _number(_extra_info(self.error_file_data).get("timestamp_ns"), _YEAR_10000_S * 1e9)
        if exact_ns is not None:
            return exact_ns / 1e9
        if self.ended_at is None:
            return float(self.timestamp)
        if self.failed_before_s:
            return self.ended_at - self.failed_before_s
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
        stack = _extra_info(self.error_file_data).get("py_callstack", "")
        recorded = "".join(map(str, stack)) if isinstance(stack, list) else str(stack)  # a list of lines, or one text
        if recorded:
            return find_traceback(recorded)
        find = find_fatal_error if self.exitcode < 0 else find_traceback
        return find(self.stderr_tail)

    @property
    def place(self) -> str:
        """The innermost call, as ``train.py:12 in main``. Where none is known, an exit code is told apart by the last line on
        stderr, numbers aside; a signal is not, as it may come anywhere.
        """
        traceback = self.traceback()
        if traceback is not None and traceback.frames:
            frame = traceback.frames[-1]
            return f"{os.path.basename(frame.file)}:{frame.line}" + (f" in {frame.function}" if frame.function else "")
        lines = plain_lines(self.stderr_tail.strip()) if self.exitcode > 0 else []
        return without_numbers(_short(lines[-1])) if lines else ""

    @property
    def hung(self) -> bool:
        """Whether it was ended because it hung."""
        return self.ended_on_purpose.startswith(HUNG)

    @property
    def wish(self) -> str:
        """What it asked for when it failed by `rallypoint.worker.fail`; nothing else can be asked for."""
        said = _extra_info(self.error_file_data).get(WISH)
        return said if isinstance(said, str) and said in WISHES else ""

    @property
    def looks_hopeless(self) -> bool:
        return looks_hopeless(self.exitcode, self.message, self.place)

    @property
    def looks_doubtful(self) -> bool:
        return looks_doubtful(self.exitcode, self.message)

    @property
    def frames(self) -> tuple[tuple[str, str], ...]:
        """The last calls, the innermost last: where each was, and the line of the program, if Python showed it."""
        traceback = self.traceback()
        if traceback is None:
            return ()
        return tuple((_place_of(frame), frame.source) for frame in traceback.frames[-_FRAMES_MAX:])

    @property
    def advice(self) -> str:
        """What is known to help, in a sentence; empty where nothing is."""
        return next(iter(_advice(self)), "")

    @property
    def kind(self) -> tuple[int, str, str]:
        """Equal for failures that are the same."""
        return failure_kind(self.exitcode, _what_happened(self), self.place)

    def _made_up_message(self) -> str:
        if self.ended_on_purpose:
            return f"{self.ended_on_purpose}; rallypoint ended PID {self.pid} with {self.signal_name()}"
        if self.exitcode < 0:
            reason = f": {self.killed_for_memory}" if self.killed_for_memory else ""
            return f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}{reason}"
        traceback = self.traceback()
        if traceback:
            return traceback.exception
        if self.full_log_folder:
            return f"exited with code {self.exitcode}; the disk of the log folder {self.full_log_folder} is full"
        return f"exited with code {self.exitcode} and left no traceback"


class ChildFailedError(Exception):
    """Workers failed and no restart was left. As text it is a summary that a person can act on, first cause first.

    `failures` maps global ranks to what is known of them.

    >>> from rallypoint import ChildFailedError, launch
    >>> try:
    ...     launch("false", nproc=1)
    ... except ChildFailedError as error:
    ...     rank, failure = error.get_first_failure()
    ...     print(f"rank {rank} ended with {failure.exitcode}")
    rank 0 ended with 1
    """

    _render_traceback_ = plainly_told

    def __init__(self, name: str, failures: dict[int, ProcessFailure]) -> None:
        super().__init__(name, failures)  # both, so that the error survives pickling
        self.name = name
        self.failures = failures
        self.world_size = 0  # workers of the whole job, where that is known
        self.is_hopeless = False  # no restart could have helped, however many were left
        # What the verdict on a job of several nodes says: the cause in words, whose it was, how that ended, and which others here
        # failed as it did.
        self.cause_text = ""
        self.cause_rank: int | None = None
        self.cause_exitcode: int | None = None
        self.ranks_like_cause: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.format_msg()

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """The rank that failed first by the failures' timestamps, and how; within a second, as far as is known."""
        if not self.failures:
            raise UsageError(f"{self.name} failed, but no worker's failure is known")
        rank = min(self.failures, key=lambda rank: (self.failures[rank].timestamp, self.failures[rank].failed_at, rank))
        return rank, self.failures[rank]

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        return _summarize(self, boarder_delim, section_delim)


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


def _number(value: object, limit: float) -> float | None:
    """Foreign programs write numbers, texts, or nonsense."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) else -1.0
    except (ValueError, OverflowError):
        return None
    return number if 0 <= number < limit else None


# --- the summary -----------------------------------------------------------------------------------------------------------


def _summarize(error: ChildFailedError, border: str, rule: str) -> str:
    """The whole text, between two borders."""
    if not error.failures:
        return _between(border, [f"{error.name} FAILED", _line_of(rule), "No worker's failure is known; see the lines above."])
    rank, first = _most_telling(error)
    same = sorted(one for one, failure in error.failures.items() if one != rank and failure.kind == first.kind)
    who = who_of(runs([rank, *same]), error.world_size)
    headline = _short(f"{error.name} FAILED: {error.cause_text or f'{who} {_what_happened(first)}'}")
    lines = [headline, _line_of(rule), *_first_cause(_title(error, rank), rank, first)]
    if same:
        lines.append(f"  and {who_of(runs(same))}: the same")
    others = _other_failures(first, {one: error.failures[one] for one in error.failures.keys() - {rank, *same}})
    return _between(border, [*lines, *([_line_of(rule), *others] if others else [])])


def _most_telling(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The cause of the whole job, if it is ours, else one like it, else the first here: a screen has one cause."""
    for rank in (error.cause_rank, *sorted(error.ranks_like_cause)):
        if rank is not None and rank in error.failures:
            return rank, error.failures[rank]
    return error.get_first_failure()


def _title(error: ChildFailedError, rank: int) -> str:
    if error.cause_rank is None or rank == error.cause_rank:
        return "First cause"
    return (
        "The same on this node" if rank in error.ranks_like_cause else "First failure on this node, a victim of the cause above"
    )


def _between(border: str, lines: list[str]) -> str:
    return "\n".join(map(_printable, [_line_of(border), *lines, _line_of(border)]))


def _line_of(delimiter: str) -> str:
    return (delimiter * _WIDTH)[:_WIDTH]


def _what_happened(failure: ProcessFailure) -> str:
    """The end of a sentence that begins with the rank; equal for workers that failed alike."""
    if failure.ended_on_purpose:
        return f"was ended by rallypoint: {failure.ended_on_purpose}"
    if _died_of_signal(failure):
        reason = failure.killed_for_memory
        memory = ": probably out of memory" if reason.startswith("probably") else ": out of memory" if reason else ""
        return f"was killed by {_signal_text(failure)}{memory}"
    text, is_exception = headline(failure.message)
    if is_exception:
        return f"raised {text}"
    return text if text.startswith("exited with code ") else f"failed: {text}"


def _died_of_signal(failure: ProcessFailure) -> bool:
    """Whether the signal is all that is known; an error file says more."""
    return failure.exitcode < 0 and not _has_error_file(failure)


def _has_error_file(failure: ProcessFailure) -> bool:
    return failure.error_file != NOT_AVAILABLE


def _signal_text(failure: ProcessFailure) -> str:
    name = failure.signal_name()
    return name if name.startswith("SIG") else f"signal {-failure.exitcode}"


def _exit_text(failure: ProcessFailure) -> str:
    return f"exit code {failure.exitcode}" + (f" ({_signal_text(failure)})" if failure.exitcode < 0 else "")


def _first_cause(title: str, rank: int, failure: ProcessFailure) -> list[str]:
    return [
        f"{title}, at {_time_text(failure.failed_at)}:",
        f"  host: {failure.hostname}   rank: {rank} (local_rank: {failure.local_rank})   pid: {failure.pid}   "
        + _exit_text(failure).replace("code ", "code: ", 1),
        *_section("error", plain_lines(_told_message(failure).strip())[:_MESSAGE_LINES_MAX]),
        *_where(failure),
        *_stderr(failure),
        f"  log: {failure.log_file or failure.no_log_advice or _NO_LOG}",
        *([f"  stacks: {failure.stacks_file}"] if failure.stacks_file else []),
        *([f"  error file: {failure.error_file}"] if _has_error_file(failure) else []),
        *_section("what to do", _advice(failure)),
    ]


def _told_message(failure: ProcessFailure) -> str:
    """With what an error handler of the user's own adds where the signal is all that is known."""
    if not _died_of_signal(failure):
        return failure.message
    from rallypoint.failures import error_files

    try:
        told = error_files.get_error_handler().maybe_enrich_signal_failure_message(failure.message, failure.error_file)
    except Exception:  # it may be anybody's, also one that does not know this method; and here a failure is told
        return failure.message
    return told if isinstance(told, str) else failure.message


def _section(title: str, lines: list[str]) -> list[str]:
    """``title: text`` for one line, a title and an indented block for more, nothing for none."""
    shown = [_short(line) for line in lines]
    if len(shown) <= 1:
        return [f"  {title}: {line}" for line in shown]
    return [f"  {title}:", *(f"    {line}" for line in shown)]


def _where(failure: ProcessFailure) -> list[str]:
    traceback = failure.traceback()
    if traceback is None or not traceback.frames:
        return []
    lines: list[str] = []
    for frame, same in groupby(traceback.frames[-_FRAMES_MAX:]):
        lines += _frame_lines(frame, len(list(same)))
    return ["  at:" if len(traceback.frames) <= _FRAMES_MAX else f"  at (the last {_FRAMES_MAX} calls):", *lines]


def _frame_lines(frame: Frame, times: int) -> list[str]:
    again = " (and again)" if times > 1 else ""
    place = _short(f"    {_place_of(frame)}{again}")
    return [place, _short(f"      {frame.source}")] if frame.source else [place]


def _place_of(frame: Frame) -> str:
    return f"{frame.file}:{frame.line}" + (f" in {frame.function}" if frame.function else "")


def _stderr(failure: ProcessFailure) -> list[str]:
    """Only what the lines above have not said already; beside a signal, a traceback is as good as any other line."""
    tail = failure.stderr_tail
    lines = [line for line in (plain_lines(tail) if _died_of_signal(failure) else outside_traceback(tail)) if line.strip()]
    if not lines:
        return []
    return ["  stderr, last lines:", *(_short(f"    {line}") for line in lines[-_STDERR_LINES_MAX:])]


def _advice(failure: ProcessFailure) -> list[str]:
    """What is known to help; nothing where nothing is known."""
    name = failure.signal_name()
    if failure.ended_on_purpose:
        return []
    if failure.killed_for_memory:
        return [_ADVICE_FOR_MEMORY]
    if failure.full_log_folder:
        return [_ADVICE_FOR_FULL_DISK]
    if failure.exitcode < 0:
        advice = [_ADVICE_BY_SIGNAL[name]] if name in _ADVICE_BY_SIGNAL else []
        if name in _CRASHES and not find_fatal_error(failure.stderr_tail):
            advice.append("With PYTHONFAULTHANDLER=1 in its environment, Python shows the line that it was in.")
        return advice
    hint = hint_for(headline(failure.message)[0])
    return [hint] if hint else _exit_code_advice(failure.exitcode)


def _exit_code_advice(exitcode: int) -> list[str]:
    if exitcode in _ADVICE_BY_EXIT_CODE:
        return [_ADVICE_BY_EXIT_CODE[exitcode]]
    names = {128 + member.value: member.name for member in signal.Signals}
    if exitcode in names:
        return [f"exit code {exitcode}: shells and containers say this when {names[exitcode]} ended the program that they ran."]
    return []


def _other_failures(first: ProcessFailure, failures: dict[int, ProcessFailure]) -> list[str]:
    """One line for all who failed alike, in the order in which they did."""
    alike: dict[tuple[int, str, str], list[int]] = {}
    for rank in sorted(failures, key=lambda rank: (failures[rank].failed_at, rank)):
        alike.setdefault(failures[rank].kind, []).append(rank)
    if not alike:
        return []
    groups = [_group_line(ranks, failures, first.failed_at) for ranks in alike.values()]
    rest = sum(len(ranks) for ranks in list(alike.values())[_OTHER_GROUPS_MAX:])
    more = [f"  and {rest} more, each in its own way; see their logs"] if rest else []
    return ["Other failures:", *groups[:_OTHER_GROUPS_MAX], *more]


def _group_line(ranks: list[int], failures: dict[int, ProcessFailure], start_s: float) -> str:
    earliest = failures[ranks[0]]
    after = f"at +{max(earliest.failed_at - start_s, 0.0):.3f} s"
    what = _what_happened(earliest)
    if len(ranks) == 1:
        details = f"local_rank {earliest.local_rank}, pid {earliest.pid}, {_exit_text(earliest)}"
        return _short(f"  rank {ranks[0]} ({details}, host {earliest.hostname}) {after}: {what}")
    hosts = sorted({failures[rank].hostname for rank in ranks})
    where = f"host {hosts[0]}" if len(hosts) == 1 else f"{len(hosts)} hosts"
    named = ranges(ranks, ", ", _RANK_RANGES_MAX)
    return _short(f"  ranks {named} ({len(ranks)} workers on {where}, {_exit_text(earliest)}) from {after[3:]}: {what}")


def _time_text(seconds: float) -> str:
    milliseconds = int(seconds * 1000)
    local = time.localtime(milliseconds // 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', local)}.{milliseconds % 1000:03}{time.strftime('%z', local)}"


def _short(line: str) -> str:
    """For what workers wrote; a path is never cut, it would be of no use."""
    return line if len(line) <= _LINE_CHARS_MAX else line[: _LINE_CHARS_MAX - 3] + "..."


def _printable(line: str) -> str:
    return "".join(char if char.isprintable() else " " for char in line.expandtabs(4)).rstrip()
