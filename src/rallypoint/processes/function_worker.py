"""The other end of `functions`: what a process does that is to run a function for us.

It runs in the worker, or in the warden that forks the workers, so it imports little. A failure is recorded in the error
file, as for a decorated script; the exit code is the one that a script would have.

A function and its arguments are packed for another interpreter by multiprocessing's own pickling, with the same preparation (the
path, ``__main__`` of a script), so whatever can be sent to a ``multiprocessing.Process`` can be sent here. A function that pickle
cannot name, such as a lambda or one from a notebook, is sent by value where ``cloudpickle`` is installed. The parcel lies in a
memory file: it needs no reader while it is written. With a function from a notebook go the lines of its cells, so that a
traceback can show them.

The workers of an agent leave together: see `_stay`.
"""

from __future__ import annotations

import _socket  # see frames
import io
import marshal
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, NoReturn

from rallypoint.base import defaults, environment
from rallypoint.errors import UsageError
from rallypoint.failures.error_files import get_error_handler, record, record_quietly, users_traceback
from rallypoint.processes.kernel import stat_fields
from rallypoint.processes.warden import Warden

__all__ = ["Parcel", "pack", "read_rank", "read_result", "run_spawned", "serve_forked", "serve_spawned"]

_RANK_BYTES = 4


class Parcel(NamedTuple):
    """A memory file with the content, and every file descriptor that must go along, under its own number."""

    fd: int
    fds: tuple[int, ...]

    def close(self) -> None:
        os.close(self.fd)


def pack(content: Any, name: str) -> Parcel:
    """Write path, preparation and content, in the order in which the receiver needs them."""
    import pickle
    from multiprocessing import spawn

    preparation = spawn.get_preparation_data(name)
    if not os.path.exists(preparation.get("init_main_from_path", "/")):  # as for a program that was read from stdin
        del preparation["init_main_from_path"]
    main_can_be_imported = "init_main_from_name" in preparation or "init_main_from_path" in preparation
    tracker_fd = _tracker_fd()
    with _collecting_fds() as passed:
        head = pickle.dumps((preparation, tracker_fd, {} if main_can_be_imported else _typed_in()))
        body = _pickle_content(content, main_can_be_imported)
    fd = os.memfd_create("parcel", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(marshal.dumps(sys.path) + head + body)
    os.lseek(fd, 0, os.SEEK_SET)
    tracker = () if tracker_fd is None else (tracker_fd,)
    return Parcel(fd, (fd, *tracker, *passed))


def _pickle_content(content: Any, main_can_be_imported: bool) -> bytes:
    """By name as multiprocessing does it; by value if that fails, or if ``__main__`` is a session that nobody can import."""
    from multiprocessing.reduction import ForkingPickler

    is_from_main = getattr(content[0], "__module__", "") == "__main__"
    if not main_can_be_imported and (is_from_main or _have_cloudpickle()):
        return _pickle_by_value(content, "it is defined in an interactive session, which a new interpreter cannot import")
    buffer = io.BytesIO()
    try:
        ForkingPickler(buffer).dump(content)
    except Exception as error:  # pickling runs the code of every object in the content, which may raise anything
        return _pickle_by_value(content, f"pickle says: {error}")
    return buffer.getvalue()


def _have_cloudpickle() -> bool:
    from importlib.util import find_spec

    return find_spec("cloudpickle") is not None


def _pickle_by_value(content: Any, reason: str) -> bytes:
    name = _name_of(content[0])
    if not _have_cloudpickle():
        raise UsageError(
            f"the function {name} or its arguments cannot be sent to a new process: {reason}. Define it at the top level of a "
            "module, or install rallypoint[functions], or use start_method='fork'"
        )
    try:
        return _cloudpickle(content)
    except Exception as error:  # as above
        raise UsageError(f"the function {name} or its arguments cannot be sent to a new process: {error}") from error


def _cloudpickle(content: Any) -> bytes:
    """By value, but queues, pipes and the like as multiprocessing sends them."""
    from collections import ChainMap
    from multiprocessing.reduction import ForkingPickler

    import cloudpickle

    as_multiprocessing_does = dict(ForkingPickler._extra_reducers)  # type: ignore[attr-defined]
    table = ChainMap(as_multiprocessing_does, cloudpickle.Pickler.dispatch_table)
    buffer = io.BytesIO()
    pickler = type("Pickler", (cloudpickle.Pickler,), {"dispatch_table": table})  # it is looked up in the class
    pickler(buffer).dump(content)
    return buffer.getvalue()


def _typed_in() -> dict[str, Any]:
    """What was typed into this session, as `linecache` has it: by names that look like files, and without a time of change."""
    import linecache

    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


class _Spawning:
    """What multiprocessing's queues, locks and pipes ask for when they are pickled for a child: a way to pass their files on."""

    def __init__(self) -> None:
        self.passed: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.passed.append(fd)
        return fd

    class DupFd:
        def __init__(self, fd: int) -> None:
            self.fd = fd

        def detach(self) -> int:
            return self.fd


@contextmanager
def _collecting_fds() -> Iterator[list[int]]:
    from multiprocessing import context

    spawning = _Spawning()
    context.set_spawning_popen(spawning)  # type: ignore[arg-type]  # it asks for no more than the above
    try:
        yield spawning.passed
    finally:
        context.set_spawning_popen(None)


def _tracker_fd() -> int | None:
    """The line to multiprocessing's resource tracker, if this process has one: its children are to share it."""
    from multiprocessing import resource_tracker

    fd: int | None = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]  # getfd() would start one
    return fd


