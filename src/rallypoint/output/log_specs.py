"""Where the workers' output goes: which stream of which local rank, and to which file.

A run has one folder, and every group of workers that it starts has its own folder in it, which no later one touches:
what explains a failure is written before the restart, and must still be there after it.

    <log_dir>/<run_id>_<random>/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}
    <log_dir>/<run_id>_<random>/attempt_<n>/{filtered_stdout.log,filtered_stderr.log}
    <log_dir>/<run_id>_<random>/events.jsonl

Nothing is made before ``reify``. Without a log folder a private temporary one is used, which goes away again with
``discard_if_empty`` when nothing was logged but the events of the run itself.

Logs serve the job and never end it. A folder that is bad from the beginning is bad input. One that is removed, full or hung
later is told of, and the next group of workers runs without logs. And what another user puts in the place of the run's folder, or
of a file in it, is not written to: every file is opened below the folder that we made, and through no link.
"""

from __future__ import annotations

import _thread  # whoever joins a Thread is remembered by threading, and the deputy's thread is not one of its own
import errno
import os
import stat
from abc import ABC, abstractmethod
from enum import IntFlag

from rallypoint.base import defaults, environment, report
from rallypoint.base.outbox import Deputy
from rallypoint.base.own_files import FOREIGN, NOBODY, foreign_owner, open_folder
from rallypoint.base.records import Record, Value, field
from rallypoint.base.signals import inbox
from rallypoint.errors import NotAFolderError, UsageError, bad_field, worker_start_error

__all__ = ["DefaultLogsSpecs", "LogFolder", "LogsDest", "LogsSpecs", "Std", "check_log_dir", "file_clerk", "open_log", "to_map"]

_USED_UP = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # what a folder needs, and this host has no more
INHERITED = ""  # the path that stands for "the launcher's own stream"
FOLDERS_TIMEOUT_S = 5.0  # for the folders of one group of workers
FIRST_TIMEOUT_S = 60.0  # for those of the first one: nothing runs yet that could wait for them
REMOVERS = 8
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

file_clerk = Deputy()  # does for all of this process what has to be done with files of logs before one can go on


class Std(IntFlag):
    """Which of a worker's two output streams are meant.

    >>> from rallypoint import Std
    >>> Std.from_str("0:1,10:3") == {0: Std.OUT, 10: Std.ALL}
    True
    """

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


class LogFolder(Value):
    """The folder of a run, as it was when we made it."""

    path: str
    device: int
    inode: int

    def open(self) -> int:
        """A descriptor of it; OSError if something else is in its place."""
        fd = os.open(self.path, _FOLDER | os.O_NOFOLLOW)
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (self.device, self.inode):
            os.close(fd)
            raise OSError(errno.ESTALE, "it is not the folder that was made for this run", self.path)
        return fd

    def open_parent_of(self, path: str) -> int:
        """A descriptor of the folder that this path is in, which is below the run's."""
        fd = self.open()
        try:
            for name in os.path.relpath(os.path.dirname(path), self.path).split(os.sep):
                fd = _step_into(fd, name)
        except OSError:
            os.close(fd)
            raise
        return fd

    def holds(self, path: str) -> bool:
        return path.startswith(self.path + os.sep) and os.pardir not in path.split(os.sep)


def _step_into(fd: int, name: str) -> int:
    """A descriptor of a folder in that one, which is closed."""
    inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
    os.close(fd)
    return inner


