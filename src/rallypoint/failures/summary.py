"""The text that a user reads when a job has failed: first cause first, then what to do, then everybody else.

Most users read one line, so the first line holds the whole story. The text has the same width everywhere and uses nothing beyond
ASCII of its own, because it ends up in terminals, log viewers, mails and tickets. Whatever workers wrote is bounded and stripped
of control characters before it is repeated.
"""

from __future__ import annotations

import signal
import time
from itertools import groupby

from rallypoint.base.text import ranges
from rallypoint.failures.process_failure import NOT_AVAILABLE
from rallypoint.failures.tracebacks import Frame, find_fatal_error, headline, outside_traceback, plain_lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.failures.process_failure import ChildFailedError, ProcessFailure

__all__ = ["summarize"]

_WIDTH = 80
_LINE_CHARS_MAX = 300
_MESSAGE_LINES_MAX = 12
_FRAMES_MAX = 6
_STDERR_LINES_MAX = 20
_OTHER_GROUPS_MAX = 8
_RANK_RANGES_MAX = 8  # a job may have thousands of ranks

_NO_LOG = "none was kept; --log-dir DIR with --tee 3 keeps all that workers write"
_ADVICE_FOR_MEMORY = "give the job more memory, or let it use less: smaller batches, fewer workers or data loaders."
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


def summarize(error: ChildFailedError, border: str, rule: str) -> str:
    """The whole text, between two borders."""
    if not error.failures:
        return _between(border, [f"{error.name} FAILED", _line_of(rule), "No worker's failure is known; see the lines above."])
    rank, first = error.get_first_failure()
    title = "First failure on this node, a victim of the cause above" if error.is_cause_elsewhere else "First cause"
    headline = _short(f"{error.name} FAILED: rank {rank} {_what_happened(first)}")
    lines = [headline, _line_of(rule), *_first_cause(title, rank, first)]
    others = _other_failures(rank, first, error.failures)
    return _between(border, [*lines, *([_line_of(rule), *others] if others else [])])


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
        *_section("error", plain_lines(failure.message.strip())[:_MESSAGE_LINES_MAX]),
        *_where(failure),
        *_stderr(failure),
        f"  log: {failure.log_file or _NO_LOG}",
        *([f"  error file: {failure.error_file}"] if _has_error_file(failure) else []),
        *_section("what to do", _advice(failure)),
    ]


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
    function = f" in {frame.function}" if frame.function else ""
    again = " (and again)" if times > 1 else ""
    place = _short(f"    {frame.file}:{frame.line}{function}{again}")
    return [place, _short(f"      {frame.source}")] if frame.source else [place]


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
    if failure.exitcode < 0:
        advice = [_ADVICE_BY_SIGNAL[name]] if name in _ADVICE_BY_SIGNAL else []
        if name in _CRASHES and not find_fatal_error(failure.stderr_tail):
            advice.append("With PYTHONFAULTHANDLER=1 in its environment, Python shows the line that it was in.")
        return advice
    return _exit_code_advice(failure.exitcode)


def _exit_code_advice(exitcode: int) -> list[str]:
    if exitcode in _ADVICE_BY_EXIT_CODE:
        return [_ADVICE_BY_EXIT_CODE[exitcode]]
    names = {128 + member.value: member.name for member in signal.Signals}
    if exitcode in names:
        return [f"exit code {exitcode}: shells and containers say this when {names[exitcode]} ended the program that they ran."]
    return []


def _other_failures(first_rank: int, first: ProcessFailure, failures: dict[int, ProcessFailure]) -> list[str]:
    """One line for all who failed alike, in the order in which they did."""
    alike: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(failures.keys() - {first_rank}, key=lambda rank: (failures[rank].failed_at, rank)):
        alike.setdefault((_exit_text(failures[rank]), _what_happened(failures[rank])), []).append(rank)
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
