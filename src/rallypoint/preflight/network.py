"""Trying the way to another machine: its name, its port, what answers there; and with a doctor at the other end, all the rest.

Two doctors talk in lines: ``time``, ``take N`` (and N bytes), ``give N``, ``back PORT``. The one that listens does nothing else,
for whoever comes, and connects to nobody but whoever asks for it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

from rallypoint.base.text import host_port
from rallypoint.net.endpoint import look_up
from rallypoint.preflight import reach
from rallypoint.preflight.rules import Finding

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["examine", "examine_name", "serve"]

GREETING = b"rallypoint doctor\n"
DIAL_TIMEOUT_S = 3.0
ANSWER_TIMEOUT_S = 2.0
BULK_BYTES, BULK_S = 16 << 20, 5.0
BULK_BYTES_MAX = 64 << 20
TRIPS = 5
_IP_MTU = 14
_CHUNK = bytes(64 * 1024)
_LINE_BYTES_MAX = 128
_GUESTS_MAX = 8


def examine_name() -> Finding:
    name = socket.gethostname()
    try:
        return reach.judge_name(name, [str(address[0]) for _, address in look_up(name, 0)])
    except OSError as error:
        return reach.judge_name(name, (), _words(error))


def examine(host: str, port: int) -> Iterator[Finding]:
    """What there is to say of the way to this place, as it is found out."""
    began = time.monotonic()
    try:
        addresses = look_up(host, port)
    except OSError as error:
        yield reach.judge_resolution(host, (), 0.0, _words(error))
        return
    yield reach.judge_resolution(host, [str(address[0]) for _, address in addresses], time.monotonic() - began)
    for family, address in addresses:
        shown = host_port(str(address[0]), port)
        try:
            with _dial(family, address) as line:
                yield reach.judge_port(shown, "", False)
                yield reach.judge_route(str(line.getsockname()[0]), _path_mtu(line, family))
        except OSError as error:
            yield reach.judge_port(shown, _words(error), _is_here(family, address))
            continue
        yield _trips(family, address)
        kind, told = _who_answers(family, address)
        yield reach.judge_answer(kind, told)
        if kind == "doctor":
            yield from _with_a_doctor(family, address)


def _dial(family: int, address: tuple[Any, ...]) -> socket.socket:
    line = socket.socket(family, socket.SOCK_STREAM)
    line.settimeout(DIAL_TIMEOUT_S)
    try:
        line.connect(address)
    except BaseException:
        line.close()
        raise
    return line


def _words(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _is_here(family: int, address: tuple[Any, ...]) -> bool:
    """Whether it is an address of this machine: then one can bind it."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True


def _path_mtu(line: socket.socket, family: int) -> int | None:
    """What the kernel knows of the way: of the interface, or what a router has told it."""
    if family != socket.AF_INET:
        return None
    try:
        return line.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    except OSError:
        return None


def _trips(family: int, address: tuple[Any, ...]) -> Finding:
    took_s, lost = [], 0
    for _ in range(TRIPS):
        began = time.monotonic()
        try:
            _dial(family, address).close()
            took_s.append(time.monotonic() - began)
        except OSError:
            lost += 1
    return reach.judge_trip(took_s, lost)


# --- who answers -----------------------------------------------------------------------------------------------------------


def _who_answers(family: int, address: tuple[Any, ...]) -> tuple[str, str]:
    if _asked(family, address, GREETING).startswith(GREETING):
        return "doctor", ""
    if told := _ask_store(family, address):
        return "store", told
    answer = _asked(family, address, b"GET /version HTTP/1.0\r\n\r\n").decode(errors="replace")
    if '"etcdserver"' in answer:
        return "etcd", answer.partition('"etcdserver":"')[2].partition('"')[0]
    if answer.startswith("HTTP/"):
        return "http", answer.splitlines()[0][:80]
    return "", ""


def _asked(family: int, address: tuple[Any, ...], question: bytes) -> bytes:
    """What comes back within a moment, as far as it comes at once."""
    try:
        with _dial(family, address) as line:
            line.settimeout(ANSWER_TIMEOUT_S)
            line.sendall(question)
            return line.recv(4096)
    except OSError:
        return b""


def _ask_store(family: int, address: tuple[Any, ...]) -> str:
    """What a store of ours says to a node of a job that is not its own: whose it is, or that it wants a secret."""
    from rallypoint.coordination.embedded.handshake import ClientHandshake, HandshakeRefused
    from rallypoint.coordination.embedded.wire import LENGTH_BYTES, FrameError, make_frame

    handshake = ClientHandshake("rallypoint doctor", None)
    answer = _asked(family, address, make_frame(handshake.hello(), None))
    if len(answer) <= LENGTH_BYTES:
        return ""
    try:
        handshake.answer(answer[LENGTH_BYTES:])
    except HandshakeRefused as refusal:
        return str(refusal).partition(", and the node")[0]
    except FrameError:
        return ""
    return "it takes us for a node of its job"


