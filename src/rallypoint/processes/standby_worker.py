"""A worker's side of ``--standby``: what `rallypoint.worker.ready` does where an agent asks for it.

A worker tells the agent that its program calls it, and goes on. A process on standby stays in it until it has a place in the job:
then it gets what a new worker starts with, its environment, its standard streams and the agent's files, and is that worker.
"""

from __future__ import annotations

import _socket  # see frames
import os
import select
import sys

from rallypoint.base import defaults, environment
from rallypoint.processes.frames import FrameReader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.checkpoint.ahead import Ahead

__all__ = ["READY", "WAIT", "take_place"]

READY = b"r"
WAIT = "wait"  # behind the number of the line: this process is on standby; the numbers of a worker's slots follow
SHOWN_BYTES = 1 << 20  # of what was written while it waited
LOOK_AGAIN_S = 1.0  # whether the worker keeps snapshots elsewhere by now; it may not have saved any yet


def take_place(place: str) -> None:
    """Say that all is ready; on standby, return when this process has become a worker. `place` is what the agent told."""
    fd, _, wait = place.partition(":")
    role, _, slots = wait.partition(":")
    try:
        line = _socket.socket(fileno=int(fd))
    except OSError:  # this process is a child of the one that was told
        return
    ahead = _look_ahead(line, slots) if slots else None
    try:
        line.send(READY, _socket.MSG_NOSIGNAL)
    except OSError:  # nobody is interested any more
        pass
    if role == WAIT:
        _become_worker(line, ahead)
    line.close()


def _look_ahead(line: _socket.socket, slots: str) -> Ahead:
    """Map the slots of the worker whose place this would be; what can be done now belongs to being ready."""
    from rallypoint.checkpoint.ahead import Ahead

    ahead = Ahead([*map(int, slots.split(","))])
    while not _is_called(line, 0.0) and ahead.look():
        pass
    return ahead


def _is_called(line: _socket.socket, within_s: float) -> bool:
    poll = select.poll()
    poll.register(line, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


def _become_worker(line: _socket.socket, ahead: Ahead | None) -> None:
    while ahead is not None and not _is_called(line, LOOK_AGAIN_S):
        ahead.look()
    try:
        frame = FrameReader(line).read()
    except EOFError:  # there will be no turn for us
        os._exit(0)
    assert frame is not None  # the line blocks
    (env, streams, kept), fds = frame
    _change_streams({target: fds[position] for target, position in streams})
    numbers = {number: fds[position] for number, position in kept}
    environment.replace(_with_own_numbers(env, numbers))
    if ahead is not None:
        from rallypoint.checkpoint import client

        client.adopt(ahead.hand_over())


def _change_streams(streams: dict[int, int]) -> None:
    """What was written so far goes where a new worker's output goes, and so does the rest."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    written = {target: _content(target) for target in streams if target in (1, 2)}
    for target, fd in streams.items():
        os.dup2(fd, target)
        os.close(fd)
    out: Any = sys.stdout
    if out is not None and not out.write_through:  # with -u it makes no difference where it goes
        out.reconfigure(line_buffering=os.isatty(1))
    for target, content in written.items():
        left = memoryview(content)
        while left:
            left = left[os.write(target, left) :]


def _content(fd: int) -> bytes:
    """Of the file in memory that it was given for a stream, the end."""
    size = os.fstat(fd).st_size
    return os.pread(fd, SHOWN_BYTES, max(0, size - SHOWN_BYTES))


def _with_own_numbers(env: dict[str, str], numbers: dict[int, int]) -> dict[str, str]:
    """Files of the agent have other numbers here, where the program has opened its own meanwhile."""
    place = env.get(defaults.ENV_CHECKPOINT)
    if place is None:
        return env
    from rallypoint.checkpoint.layout import read_place, write_place

    told = read_place(place)
    files, line = tuple(numbers[one] for one in told.files), None if told.line is None else numbers[told.line]
    return {**env, defaults.ENV_CHECKPOINT: write_place(told.replace(files=files, line=line))}
