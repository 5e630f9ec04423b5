"""The end of one log, wherever its worker is: read from its file here, or asked for through the job's store (`store_relay`)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from rallypoint.base.json_text import clip, from_json, to_json
from rallypoint.base.records import Value
from rallypoint.coordination.engine import Coordination
from rallypoint.coordination.model import Transaction
from rallypoint.errors import RallypointError
from rallypoint.inspection.store_relay import MOST_BYTES, Shelf, collect, packed, unpacked
from rallypoint.inspection.view import to_document
from rallypoint.output.log_specs import LogFolder, open_log
from rallypoint.protocol import job_records as job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "END_BYTES", "Answers", "FindLog", "LogEnd", "LogFile", "LogWish", "ask_node", "find_end", "pack", "read_end", "read_log_end",
    "read_wish", "unpack",
]  # fmt: skip

END_BYTES = 64 * 1024
STREAMS = ("stdout", "stderr")
SHELF = 8
WORD_CHARACTERS = 4096


class LogFile(Value):
    """Where a worker writes, and the run's folder as it was made, if that is known: no link is followed below it."""

    path: str
    folder: LogFolder | None = None


class LogEnd(Value):
    """Whole lines at the end of a log, unless it `is_cut` in the middle of its only one; or why there are none."""

    path: str = ""
    size: int = 0
    written_s: float = 0.0  # ago
    is_cut: bool = False  # there is more before it
    text: str = ""
    error: str = ""


class LogWish(Value):
    """The end of what the worker of this rank has written to one of the streams: the one with something newer in it, or, for an
    odd `choice`, the other.
    """

    rank: int
    streams: tuple[str, ...] = STREAMS
    choice: int = 0


FindLog = Callable[[int, str], LogFile | None]  # of a global rank of this node, and stdout or stderr; None: no such rank


# --- from files ------------------------------------------------------------------------------------------------------------


def find_end(wish: LogWish, find_log: FindLog, most: int = END_BYTES) -> LogEnd | None:
    """Of a worker of this node; None if it has none of this rank."""
    found = [find_log(wish.rank, stream) for stream in wish.streams]
    files = [one for one in found if one is not None]
    if not files:
        return None
    what = f"{' or '.join(wish.streams)} of rank {wish.rank}"
    missing = LogEnd(error=f"no file has the {what}; --tee 3 or --redirects 3 keeps what workers write")
    return read_end(files, wish.choice, most) or missing


def read_end(files: Sequence[LogFile], choice: int, most: int) -> LogEnd | None:
    """Of the one that was written last, or of the next one if `choice` is odd; None if there is none that can be read."""
    found: list[tuple[os.stat_result, str, int]] = []
    try:
        for one in files:
            try:
                fd = open_log(one.folder, one.path, os.O_RDONLY | os.O_NONBLOCK)
            except OSError:
                continue
            found.append((os.fstat(fd), one.path, fd))
        if not found:
            return None
        found.sort(key=lambda one: (one[0].st_size > 0, one[0].st_mtime), reverse=True)
        return _read(*found[choice % len(found)], most)
    finally:
        for _, _, fd in found:
            os.close(fd)


def _read(status: os.stat_result, path: str, fd: int, most: int) -> LogEnd:
    written_s = max(time.time() - status.st_mtime, 0.0)
    is_cut = status.st_size > most
    try:
        data = os.pread(fd, most, max(status.st_size - most, 0))
    except OSError as error:
        return LogEnd(path, error=f"{path} cannot be read: {error.strerror}")
    if is_cut:
        data = data.partition(b"\n")[2] or data
    return LogEnd(path, status.st_size, round(written_s, 3), is_cut, data.decode(errors="replace"))


# --- from another node -----------------------------------------------------------------------------------------------------


def ask_node(engine: Coordination, node_id: str, wish: LogWish, by: str, patience_s: float) -> LogEnd:
    """RallypointError: the node does not answer."""
    asked = job.Asked("log_end", node_id, by, to_json(to_document(wish)))
    told = collect(engine, asked, [node_id], time.monotonic() + patience_s).get(node_id)
    if told is None:
        raise RallypointError(f"its node has not sent it within {patience_s:g} s")
    return unpack(told)


class Answers:
    """Of one node."""

    def __init__(self, find_log: FindLog) -> None:
        self._find_log = find_log
        self._shelf = Shelf(SHELF)
        self._shelving = threading.Lock()

    def make(self, node_id: str, number: int, detail: str) -> Transaction:
        """What puts the answer into the store. ValueError: that was no question."""
        wish = read_wish(from_json(detail))
        told = pack(find_end(wish, self._find_log) or LogEnd(error=f"rank {wish.rank} is none of this node's any more"))
        with self._shelving:
            return self._shelf.put(node_id, number, told)


def pack(end: LogEnd, most_bytes: int = MOST_BYTES) -> bytes:
    """With as much of its text as there is room for."""
    told = packed(to_document(end))
    while len(told) > most_bytes:
        end = end.replace(text=end.text[len(end.text) // 2 + 1 :], is_cut=True)
        told = packed(to_document(end))
    return told


def unpack(told: bytes) -> LogEnd:
    """RallypointError: it is none."""
    try:
        return read_log_end(unpacked(told))
    except ValueError as error:
        raise RallypointError(f"what its node has sent cannot be understood: {error}") from None


def read_log_end(found: Any) -> LogEnd:
    """ValueError: that is none."""
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    path, text, error = (found.get(name, "") for name in ("path", "text", "error"))
    size, written_s = found.get("size", 0), found.get("written_s", 0.0)
    if not all(isinstance(one, str) for one in (path, text, error)):
        raise ValueError("a word is no text")
    if type(size) is not int or type(written_s) not in (int, float):
        raise ValueError("a size or a time is no number")
    return LogEnd(
        clip(path, WORD_CHARACTERS), size, float(written_s), found.get("is_cut") is True, text, clip(error, WORD_CHARACTERS)
    )


def read_wish(found: Any) -> LogWish:
    """ValueError: that is none."""
    try:
        rank, streams, choice = found["rank"], found["streams"], found["choice"]
        wish = LogWish(int(rank), tuple(stream for stream in STREAMS if stream in streams), int(choice))
    except (TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"that is no question for the end of a log: {error}") from None
    if not wish.streams:
        raise ValueError("that is no question for the end of a log: it names no stream")
    return wish