# --- two doctors -----------------------------------------------------------------------------------------------------------


def _with_a_doctor(family: int, address: tuple[Any, ...]) -> Iterator[Finding]:
    try:
        with _dial(family, address) as line, line.makefile("rb") as lines:
            line.settimeout(BULK_S)
            line.sendall(GREETING)
            lines.readline(_LINE_BYTES_MAX)
            yield _clocks(line, lines)
            yield _way_back(line, lines, family)
            yield _upload(line, lines)
            yield _download(line, lines)
    except OSError as error:
        yield Finding("other end", "bad", f"it went away: {_words(error)}", "try again")


def _clocks(line: socket.socket, lines: Any) -> Finding:
    """Of the quickest of several questions: the answer was given within that time."""
    found = []
    for _ in range(TRIPS):
        asked_ns = time.time_ns()
        line.sendall(b"time\n")
        theirs_ns = int(lines.readline(_LINE_BYTES_MAX) or 0)
        heard_ns = time.time_ns()
        found.append((heard_ns - asked_ns, (asked_ns + heard_ns) / 2 - theirs_ns))
    took_ns, off_ns = min(found)
    return reach.judge_offset(off_ns / 1e9, took_ns / 2e9)


def _way_back(line: socket.socket, lines: Any, family: int) -> Finding:
    with socket.socket(family, socket.SOCK_STREAM) as door:
        door.bind((line.getsockname()[0], 0))
        door.listen(1)
        line.sendall(f"back {door.getsockname()[1]}\n".encode())
        answer = lines.readline(_LINE_BYTES_MAX).decode(errors="replace").strip()
    return reach.judge_back("" if answer == "ok" else answer or "no answer")


def _upload(line: socket.socket, lines: Any) -> Finding:
    line.sendall(f"take {BULK_BYTES}\n".encode())
    began, sent = time.monotonic(), 0
    try:
        while sent < BULK_BYTES:
            sent += line.send(_CHUNK)
        lines.readline(_LINE_BYTES_MAX)
    except TimeoutError:
        return reach.judge_rate("to there", 0, BULK_S, is_complete=False)
    return reach.judge_rate("to there", sent, time.monotonic() - began, is_complete=True)


def _download(line: socket.socket, lines: Any) -> Finding:
    line.sendall(f"give {BULK_BYTES}\n".encode())
    began, got = time.monotonic(), 0
    try:
        while got < BULK_BYTES and (part := lines.read1(len(_CHUNK))):
            got += len(part)
    except TimeoutError:
        return reach.judge_rate("from there", got, time.monotonic() - began, is_complete=False)
    return reach.judge_rate("from there", got, time.monotonic() - began, is_complete=True)


def serve(door: socket.socket) -> None:
    """Be the other end for whoever comes, a few at a time, until the socket is closed or the process ends."""
    seats = threading.BoundedSemaphore(_GUESTS_MAX)

    def attend(line: socket.socket) -> None:
        try:
            with line, line.makefile("rb") as lines:
                line.settimeout(DIAL_TIMEOUT_S + BULK_S)
                while command := lines.readline(_LINE_BYTES_MAX):
                    _obey(command.decode(errors="replace").split(), line, lines)
        except (OSError, ValueError):
            return  # it went away, or is no doctor
        finally:
            seats.release()

    while True:
        try:
            line, _ = door.accept()
        except OSError:
            return
        if not seats.acquire(blocking=False):
            line.close()
            continue
        threading.Thread(target=attend, args=(line,), name="rallypoint-doctor", daemon=True).start()


def _obey(command: list[str], line: socket.socket, lines: Any) -> None:
    match command:
        case ["rallypoint", "doctor"]:
            line.sendall(GREETING)
        case ["time"]:
            line.sendall(b"%d\n" % time.time_ns())
        case ["take", count]:
            left = min(int(count), BULK_BYTES_MAX)
            while left > 0 and (part := lines.read1(min(left, len(_CHUNK)))):
                left -= len(part)
            line.sendall(b"ok\n")
        case ["give", count]:
            left = min(int(count), BULK_BYTES_MAX)
            while left > 0:
                left -= line.send(_CHUNK[:left])
        case ["back", port]:
            line.sendall(f"{_call_back(line, int(port))}\n".encode())
        case _:
            raise ValueError("no such command")


def _call_back(line: socket.socket, port: int) -> str:
    """Only to whoever asks."""
    peer = line.getpeername()
    try:
        _dial(line.family, (peer[0], port, *peer[2:])).close()
    except OSError as error:
        return _words(error)
    return "ok"
