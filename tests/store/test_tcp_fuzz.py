"""Hostile requests by the thousand: the server neither falls, nor hangs, nor grows, and serves its own clients all the while.

P36. Some peers greet wrongly, most are let in; what they send are true requests with bits, bytes, lengths and counts changed, odd
contents, plain noise, and beginnings without an end. Each connection is made from its own seed, which a failure names.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from tests.store.tcp_peers import RESET, ServerApart, TcpPeer

from rallypoint.store import tcp_protocol as wire

LIMIT_BYTES = 32 << 20
GROWTH_KB = 80 * 1024  # what is kept, what the allocator does not give back, and what is on its way
OPEN_AT_ONCE = 40
REQUESTS_PER_PEER = 24  # the first that breaks the format is the last that is looked at
PEERS_PER_CHECK = 250
OPERATIONS = range(19)
KEYS = [b"", b"a", b"b", b"q", b"/counter", b"\0", b"\xff" * 30, b"k" * 8192]
VALUES = [b"", b"1", b"-1", b" 7x", b"9" * 400, b"text", b"%d" % (2**63 - 1), bytes(300), b"v" * 20_000]
LENGTHS = [0, 1, 2, 7, 8, 100, 8191, 8192, 8193, 2**20, 2**23, 2**23 + 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
COUNTS = [0, 1, 3, 131_072, 131_073, 2**31, 2**63, 2**64 - 1]
NUMBERS = {wire.U32: [0, 1, 2**32 - 1], wire.I64: [0, 1, -1, 3, 2**63 - 1, -(2**63)], None: [wire.NO_NUMBER]}


class Hostile:
    """One seed's worth of hostility: what one peer says."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.goes_without_a_word = self._random.random() < 0.5
        self.reads = self._random.random() < 0.5

    def stream(self) -> bytes:
        requests = [self._greeting(), *(self._request() for _ in range(self._random.randrange(1, REQUESTS_PER_PEER)))]
        if self._random.random() < 0.3:
            requests.append(self._cut(self._true_request()))
        return b"".join(requests)

    def _greeting(self) -> bytes:
        kind = self._random.random()
        if kind < 0.9:
            return wire.GREETING
        return self._changed(wire.GREETING) if kind < 0.97 else b""

    def _request(self) -> bytes:
        kind = self._random.random()
        if kind < 0.35:
            return self._true_request()  # within the format, whatever it asks for
        if kind < 0.65:
            return self._changed(self._true_request())
        if kind < 0.85:
            return self._with_a_lie(self._true_request())
        if kind < 0.90:
            return bytes([self._random.choice([5, 6, 10, 11])]) + wire.U64.pack(self._random.choice(COUNTS))
        return self._random.randbytes(self._random.randrange(1, 60))

    def _true_request(self) -> bytes:
        operation = self._random.choice(OPERATIONS[1:])
        shape = wire.SHAPES[operation]
        times = self._random.randrange(4) if shape.is_counted else 1
        strings = [
            self._random.choice(KEYS if place == 0 else VALUES) for _ in range(times) for place in range(len(shape.limits))
        ]
        return wire.request(operation, strings, self._random.choice(NUMBERS[shape.number]))

    def _with_a_lie(self, data: bytes) -> bytes:
        """A length, or whatever stands there, that is another."""
        at = self._random.choice([1, 9, self._random.randrange(1, len(data) + 1)])
        return data[:at] + wire.U64.pack(self._random.choice(LENGTHS)) + data[at + 8 :]

    def _cut(self, data: bytes) -> bytes:
        return data[: self._random.randrange(len(data))]

    def _changed(self, data: bytes) -> bytes:
        changed = bytearray(data)
        at = self._random.randrange(len(changed))
        match self._random.randrange(4):
            case 0:
                changed[at] ^= 1 << self._random.randrange(8)
            case 1:
                del changed[at : at + self._random.randrange(1, 20)]
            case 2:
                changed[at:at] = self._random.randbytes(self._random.randrange(1, 20))
            case _:
                changed[at:at] = changed[: self._random.randrange(1, 20)]
        return bytes(changed)


