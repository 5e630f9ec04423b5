"""The switch itself, with plain sockets: what it carries arrives unharmed, and what it does to packets is what was asked for."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.network.machines import Network, Node
from tests.network.switch import Line, checksum, reset_for
from tests.pace import is_under

pytestmark = pytest.mark.root

PORT = 5000
ESTABLISHED = 1
ANSWER_S = 20.0
WaitUntil = Callable[..., Any]


class Pair:
    """Two machines, and the sockets that the test opened there."""

    def __init__(self, net: Network) -> None:
        self.net = net
        self.one, self.other = net.nodes
        self._opened: list[socket.socket] = []

    def socket(self, node: Node, kind: int) -> socket.socket:
        with node.inside():
            self._opened.append(socket.socket(socket.AF_INET, kind))
        self._opened[-1].settimeout(ANSWER_S)
        return self._opened[-1]

    def datagrams(self) -> tuple[socket.socket, socket.socket]:
        """A sender on one machine and a receiver on the other, who know each other."""
        ends = self.socket(self.one, socket.SOCK_DGRAM), self.socket(self.other, socket.SOCK_DGRAM)
        for end, node in zip(ends, self.net.nodes, strict=True):
            end.bind((node.address, PORT))
        ends[0].connect((self.other.address, PORT))
        ends[1].connect((self.one.address, PORT))
        return ends

    def connection(self) -> tuple[socket.socket, socket.socket]:
        """The two ends of a TCP connection; the second one called."""
        listener, caller = self.socket(self.one, socket.SOCK_STREAM), self.socket(self.other, socket.SOCK_STREAM)
        listener.bind((self.one.address, PORT))
        listener.listen()
        caller.connect((self.one.address, PORT))
        self._opened.append(listener.accept()[0])
        self._opened[-1].settimeout(ANSWER_S)
        return self._opened[-1], caller

    def counts(self) -> dict[str, int]:
        assert self.net.switch is not None
        return self.net.switch.counts()

    def close(self) -> None:
        for one in self._opened:
            one.close()


@pytest.fixture
def pair(network: Callable[[int], Network]) -> Iterator[Pair]:
    made = Pair(network(2))
    yield made
    made.close()


def carry(source: socket.socket, sink: socket.socket, data: bytes) -> bytes:
    """What arrives of this."""
    thread = threading.Thread(target=lambda: (source.sendall(data), source.shutdown(socket.SHUT_WR)))
    thread.start()
    arrived = b"".join(iter(lambda: sink.recv(65536), b""))
    thread.join()
    return arrived


def state_of(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def test_what_is_sent_arrives_whole(pair: Pair) -> None:
    """Both ways, in segments that the kernel made and summed up by itself."""
    here, there = pair.connection()
    data = bytes(range(256)) * 8192
    assert carry(here, there, data) == data
    assert carry(there, here, data[::-1]) == data[::-1]
    assert pair.counts()["dropped"] == 0


@pytest.mark.parametrize("direction", ["sent", "received"])
def test_a_cut_is_silent_and_one_way(pair: Pair, wait_until: WaitUntil, direction: str) -> None:
    here, there = pair.datagrams()
    cut_node = pair.one if direction == "sent" else pair.other
    cut_node.cut(sent=direction == "sent", received=direction == "received")
    here.send(b"lost")
    wait_until(lambda: pair.counts()["dropped"] == 1)
    there.send(b"the other way")
    assert here.recv(100) == b"the other way"
    cut_node.heal()
    here.send(b"healed")
    assert there.recv(100) == b"healed"


def test_a_delay_holds_each_packet(pair: Pair) -> None:
    here, there = pair.datagrams()
    pair.other.slow(round_trip_s=0.3)
    began = time.monotonic()
    here.send(b"ping")
    there.send(there.recv(100))
    assert here.recv(100) == b"ping"
    took_s = time.monotonic() - began
    print(f"a round trip took {took_s:.3f} s")
    assert took_s >= 0.3
    assert is_under(took_s, 3.0)


def test_loss_takes_its_share(pair: Pair, wait_until: WaitUntil) -> None:
    here, _ = pair.datagrams()
    pair.one.line(sent=Line(loss=0.5))
    for _ in range(200):
        here.send(b"any")
    wait_until(lambda: sum(pair.counts().values()) == 200)
    assert 60 <= pair.counts()["dropped"] <= 140
    pair.one.heal()
    pair.other.line(Line(loss=0.1), Line(loss=0.1))
    near, far = pair.connection()
    assert carry(near, far, b"0123456789" * 5000) == b"0123456789" * 5000


def test_jitter_changes_the_order(pair: Pair) -> None:
    here, there = pair.datagrams()
    pair.other.line(received=Line(jitter_s=0.1))
    sent = [bytes([number]) for number in range(100)]
    for one in sent:
        here.send(one)
    arrived = [there.recv(100) for _ in sent]
    assert arrived != sent
    assert sorted(arrived) == sent


def test_a_rejected_sender_is_reset_and_the_receiver_hears_nothing(pair: Pair, wait_until: WaitUntil) -> None:
    """As a firewall in front of one machine does: here the connection is over, there it lives on, whatever is sent from there."""
    here, there = pair.connection()
    here.send(b"before")
    assert there.recv(100) == b"before"
    pair.other.reject()
    here.send(b"swallowed")
    with pytest.raises(ConnectionResetError):
        here.recv(100)
    rejected = pair.counts()["rejected"]
    there.send(b"into the void")  # which is answered by a reset, which is swallowed
    wait_until(lambda: pair.counts()["rejected"] > rejected)
    assert state_of(there) == ESTABLISHED
    there.setblocking(False)
    with pytest.raises(BlockingIOError):
        there.recv(100)


def test_a_rejected_answer_ends_no_attempt_to_connect(pair: Pair, wait_until: WaitUntil) -> None:
    """The caller's SYN arrives, the answer is rejected: the caller hears nothing, until all is well again."""
    pair.other.reject()
    listener, caller = pair.socket(pair.one, socket.SOCK_STREAM), pair.socket(pair.other, socket.SOCK_STREAM)
    listener.bind((pair.one.address, PORT))
    listener.listen()
    caller.setblocking(False)
    assert caller.connect_ex((pair.one.address, PORT)) != 0
    wait_until(lambda: pair.counts()["rejected"] >= 1)
    assert caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    pair.other.heal()
    caller.settimeout(ANSWER_S)
    listener.accept()[0].close()  # by the caller's next attempt
    assert caller.recv(100) == b""


def test_resets_carry_right_checksums() -> None:
    """A SYN has nothing to acknowledge, so the answer acknowledges it; no reset is answered by a reset."""
    addresses = socket.inet_aton("10.0.0.1") + socket.inet_aton("10.0.0.2")
    header = struct.pack("!BBHHHBBH", 0x45, 0, 40, 0, 0, 64, socket.IPPROTO_TCP, 0) + addresses
    syn = struct.pack("!HHIIBBHHH", 1000, 2000, 0xFFFFFFFF, 0, 5 << 4, 2, 0, 0, 0)
    answer = reset_for(header + syn)
    assert answer is not None
    assert answer[12:20] == addresses[4:] + addresses[:4]
    assert struct.unpack_from("!HHIIBB", answer, 20) == (2000, 1000, 0, 0, 5 << 4, 4 | 16)
    assert checksum(answer[:20]) == 0
    assert checksum(answer[12:20] + struct.pack("!HH", socket.IPPROTO_TCP, 20) + answer[20:]) == 0
    assert reset_for(answer) is None
