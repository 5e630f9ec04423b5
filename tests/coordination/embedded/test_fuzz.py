"""Hostile frames by the thousand: the store neither falls, nor hangs, nor grows, and serves its own clients all the while.

P36. Half of the peers are strangers, half have been let in, with and without a secret; what they send are true frames with bits,
bytes, lengths and fields changed, and plain noise. The seed is printed by a failure.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.pace import is_under

from rallypoint.coordination.embedded import wire
from rallypoint.coordination.embedded.client import EmbeddedCoordination
from rallypoint.coordination.embedded.handshake import ClientHandshake
from rallypoint.coordination.embedded.server import CoordinationServer
from rallypoint.coordination.embedded.service import StoreService
from rallypoint.coordination.embedded.wire import encode, make_frame
from rallypoint.coordination.model import Get, Put, Transaction

Start = Callable[..., CoordinationServer]
SECRET = b"a secret"
FRAMES_PER_PEER = 4  # the first that breaks the rules is the last that is looked at
GROWTH_KB = 64 * 1024
REQUESTS: list[list[Any]] = [
    [1, "transact", [["k", "mod", 0]], [["put", "k", "value", 0], ["get", "k"]], [["delete", "k", True]]],
    [2, "read", ""], [3, "watch", "k", 1], [4, "unwatch", "k"], [5, "grant", 0.5], [6, "keep", 1], [7, "revoke"],
    [8, "resume", "00"],
]  # fmt: skip
ODD: list[Any] = [None, True, -1, 0, 2**63, 1e308, float("nan"), "", "\ud800", "k" * 2000, [], [[]], {}, {"k": 1}, "\xff" * 300]


class Fuzzer:
    """One seed's worth of hostility."""

    def __init__(self, server: CoordinationServer, seed: int, secret: bytes | None) -> None:
        self._random = random.Random(seed)
        self._address = server.addresses[0]
        self._secret = secret

    def attack(self) -> None:
        with socket.create_connection(self._address, timeout=10) as peer, contextlib.suppress(ConnectionError):
            self._attack_by(peer, FRAMES_PER_PEER)

    def _attack_by(self, peer: socket.socket, count: int) -> None:
        seal = None
        if is_welcome := self._random.random() < 0.5:
            seal = self._greet(peer)
        for _ in range(count):
            peer.sendall(self._hostile_frame(seal, is_welcome))
        peer.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            peer.recv(1 << 20)

    def _greet(self, peer: socket.socket) -> wire.Seal | None:
        handshake = ClientHandshake("job", self._secret)
        peer.sendall(make_frame(handshake.hello(), None))
        while handshake.welcome is None:
            length = int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "big")
            answer = handshake.answer(peer.recv(length, socket.MSG_WAITALL))
            if answer is not None:
                peer.sendall(make_frame(answer, None))
        return handshake.outgoing

    def _hostile_frame(self, seal: wire.Seal | None, is_welcome: bool) -> bytes:
        """Mostly inside a true frame, so that it is looked at; sometimes the frame itself is not true."""
        body = self._hostile_body() if is_welcome else self._hostile_greeting()
        kind = self._random.random()
        if kind < 0.05:
            return self._random.randbytes(self._random.randrange(1, 200))
        frame = make_frame(body, seal)
        return self._mangle(frame) if kind < 0.1 else frame

    def _hostile_greeting(self) -> bytes:
        hello = ClientHandshake("job", self._secret).hello()
        return self._mangle(hello) if self._random.random() < 0.7 else self._random.randbytes(self._random.randrange(200))

    def _hostile_body(self) -> bytes:
        request = json.loads(json.dumps(self._random.choice(REQUESTS)))
        kind = self._random.random()
        if kind < 0.5:
            return encode(self._with_something_odd(request))
        if kind < 0.9:
            return self._mangle(encode(request))
        return self._random.randbytes(self._random.randrange(400))

    def _with_something_odd(self, value: Any) -> Any:
        if not isinstance(value, list) or not value or self._random.random() < 0.3:
            return [value, self._random.choice(ODD)] if isinstance(value, list) else self._random.choice(ODD)
        value[self._random.randrange(len(value))] = self._with_something_odd(value[self._random.randrange(len(value))])
        return value

    def _mangle(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._random.randrange(1, 4)):
            at = self._random.randrange(len(changed)) if changed else 0
            match self._random.randrange(4):
                case 0 if changed:
                    changed[at] ^= 1 << self._random.randrange(8)
                case 1 if changed:
                    del changed[at : at + self._random.randrange(1, 20)]
                case 2:
                    changed[at:at] = self._random.randbytes(self._random.randrange(1, 20))
                case _:
                    changed[at:at] = changed[: self._random.randrange(1, 20)]
        return bytes(changed)


def resident_kb() -> int:
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def assert_serves(client: EmbeddedCoordination) -> float:
    before = time.monotonic()
    found = client.transact(Transaction((), (Put("good", b"x"), Get("good"))), before + 10).items
    assert [item.value for item in found if item is not None] == [b"x"]
    return time.monotonic() - before


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many frames the server has looked at as a whole, and answered or refused."""
    count = [0]

    def counting(real: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            count[0] += 1
            real(*args)

        return call

    monkeypatch.setattr(StoreService, "serve", counting(StoreService.serve))
    monkeypatch.setattr(CoordinationServer, "_greet", counting(CoordinationServer._greet))
    return count


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
@pytest.mark.parametrize("count", [10_000, pytest.param(500_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_p36_hostile_frames(
    start_server: Start, connect: Any, judged: list[int], warnings: list[str], secret: bytes | None, count: int
) -> None:
    server = start_server("job", secret)
    client = connect(server, "job", secret)
    before_kb, slowest_s = resident_kb(), 0.0
    seed = 0
    while judged[0] < count:
        Fuzzer(server, seed, secret).attack()
        seed += 1
        if seed % 200 == 0:
            slowest_s = max(slowest_s, assert_serves(client))
            assert resident_kb() - before_kb < GROWTH_KB, f"seed {seed}"
    assert is_under(slowest_s, 2)
    assert not [line for line in warnings if "internal mistake" in line]
    assert warnings
    assert server.wait_until_alone(time.monotonic() + 10)
