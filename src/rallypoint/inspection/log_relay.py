"""The logs of a node whose folder cannot be read here: it sends them, and they are kept in a folder of ours as long as we read.

Whoever wants them listens, at the address of an agent of this machine, and has that agent ask the node, through the job's store,
to call back: with a key that was made for this one call, which both prove to know, as agents do for snapshots
(`checkpoint.transfer`). What the node sends is sealed, and goes one way: blocks of whole lines of its log files, and its file of
events. Here they are put into files of the same names, and are read like those of any node. A node sends nothing but what is in
the folder of its run; and of what is sent only names that such a folder has are taken.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

from rallypoint.base import defaults
from rallypoint.base.json_text import clip, from_json
from rallypoint.base.records import Value
from rallypoint.checkpoint.transfer import FRAME_BYTES, Channel, TransferError
from rallypoint.errors import RallypointError
from rallypoint.inspection import client
from rallypoint.inspection.log_files import Tap
from rallypoint.inspection.log_lines import Mark
from rallypoint.inspection.log_reading import STREAMS, Found, Logs, NodeLogs, Wish
from rallypoint.inspection.view import NodeView
from rallypoint.net.endpoint import address_of, hold_port

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Mirror", "Sent", "read_frame", "send_logs"]

NAME = "logs"  # what the handshake is about
KEY_BYTES = 32
ANSWER_S = 10.0
ERROR_BYTES = 1000
ALIVE_EVERY_S = 5.0  # less than a connection may be silent
_FILE = re.compile(rf"{re.escape(defaults.EVENT_FILE)}|attempt_\d{{1,9}}/\d{{1,9}}/(?:stdout|stderr)\.log")


# --- who reads -------------------------------------------------------------------------------------------------------------


class Mirror(NodeLogs):
    """A node elsewhere, as if its folder were here. RallypointError: it does not send anything, for the reason that is told."""

    def __init__(self, node: NodeView, through: Sequence[client.Agent], wish: Wish, follow: bool) -> None:
        super().__init__(tempfile.mkdtemp(prefix="rallypoint_logs_"), node.node)
        self._is_over = False
        self._error = ""
        self._channel: Channel | None = None
        self._thread = threading.Thread(target=self._receive, name="rallypoint-logs", daemon=True)
        is_up = False
        try:
            self._channel = _call_for(node, through, wish, follow)
            self._thread.start()
            if not follow:
                self._thread.join()
            is_up = True
        except OSError as error:
            raise RallypointError(f"nobody can call this machine: {error.strerror or error}") from None
        finally:
            if not is_up:
                self.close()

    @property
    def has_ended(self) -> bool:
        return self._is_over

    def take_error(self) -> str:
        error = self._error if self._is_over else ""
        self._error = "" if error else self._error
        return error

    @property
    def is_here(self) -> bool:
        return True  # whether it has ended is known for sure

    def close(self) -> None:
        if self._channel is not None:
            self._channel.abort()
        if self._thread.ident is not None:
            self._thread.join()
        if self._channel is not None:
            self._channel.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _receive(self) -> None:
        assert self._channel is not None
        try:
            while self._take(self._channel.receive()):
                pass
        except (TransferError, OSError, ValueError) as error:
            self._error = str(error)
        self._is_over = True

    def _take(self, frame: bytes) -> bool:
        """Whether more will come."""
        sent = read_frame(frame)
        if sent.file:
            path = os.path.join(self.folder, sent.file)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "ab") as file:
                file.write(sent.block)
            os.utime(path, ns=(sent.written_us * 1000, sent.written_us * 1000))
        self._error = sent.error
        return not sent.is_last


class Sent(Value):
    """What one frame holds: a piece of a file of a run's folder, or the end, and why it is the end; or nothing."""

    file: str = ""
    written_us: int = 0
    block: bytes = b""
    is_last: bool = False
    error: str = ""


def read_frame(frame: bytes) -> Sent:
    """ValueError: that is nothing that a node sends."""
    head, _, block = frame.partition(b"\n")
    try:
        found = from_json(head)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("it says what cannot be understood")
    file, written_us = found.get("file", ""), found.get("written_us", 0)
    if file != "" and (not isinstance(file, str) or not _FILE.fullmatch(file)):
        raise ValueError(f"{file!r:.60} is no log file")
    if type(written_us) is not int or not 0 <= written_us < 1 << 53:
        raise ValueError(f"{written_us!r:.60} is no time")
    return Sent(file, written_us, block, "end" in found, clip(str(found.get("error", "")), ERROR_BYTES))


