"""What can be asked of a worker's control socket, and how stacks are written down.

``GET /handler/`` lists the names of the handlers as JSON, and ``POST /handler/NAME`` calls one: the paths are those of torch's
worker server, so that what was written to ask one can ask the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from rallypoint.base.records import Value
from rallypoint.net.http import Request, Response

__all__ = ["Call", "Frame", "ThreadStack", "is_handler_name", "json_answer", "resolve", "write_stacks"]

FOLDER = "/handler/"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
FRAMES_AT_EACH_END = 100  # of a stack; what is between them says little, mostly that somebody calls himself
PAGE = """\
The control socket of a worker.
GET /handler/        the names of the handlers, as JSON
POST /handler/NAME   call one of them
"""


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


def is_handler_name(name: str) -> bool:
    """Whether it can stand in a path as it is."""
    return NAME.fullmatch(name) is not None


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
