"""Trying the way to another machine: its name, its port, what answers there; and with a doctor at the other end, all the rest.

Two doctors talk in lines: ``time``, ``take N`` (and N bytes), ``give N``, ``back PORT``. The one that listens does nothing else,
for whoever comes, and connects to nobody but whoever asks for it. It sees besides who tries to come and cannot: connections that
its kernel has answered, and that nobody completes, are of those whom no answer reaches.

Everything ends in time, however little comes at once: a `_Talk` as a whole has so many seconds, not each of its calls.
"""

from __future__ import annotations

import errno
import fcntl
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from rallypoint.base.text import host_port
from rallypoint.net.endpoint import look_up
from rallypoint.preflight import reach
from rallypoint.preflight.rules import Finding

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["examine", "examine_name", "serve", "watch_for_unanswered"]

GREETING = b"rallypoint doctor\n"
DIAL_TIMEOUT_S = 3.0
ANSWER_TIMEOUT_S = 2.0
BULK_BYTES, BULK_S = 16 << 20, 5.0
SILENCE_S = 3.0  # after which no more is expected
BULK_BYTES_MAX = 64 << 20
TRIPS = 5
PROBE_BYTES, PROBE_S = 32 * 1024, 1.5
GUEST_S = 10.0  # for each command of a guest, the wait for it included
_MTU_OPTIONS = {socket.AF_INET: (socket.IPPROTO_IP, 14), socket.AF_INET6: (socket.IPPROTO_IPV6, 24)}
_HEADER_BYTES = {socket.AF_INET: 40, socket.AF_INET6: 60}
_CHUNK = bytes(64 * 1024)
_LINE_BYTES_MAX = 128
_ANSWER_BYTES_MAX = 4096
_DIGITS_MAX = 20
_GLANCE_MS = 100
_GUESTS_MAX = 8
_LOOK_S, _TOLD_AGAIN_S = 1.0, 60.0
_DROP = struct.pack("ii", 1, 0)  # SO_LINGER: what has not been sent when the socket is closed is of no use to anybody


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
                yield reach.judge_route(str(line.getsockname()[0]), _path_mtu(line))
        except OSError as error:
            yield reach.judge_port(shown, _words(error), _is_here(family, address))
            continue
        yield _trips(family, address)
        kind, told = _who_answers(family, address)
        yield reach.judge_answer(kind, told)
        if kind == "doctor":
            yield from _with_a_doctor(family, address)


def _dial(family: int, address: tuple[Any, ...], packet_bytes: int = 0) -> socket.socket:
    """With `packet_bytes`, both sides send no larger packets than that."""
    line = socket.socket(family, socket.SOCK_STREAM)
    line.settimeout(DIAL_TIMEOUT_S)
    try:
        if packet_bytes:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, packet_bytes - _HEADER_BYTES[socket.AddressFamily(family)])
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


def _path_mtu(line: socket.socket) -> int | None:
    """What the kernel knows of the way: at first of the interface, later also what a router has told it."""
    try:
        return line.getsockopt(*_MTU_OPTIONS[socket.AddressFamily(line.family)])
    except (KeyError, OSError):
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


class _Talk:
    """Lines and bytes over a connection, all of it within so many seconds from now; TimeoutError when they are over."""

    def __init__(self, line: socket.socket, within_s: float) -> None:
        self.line = line
        self._read = b""
        self.give_time(within_s)

    def give_time(self, within_s: float) -> None:
        self._ends_at = time.monotonic() + within_s

    def _be_in_time(self) -> None:
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(errno.ETIMEDOUT, "it took too long")
        self.line.settimeout(left_s)

    def say(self, what: bytes) -> None:
        self._be_in_time()
        self.line.sendall(what)

    def put(self, what: bytes) -> int:
        """How much of it was taken."""
        self._be_in_time()
        return self.line.send(what)

    def take(self, most: int) -> bytes:
        """What is there next; nothing once they have closed the connection."""
        if self._read:
            part, self._read = self._read[:most], self._read[most:]
            return part
        self._be_in_time()
        return self.line.recv(most)

    def next_line(self) -> str:
        """Without its end; empty once they have closed the connection."""
        held = b""
        while b"\n" not in held:
            if len(held) > _LINE_BYTES_MAX:
                raise ValueError("a line that does not end")
            part = self.take(_LINE_BYTES_MAX)
            if not part:
                return ""
            held += part
        line, _, rest = held.partition(b"\n")
        self._read = rest + self._read
        return line.decode(errors="replace")

    def answer(self) -> str:
        """To what was asked."""
        line = self.next_line()
        if not line:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        return line

    def number(self) -> int:
        line = self.answer()
        if not (line.isascii() and line.isdecimal() and len(line) <= _DIGITS_MAX):
            raise ValueError(f"{line[:40]!r} is no number")
        return int(line)


