"""Where the workers' output goes: which stream of which local rank, and to which file.

A run has one folder, and every group of workers that it starts has its own folder in it, which no later one touches:
what explains a failure is written before the restart, and must still be there after it.

    <log_dir>/<run_id>_<random>/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}
    <log_dir>/<run_id>_<random>/attempt_<n>/{filtered_stdout.log,filtered_stderr.log}
    <log_dir>/<run_id>_<random>/events.jsonl

Nothing is made before ``reify``. Without a log folder a private temporary one is used, which goes away again with
``discard_if_empty`` when nothing was logged but the events of the run itself.
"""

from __future__ import annotations

import errno
import os
import stat
from abc import ABC, abstractmethod
from enum import IntFlag

from rallypoint import defaults
from rallypoint.errors import NotAFolderError, UsageError
from rallypoint.records import Record, field

__all__ = ["DefaultLogsSpecs", "LogsDest", "LogsSpecs", "Std", "check_log_dir", "to_map"]

INHERITED = ""  # the path that stands for "the launcher's own stream"


class Std(IntFlag):
    """Which of a worker's two output streams are meant."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Read ``"3"`` (every rank) or ``"0:1,10:3"`` (local rank 0: stdout, local rank 10: both; the others: none)."""
        if ":" not in vm:
            return _parse_std(vm, vm)
        pairs = [pair.partition(":") for pair in vm.split(",")]
        return {_parse_rank(rank, vm): _parse_std(value, vm) for rank, _, value in pairs}


def _parse_std(text: str, whole: str) -> Std:
    if text.strip() not in ("0", "1", "2", "3"):
        raise _std_error(f"{text!r} is not a choice of streams", whole)
    return Std(int(text))


def _parse_rank(text: str, whole: str) -> int:
    rank = text.strip()
    if not (rank.isascii() and rank.isdigit() and len(rank) <= 9):
        raise _std_error(f"{text!r} is not a local rank", whole)
    return int(rank)


def _std_error(problem: str, whole: str) -> UsageError:
    return UsageError(
        f"redirects/tee {whole!r}: {problem}. Use 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
        "or name local ranks, as in 0:1,10:3."
    )


def to_map(val_or_map: Std | dict[int, Std], local_world_size: int) -> dict[int, Std]:
    """One choice per local rank; ranks that a mapping does not name have none, and those beyond the world are ignored."""
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    return {rank: val_or_map.get(rank, Std.NONE) for rank in range(local_world_size)}


class LogsDest(Record):
    """Where each local rank's streams go: a path, or ``""`` for the launcher's own stream. ``tee_*`` hold only tee'd ranks."""

    stdouts: dict[int, str] = field(factory=dict)
    stderrs: dict[int, str] = field(factory=dict)
    tee_stdouts: dict[int, str] = field(factory=dict)
    tee_stderrs: dict[int, str] = field(factory=dict)
    error_files: dict[int, str] = field(factory=dict)
    filtered_stdout: str = field(factory=str)
    filtered_stderr: str = field(factory=str)


class LogsSpecs(ABC):
    """What the user wants logged, and how that becomes files; replaceable through ``--logs-specs``."""

    log_max_bytes: int | None = None  # the most that one log file may hold; the launcher sets it

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make what is needed on the disk for a group of workers, given each one's environment by local rank."""

    @property
    def root_log_dir(self) -> str:
        """The folder under which everything is logged."""
        return self._root_log_dir or ""