class Attackers:
    """Peers of which some are always there, in whatever state they have brought themselves and the server into."""

    def __init__(self, port: int) -> None:
        self._address = ("127.0.0.1", port)
        self._open: deque[tuple[socket.socket, Hostile]] = deque()

    def attack(self, seed: int) -> None:
        hostile = Hostile(seed)
        sock = socket.create_connection(self._address, timeout=20)
        self._open.append((sock, hostile))
        with contextlib.suppress(ConnectionError):
            sock.sendall(hostile.stream())
        if len(self._open) > OPEN_AT_ONCE:
            self._end(*self._open.popleft())

    def _end(self, sock: socket.socket, hostile: Hostile) -> None:
        with sock:
            sock.setblocking(False)
            if hostile.reads:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    sock.recv(1 << 20)
            if hostile.goes_without_a_word:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    def close(self) -> None:
        while self._open:
            self._end(*self._open.popleft())


class GoodClient:
    """One that keeps to the rules, and is entitled to its values. Their sizes stay, so that a full store is no reason."""

    def __init__(self, port: int) -> None:
        self.peer = TcpPeer(port).greet()
        self._random = random.Random("good")
        self._names = [b"/good/" + self._random.randbytes(16).hex().encode() for _ in range(8)]
        self._values = dict.fromkeys(self._names, bytes(1000))
        self._count = 10**12
        self.peer.set(b"/good/counter", b"%d" % self._count)
        self.peer.say(wire.MULTI_SET, *(text for item in self._values.items() for text in item))
        self.peer.say(wire.QUEUE_PUSH, b"/good/queue", b"first")
        self.peer.ping()

    def check(self) -> None:
        """All that it has stored is there, and what it stores now too."""
        assert {name: self.peer.get(name) for name in self._names} == self._values
        name = self._random.choice(self._names)
        self._values[name] = self._random.randbytes(1000)
        self.peer.set(name, self._values[name])
        assert self.peer.get(name) == self._values[name]
        self._count += 1
        self.peer.say(wire.ADD, b"/good/counter", number=1)
        assert self.peer.take_number() == self._count
        self.peer.say(wire.WAIT, *self._names)
        assert self.peer.take(1) == wire.STOP_WAITING
        self.peer.say(wire.QUEUE_LEN, b"/good/queue")
        assert self.peer.take_number() == 1
        self.clear_up()
        self.peer.ping()

    def clear_up(self) -> None:
        """Delete what the others have left, so that there is room for more of it."""
        mine = {*self._names, b"/good/counter"}
        keys = self.peer.keys()
        assert mine <= set(keys)
        rubbish = [key for key in keys if key not in mine]
        self.peer.socket.sendall(b"".join(wire.request(wire.DELETE_KEY, [key]) for key in rubbish))
        self.peer.take(8 * len(rubbish))


@pytest.fixture
def server() -> Iterator[ServerApart]:
    one = ServerApart(LIMIT_BYTES)
    yield one
    complaints = one.close()
    assert "the store has turned away" in complaints
    assert "Traceback" not in complaints


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_p36_hostile_requests(server: ServerApart, wait_until: Any, count: int) -> None:
    good, attackers = GoodClient(server.port), Attackers(server.port)
    before_kb, seeds = server.resident_kb(), itertools.count()
    files = len(os.listdir(f"/proc/{server.pid}/fd"))
    with good.peer.socket, contextlib.closing(attackers):
        while server.judged() < count:
            for seed in itertools.islice(seeds, PEERS_PER_CHECK):
                attackers.attack(seed)
            print("up to seed", seed)
            good.check()
            assert server.resident_kb() - before_kb < GROWTH_KB
        attackers.close()
        good.check()
        wait_until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) == files)
