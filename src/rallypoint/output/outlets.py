"""Where each worker's output goes, decided from the log destinations, and carried there.

Three ways out, each as cheap as it can be. Output that nobody but the console wants is inherited. Output that only a file wants
is written there by the worker itself. Everything else passes through the pump: what is shown and kept, what has a size cap, what
several workers write to one file or pipe, where their lines would come apart, and always stderr that is not redirected, so that
its last lines can be told when the worker fails.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Collection, Mapping

from rallypoint.base import defaults, report
from rallypoint.base.records import Value
from rallypoint.base.signals import inbox
from rallypoint.output.log_specs import FOLDERS_TIMEOUT_S, LogFolder, LogsDest, Std, file_clerk, open_log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.output.console import Console
    from rallypoint.output.pump import StreamPump

__all__ = ["Outlets", "Route", "mixes_lines"]

PROBE_BYTES = 4096
_APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class Route(Value):
    """Where one stream of one worker goes through the pump, besides being remembered."""

    local_rank: int
    stream: Std
    log_file: str = ""
    console: Console | None = None
    prefix: str = ""
    filters: tuple[str, ...] = ()
    filtered_file: str = ""
    is_inherited: bool = False  # the worker is to find things as if our own stream were its
    json_fields: str = ""  # each line is to be shown as a JSON object that has these
    keeps_objects: bool = False  # unless it is one from another launcher


class Outlets:
    """The ends of all streams of one group of workers."""

    def __init__(
        self,
        logs: LogsDest,
        ranks: Collection[int],
        log_max_bytes: int | None = None,
        folder: LogFolder | None = None,
        speakers: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        """With `speakers`, which are the workers' environments, lines are shown as JSON that says whose they are."""
        self._logs = logs
        self._is_stdout_mixed = sum(not logs.stdouts.get(rank) for rank in ranks) > 1 and mixes_lines(Std.OUT)
        self._speakers = speakers
        self._log_max_bytes = log_max_bytes
        self._folder = folder
        self._files: dict[str, int] = {}  # those that workers write to themselves
        self._pump: StreamPump | None = None
        self._workers_ends: list[int] = []
        self._awaited: set[int] = set()
        self._our_ends: list[tuple[int, Route, bool]] = []  # and whether the console shows it

    def make_filtered_files(self, streams: Std) -> None:
        """Make the files for filtered lines of these streams: they are there as soon as the workers are, matched or not."""
        wanted = ((Std.OUT, self._logs.filtered_stdout), (Std.ERR, self._logs.filtered_stderr))
        paths = [file for stream, file in wanted if stream & streams and file]
        if paths:
            with contextlib.suppress(OSError):  # told by the pump, which opens them again
                file_clerk.do(lambda: _close_all(_open_all(self._folder, paths)), FOLDERS_TIMEOUT_S, inbox.raise_pending)

    def open_files(self) -> None:
        """Open what workers write to themselves. Should that fail, or hang, their output goes nowhere, and they run."""
        streams = [(Std.OUT, self._logs.stdouts), (Std.ERR, self._logs.stderrs)]
        paths = [file for stream, files in streams for rank, file in files.items() if self._is_the_workers_own(rank, stream)]
        if not paths:
            return
        try:
            self._files = file_clerk.do(
                lambda: _open_all(self._folder, paths), FOLDERS_TIMEOUT_S, inbox.raise_pending, discard=_close_all
            )
        except OSError as error:
            report.warn(f"what workers write is lost, as {error.filename or paths[0]} cannot be opened: {error.strerror}")
            self._files = {path: os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC) for path in paths}

    def open(self, local_rank: int, stream: Std, prefix: str, filters: tuple[str, ...]) -> int:
        """The file descriptor that the worker is to find as this stream."""
        file, is_tee = self._destination(local_rank, stream)
        if stream == Std.OUT and not file and not self._is_stdout_mixed and self._speakers is None:
            return int(stream)
        if self._is_the_workers_own(local_rank, stream):
            return self._files[file]
        route = Route(local_rank, stream, file if file != os.devnull else "", is_inherited=stream == Std.OUT and not file)
        if is_tee:
            filtered_file = self._logs.filtered_stdout if stream == Std.OUT else self._logs.filtered_stderr
            route = route.replace(prefix=prefix, filters=filters, filtered_file=filtered_file)
        if self._speakers is not None:
            from rallypoint.output.json_lines import fields_of_worker

            route = route.replace(json_fields=fields_of_worker(local_rank, self._speakers.get(local_rank, {}), stream))
        our_end, end = os.pipe()
        self._our_ends.append((our_end, route, is_tee or not file))
        self._workers_ends.append(end)
        return end

    def _destination(self, local_rank: int, stream: Std) -> tuple[str, bool]:
        """The file, if there is one, and whether the console shows it as well."""
        if stream == Std.OUT:
            return self._logs.stdouts.get(local_rank, ""), local_rank in self._logs.tee_stdouts
        return self._logs.stderrs.get(local_rank, ""), local_rank in self._logs.tee_stderrs

    def _is_the_workers_own(self, local_rank: int, stream: Std) -> bool:
        """Whether the worker writes to the file itself: not if that has a size cap, nor stderr that is kept as a tail only."""
        file, is_tee = self._destination(local_rank, stream)
        must_pass_the_pump = stream == Std.ERR if file == os.devnull else self._log_max_bytes is not None
        return bool(file) and not is_tee and not must_pass_the_pump

    def hand_over(self) -> None:
        """The workers have their ends; close ours, and start to listen. The pump is imported while the workers start."""
        from rallypoint.output.console import console_writer, inherited_writer
        from rallypoint.output.pump import StreamPump

        self._close_workers_ends()
        self._pump = StreamPump(defaults.STDERR_TAIL_BYTES, self._log_max_bytes, self._folder)
        for end, route, is_shown in self._our_ends:
            write = inherited_writer(route.stream) if route.is_inherited else console_writer(route.stream)
            self._pump.attach(route.replace(console=write) if is_shown else route, end)
        self._our_ends.clear()
        self._pump.start()

    def worker_ended(self, local_rank: int) -> None:
        if self._pump is not None:
            self._pump.worker_ended(local_rank)

    def await_drained(self, local_ranks: set[int], timeout_s: float) -> None:
        """Wait until all that these workers wrote has arrived; once for each, as a stuck console would hold us each time."""
        if self._pump is None:
            return
        deadline = time.monotonic() + timeout_s
        for rank in sorted(local_ranks - self._awaited):
            self._awaited.add(rank)
            self._pump.wait_drained(rank, max(0.0, deadline - time.monotonic()))

    def stderr_tail(self, local_rank: int) -> str:
        """The last lines that an ended worker wrote to stderr, as far as they have passed here."""
        if self._pump is None:
            return ""
        self._pump.wait_carried(local_rank, timeout_s=1.0)
        return self._pump.tail(local_rank, Std.ERR)

    def keep_tail(self, folder: str, tail: str) -> str:
        """Write the last lines of a failed worker without a log beside its error file; the path of that, or nothing."""
        if not tail or not folder:
            return ""
        path = os.path.join(folder, "stderr_tail.log")
        try:
            with open(open_log(self._folder, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8") as file:
                file.write(tail)
        except OSError as error:
            report.warn(f"the last lines of stderr could not be kept in {path}: {error.strerror}")
            return ""
        return path

    def file_tail(self, file: str) -> str:
        """The last lines of a log file."""
        try:
            with open(open_log(self._folder, file, os.O_RDONLY), "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - defaults.STDERR_TAIL_BYTES))
                return log.read().decode(errors="replace")
        except OSError:  # it was deleted; the summary does without
            return ""

    def full_folder(self, local_rank: int) -> str:
        """The log folder, if this worker writes to files in it itself, and its disk takes nothing more; else nothing."""
        for stream in (Std.OUT, Std.ERR):
            file, _ = self._destination(local_rank, stream)
            if self._is_the_workers_own(local_rank, stream) and file != os.devnull and self._is_on_full_disk(file):
                return self._folder.path if self._folder is not None else os.path.dirname(file)
        return ""

    def _is_on_full_disk(self, file: str) -> bool:
        """Also tried, as the number of free blocks does not tell of quotas."""
        try:
            if os.statvfs(os.path.dirname(file)).f_bavail == 0:
                return True
            probe = os.open(os.path.dirname(file), os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC)  # a file that nobody else sees
            try:
                return os.write(probe, bytes(PROBE_BYTES)) < PROBE_BYTES
            finally:
                os.close(probe)
        except OSError as error:
            return error.errno in (errno.ENOSPC, errno.EDQUOT)

    def quiet_interrupts(self) -> None:
        if self._pump is not None:
            self._pump.quiet_interrupts()

    def close(self, timeout_s: float) -> None:
        self._close_workers_ends()
        for end, *_ in self._our_ends:
            os.close(end)
        self._our_ends.clear()
        if self._pump is not None:
            self._pump.close(timeout_s)

    def _close_workers_ends(self) -> None:
        for end in self._workers_ends:
            os.close(end)
        self._workers_ends.clear()
        _close_all(self._files)
        self._files = {}


def mixes_lines(fd: int) -> bool:
    """Whether lines of several writers come apart there, because programs fill a buffer first, and cut it anywhere.

    On a terminal they write line by line. And what goes to a device such as /dev/null is not read as lines.
    """
    try:
        mode = os.fstat(fd).st_mode
    except OSError:  # there is none
        return False
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _open_all(folder: LogFolder | None, paths: list[str]) -> dict[str, int]:
    opened: dict[str, int] = {}
    try:
        for path in paths:
            if path not in opened:
                opened[path] = open_log(folder, path, _APPENDING, 0o644)
    except OSError:
        _close_all(opened)
        raise
    return opened


def _close_all(opened: dict[str, int]) -> None:
    for fd in opened.values():
        os.close(fd)
