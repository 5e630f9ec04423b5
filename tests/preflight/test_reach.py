"""What was seen of the way to another machine, and the real way between two doctors, to a store, and to nobody."""

from __future__ import annotations

import contextlib
import http.server
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests import ports

from rallypoint.preflight import network, reach
from rallypoint.preflight.rules import Finding

HERE = "n0:1 is this machine's, and free: a job could have its store here"


@pytest.mark.parametrize(
    ("found", "state", "what"),
    [
        (reach.judge_name("n0", ["10.0.0.1"]), "ok", "n0 is 10.0.0.1"),
        (reach.judge_name("n0", ["127.0.1.1"]), "unknown", "n0 is 127.0.1.1, which no other machine can reach"),
        (reach.judge_name("n0", [], "Name not known"), "unknown", "n0 does not resolve here: Name not known"),
        (reach.judge_resolution("n0", [], 0.0, "Name not known"), "bad", "n0: Name not known"),
        (reach.judge_resolution("n0", ["10.0.0.1", "::2"], 0.02), "ok", "n0 is 10.0.0.1, ::2 (20 ms)"),
        (reach.judge_port("n0:1", "timed out", False), "bad", "n0:1: timed out"),
        (reach.judge_port("n0:1", "Connection refused", False), "bad", "n0:1: Connection refused"),
        (reach.judge_port("n0:1", "Connection refused", True), "ok", HERE),
        (reach.judge_port("n0:1", "No route to host", False), "bad", "n0:1: No route to host"),
        (reach.judge_route("10.0.0.1", 1450), "ok", "from 10.0.0.1, packets of up to 1450 bytes"),
        (reach.judge_route("10.0.0.1", 576), "bad", "from 10.0.0.1, packets of up to 576 bytes"),
        (reach.judge_trip([0.001, 0.002], 0), "ok", "1.00 ms at best, 2.00 ms at worst, of 2 connections"),
        (reach.judge_trip([0.001], 4), "bad", "1.00 ms at best, 1.00 ms at worst, of 1 connection; 4 were lost"),
        (reach.judge_trip([], 5), "bad", "5 tries, no answer"),
        (reach.judge_answer("etcd", "3.5.1"), "ok", "etcd 3.5.1"),
        (reach.judge_answer("", ""), "bad", "something accepts connections and says nothing"),
        (reach.judge_offset(-3600.0, 0.01), "unknown", "3600.000 s behind theirs, within 0.010 s"),
        (reach.judge_offset(6.0, 2.0), "ok", "6.000 s ahead of theirs, within 2.000 s"),
        (reach.judge_rate("to there", 16 << 20, 0.1, is_complete=True), "ok", "168 MB/s"),
        (reach.judge_rate("to there", 5_000_000, 5.0, is_complete=False), "ok", "1.00 MB/s"),
        (reach.judge_rate("to there", 1448, 5.0, is_complete=False), "bad", "1448 bytes arrived in 5 s, then nothing"),
        (reach.judge_rate("to there", 300_000, 5.0, is_complete=False, silent_s=0.1), "ok", "0.06 MB/s"),
        (reach.judge_rate("to there", 300_000, 5.0, is_complete=False, silent_s=3.0), "bad",
         "300000 bytes arrived in 5 s, then nothing"),
        (reach.judge_packets((), 1500, 1400), "ok", "up to 1400 bytes on the way, as a router says; 1500 at this interface"),
        (reach.judge_packets(["to there"], 1500, 1400), "bad", "up to 1400 bytes arrive, those of 1500 bytes do not (to there)"),
        (reach.judge_packets(["from there"], None, None), "bad",
         "not even small ones arrive once a connection carries data (from there)"),
        (reach.judge_back("timed out"), "bad", "they cannot connect to this machine: timed out"),
    ],
)  # fmt: skip
def test_what_is_seen_is_told_with_its_numbers(found: Finding, state: str, what: str) -> None:
    assert (found.state, found.what) == (state, what)
    assert found.advice or state == "ok"


def test_the_table_says_what_to_do_below_what_is_wrong() -> None:
    rows = [Finding("disk", "ok", "fine"), Finding("clock", "bad", "off", "mend it")]
    assert reach.table(rows).splitlines() == ["ok   disk   fine", "BAD  clock  off", "            -> mend it"]


@pytest.mark.parametrize(("limit", "usual", "largest"), [(1400, 1500, 1400), (1499, 1500, 1492), (9999, 1500, 1492),
                                                          (1999, 9000, 1500), (500, 1500, None), (1400, None, 1400)])  # fmt: skip
def test_the_largest_packets_that_arrive_are_found_with_few_tries(limit: int, usual: int | None, largest: int | None) -> None:
    tried: list[int] = []

    def arrive(size: int) -> bool:
        tried.append(size)
        return size <= limit

    assert reach.largest_that_fits(arrive, usual) == largest
    assert len(tried) <= 4


