"""The main block of a worker: its error is recorded, and while it runs, it can be asked what it does.

    from rallypoint.control_plane import worker_main

    if __name__ == "__main__":
        with worker_main():
            train()

If TORCH_WORKER_SERVER_SOCKET names a path, a thread of the worker answers HTTP there, at a Unix socket that only the same user
can open: ``POST /handler/dump_traceback`` gives the stacks of all threads. No port is ever opened. If it does not, nothing is
served, and nothing of what serves is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping

from rallypoint.base import defaults, environment
from rallypoint.base.records import Value
from rallypoint.failures.error_files import get_error_handler, record_quietly
from rallypoint.net.http import Request, Response

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

__all__ = ["TORCH_WORKER_SERVER_SOCKET", "Request", "Response", "register_handler", "worker_main"]

TORCH_WORKER_SERVER_SOCKET = "TORCH_WORKER_SERVER_SOCKET"
GOODBYE_S = 2.0  # for an answer that is being made when the worker's work is done
FOLDER = "/handler/"  # the paths are those of torch's worker server, so that what was written to ask one can ask the other
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
FRAMES_AT_EACH_END = 100  # of a stack; what is between them says little, mostly that somebody calls himself
PAGE = """\
The control socket of a worker.
GET /handler/        the names of the handlers, as JSON
POST /handler/NAME   call one of them
"""

# What every worker is told by its launcher; none of it is secret.
CONTRACT = (
    defaults.ENV_RANK, defaults.ENV_LOCAL_RANK, defaults.ENV_WORLD_SIZE, defaults.ENV_LOCAL_WORLD_SIZE, defaults.ENV_GROUP_RANK,
    defaults.ENV_GROUP_WORLD_SIZE, defaults.ENV_ROLE_RANK, defaults.ENV_ROLE_WORLD_SIZE, defaults.ENV_ROLE_NAME,
    defaults.ENV_MASTER_ADDR, defaults.ENV_MASTER_PORT, defaults.ENV_RESTART_COUNT, defaults.ENV_MAX_RESTARTS,
    defaults.ENV_RUN_ID, defaults.ENV_USE_AGENT_STORE, defaults.ENV_ERROR_FILE, defaults.ENV_SIGNALS_TO_HANDLE,
    defaults.ENV_NCCL_ASYNC_ERROR_HANDLING, defaults.ENV_OMP_NUM_THREADS, defaults.ENV_CUDA_VISIBLE_DEVICES,
)  # fmt: skip


class Call(Value):
    """A request for the handler of this name."""

    name: str


class Frame(Value):
    file: str
    line: int | None
    function: str


class ThreadStack(Value):
    """Where a thread is; the frames from the innermost to the outermost."""

    ident: int
    name: str
    frames: tuple[Frame, ...]
    is_current: bool = False  # the one that looks


class Handler(Value):
    fn: Callable[[Request], Response]
    description: str


@contextlib.contextmanager
def worker_main() -> Iterator[None]:
    """Around the main work of a worker: an exception that leaves the block is recorded in the error file, and raised again.

    UsageError, before the block begins: TORCH_WORKER_SERVER_SOCKET names a path at which this worker cannot listen.
    """
    handler = get_error_handler()
    handler.initialize()
    try:
        with _served():
            yield
    except Exception as error:  # all of them, because all of them end the worker; each is raised again
        record_quietly(handler, error)
        raise


def register_handler(name: str, fn: Callable[[Request], Response], description: str = "") -> None:
    """Let ``POST /handler/NAME`` call `fn`, on the thread that serves: whoever else asks waits until it returns.

    What it raises is the answer to whoever asked, and harms nothing else.
    """
    if NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} cannot name a handler; take letters, digits, '_', '-' and '.', at most 64")
    if name in _handlers:
        raise ValueError(f"there is a handler {name!r} already")
    _handlers[name] = Handler(fn, description)


# --- serving ---------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _served() -> Iterator[None]:
    path = environment.own.get(TORCH_WORKER_SERVER_SOCKET)
    if not path:
        yield
        return
    from rallypoint.net.http_server import HttpServer
    from rallypoint.net.private_socket import PrivateSocket, is_from_owner

    place = PrivateSocket(path, TORCH_WORKER_SERVER_SOCKET)
    server = HttpServer([place.listener], _answer, "control", admits=is_from_owner)
    owner = os.getpid()
    server.start()
    try:
        yield
    finally:
        place.remove()
        if os.getpid() == owner:  # a fork that ends the block has no such thread
            server.stop(GOODBYE_S)  # a handler that does not return must not keep the worker from ending


def resolve(request: Request, names: Iterable[str]) -> Call | Response:
    """The handler that is asked for, or the answer where none is."""
    if request.path in ("/", FOLDER):
        if request.method == "POST":
            return _wrong_method("GET, HEAD")
        return Response(200, PAGE) if request.path == "/" else json_answer(sorted(names))
    name = request.path[len(FOLDER) :] if request.path.startswith(FOLDER) else None
    if name is None:
        return Response(404, "there is nothing here; GET /handler/ lists what there is\n")
    if name not in names:
        return Response(404, f"Handler {name!r} not found; GET /handler/ lists those that there are\n")
    return Call(name) if request.method == "POST" else _wrong_method("POST")


def _wrong_method(right: str) -> Response:
    return Response(405, f"this path takes {right}\n", headers=(("Allow", right),))


def json_answer(value: list[str] | Mapping[str, str]) -> Response:
    return Response(200, json.dumps(value), "application/json")


def _answer(request: Request) -> Response:
    match resolve(request, _handlers):
        case Call(name):
            return _call(name, request)
        case Response() as response:
            return response


def _call(name: str, request: Request) -> Response:
    try:
        response = _handlers[name].fn(request)
    except Exception as error:  # a mistake of whoever wrote the handler is for whoever asked, not for the training
        return Response(500, f"the handler {name!r} has failed: {type(error).__name__}: {error}\n")
    if not isinstance(response, Response):
        return Response(500, f"the handler {name!r} gave {type(response).__name__} instead of a Response\n")
    return response


# --- what every worker answers ---------------------------------------------------------------------------------------------


def _ping(_: Request) -> Response:
    return Response(200, "pong", "text/plain")


def _list(_: Request) -> Response:
    return json_answer({name: handler.description for name, handler in sorted(_handlers.items())})


def _environment(_: Request) -> Response:
    return json_answer({name: environment.own[name] for name in CONTRACT if name in environment.own})


def _dump_traceback(_: Request) -> Response:
    import threading

    names = {thread.ident: thread.name for thread in threading.enumerate()}
    current = threading.get_ident()
    stacks = [
        ThreadStack(ident, names.get(ident, "not started by Python"), tuple(_frames(frame)), ident == current)
        for ident, frame in sys._current_frames().items()
    ]
    return Response(200, write_stacks(stacks))


def _frames(innermost: FrameType) -> Iterator[Frame]:
    frame: FrameType | None = innermost
    while frame is not None:
        yield Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def write_stacks(stacks: Iterable[ThreadStack]) -> str:
    """In the form that Python's faulthandler uses, the thread that looks last."""
    return "\n".join(_write_stack(stack) for stack in sorted(stacks, key=lambda stack: stack.is_current))


def _write_stack(stack: ThreadStack) -> str:
    kind = "Current thread" if stack.is_current else "Thread"
    lines = [f"{kind} 0x{stack.ident:016x} [{stack.name}] (most recent call first):", *_frame_lines(stack.frames)]
    return "".join(f"{line}\n" for line in lines)


def _frame_lines(frames: tuple[Frame, ...]) -> list[str]:
    if not frames:
        return ["  <no Python frame>"]
    lines = [f'  File "{frame.file}", line {frame.line or "???"} in {frame.function}' for frame in frames]
    left_out = len(lines) - 2 * FRAMES_AT_EACH_END
    if left_out > 0:
        lines[FRAMES_AT_EACH_END:-FRAMES_AT_EACH_END] = [f"  ... {left_out} more ..."]
    return lines


_handlers = {
    "dump_traceback": Handler(_dump_traceback, "The Python stacks of all threads."),
    "env": Handler(_environment, "What the launcher told this worker: ranks, sizes and addresses."),
    "handlers": Handler(_list, "The names of all handlers, with what they do."),
    "ping": Handler(_ping, "Answers pong, if Python code can run in this worker."),
}
