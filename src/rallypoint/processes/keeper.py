"""The keeper of warm workers: an interpreter that has imported what they need, and forks them.

It was started by the warden as a worker is, with the same command, and our `sitecustomize` stopped it before the program: so what
is left to do in a fork is what a fresh interpreter does next, and the program cannot tell the difference. It runs no code of the
program's; only the modules that it was told to import.

It fails closed. Where a fork might not be like a fresh process, because threads have stayed or a device is open, it says so and
ends, and the warden starts fresh workers.

A worker must be the warden's child, not ours. So we fork one process that forks all workers and ends, which makes them the
warden's. Then each waits for its word, so that none runs of which the warden does not know.

    warden ── keeper ── (gone) ── worker

The warden owns the other end of the `line`; when that is gone, so are we.
"""

from __future__ import annotations

import _socket  # see frames
import marshal
import os
import select
import sys
import time

from rallypoint.processes.frames import FrameReader, send_frame
from rallypoint.processes.kernel import set_name, stat_fields
from rallypoint.processes.newborn import NOT_STARTED, bind, leave_home, place_files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

__all__ = ["keep"]

NAME = "rally-keeper"
SEND_TIMEOUT_S = 60.0  # the warden reads at once, unless it is stopped


def keep(line_fd: int) -> None:
    """Be the keeper. It returns in the workers, which go on as interpreters that have just started."""
    os.set_inheritable(line_fd, False)
    line = _socket.socket(fileno=line_fd)
    ours = _our_modules()
    with open("/proc/self/comm", encoding="utf-8", errors="surrogateescape") as comm:
        name = comm.read().rstrip("\n")
    set_name(NAME)
    frames = FrameReader(line)
    (modules,), _ = _next(frames)
    begun_at = time.monotonic()
    why, module = _import_all(modules)
    if why:
        _end(line, "refused", why, module)
    marks = _marks()
    _tell(line, "ready", time.monotonic() - begun_at)
    while True:
        (requests, warden_pid), fds = _next(frames)
        if why := _why_others(requests) or _why_not_safe():
            _end(line, "refused", why)
        if changed := _changed(marks):
            _end(line, "stale", changed)
        born = _fork_all(requests, line)
        if born is not None:
            break
        for fd in fds:
            os.close(fd)
    _become(born, fds, line, warden_pid, name)
    _forget(ours)


def _next(frames: FrameReader) -> tuple[Any, list[int]]:
    try:
        frame = frames.read()
    except EOFError:
        os._exit(0)
    assert frame is not None  # the line blocks
    return frame


def _tell(line: _socket.socket, *message: Any) -> None:
    try:
        send_frame(line, message, [], time.monotonic() + SEND_TIMEOUT_S)
    except OSError:  # the warden has given us up, or is gone
        os._exit(1)


def _end(line: _socket.socket, *message: Any) -> None:
    _tell(line, *message)
    os._exit(0)


# --- before the fork -------------------------------------------------------------------------------------------------------


def _import_all(modules: tuple[str, ...]) -> tuple[str, str]:
    """Why workers must do without, and which module it is for; what they print goes where our own output goes."""
    from importlib import import_module

    for module in modules:
        try:
            import_module(module)
        except BaseException as error:  # whatever it is, the program may do without this module
            return f"{module} could not be imported: {type(error).__name__}: {error}", module
        if why := _why_not_safe():
            return why, module
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    return "", ""


def _why_not_safe() -> str:
    """Why a fork of this process might not be what a fresh one is; empty if it is."""
    if (count := _threads_after_fork()) > 1:
        return f"{count - 1} thread{'s' * (count > 2)} of what was imported would be missing in a fork"
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing itself
            continue
        if path.startswith("/dev/nvidia"):
            return f"what was imported has opened {path}, which cannot be shared with forks"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "what was imported has initialised CUDA, which does not survive a fork"
    return _shadow()


def _threads_after_fork() -> int:
    """Threads that know of forks end themselves before one, as those of OpenBLAS; so fork once, and count who is left."""
    if len(os.listdir("/proc/self/task")) > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task"))


def _shadow() -> str:
    """A module of the program's own that it would get in place of one of these, as its folder is searched first."""
    script = sys.argv[0]
    if script == "-c" or not script:
        return ""
    folder = os.path.realpath("." if script == "-m" else os.path.dirname(script))
    try:
        there = {name.removesuffix(".py") for name in os.listdir(folder)}
    except OSError:
        return ""
    for name in sorted(there & {name for name in sys.modules if "." not in name} - {"__main__", "sitecustomize"}):
        file = getattr(sys.modules[name], "__file__", None)
        theirs = (os.path.join(folder, f"{name}.py"), os.path.join(folder, name, "__init__.py"))
        if file and not os.path.realpath(file).startswith(folder + os.sep) and any(map(os.path.exists, theirs)):
            return f"the program would get {name} from its own folder, {folder}"
    return ""