def test_who_tries_to_connect_and_is_not_reached_is_in_the_kernels_table() -> None:
    """As a little-endian kernel writes it; the second row is of another port, the third is connected."""
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 02004D0A:72D8 01004D0A:A1B2 03 00000000:00000000 01:00000064 00000000     0        0 0 1 0\n"
        "   1: 0200000A:1F90 0900000A:A1B2 03 00000000:00000000 01:00000064 00000000     0        0 0 1 0\n"
        "   2: 0200000A:72D8 0900000A:A1B2 01 00000000:00000000 00:00000000 00000000     0        0 9 1 0\n"
    )
    found = list(reach.half_open_peers(table, 0x72D8))
    assert [socket.inet_ntoa(one) for one in found] == ["10.77.0.1"]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a doctor that listens."""
    monkeypatch.setattr(network, "ANSWER_TIMEOUT_S", 30.0)
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(30.0)
        thread = threading.Thread(target=network.serve, args=(door,))
        thread.start()
        yield door.getsockname()[1]
        door.shutdown(socket.SHUT_RDWR)
        thread.join()


def states(port: int, host: str = "127.0.0.1") -> dict[str, Finding]:
    return {one.check: one for one in network.examine(host, port)}


def test_two_doctors_measure_the_way_between_them(doctor: int) -> None:
    found = states(doctor)
    assert list(found) == ["resolve", "port", "route", "round trip", "answers", "clocks", "way back", "to there", "from there"]
    assert {one.state for one in found.values()} == {"ok"}


def test_p48_clocks_an_hour_apart_are_told_and_make_no_machine_unfit(doctor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """P48: the other end is another thread here, so it is told by its name."""
    now_ns = time.time_ns

    def skewed() -> int:
        is_other_end = threading.current_thread().name == "rallypoint-doctor"
        return now_ns() + 3600 * 10**9 * is_other_end

    monkeypatch.setattr(network.time, "time_ns", skewed)
    clocks = states(doctor)["clocks"]
    assert clocks.state == "unknown"
    assert float(clocks.what.partition(" s behind theirs")[0]) == pytest.approx(3600.0, abs=10.0)


def test_a_way_that_goes_in_one_direction_only_is_told(doctor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_call_back", lambda line, port: "timed out")
    assert states(doctor)["way back"].state == "bad"


@contextlib.contextmanager
def listening(attend: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of somebody who attends to whoever comes, one after the other."""
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    line, _ = door.accept()
                    with line, contextlib.suppress(OSError):
                        attend(line)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield door.getsockname()[1]
        finally:
            door.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"soon\n", "it does not answer as a doctor does: 'soon' is no number"),
        (b"9" * 40 + b"\n", f"it does not answer as a doctor does: '{'9' * 40}' is no number"),
        (b"x" * 1000, "it does not answer as a doctor does: a line that does not end"),
        (b"", "it went away: it closed the connection"),
    ],
)
def test_a_doctor_that_answers_nonsense_or_goes_is_told(answer: bytes, told: str) -> None:
    def attend(line: socket.socket) -> None:
        with line.makefile("rb") as lines:
            line.sendall(lines.readline())
            if lines.readline():
                line.sendall(answer)

    with listening(attend) as port:
        found = states(port)["other end"]
    assert (found.state, found.what) == ("bad", told)


def test_an_answer_in_pieces_is_read_to_its_end() -> None:
    def attend(line: socket.socket) -> None:
        line.recv(4096)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in (b"HTTP/1.0 200 OK\r\n", b'\r\n{"etcdser', b'ver":"3.5.9"}'):
            line.sendall(piece)
            select.select([], [], [], 0.01)  # so that it is a packet of its own

    with listening(attend) as port:
        assert states(port)["answers"].what == "etcd 3.5.9"


def test_a_slow_way_is_measured_in_time_and_not_taken_for_one_that_loses_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a trickle, of which each piece comes in time, nor a reader who leaves much in the buffers takes longer."""
    monkeypatch.setattr(network, "BULK_S", 0.6)

    def attend(line: socket.socket) -> None:
        with line.makefile("rb") as lines:
            line.sendall(lines.readline())
            while command := lines.readline().split():
                if command[0] == b"time":
                    line.sendall(b"%d\n" % time.time_ns())
                elif command[0] == b"back":
                    line.sendall(b"ok\n")
                elif command[0] == b"give":
                    while line.send(bytes(100)):
                        select.select([], [], [], 0.01)
                else:
                    while lines.read1(10_000):  # type: ignore[attr-defined]
                        select.select([], [], [], 0.01)

    began = time.monotonic()
    with listening(attend) as port:
        found = states(port)
    for direction in ("to there", "from there"):
        assert (found[direction].state, found[direction].what.endswith(" MB/s")) == ("ok", True)
    assert time.monotonic() - began < 60  # a trickle of 16 MiB would take half an hour


def test_what_answers_at_a_port_is_named(start_rallyrun: Callable[..., Any], doctor: int) -> None:
    """A store of ours tells whose it is; a web server is none; and where nobody is, there could be one."""
    port = ports.free_port()
    meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "my-job"]
    host = start_rallyrun([*meeting, "--no-python", "true"])
    host.wait_for_line("this node hosts the coordination store")
    found = states(port)
    assert found["answers"].what == "a coordination store of rallypoint: this is the store of job 'my-job'"
    host.process.terminate()
    host.process.wait()
    assert states(port)["port"].what.endswith("is this machine's, and free: a job could have its store here")
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        found = states(server.server_port)
        server.shutdown()
        thread.join()
    assert (found["answers"].state, found["answers"].what.startswith("an HTTP server: HTTP/1.0 501")) == ("bad", True)
    assert states(1, "no-such-host.invalid")["resolve"].state == "bad"