def run_spawned(parcel: BinaryIO, local_rank: int, line_fd: int, result_fd: int) -> None:
    """Be a worker of the start method ``spawn``."""
    fn, args = _unpack(parcel)
    parcel.close()
    _call(fn, args, local_rank, line_fd, result_fd)


def serve_spawned(parcel: BinaryIO, sock_fd: int, agent_pid: int) -> NoReturn:
    """Be the warden of the start method ``forkserver``."""
    os.setsid()
    fn, args = _unpack(parcel)
    parcel.close()
    os.set_inheritable(sock_fd, False)
    _serve(_socket.socket(fileno=sock_fd), agent_pid, fn, args)


def serve_forked(sock: _socket.socket, agent_pid: int, fn: Callable[..., Any], args: dict[int, tuple[Any, ...]]) -> NoReturn:
    """Be the warden of the start method ``fork``: a copy of the agent, which must never return into the agent's code."""
    try:
        os.setsid()
        _serve(sock, agent_pid, fn, args)
    finally:
        os._exit(1)


def _serve(sock: _socket.socket, agent_pid: int, fn: Callable[..., Any], args: dict[int, tuple[Any, ...]]) -> NoReturn:
    def become(request: dict[str, Any]) -> None:
        _run_forked(request, fn, args[request["local_rank"]])

    try:
        Warden(sock, agent_pid, become).run()
    except ProcessLookupError:  # the agent was gone before we could watch it
        pass
    os._exit(0)


def _run_forked(request: dict[str, Any], fn: Callable[..., Any], args: tuple[Any, ...]) -> NoReturn:
    """Be a worker that was forked; multiprocessing's own bootstrap puts its state in order and gives the exit code."""
    from multiprocessing import get_context, util

    _reset_signals()  # before the next line, by which the agent learns that we are there, and may signal us
    for fd in (request["error_fd"], *request["fds_of_others"]):
        os.close(fd)
    if request["cwd"]:
        os.chdir(request["cwd"])
    for name in defaults.ENV_SECRETS:
        if name in os.environ:
            _erase_from_environ_block(name)
    os.environ.clear()
    os.environ.update(request["env"])
    _join_the_watch()
    (_, line_fd), (_, result_fd) = request["fds"][-2:]
    process = get_context("fork").Process(target=_call, args=(fn, args, request["local_rank"], line_fd, result_fd))
    code = process._bootstrap()  # type: ignore[attr-defined]  # what Process.start() calls in the child
    util._exit_function()  # type: ignore[attr-defined]  # from 3.13 on left to the caller; before, the second call does nothing
    os._exit(code)


def _join_the_watch() -> None:
    """What a new interpreter does at its start where the agent watches for hangs: answer for its stacks, and speak for itself."""
    if defaults.ENV_STACKS in os.environ:
        from rallypoint.worker_site import sitecustomize

        sitecustomize.register(os.environ)
    worker = sys.modules.get("rallypoint.worker")  # of the process that was forked, which has no pulse of its own
    if worker is not None:
        worker.announce()