def _marks() -> dict[str, tuple[int, int]]:
    """What tells whether a file that was imported has changed since. Python's own do not, and ours are not the program's."""
    standard, ours = os.path.dirname(os.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep
    files = {file for module in list(sys.modules.values()) if (file := _source(module))}
    return {
        file: mark
        for file in files
        if (not file.startswith(standard) or "-packages" in file)
        and not file.startswith(ours)
        and (mark := _mark(file)) is not None
    }


def _source(module: ModuleType) -> str | None:
    return module.__dict__.get("__file__") if hasattr(module, "__dict__") else None


def _mark(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:  # it comes from an archive, or is gone
        return None
    return found.st_mtime_ns, found.st_size


def _changed(marks: dict[str, tuple[int, int]]) -> str:
    return next((file for file, mark in marks.items() if _mark(file) != mark), "")


def _why_others(requests: list[dict[str, Any]]) -> str:
    """They may differ in the arguments of the program only."""
    head = _head()
    return "" if all(list(one["argv"])[: len(head)] == head for one in requests) else "their commands differ"


def _head() -> list[str]:
    """The command up to the program's arguments."""
    return sys.orig_argv[: len(sys.orig_argv) - (len(sys.argv) - 1)]


def _fork_all(requests: list[dict[str, Any]], line: _socket.socket) -> dict[str, Any] | None:
    """None in the keeper; in a worker, what it is to be."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return None
    started: list[tuple[int, int]] = []
    failed: list[tuple[int, int, str]] = []
    for request in requests:
        try:
            pid = os.fork()
        except OSError as error:  # there may be no more processes, or memory
            failed.append((request["local_rank"], error.errno or 0, str(error)))
            continue
        if pid == 0:
            return request
        started.append((request["local_rank"], pid))
    _end(line, "forked", started, failed)
    return None


# --- after the fork --------------------------------------------------------------------------------------------------------


def _become(request: dict[str, Any], fds: list[int], line: _socket.socket, warden_pid: int, name: str) -> None:
    """All that a worker of the warden's own goes through, and what exec would do for it."""
    word_fd = fds[request["word"]]
    try:
        line_fd = line.detach()
        if not os.read(word_fd, 1):  # the warden has given us up
            os._exit(NOT_STARTED)
        _await_adoption(warden_pid)
        leave_home(warden_pid)
        word_fd, kept = place_files(request, fds, word_fd)
        bind(request)
        for fd in {line_fd, *fds} - kept:
            _close(fd)
        if request["cwd"]:
            os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        _set_arguments(list(request["argv"]))
        set_name(name)
        _renew()
    except (OSError, ValueError) as error:
        os.write(word_fd, marshal.dumps((getattr(error, "errno", 0) or 0, str(error))))
        os._exit(NOT_STARTED)
    os.close(word_fd)


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:  # it has been moved
        pass


def _await_adoption(warden_pid: int) -> None:
    """Until the process between the keeper and us has ended, and we are the warden's."""
    parent = os.getppid()
    if parent == warden_pid:
        return
    try:
        parent_fd = os.pidfd_open(parent)
    except ProcessLookupError:  # it has ended meanwhile
        return
    end = select.poll()
    end.register(parent_fd, select.POLLIN)
    end.poll()
    os.close(parent_fd)


def _set_arguments(command: list[str]) -> None:
    """Also where ps looks for them; there is as much room as the keeper's own command took."""
    if command == sys.orig_argv:
        return
    sys.argv[1:] = command[len(_head()) :]
    sys.orig_argv[:] = command
    start, end = map(int, stat_fields("self")[45:47])  # arg_start and arg_end of proc(5)
    text = b"".join(os.fsencode(one) + b"\0" for one in command)
    if len(text) <= end - start:
        try:
            with open("/proc/self/mem", "r+b", buffering=0) as memory:
                memory.seek(start)
                memory.write(text.ljust(end - start, b"\0"))
        except OSError:  # a kernel that forbids it: ps shows the arguments of another worker
            pass


def _renew() -> None:
    """What a fresh interpreter would have found out or drawn for itself."""
    sys.path_importer_cache.clear()  # what it says of folders may be old
    out: Any = sys.stdout
    if out is not None and not out.write_through:  # with -u it makes no difference where it goes
        out.reconfigure(line_buffering=os.isatty(1))
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:  # Python's own generator does so by itself
        numpy_random.seed()


def _our_modules() -> set[str]:
    return {name for name in sys.modules if name.partition(".")[0] == "rallypoint"}


def _forget(ours: set[str]) -> None:
    """The program imports rallypoint anew, if it does; unless something that was imported here has it already."""
    if _our_modules() == ours:
        for name in ours:
            del sys.modules[name]