def open_log(folder: LogFolder | None, path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file; below the run's folder through no link, whoever may have put it there."""
    if folder is None or not folder.holds(path):
        return os.open(path, flags | os.O_CLOEXEC, mode)
    fd = folder.open_parent_of(path)
    try:
        return os.open(os.path.basename(path), flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=fd)
    finally:
        os.close(fd)


class LogsDest(Record):
    """Where each local rank's streams go: a path, or ``""`` for the launcher's own stream. ``tee_*`` hold only tee'd ranks.

    >>> from rallypoint import LogsDest
    >>> LogsDest(stdouts={0: "logs/0.out", 1: ""}).stdouts[0]
    'logs/0.out'
    """

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
    log_format: str = defaults.LOG_FORMAT  # of lines on the console; the launcher sets it, too

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
    """The layout that the module's docstring shows. ``/dev/null`` as the log folder keeps no file at all.

    >>> from rallypoint import DefaultLogsSpecs, LaunchConfig, Std
    >>> config = LaunchConfig.standalone(2, logs_specs=DefaultLogsSpecs(log_dir="logs", redirects=Std.ALL, tee={0: Std.OUT}))
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self.is_temporary = not log_dir  # the user has named no folder
        super().__init__(log_dir or _temporary_path(), redirects, tee, local_ranks_filter)
        self.run_folder: LogFolder | None = None  # None before the first ``reify``
        self.attempt_dir = ""  # the folder of the last group of workers; empty where there is none
        self._last_attempt = -1
        self._global_ranks: dict[int, str] = {}  # by local rank, as far as the last group knew them
        self._linked_run = ""
        self._has_worked = False
        self._is_troubled = False

    def __repr__(self) -> str:
        return (
            f"DefaultLogsSpecs(root_log_dir={self.root_log_dir!r}, redirects={self._redirects!r}, tee={self._tee!r}, "
            f"local_ranks_filter={self._local_ranks_filter!r})"
        )

    @property
    def run_log_dir(self) -> str:
        """This run's own folder, to be shown to the user; empty before the first ``reify``."""
        return self.run_folder.path if self.run_folder else ""

    @property
    def keeps_output(self) -> bool:
        """Whether any worker's output goes to a file."""
        return bool(self._redirects or self._tee) and self.root_log_dir != os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make one new attempt folder with one for each worker, name all files in it, and tell workers of their error file."""
        env = next(iter(envs.values()), {})
        run_id, restart_count = env.get(defaults.ENV_RUN_ID, defaults.RUN_ID_CLI), int(env.get(defaults.ENV_RESTART_COUNT, "0"))
        ranks = {local_rank: one.get(defaults.ENV_RANK, "") for local_rank, one in envs.items()}
        self._global_ranks = {local_rank: rank for local_rank, rank in ranks.items() if rank.isdecimal()}
        attempt_dir = self.attempt_dir = self._try_to_make_folders(run_id, restart_count, sorted(envs))
        dest = self._destinations(sorted(envs), attempt_dir)
        for rank in envs if attempt_dir else ():
            envs[rank][defaults.ENV_ERROR_FILE] = dest.error_files[rank]
        return dest

    def link(self) -> None:
        """Have links made to the run and its newest attempt, for people to find them; nobody waits for that."""
        if self.run_folder is None or (self.is_temporary and not (self.keeps_output and self.attempt_dir)):
            return
        from rallypoint.output.log_links import Linked, link_maker

        is_new_run = not self.is_temporary and self._linked_run != self.run_folder.path
        self._linked_run = self.run_folder.path
        link_maker.put(Linked(self.run_folder, is_new_run, os.path.basename(self.attempt_dir), self._global_ranks))

    def discard_if_empty(self) -> bool:
        """Remove the temporary folder when no worker has left anything in it; says whether it is gone."""
        if self._linked_run:
            from rallypoint.output.log_links import link_maker

            link_maker.flush(FOLDERS_TIMEOUT_S)
        try:
            if not (self.is_temporary and self.run_folder and _remove_if_empty(self.root_log_dir)):
                return False
        except OSError:  # somebody else keeps something there, so it stays
            return False
        self._root_log_dir = _temporary_path()
        self.run_folder = None
        self.attempt_dir = ""
        self._last_attempt = -1
        return True

    def _try_to_make_folders(self, run_id: str, restart_count: int, ranks: list[int]) -> str:
        """The folder of a new attempt; empty where none is wanted, or none can be had any more."""
        if self.root_log_dir == os.devnull:
            return ""
        timeout_s = FOLDERS_TIMEOUT_S if self._has_worked else FIRST_TIMEOUT_S
        try:
            path = file_clerk.do(lambda: self._make_folders(run_id, restart_count, ranks), timeout_s, inbox.raise_pending)
        except OSError as error:
            if not self._has_worked and error.errno in _USED_UP:
                self._unmake_root()
                raise worker_start_error(error.errno, f"no folder for logs can be made: {error.strerror}") from error
            if not self._has_worked:
                culprit = defaults.ENV_TMPDIR if self.is_temporary else "log_dir"
                raise _log_dir_error(self.root_log_dir, error.strerror or str(error), culprit) from error
            if not self._is_troubled:
                report.warn(f"the workers run without log files, as none can be made in {self.run_log_dir}: {error.strerror}")
            self._is_troubled = True
            return ""
        if self._is_troubled:
            report.info(f"log files are kept again, in {path}")
        self._has_worked, self._is_troubled = True, False
        return path

    def _make_folders(self, run_id: str, restart_count: int, ranks: list[int]) -> str:
        """The first number that is free: an earlier attempt's folder is never used again."""
        folder = self.make_run_folder(run_id)
        fd = folder.open()
        try:
            while True:
                self._last_attempt = max(restart_count, self._last_attempt + 1)
                name = f"attempt_{self._last_attempt}"
                if _make_folder(name, dir_fd=fd):
                    break
            fd = _step_into(fd, name)
            for rank in ranks:
                os.mkdir(str(rank), dir_fd=fd)
        finally:
            os.close(fd)
        return os.path.join(folder.path, name)

    def make_run_folder(self, run_id: str) -> LogFolder:
        """This run's own folder, which is made if there is none yet."""
        if self.run_folder is None:
            self._make_root()
            self.run_folder = _make_run_folder(os.path.abspath(self.root_log_dir), _as_file_name(run_id))
        return self.run_folder

    def _make_root(self) -> None:
        if not self.is_temporary:
            os.makedirs(self.root_log_dir, exist_ok=True)
            return
        while not _make_folder(self.root_log_dir, mode=0o700):
            self._root_log_dir = _temporary_path()

    def _unmake_root(self) -> None:
        """What was made of it before there were no files left, with which alone a folder can be looked through."""
        if self.is_temporary and self.run_folder is None:
            try:
                os.rmdir(self.root_log_dir)
            except OSError:  # it was not made, or somebody keeps something there
                return

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
    owner = foreign_owner(os.stat(nearest))
    if owner:
        raise _log_dir_error(log_dir, FOREIGN.format(owner=owner))
    if not os.access(nearest, os.W_OK | os.X_OK):
        reason = errno.EROFS if os.statvfs(nearest).f_flag & os.ST_RDONLY else errno.EACCES
        raise _log_dir_error(log_dir, f"{os.strerror(reason)} in {nearest}")


def _log_dir_error(log_dir: str, reason: str, culprit: str = "log_dir") -> UsageError:
    kind = NotAFolderError if os.path.exists(log_dir) and not os.path.isdir(log_dir) else UsageError
    problem = f": no logs can be written under {log_dir!r}: {reason}. Name a folder that you may write to."
    return bad_field(culprit, problem, kind)


def _temporary_path() -> str:
    parent = environment.temporary_dir()
    return os.path.join(os.path.abspath(parent), f"rallypoint_{os.urandom(8).hex()}")


def _as_file_name(run_id: str) -> str:
    """The run id as one part of a path: no separator, nothing unprintable, and short enough for any file system."""
    printable = "".join(c if c.isprintable() and c != "/" else "_" for c in run_id)
    return printable.encode()[:200].decode(errors="ignore")


def _make_folder(path: str, mode: int = 0o777, dir_fd: int | None = None) -> bool:
    """False when it was there already, so that two runs can never share a folder."""
    try:
        os.mkdir(path, mode, dir_fd=dir_fd)
    except FileExistsError:
        return False
    return True


def _make_run_folder(root: str, stem: str) -> LogFolder:
    root_fd = open_folder(root)
    try:
        while True:
            name = f"{stem}_{os.urandom(4).hex()}"
            if _make_folder(name, dir_fd=root_fd):
                break
        root_fd = _step_into(root_fd, name)
        status = os.fstat(root_fd)
    finally:
        os.close(root_fd)
    path = os.path.join(root, name)
    if status.st_uid not in (os.geteuid(), NOBODY):
        raise OSError(errno.ESTALE, "somebody has put another folder in the place of the one that was made", path)
    return LogFolder(path, status.st_dev, status.st_ino)


def _remove_if_empty(root: str) -> bool:
    """Remove a tree of nothing but folders, links to them, the run's events, and empty files, as a silent stream leaves one.

    It is looked through before anything is removed, and that with calls that refuse a folder which is not empty.
    """
    files: list[str] = []
    levels: dict[int, list[str]] = {}
    for folder, folders, names in os.walk(root, topdown=False):
        levels.setdefault(folder.count(os.sep), []).append(folder)
        files += [path for path in (os.path.join(folder, name) for name in folders) if os.path.islink(path)]
        for name in names:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            if name != defaults.EVENT_FILE and (status.st_size or not stat.S_ISREG(status.st_mode)):
                return False
            files.append(path)
    for path in files:
        os.unlink(path)
    for level in sorted(levels, reverse=True):
        _remove_folders(levels[level])
    return True


def _remove_folders(folders: list[str]) -> None:
    """Folders of which none holds another, beside each other: it may take the kernel milliseconds to free what one took."""
    errors: list[OSError] = []

    def remove(share: list[str], done: _thread.LockType) -> None:
        try:
            for folder in share:
                os.rmdir(folder)
        except OSError as error:
            errors.append(error)
        finally:
            done.release()

    shares = [folders[at::REMOVERS] for at in range(min(REMOVERS, len(folders)))]
    locks = [_thread.allocate_lock() for _ in shares]
    for done in locks:
        done.acquire()
    for share, done in zip(shares[1:], locks[1:], strict=True):
        try:
            _thread.start_new_thread(remove, (share, done))
        except RuntimeError:  # no thread is left
            remove(share, done)
    remove(shares[0], locks[0])
    for done in locks:
        done.acquire()
    if errors:
        raise errors[0]
