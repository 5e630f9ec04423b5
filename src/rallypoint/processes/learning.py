"""``--preload auto``: the modules that a program imported when it ran last, and that took longest.

One worker of the node measures what it imports (`worker_site.import_times`), and writes it into a file in our memory. What comes
of that is kept (`import_record`) beside the folders of the runs, or among the user's caches where no log folder is named: after a
while, before the next group of workers, and at the end. So a worker may end as it likes, and if we are killed, what was known
before is still there. From the record are chosen the modules that workers find imported (`warm_rules.choose_modules`), also those
of the next group of this very run.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from collections.abc import Callable, Sequence

from rallypoint.base import defaults, environment, report
from rallypoint.base.outbox import Outbox
from rallypoint.base.own_files import open_own, replace_own, write_whole
from rallypoint.base.signals import inbox
from rallypoint.output.log_specs import file_clerk
from rallypoint.processes import import_record
from rallypoint.processes.import_record import FILE_BYTES, MEASURED_BYTES, ImportRecord, Measured
from rallypoint.processes.warm_rules import choose_modules, program_of
from rallypoint.worker_site import SITE_FOLDER, in_front

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.processes.warden_client import Launch

__all__ = ["Learner", "record_path"]

READ_TIMEOUT_S = 5.0
KEEP_AFTER_S = 65.0  # by then a worker measures no more
_FLAG = f"--preload {defaults.PRELOAD_AUTO}"


class Learner:
    """What is known of the imports of one program. Without a `path`, or a program that has a name, nothing is kept."""

    def __init__(self, entrypoint: Callable[..., Any] | str | None, args: Sequence[Any], path: str) -> None:
        self._entrypoint, self._args = entrypoint, args
        self._program = self._name = self._package = ""
        self._path = path
        self._record: ImportRecord | None = None
        self._is_read = False
        self._kept: ImportRecord | None = None  # as it is in the file
        self._told = ""
        self._measuring_fd: int | None = None
        self._keep_at: float | None = None
        self._outbox = Outbox(self._write, on_error=self._tell_loss)

    def choose(self) -> tuple[str, ...]:
        """The modules for the next group of workers; one line says which, and why these."""
        self._read()
        self._keep()
        if self._record is None:
            return ()
        self._tell(self.describe())
        return tuple(name for name, _ in _choice(self._record))

    def describe(self) -> str:
        """What is known by now."""
        self._read()
        if not self._program:
            return "there is no script, module or function whose imports could be remembered"
        if self._record is None:
            return f"nothing is known yet of what {self._name} imports; the first run measures it"
        names = ", ".join(f"{name} ({took_s:.1f} s)" for name, took_s in _choice(self._record))
        text = f"{names}, as {self._name} imported them last" if names else f"{self._name} imports nothing that takes long"
        left_out = dict(self._record.left_out)
        slow = [name for name, _ in choose_modules(self._record.modules) if name in left_out]
        return "; ".join([text, *(f"without {name}: {left_out[name]}" for name in slow)])

    def _tell(self, text: str) -> None:
        """Once, until it changes."""
        if text != self._told:
            self._told = text
            report.info(f"{_FLAG}: {text}")

    # --- what a worker measures --------------------------------------------------------------------------------------------

    def equip(self, launch: Launch) -> Launch:
        """The same worker, which measures what it imports."""
        self._close_measuring()
        if self._record is None:
            self._tell(self.describe())
        if not self._program:
            return launch
        try:
            fd = self._measuring_fd = _memory_file()
        except OSError as error:
            report.warn(f"{_FLAG}: what {self._name} imports is not measured: {_in_words(error)}")
            return launch
        self._keep_at = time.monotonic() + KEEP_AFTER_S
        python_path = launch.env.get(defaults.ENV_PYTHONPATH, "")
        is_for_this_alone = python_path.partition(os.pathsep)[0] != SITE_FOLDER
        order = f"{'1' * is_for_this_alone}:{self._package}:/proc/{os.getpid()}/fd/{fd}"
        return launch.replace(env={**launch.env, defaults.ENV_IMPORTS: order, defaults.ENV_PYTHONPATH: in_front(python_path)})

    def note_refused(self, module: str, why: str) -> None:
        """Workers of later groups and runs import this one themselves."""
        if self._record is not None and module:
            self._record = import_record.add_measured(self._record, Measured((), ((module, why),)))

    def next_look_at(self) -> float | None:
        return self._keep_at

    def look(self, now: float) -> None:
        if self._keep_at is not None and now >= self._keep_at:
            self._keep_at = None
            self._keep()

    def close(self) -> None:
        self._keep()
        self._close_measuring()

    def _close_measuring(self) -> None:
        if self._measuring_fd is not None:
            os.close(self._measuring_fd)
        self._measuring_fd = self._keep_at = None

    # --- what is kept ------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        if self._is_read:
            return
        self._is_read = True
        try:
            identity = file_clerk.do(lambda: _identity(self._entrypoint, self._args), READ_TIMEOUT_S, inbox.raise_pending)
            self._program, self._name, self._package = identity
            records = file_clerk.do(lambda: _read_file(self._path), READ_TIMEOUT_S, inbox.raise_pending)
        except (OSError, ValueError) as error:
            report.warn(f"{_FLAG}: what was kept in {self._path} is not used: {_in_words(error)}")
            return
        self._record = self._kept = import_record.find_record(records, self._new_record())

    def _new_record(self) -> ImportRecord:
        return import_record.record_of(self._program, f"{sys.executable} {sys.version.split()[0]}", time.time())

    def _keep(self) -> None:
        """Have it written down, if it is not what was known."""
        if self._measuring_fd is not None:
            text = os.pread(self._measuring_fd, MEASURED_BYTES, 0).partition(b"\0")[0].decode(errors="replace")
            measured = import_record.read_measured(text)
            if measured is not None:
                self._record = import_record.add_measured(self._record or self._new_record(), measured)
        if self._record is not None and self._record != self._kept:
            self._kept = self._record
            self._outbox.put(self._record)

    def _write(self, record: ImportRecord) -> None:
        if not self._path:
            raise FileNotFoundError(errno.ENOENT, f"neither {defaults.ENV_CACHE_HOME} nor {defaults.ENV_HOME} names a folder")
        try:
            others = _read_file(self._path)
        except (OSError, ValueError):  # then this is the first
            others = ()
        _write_file(self._path, import_record.write_records(import_record.put_record(others, record)))

    def _tell_loss(self, error: BaseException) -> None:
        text = f"what {self._name} imports cannot be kept{f' in {self._path}' if self._path else ''}: {_in_words(error)}"
        report.warn(f"{_FLAG}: {text}; --log-dir names another folder")


def record_path(log_dir: str) -> str:
    """Where it is kept, with this log folder or without; empty if there is no place for it."""
    if log_dir and log_dir != os.devnull:
        return os.path.join(os.path.abspath(log_dir), defaults.IMPORTS_FILE)
    cache = environment.cache_dir()
    return os.path.join(cache, defaults.IMPORTS_CACHE) if cache else ""


def _identity(entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]) -> tuple[str, str, str]:
    """By what a program is known, how people call it, and the package that is its own; all empty if there is nothing to know."""
    if callable(entrypoint):
        return _identity_of_function(entrypoint, args)
    flag, name = program_of([entrypoint or "", *map(str, args)])
    if flag:
        return f"{os.getcwd()} {flag} {name}", name, name.partition(".")[0]
    return (os.path.realpath(name), os.path.basename(name), "") if name else ("", "", "")


def _identity_of_function(function: Callable[..., Any], args: Sequence[Any]) -> tuple[str, str, str]:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", "")
    if module == "__main__":
        module = os.path.realpath(getattr(sys.modules["__main__"], "__file__", None) or "")
    script = args[0] if args and isinstance(args[0], str) and os.path.isfile(args[0]) else ""  # as of --run-path
    if script:
        return f"{module}:{name} {os.path.realpath(script)}", os.path.basename(script), ""
    return f"{module}:{name}", name, "" if os.sep in module else module.partition(".")[0]


def _memory_file() -> int:
    """No worker can make it larger than it is."""
    fd = os.memfd_create("rally-imports", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MEASURED_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd


def _choice(record: ImportRecord) -> tuple[tuple[str, float], ...]:
    return choose_modules(record.modules, dict(record.left_out))


def _in_words(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error)


def _read_file(path: str) -> tuple[ImportRecord, ...]:
    """Nobody else may have written it: what it names is imported."""
    try:
        fd = open_own(path)
    except FileNotFoundError:
        return ()
    try:
        if os.fstat(fd).st_size > FILE_BYTES:
            raise ValueError(f"it has more than {FILE_BYTES} bytes")
        content = os.read(fd, FILE_BYTES)
    finally:
        os.close(fd)
    return import_record.read_records(content.decode())


def _write_file(path: str, text: str) -> None:
    """As a whole or not at all."""
    if os.path.basename(path) != defaults.IMPORTS_FILE:  # a log folder is there, or was removed
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    replace_own(path, lambda fd: write_whole(fd, text.encode("ascii")))