def _erase_from_environ_block(name: str) -> None:
    """Overwrite a variable's value where /proc/self/environ shows it: a fork has its parent's, out of the reach of os.environ."""
    try:
        start, end = map(int, stat_fields("self")[47:49])  # env_start and env_end of proc(5)
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            block = b"\0" + memory.read(end - start)
            before, found, rest = block.partition(f"\0{name}=".encode())
            memory.seek(start - 1 + len(before) + len(found))
            memory.write(bytes(rest.find(b"\0")) if found else b"")
    except (OSError, ValueError):  # a kernel that forbids it: os.environ lacks the variable all the same
        return


def _reset_signals() -> None:
    """What exec does for a program: no handler of the agent or the warden is left, and what was ignored stays ignored."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _call(fn: Callable[..., Any], args: tuple[Any, ...], local_rank: int, line_fd: int, result_fd: int) -> None:
    """Run the function, with its failure recorded, leave what it returned, and stay until all have."""
    try:
        result = record(fn)(*args)
    except Exception as error:  # whatever it is, it ends the worker, and is in the error file
        _show(error)
        raise SystemExit(1) from None
    with os.fdopen(result_fd, "wb") as file:
        file.write(_pickle_result(fn, result))
    _stay(local_rank, line_fd)


def _stay(local_rank: int, line_fd: int) -> None:
    """Tell the agent that the function has returned, and wait until it hangs up: when all have, or when we are to go.

    What a function leaves open, such as a process group of torch's, breaks in the others when its process ends first.
    """
    line = _socket.socket(fileno=line_fd)
    try:
        line.send(local_rank.to_bytes(_RANK_BYTES, "little"))
        line.recv(1)
    except OSError:  # it has hung up already
        pass
    line.close()


def read_rank(line: _socket.socket) -> int | None:
    """The next worker that has returned, of those that the agent has not yet read; None: there is none."""
    try:
        return int.from_bytes(line.recv(_RANK_BYTES), "little")
    except BlockingIOError:
        return None


def _show(error: Exception) -> None:
    """As the interpreter would; but it does not know the lines of a notebook, and would show ours."""
    error.__traceback__ = users_traceback(error)
    if sys.excepthook is not sys.__excepthook__:  # the program has its own way
        sys.excepthook(type(error), error, error.__traceback__)
        return
    import traceback

    traceback.print_exception(type(error), error, error.__traceback__)


def _pickle_result(fn: Callable[..., Any], result: Any) -> bytes:
    """By name where that can be, else by value where ``cloudpickle`` is installed."""
    import pickle

    try:
        return pickle.dumps(result)
    except Exception as error:  # pickling runs the code of every object in the result, which may raise anything
        reason = error
    if _have_cloudpickle():
        import cloudpickle

        try:
            return bytes(cloudpickle.dumps(result))
        except Exception as error:  # as above
            reason = error
    rank = environment.text(defaults.ENV_RANK, "?")
    problem = TypeError(
        f"{_name_of(fn)} returned {_kind_of(result)} on rank {rank}, which cannot be sent to the launcher ({reason});"
        f" return plain data, or write it to a file and return the path"
    )
    record_quietly(get_error_handler(), problem)
    raise SystemExit(1 if environment.text(defaults.ENV_ERROR_FILE) else f"TypeError: {problem}")


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _kind_of(value: object) -> str:
    kind = type(value)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def read_result(rank: int, result_fd: int) -> Any:
    """What the function returned; a worker that ended without returning, as by ``os._exit(0)``, returned nothing."""
    import pickle

    if os.fstat(result_fd).st_size == 0:
        return None
    with os.fdopen(os.dup(result_fd), "rb") as file:
        file.seek(0)
        try:
            return pickle.load(file)
        except Exception as error:  # unpickling runs the code of every object in the result
            raise RuntimeError(f"what worker {rank} returned cannot be read back: {type(error).__name__}: {error}") from error


def _unpack(parcel: BinaryIO) -> Any:
    """Prepare this interpreter as multiprocessing prepares its children, then load what was sent."""
    import pickle
    from multiprocessing import process, resource_tracker, spawn

    current: Any = process.current_process()
    current._inheriting = True  # a script without a __main__ guard is told so, instead of starting itself for ever
    try:
        preparation, tracker_fd, typed_in = pickle.load(parcel)
        if typed_in:
            import linecache

            linecache.cache.update(typed_in)
        if tracker_fd is not None:
            resource_tracker._resource_tracker._fd = tracker_fd  # type: ignore[attr-defined]
        spawn.prepare(preparation)
        return pickle.load(parcel)
    finally:
        del current._inheriting
        if sys.stdout is not None:
            sys.stdout.flush()
