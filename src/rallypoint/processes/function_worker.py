"""The other end of `functions`: what a process does that is to run a function for us.

It runs in the worker, or in the warden that forks the workers, so it imports little. A failure is recorded in the error
file, as for a decorated script; the exit code is the one that a script would have.
"""

from __future__ import annotations

import _socket  # see frames
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

from rallypoint import defaults
from rallypoint.processes.error_files import record
from rallypoint.processes.warden import Warden

__all__ = ["read_result", "run_spawned", "serve_forked", "serve_spawned"]


def run_spawned(parcel: BinaryIO, result_fd: int) -> None:
    """Be a worker of the start method ``spawn``."""
    fn, args = _unpack(parcel)
    parcel.close()
    _call(fn, args, result_fd)


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
    if defaults.ENV_SECRET in os.environ:
        _erase_from_environ_block(defaults.ENV_SECRET)
    os.environ.clear()
    os.environ.update(request["env"])
    _join_the_watch()
    (_, result_fd) = request["fds"][-1]
    process = get_context("fork").Process(target=_call, args=(fn, args, result_fd))
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
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[47]), int(fields[48])  # env_start and env_end of proc(5), the third field being the first here
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            block = b"\0" + memory.read(end - start)
            before, found, rest = block.partition(f"\0{name}=".encode())
            memory.seek(start - 1 + len(before) + len(found))
            memory.write(bytes(rest.find(b"\0")) if found else b"")
    except OSError:  # a kernel that forbids it: os.environ lacks the variable all the same
        return


def _reset_signals() -> None:
    """What exec does for a program: no handler of the agent or the warden is left, and what was ignored stays ignored."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _call(fn: Callable[..., Any], args: tuple[Any, ...], result_fd: int) -> None:
    """Run the function, with its failure recorded, and leave what it returned."""
    result = record(fn)(*args)
    with os.fdopen(result_fd, "wb") as file:
        file.write(_pickle_result(result))


def _pickle_result(result: Any) -> bytes:
    """By name where that can be, else by value where ``cloudpickle`` is installed."""
    import pickle

    try:
        return pickle.dumps(result)
    except Exception:  # pickling runs the code of every object in the result, which may raise anything
        try:
            import cloudpickle
        except ImportError:
            pass
        else:
            return bytes(cloudpickle.dumps(result))
        raise


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
        preparation, tracker_fd = pickle.load(parcel)
        if tracker_fd is not None:
            resource_tracker._resource_tracker._fd = tracker_fd  # type: ignore[attr-defined]
        spawn.prepare(preparation)
        return pickle.load(parcel)
    finally:
        del current._inheriting
        if sys.stdout is not None:
            sys.stdout.flush()