# --- who answers -----------------------------------------------------------------------------------------------------------


def _who_answers(family: int, address: tuple[Any, ...]) -> tuple[str, str]:
    if _asked(family, address, GREETING, lambda answer: answer.endswith(b"\n")).startswith(GREETING):
        return "doctor", ""
    if told := _ask_store(family, address):
        return "store", told
    answer = _asked(family, address, b"GET /version HTTP/1.0\r\n\r\n", lambda _: False).decode(errors="replace")
    if '"etcdserver"' in answer:
        return "etcd", answer.partition('"etcdserver":"')[2].partition('"')[0]
    if answer.startswith("HTTP/"):
        return "http", answer.splitlines()[0][:80]
    return "", ""


def _asked(family: int, address: tuple[Any, ...], question: bytes, is_whole: Callable[[bytes], bool]) -> bytes:
    """What comes back within a moment, in however many pieces, until it is whole or they have closed the connection."""
    answer = b""
    with suppress(OSError), _dial(family, address) as line:  # it is judged by what has come
        talk = _Talk(line, ANSWER_TIMEOUT_S)
        talk.say(question)
        while len(answer) < _ANSWER_BYTES_MAX and (part := talk.take(_ANSWER_BYTES_MAX)):
            answer += part
            if is_whole(answer):
                break
    return answer


def _ask_store(family: int, address: tuple[Any, ...]) -> str:
    """What a store of ours says to a node of a job that is not its own: whose it is, or that it wants a secret."""
    from rallypoint.coordination.embedded.handshake import ClientHandshake, HandshakeRefused
    from rallypoint.coordination.embedded.wire import LENGTH_BYTES, FrameError, make_frame

    def is_whole(answer: bytes) -> bool:
        return len(answer) >= LENGTH_BYTES + int.from_bytes(answer[:LENGTH_BYTES], "big")

    handshake = ClientHandshake("rallypoint doctor", None)
    answer = _asked(family, address, make_frame(handshake.hello(), None), is_whole)
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
    """Each on a connection of its own: what one leaves in the buffers would be in the way of the next."""
    try:
        for measure in (_clocks, _way_back):
            with _greeted(family, address) as talk:
                yield measure(talk)
        stuck, mtu = [], None
        for direction, move in (("to there", _upload), ("from there", _download)):
            with _greeted(family, address) as talk:
                usual = _path_mtu(talk.line)
                found = move(talk, direction)
                mtu = _path_mtu(talk.line)
            yield found
            if found.state == "bad":
                stuck.append(direction)
        if stuck:
            yield reach.judge_packets(stuck, usual, _largest_that_arrives(family, address, usual))
        elif usual and mtu and mtu < usual:
            yield reach.judge_packets((), usual, mtu)
    except OSError as error:
        yield Finding("other end", "bad", f"it went away: {_words(error)}", "try again")
    except ValueError as error:
        advice = "see what listens there, and that it is of the same version"
        yield Finding("other end", "bad", f"it does not answer as a doctor does: {error}", advice)


class _greeted:
    """A connection to a doctor that has said so."""

    def __init__(self, family: int, address: tuple[Any, ...], packet_bytes: int = 0) -> None:
        self._line = _dial(family, address, packet_bytes)

    def __enter__(self) -> _Talk:
        talk = _Talk(self._line, DIAL_TIMEOUT_S + ANSWER_TIMEOUT_S)
        try:
            talk.say(GREETING)
            talk.answer()
        except BaseException:
            self._line.close()
            raise
        return talk

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP)
        self._line.close()


def _clocks(talk: _Talk) -> Finding:
    """Of the quickest of several questions: the answer was given within that time."""
    found = []
    for _ in range(TRIPS):
        asked_ns = time.time_ns()
        talk.say(b"time\n")
        theirs_ns = talk.number()
        heard_ns = time.time_ns()
        found.append((heard_ns - asked_ns, (asked_ns + heard_ns) / 2 - theirs_ns))
    took_ns, off_ns = min(found)
    return reach.judge_offset(off_ns / 1e9, took_ns / 2e9)


def _way_back(talk: _Talk) -> Finding:
    with socket.socket(talk.line.family, socket.SOCK_STREAM) as door:
        door.bind((talk.line.getsockname()[0], 0))
        door.listen(1)
        talk.say(f"back {door.getsockname()[1]}\n".encode())
        answer = talk.answer().strip()
    return reach.judge_back("" if answer == "ok" else answer)