def _call_for(node: NodeView, through: Sequence[client.Agent], wish: Wish, follow: bool) -> Channel:
    """A connection from the node."""
    host = next((agent.node.address for agent in through if agent.node.address), "")
    if not host or not node.id:
        raise RallypointError("it cannot be asked for them")
    key = os.urandom(KEY_BYTES)
    listeners = [socket.socket(fileno=one.detach()) for one in hold_port(host, (0,))]
    try:
        detail = {
            "host": host,
            "port": address_of(listeners[0])[1],
            "key": key.hex(),
            "ranks": wish.ranks,
            "streams": wish.streams,
            "since_us": wish.since_us,
            "tail": wish.tail if wish.pattern is None else None,  # no expression of somebody else's is tried there
            "follow": follow,
        }
        client.LocalJob(through).send_logs(node.id, json.dumps(detail))
        return _await_call(listeners, key)
    finally:
        for listener in listeners:
            listener.close()


def _await_call(listeners: Sequence[socket.socket], key: bytes) -> Channel:
    """From whoever knows the key; strangers are let go."""
    deadline = time.monotonic() + ANSWER_S
    while (left_s := deadline - time.monotonic()) > 0:
        for listener in select.select(listeners, [], [], left_s)[0]:
            channel = Channel(listener.accept()[0])
            try:
                channel.welcome(key, NAME)
            except (TransferError, OSError, ValueError):
                channel.close()
            else:
                return channel
    raise RallypointError(f"it has not sent them within {ANSWER_S:g} s")


# --- who sends -------------------------------------------------------------------------------------------------------------


class _Own(NodeLogs):
    """This node; it has ended when its agent ends."""

    def __init__(self, node: NodeView, is_closing: Callable[[], bool]) -> None:
        super().__init__(node.log_dir, node.node)
        self._is_closing = is_closing

    @property
    def has_ended(self) -> bool:
        return self._is_closing()


def send_logs(detail: str, node: NodeView, is_closing: Callable[[], bool]) -> None:
    """To who asks, until it has what it wants, is gone, or this agent ends. RallypointError: it could not be done."""
    try:
        asked = from_json(detail)
        wish, follow = _read_wish(asked), asked["follow"] is True
        channel = Channel.call(str(asked["host"]), int(asked["port"]), bytes.fromhex(asked["key"]), NAME)
    except (ValueError, KeyError, TypeError, TransferError) as error:
        raise RallypointError(f"logs cannot be sent: {error}") from None
    own = _Own(node, is_closing)
    try:
        _send_all(channel, Logs(node.node, lambda: Found((own,))), wish, follow, node.log_dir)
        _send(channel, {"end": True})
    except RallypointError as error:
        _send(channel, {"end": True, "error": str(error)})
    except (TransferError, OSError) as error:
        raise RallypointError(f"logs are sent no more: {error}") from None
    finally:
        channel.close()


def _send_all(channel: Channel, logs: Logs, wish: Wish, follow: bool, folder: str) -> None:
    events = Tap(os.path.join(folder, defaults.EVENT_FILE), Mark(0, ""))
    sent_at = time.monotonic()
    try:
        for lanes in logs.passages(wish, follow):
            names = {lane.mark: os.path.relpath(logs.path_of(lane.mark), folder) for lane in lanes}
            pieces = [(defaults.EVENT_FILE, events.lane(False, False, 1)), *((names[lane.mark], lane) for lane in lanes)]
            for name, lane in pieces:
                for block in lane.blocks:
                    for start in range(0, len(block), FRAME_BYTES // 2):
                        _send(channel, {"file": name, "written_us": lane.written_us}, block[start : start + FRAME_BYTES // 2])
                        sent_at = time.monotonic()
            if time.monotonic() - sent_at >= ALIVE_EVERY_S:
                _send(channel, {})
                sent_at = time.monotonic()
    finally:
        events.close()


def _send(channel: Channel, head: dict[str, Any], block: bytes = b"") -> None:
    channel.send(json.dumps(head).encode() + b"\n" + block)


def _read_wish(asked: dict[str, Any]) -> Wish:
    """ValueError or TypeError: it is none."""
    ranks, since_us, tail = asked["ranks"], asked["since_us"], asked["tail"]
    return Wish(
        ranks=None if ranks is None else tuple((int(first), int(last)) for first, last in ranks),
        streams=tuple(stream for stream in STREAMS if stream in asked["streams"]),
        since_us=None if since_us is None else int(since_us),
        tail=None if tail is None else int(tail),
    )
