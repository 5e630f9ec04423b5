"""Asking NCCL, and torch's recorder of it, how far each worker has come: what `hangs.collectives` compares.

Flight Recorder writes what it has into a file once anything is written to a pipe that each worker has. It takes its time: up to
a second until it looks, and four on an H200 until all is written. So nothing waits for it but the end of the worker that hangs.
The RAS service of NCCL listens at a port of each machine, and answers for all processes of the job at once, in milliseconds.

Both belong to the program: whatever comes from them is bounded, and a dump is read by what makes nothing but plain values of it.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from rallypoint.base import defaults, environment
from rallypoint.base.json_text import from_json
from rallypoint.base.records import Value
from rallypoint.errors import UsageError
from rallypoint.net.endpoint import parse_rendezvous_endpoint

__all__ = ["DUMPS_S", "DUMP_NAME", "FlightRecorders", "RasAnswer", "ask_ras", "read_dump"]

DUMPS_S = 8.0  # from the question until nobody waits for dumps any more
DUMP_BYTES_MAX = 64 << 20
DUMP_NAME = "nccl_trace_rank_"  # as torch's own tools expect it
RAS_S = 1.0  # for all of its answer
RAS_BYTES_MAX = 16 << 20
RAS_PORT = 28028
_GREETING, _READY = b"CLIENT PROTOCOL 2\n", b"SERVER PROTOCOL"
_ASKED = b"1\n"


class FlightRecorders:
    """Those of the workers of one node, group after group; workers that use no NCCL have none."""

    def __init__(self) -> None:
        self._folder = ""  # of their pipes, and of a link to where the dumps go: the folder of a group is not known before
        self._pipes = self._dumps = ""  # how the names begin
        self._asked: dict[int, os.stat_result | None] = {}  # by global rank: a dump that was there before
        self._found: dict[int, object] = {}
        self._asked_at = 0.0

    def env(self, given: Mapping[str, str]) -> dict[str, str]:
        """What a worker's environment needs, besides what it has: programs may have places of their own."""
        if not self._folder:
            self._make_folder()
        if not self._folder:
            return {}
        own = {
            defaults.ENV_NCCL_PIPE: os.path.join(self._folder, "ask_"),
            defaults.ENV_NCCL_DUMPS: os.path.join(self._folder, "here", DUMP_NAME),
        }
        before = given.get(defaults.ENV_NCCL_DUMPS) or given.get(defaults.ENV_NCCL_DUMPS_BEFORE)
        if before:
            own[defaults.ENV_NCCL_DUMPS] = before
        own[defaults.ENV_NCCL_PIPE] = given.get(defaults.ENV_NCCL_PIPE) or own[defaults.ENV_NCCL_PIPE]
        self._pipes, self._dumps = own[defaults.ENV_NCCL_PIPE], own[defaults.ENV_NCCL_DUMPS]
        return {**own, defaults.ENV_NCCL_DUMPS_BEFORE: self._dumps}

    def _make_folder(self) -> None:
        path = os.path.join(environment.temporary_dir(), f"rallypoint-nccl-{os.getpid()}-{os.urandom(4).hex()}")
        with suppress(OSError):  # then they cannot be asked
            os.mkdir(path, 0o700)
            self._folder = path

    def begin(self, folder: str) -> None:
        """Another group has been started, whose dumps go into this folder, if there is one."""
        self._asked, self._found = {}, {}
        if self._folder:
            here = os.path.join(self._folder, "here")
            with suppress(OSError):
                os.unlink(here)
            with suppress(OSError):
                os.symlink(os.path.abspath(folder) if folder else ".", here)

    def ask(self, ranks: Iterable[int]) -> None:
        """Let these write down what they have; whoever has no recorder is not waited for."""
        self._asked_at = time.monotonic()
        for rank in ranks if self._pipes else ():
            before = _look_at(f"{self._dumps}{rank}")
            with suppress(OSError):  # no such pipe, or nobody who reads it
                _ring(f"{self._pipes}{rank}.pipe")
                self._asked[rank] = before

    @property
    def was_asked(self) -> bool:
        """Whether any of them heard it."""
        return bool(self._asked)

    def dumps(self) -> dict[int, object]:
        """By global rank, those that are there by now."""
        for rank, before in self._asked.items():
            path = f"{self._dumps}{rank}"
            if rank not in self._found and _is_new(before, _look_at(path)):
                dump = read_dump(path)
                if dump is not None:
                    self._found[rank] = dump
        return self._found

    def are_awaited(self, now: float) -> bool:
        """Whether some that were asked may still write."""
        return bool(self._asked) and now < self._asked_at + DUMPS_S and len(self.dumps()) < len(self._asked)

    def close(self) -> None:
        if self._folder:
            from shutil import rmtree

            rmtree(self._folder, ignore_errors=True)
            self._folder = self._pipes = ""


def _look_at(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _is_new(before: os.stat_result | None, now: os.stat_result | None) -> bool:
    if now is None or before is None:
        return now is not None
    return (before.st_mtime_ns, before.st_ino, before.st_size) != (now.st_mtime_ns, now.st_ino, now.st_size)


def _ring(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            raise OSError(f"{path} is no pipe")
        os.write(fd, _ASKED)
    finally:
        os.close(fd)


def read_dump(path: str) -> object:
    """What a dump of Flight Recorder says, a pickle of plain values; None for one that is half written, or anything else."""
    import io
    import pickle

    class PlainUnpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            raise pickle.UnpicklingError(f"a dump has no {module}.{name}")

    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = os.read(fd, DUMP_BYTES_MAX) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
        return PlainUnpickler(io.BytesIO(data)).load()
    except Exception:  # bytes that are no pickle make it raise whatever they like
        return None
    finally:
        os.close(fd)


class RasAnswer(Value):
    """What NCCL says of the job: as a document, by those versions that can, or only in words."""

    text: str = ""
    document: object = None


def ask_ras(place: str, timeout_s: float = RAS_S) -> RasAnswer:
    """The state of the communicators of a job, by the service that listens at this place; empty if none answers in time."""
    give_up_at = time.monotonic() + timeout_s
    try:
        host, port = parse_rendezvous_endpoint(place or f"localhost:{RAS_PORT}", RAS_PORT)
        with socket.create_connection((host, port), timeout_s) as connection:
            conversation = _Conversation(connection, give_up_at)
            if not conversation.ask(_GREETING).startswith(_READY):
                return RasAnswer()
            conversation.ask(b"TIMEOUT 1\n")
            conversation.ask(b"SET FORMAT json\n")
            connection.sendall(b"STATUS\n")
            text = conversation.rest().decode(errors="replace")
    except (OSError, UsageError):
        return RasAnswer()
    try:
        return RasAnswer(text, from_json(text))
    except ValueError:
        return RasAnswer(text)


class _Conversation:
    def __init__(self, connection: socket.socket, give_up_at: float) -> None:
        self._connection, self._give_up_at = connection, give_up_at
        self._heard = b""

    def ask(self, line: bytes) -> bytes:
        self._connection.sendall(line)
        while b"\n" not in self._heard and self._hear():
            pass
        answer, _, self._heard = self._heard.partition(b"\n")
        return answer

    def rest(self) -> bytes:
        while len(self._heard) < RAS_BYTES_MAX and self._hear():
            pass
        return self._heard

    def _hear(self) -> bool:
        self._connection.settimeout(max(0.001, self._give_up_at - time.monotonic()))
        heard = self._connection.recv(1 << 16)
        self._heard += heard
        return bool(heard)