class DefaultLogsSpecs(LogsSpecs):
    """The layout that the module's docstring shows. ``/dev/null`` as the log folder keeps no file at all."""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._is_temporary = not log_dir
        super().__init__(log_dir or _temporary_path(), redirects, tee, local_ranks_filter)
        self._run_log_dir = ""
        self._attempt_dir = ""
        self._last_attempt = -1

    def __repr__(self) -> str:
        return (
            f"DefaultLogsSpecs(root_log_dir={self.root_log_dir!r}, redirects={self._redirects!r}, tee={self._tee!r}, "
            f"local_ranks_filter={self._local_ranks_filter!r})"
        )

    @property
    def run_log_dir(self) -> str:
        """This run's own folder, to be shown to the user; empty before the first ``reify``."""
        return self._run_log_dir

    @property
    def is_temporary(self) -> bool:
        """Whether the user has named no folder."""
        return self._is_temporary

    @property
    def attempt_dir(self) -> str:
        """The folder of the last group of workers; empty where there is none."""
        return self._attempt_dir

    @property
    def keeps_output(self) -> bool:
        """Whether any worker's output goes to a file."""
        return bool(self._redirects or self._tee) and self.root_log_dir != os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make one new attempt folder with one for each worker, name all files in it, and tell workers of their error file."""
        env = next(iter(envs.values()), {})
        restart_count = int(env.get(defaults.ENV_RESTART_COUNT, "0"))
        try:
            attempt_dir = self._make_attempt_folder(env.get(defaults.ENV_RUN_ID, defaults.RUN_ID_CLI), restart_count)
            for rank in envs if attempt_dir else ():
                os.mkdir(os.path.join(attempt_dir, str(rank)))
        except OSError as error:
            culprit = defaults.ENV_TMPDIR if self._is_temporary else "--log-dir"
            raise _log_dir_error(self.root_log_dir, str(error), culprit) from error
        self._attempt_dir = attempt_dir
        dest = self._destinations(sorted(envs), attempt_dir)
        for rank in envs if attempt_dir else ():
            envs[rank][defaults.ENV_ERROR_FILE] = dest.error_files[rank]
        return dest

    def discard_if_empty(self) -> bool:
        """Remove the temporary folder when no worker has left anything in it; says whether it is gone."""
        if not (self._is_temporary and self._run_log_dir and _holds_nothing(self.root_log_dir)):
            return False
        try:
            _remove_empty_tree(self.root_log_dir)
        except OSError:  # somebody else keeps something there, so it stays
            return False
        self._root_log_dir = _temporary_path()
        self._run_log_dir = self._attempt_dir = ""
        self._last_attempt = -1
        return True

    def _make_attempt_folder(self, run_id: str, restart_count: int) -> str:
        """The first number that is free: an earlier attempt's folder is never used again."""
        if self.root_log_dir == os.devnull:
            return ""
        self.make_run_folder(run_id)
        while True:
            self._last_attempt = max(restart_count, self._last_attempt + 1)
            path = os.path.join(self._run_log_dir, f"attempt_{self._last_attempt}")
            if _make_folder(path):
                return path

    def make_run_folder(self, run_id: str) -> None:
        """Make this run's own folder, unless it is there already."""
        if not self._run_log_dir and self.root_log_dir != os.devnull:
            self._make_root()
            stem = os.path.join(os.path.abspath(self.root_log_dir), _as_file_name(run_id))
            self._run_log_dir = _make_new_folder(f"{stem}_")

    def _make_root(self) -> None:
        if not self._is_temporary:
            os.makedirs(self.root_log_dir, exist_ok=True)
            return
        while not _make_folder(self.root_log_dir, mode=0o700):
            self._root_log_dir = _temporary_path()

    def _destinations(self, ranks: list[int], attempt_dir: str) -> LogsDest:
        world = max(ranks, default=-1) + 1
        redirects, tees = to_map(self._redirects, world), to_map(self._tee, world)
        dest = LogsDest()
        for rank in ranks:
            shown = not self._local_ranks_filter or rank in self._local_ranks_filter
            for std, files, tee_files, name in (
                (Std.OUT, dest.stdouts, dest.tee_stdouts, "stdout.log"),
                (Std.ERR, dest.stderrs, dest.tee_stderrs, "stderr.log"),
            ):
                path = os.path.join(attempt_dir, str(rank), name) if attempt_dir else os.devnull
                if std & (redirects[rank] | tees[rank]):
                    files[rank] = path
                else:
                    files[rank] = INHERITED if shown else os.devnull
                if shown and std & tees[rank]:
                    tee_files[rank] = path
            dest.error_files[rank] = os.path.join(attempt_dir, str(rank), "error.json") if attempt_dir else ""
        if attempt_dir:
            dest.filtered_stdout = os.path.join(attempt_dir, "filtered_stdout.log")
            dest.filtered_stderr = os.path.join(attempt_dir, "filtered_stderr.log")
        return dest


def check_log_dir(log_dir: str | None) -> None:
    """Refuse a log folder that could not be made or written to, without making it."""
    if not log_dir or log_dir == os.devnull:
        return
    nearest = os.path.abspath(log_dir)
    while not os.path.lexists(nearest):
        nearest = os.path.dirname(nearest)
    if not os.path.isdir(nearest):
        raise _log_dir_error(log_dir, f"{nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        reason = errno.EROFS if os.statvfs(nearest).f_flag & os.ST_RDONLY else errno.EACCES
        raise _log_dir_error(log_dir, f"{os.strerror(reason)} in {nearest}")


def _log_dir_error(log_dir: str, reason: str, culprit: str = "--log-dir") -> UsageError:
    kind = NotAFolderError if os.path.exists(log_dir) and not os.path.isdir(log_dir) else UsageError
    return kind(f"{culprit}: no logs can be written under {log_dir!r}: {reason}. Name a folder that you may write to.")


def _temporary_path() -> str:
    parent = os.environ.get(defaults.ENV_TMPDIR) or defaults.TEMPORARY_DIR
    return os.path.join(os.path.abspath(parent), f"rallypoint_{os.urandom(8).hex()}")


def _as_file_name(run_id: str) -> str:
    """The run id as one part of a path: no separator, nothing unprintable, and short enough for any file system."""
    printable = "".join(c if c.isprintable() and c != "/" else "_" for c in run_id)
    return printable.encode()[:200].decode(errors="ignore")


def _make_folder(path: str, mode: int = 0o777) -> bool:
    """False when it was there already, so that two runs can never share a folder."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return False
    return True


def _make_new_folder(stem: str) -> str:
    while True:
        path = stem + os.urandom(4).hex()
        if _make_folder(path):
            return path


def _holds_nothing(root: str) -> bool:
    """Whether there is nothing but folders, the run's events, and empty files, as a stream that stayed silent leaves one."""
    for folder, _, files in os.walk(root):
        for name in filter(lambda name: name != defaults.EVENT_FILE, files):
            status = os.lstat(os.path.join(folder, name))
            if status.st_size or not stat.S_ISREG(status.st_mode):
                return False
    return True


def _remove_empty_tree(root: str) -> None:
    """Bottom-up, and only with calls that refuse a folder that is not empty."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