class _Pace:
    """How much has moved so far, and when the last of it."""

    def __init__(self) -> None:
        self.moved = 0
        self._began = self._moved_at = time.monotonic()

    @property
    def took_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._moved_at

    @property
    def may_go_on(self) -> bool:
        return self.took_s < BULK_S and self.silent_s < SILENCE_S

    def note(self, moved: int) -> None:
        if moved > self.moved:
            self.moved, self._moved_at = moved, time.monotonic()

    def judge(self, direction: str, is_complete: bool) -> Finding:
        return reach.judge_rate(direction, self.moved, self.took_s, is_complete, self.silent_s)


def _upload(talk: _Talk, direction: str) -> Finding:
    """What has arrived is what their kernel has acknowledged, not what ours has taken."""
    talk.say(f"take {BULK_BYTES}\n".encode())
    line, pace, sent = talk.line, _Pace(), 0
    while pace.may_go_on:
        line.setblocking(False)
        is_sending = sent < BULK_BYTES
        heard, room, _ = select.select([line], [line] if is_sending else [], [], _GLANCE_MS / 1000)
        if heard:
            talk.answer()
            pace.note(BULK_BYTES)
            return pace.judge(direction, is_complete=True)
        if room:
            sent += line.send(_CHUNK[: BULK_BYTES - sent])
        pace.note(sent - _unacknowledged(line))
    return pace.judge(direction, is_complete=False)


def _unacknowledged(line: socket.socket) -> int:
    (count,) = struct.unpack("i", fcntl.ioctl(line.fileno(), termios.TIOCOUTQ, bytes(4)))
    return int(count)


def _download(talk: _Talk, direction: str) -> Finding:
    talk.say(f"give {BULK_BYTES}\n".encode())
    pace = _Pace()
    while pace.moved < BULK_BYTES and pace.may_go_on:
        talk.give_time(min(BULK_S - pace.took_s, SILENCE_S - pace.silent_s))
        with suppress(TimeoutError):
            part = talk.take(len(_CHUNK))
            if not part:
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
            pace.note(pace.moved + len(part))
    return pace.judge(direction, pace.moved >= BULK_BYTES)


def _largest_that_arrives(family: int, address: tuple[Any, ...], usual: int | None) -> int | None:
    """How large packets may be so that all arrive, either way, of sizes that are usual; None: not even small ones do."""

    def arrive(size: int) -> bool:
        try:
            with _greeted(family, address, size) as talk:
                talk.give_time(PROBE_S)
                talk.say(b"take %d\n" % PROBE_BYTES + bytes(PROBE_BYTES) + b"give %d\n" % PROBE_BYTES)
                talk.answer()
                got = 0
                while got < PROBE_BYTES and (part := talk.take(PROBE_BYTES - got)):
                    got += len(part)
                return got == PROBE_BYTES
        except OSError:
            return False

    return reach.largest_that_fits(arrive, usual)


# --- the one that listens --------------------------------------------------------------------------------------------------


def serve(door: socket.socket) -> None:
    """Be the other end for whoever comes, a few at a time, until the socket is closed or the process ends."""
    seats = threading.BoundedSemaphore(_GUESTS_MAX)

    def attend(line: socket.socket) -> None:
        try:
            with line:
                talk = _Talk(line, GUEST_S)
                while command := talk.next_line():
                    _obey(command.split(), talk)
                    talk.give_time(GUEST_S)
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


def _obey(command: list[str], talk: _Talk) -> None:
    match command:
        case ["rallypoint", "doctor"]:
            talk.say(GREETING)
        case ["time"]:
            talk.say(b"%d\n" % time.time_ns())
        case ["take", count]:
            left = min(int(count), BULK_BYTES_MAX)
            while left > 0:
                part = talk.take(min(left, len(_CHUNK)))
                if not part:
                    raise ConnectionResetError
                left -= len(part)
            talk.say(b"ok\n")
        case ["give", count]:
            left = min(int(count), BULK_BYTES_MAX)
            while left > 0:
                left -= talk.put(_CHUNK[:left])
        case ["back", port]:
            talk.say(f"{_call_back(talk.line, int(port))}\n".encode())
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


def watch_for_unanswered(port: int, tell: Callable[[str], object], is_over: Callable[[float], bool]) -> None:
    """Tell of machines whose connections to this port stay half open: ours do not reach them. `is_over` waits so many seconds."""
    before: set[str] = set()
    told_at: dict[str, float] = {}
    while not is_over(_LOOK_S):
        now, half_open = time.monotonic(), _half_open(port)
        for address in half_open & before:
            if now - told_at.get(address, -_TOLD_AGAIN_S) >= _TOLD_AGAIN_S:
                told_at[address] = now
                tell(address)
        before = half_open


def _half_open(port: int) -> set[str]:
    found: set[bytes] = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError), open(path, encoding="ascii") as file:
            found.update(reach.half_open_peers(file.read(), port))
    families = {4: socket.AF_INET, 16: socket.AF_INET6}
    return {socket.inet_ntop(families[len(address)], address).removeprefix("::ffff:") for address in found}
