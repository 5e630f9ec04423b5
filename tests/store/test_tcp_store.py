"""The client of torch's TCPStore protocol: operations, waiting in vain, losing the server, forking, and hosting it."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import AT_ONCE_S

from rallypoint.base.backoff import Backoff
from rallypoint.net.endpoint import open_listeners
from rallypoint.store import tcp_protocol as wire
from rallypoint.store import tcp_store
from rallypoint.store.hash_store import HashStore
from rallypoint.store.interface import QueueEmptyError, StoreError, StoreNetworkError, StoreTimeoutError
from rallypoint.store.tcp_server import TcpStoreServer
from rallypoint.store.tcp_store import TCPStore

TIMEOUT_S = 10.0
WAIT_K = wire.request(wire.WAIT, [b"/k"])
CANCEL = wire.request(wire.CANCEL_WAIT)
ADD_N = wire.request(wire.ADD, [b"/n"], 1)


def served() -> TcpStoreServer:
    sockets = open_listeners("127.0.0.1", 0, is_host=True, wildcard_allowed=False)
    assert sockets is not None
    server = TcpStoreServer(sockets)
    server.start()
    return server


@pytest.fixture
def server() -> Iterator[TcpStoreServer]:
    server = served()
    yield server
    server.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., TCPStore]]:
    """``connect(server or port, …)`` is a store that is closed when the test ends."""
    with contextlib.ExitStack() as stores:

        def make(server: TcpStoreServer | int, **options: Any) -> TCPStore:
            port = server if isinstance(server, int) else server.addresses[0][1]
            store = TCPStore("127.0.0.1", port, **{"timeout": TIMEOUT_S, **options})
            stores.callback(store.close)
            return store

        yield make


@pytest.fixture
def store(server: TcpStoreServer, connect: Callable[..., TCPStore]) -> TCPStore:
    return connect(server)


class Work:
    """Something that is done beside the test; `result` is what it gave or raised."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._result: object = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:
            self._result = error

    def result(self) -> Any:
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive(), "still at work"
        return self._result


class Peer:
    """The other end of a connection, and what a server says there word by word."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def hear(self, expected: bytes) -> None:
        heard = b""
        while len(heard) < len(expected) and (more := self.socket.recv(len(expected) - len(heard))):
            heard += more
        assert heard == expected

    def say(self, data: bytes) -> None:
        self.socket.sendall(data)

    def greet(self) -> None:
        self.hear(wire.GREETING + wire.request(wire.PING, (), os.getpid()))
        self.say(wire.U32.pack(os.getpid()))

    def stay(self) -> None:
        """Until the other end has gone."""
        while self.socket.recv(65536):
            pass


@pytest.fixture
def play(connect: Callable[..., TCPStore]) -> Iterator[Callable[..., TCPStore]]:
    """``play(part)`` is a store whose server is greeted, and then plays its `part`."""
    with contextlib.ExitStack() as cleanup:

        def start(part: Callable[[Peer], None], **options: Any) -> TCPStore:
            listener = cleanup.enter_context(socket.create_server(("127.0.0.1", 0)))

            def run() -> None:
                sock, _ = listener.accept()
                with sock:
                    sock.settimeout(TIMEOUT_S)
                    peer = Peer(sock)
                    peer.greet()
                    part(peer)

            work = Work(run)
            store = connect(listener.getsockname()[1], **options)

            def finish() -> None:
                store.close()
                if error := work.result():
                    raise error

            cleanup.callback(finish)
            return store

        yield start


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server has little time to answer."""
    monkeypatch.setattr(tcp_store, "ANSWER_S", 0.2)


def is_refused(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    return False


# --- operations ------------------------------------------------------------------------------------------------------------


def test_values_counters_and_comparisons(store: TCPStore) -> None:
    store.set("k", "größer")
    assert store.get("k").decode() == "größer"
    store.set("empty", b"")
    assert store.get("empty") == b""
    assert [store.add("n", 5), store.add("n", -7)] == [5, -2]
    assert store.get("n") == b"-2"
    assert [store.compare_set("c", "", "x"), store.compare_set("c", "x", "y")] == [b"x", b"y"]
    assert store.compare_set("d", "q", "z") == b"q"
    store.append("a", "x")
    store.append("a", b"y")
    store.multi_set(["p", "q"], ["1", b"2"])
    assert store.multi_get(["q", "p", "a"]) == [b"2", b"1", b"xy"]
    assert [store.check(["p", "q"]), store.check(["p", "other"]), store.check([]), store.multi_get([])] == [True, False, True, []]
    store.wait(["p", "q"])
    store.wait([])
    assert store.num_keys() == 7
    assert [store.delete_key("p"), store.delete_key("p")] == [True, False]
    assert sorted(store.list_keys()) == ["a", "c", "empty", "k", "n", "q"]


def test_queues(store: TCPStore) -> None:
    store.queue_push("q", "1")
    store.queue_push("q", b"2")
    assert store.queue_len("q") == 2
    assert [store.queue_pop("q"), store.queue_pop("q", block=False)] == [b"1", b"2"]
    with pytest.raises(QueueEmptyError, match="'q' is empty"):
        store.queue_pop("q", block=False)


def test_what_callers_read(store: TCPStore, server: TcpStoreServer) -> None:
    assert (store.host, store.port) == server.addresses[0]
    assert (store.libuvBackend, store.has_extended_api()) == (True, True)
    assert (store.timeout, store.timeout_s) == (timedelta(seconds=TIMEOUT_S), TIMEOUT_S)


def test_the_timeout_is_torchs_unless_said_otherwise(server: TcpStoreServer) -> None:
    store = TCPStore("127.0.0.1", server.addresses[0][1])
    assert store.timeout == timedelta(seconds=300)
    store.close()


def test_large_values_both_ways(store: TCPStore) -> None:
    value = os.urandom(1024) * (wire.MAX_VALUE_BYTES // 1024)
    store.set("large", value)
    store.multi_set(["a", "b"], [value, value])
    assert store.get("large") == value
    assert store.multi_get(["a", "b"]) == [value, value]


def test_many_keys_at_once(store: TCPStore) -> None:
    keys = [f"key{number}" for number in range(5000)]
    store.multi_set(keys, keys)
    assert store.multi_get(keys) == [key.encode() for key in keys]
    assert sorted(store.list_keys()) == sorted(keys)


@pytest.mark.parametrize(
    ("operation", "make_arguments", "reason"),
    [
        ("set", lambda: ("k", bytes(wire.MAX_VALUE_BYTES + 1)), "8388609 bytes"),
        ("set", lambda: ("k" * wire.MAX_KEY_BYTES, "v"), "8193 bytes"),
        ("get", lambda: ("k" * wire.MAX_KEY_BYTES,), "8193 bytes"),
        ("check", lambda: (["k"] * (wire.MAX_KEYS + 1),), "131073 keys"),
        ("add", lambda: ("n", 1 << 63), "64 bits"),
        ("barrier", lambda: ("b", 1 << 63), "64 bits"),
    ],
)
def test_what_no_server_takes_is_not_sent(
    store: TCPStore, operation: str, make_arguments: Callable[[], tuple[Any, ...]], reason: str
) -> None:
    with pytest.raises(StoreError, match=reason):
        getattr(store, operation)(*make_arguments())
    assert store.add("n", 1) == 1


def test_wrong_arguments_do_not_break_the_connection(store: TCPStore) -> None:
    with pytest.raises(TypeError, match="int"):
        store.set("k", 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"\['key'\]"):
        store.wait("key")
    with pytest.raises(ValueError, match="2 keys and 1 values"):
        store.multi_set(["a", "b"], ["1"])
    with pytest.raises(ValueError, match="0 s or longer"):
        store.wait(["k"], -1)
    assert store.num_keys() == 0


KEYS = st.sampled_from(["a", "b", ""])
VALUES = st.sampled_from(["", "x", b"\0\xff"])
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("append"), KEYS, VALUES),
    st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES),
    st.tuples(st.just("add"), st.just("n"), st.integers(-3, 3)),
    st.tuples(st.just("delete_key"), st.sampled_from(["a", "b", "n"])),
    st.tuples(st.just("queue_push"), KEYS, VALUES),
    st.tuples(st.just("queue_pop"), KEYS, st.just(False)),
    st.tuples(st.just("queue_len"), KEYS),
    st.tuples(st.just("check"), st.lists(KEYS)),
    st.tuples(st.just("multi_set"), st.just(["a", "n"]), st.just(["1", "2"])),
    st.tuples(st.just("num_keys")),
)


def outcome(store: TCPStore | HashStore, step: tuple[Any, ...]) -> object:
    name, *arguments = step
    try:
        return getattr(store, name)(*arguments)
    except QueueEmptyError:
        return "empty"


@given(st.lists(STEPS, max_size=20))
@settings(max_examples=60, deadline=None)
def test_it_does_what_the_store_in_memory_does(steps: list[tuple[Any, ...]]) -> None:
    store, model = TCPStore("127.0.0.1", 0, is_master=True), HashStore()
    with contextlib.closing(store):
        assert [outcome(store, step) for step in steps] == [outcome(model, step) for step in steps]
        assert store.list_keys() == model.list_keys()
        assert store.multi_get(model.list_keys()) == model.multi_get(model.list_keys())


# --- waiting ---------------------------------------------------------------------------------------------------------------


def test_a_value_is_waited_for(server: TcpStoreServer, connect: Callable[..., TCPStore]) -> None:
    first, second = connect(server), connect(server)
    waiting = [Work(lambda: first.get("k")), Work(lambda: connect(server).multi_get(["k", "m"]))]
    waiting += [Work(lambda: connect(server).queue_pop("q")), Work(lambda: connect(server).wait(["k", "q"]))]
    second.set("k", "v")
    second.set("m", "w")
    second.queue_push("q", "1")
    second.queue_push("q", "2")
    assert [one.result() for one in waiting] == [b"v", [b"v", b"w"], b"1", None]


@pytest.mark.parametrize(
    ("operation", "arguments", "message"),
    [
        ("get", ("k",), "waited 0.05 s for 'k' in vain$"),
        ("wait", (["there", "k", "m"],), r"waited 0.05 s for 'k', 'm' in vain \(1 of 3 keys are there\)"),
        ("wait", (["k"], timedelta(milliseconds=20)), "waited 0.02 s for 'k' in vain"),
        ("wait", (["k"], 0), "waited 0 s for 'k' in vain"),
        ("multi_get", (["there", "k"],), r"for 'k' in vain \(1 of 2"),
        ("queue_pop", ("k",), "for 'k' in vain"),
        ("queue_pop", ("there",), "for 'there' in vain"),  # a value is there under this key, but no queue
        ("barrier", ("b", 3, 0.02), "waited 0.02 s at the barrier 'b' in vain: 1 of 3 came"),
    ],
)
def test_who_waits_in_vain_is_told_for_what_and_can_go_on(
    store: TCPStore, operation: str, arguments: tuple[Any, ...], message: str
) -> None:
    store.set_timeout(timedelta(milliseconds=50))
    store.set("there", "v")
    for count in (1, 2):
        with pytest.raises(StoreTimeoutError, match=message if count == 1 else "in vain"):
            getattr(store, operation)(*arguments)
        assert (store.add("n", 1), store.get("there")) == (count, b"v")


def test_no_time_is_enough_for_what_is_there(store: TCPStore) -> None:
    store.set("k", "v")
    store.set_timeout(0)
    for _ in range(100):
        store.wait(["k"], 0)
        store.barrier("alone", 1, 0)
    assert store.multi_get(["k"]) == [b"v"]


def test_a_barrier_lets_go_when_all_are_there(server: TcpStoreServer, connect: Callable[..., TCPStore]) -> None:
    members = [connect(server) for _ in range(3)]
    waiting = [Work(lambda member=member: member.barrier("b", 3)) for member in members[:2]]  # type: ignore[misc]
    members[2].barrier("b", 3)
    assert [one.result() for one in waiting] == [None, None]
    assert members[0].get("b") == b"3"


def test_what_comes_while_the_wait_is_cancelled_has_come(play: Callable[..., TCPStore]) -> None:
    """The server has let us go just before it hears that we do not want to wait any more; both are answered."""

    def part(peer: Peer) -> None:
        peer.hear(WAIT_K + CANCEL)
        peer.say(wire.STOP_WAITING + wire.WAIT_CANCELED)
        peer.hear(ADD_N)
        peer.say(wire.I64.pack(7))

    store = play(part)
    store.wait(["k"], 0.05)
    assert store.add("n", 1) == 7


def test_who_gets_in_at_the_last_moment_gets_the_value(play: Callable[..., TCPStore]) -> None:
    get = wire.request(wire.GET, [b"/k"])

    def part(peer: Peer) -> None:
        peer.hear(wire.request(wire.CHECK, [b"/k"]) + get)
        peer.say(wire.NOT_READY + wire.packed(b""))
        peer.hear(WAIT_K + CANCEL)
        peer.say(wire.STOP_WAITING + wire.WAIT_CANCELED)
        peer.hear(get)
        peer.say(wire.packed(b"v"))

    assert play(part, timeout=0.05).get("k") == b"v"


def test_keys_that_have_all_come_after_the_cancelling_were_not_waited_for_in_vain(play: Callable[..., TCPStore]) -> None:
    def part(peer: Peer) -> None:
        peer.hear(wire.request(wire.WAIT, [b"/a", b"/b"]) + CANCEL)
        peer.say(wire.WAIT_CANCELED)
        peer.hear(wire.request(wire.CHECK, [b"/a"]) + wire.request(wire.CHECK, [b"/b"]))
        peer.say(wire.READY + wire.READY)

    play(part).wait(["a", "b"], 0.05)


@pytest.mark.usefixtures("impatient")
def test_a_server_that_does_not_even_cancel_is_lost(play: Callable[..., TCPStore]) -> None:
    store = play(Peer.stay, timeout=0.05)
    for _ in range(2):
        with pytest.raises(StoreNetworkError, match="no answer"):
            store.wait(["k"])


def test_a_queue_that_others_empty_first_is_waited_for_again(play: Callable[..., TCPStore]) -> None:
    pop, none = wire.request(wire.QUEUE_POP, [b"/k"]), wire.I64.pack(0)

    def part(peer: Peer) -> None:
        for _ in range(3):
            peer.hear(pop)
            peer.say(none)
            peer.hear(WAIT_K)
            peer.say(wire.STOP_WAITING)
        peer.hear(pop)
        peer.say(wire.I64.pack(1) + wire.packed(b"v"))

    assert play(part).queue_pop("k") == b"v"


def test_threads_share_a_connection_and_a_clone_has_its_own(store: TCPStore, wait_until: Callable[..., object]) -> None:
    counts = [Work(lambda: [store.add("n", 1) for _ in range(100)]) for _ in range(8)]
    assert sorted(count for one in counts for count in one.result()) == list(range(1, 801))
    with contextlib.closing(store.clone()) as clone:
        waiting = Work(lambda: store.get("k"))
        wait_until(store._clients[os.getpid()]._lock.locked)
        assert (clone.timeout_s, clone.host, clone.port) == (store.timeout_s, store.host, store.port)
        clone.set("k", "v")
        assert waiting.result() == b"v"


# --- the connection --------------------------------------------------------------------------------------------------------


def test_every_operation_of_a_lost_server_says_so(server: TcpStoreServer, connect: Callable[..., TCPStore]) -> None:
    """P04: whoever waits for a key is told at once when the server ends."""
    store, clone = connect(server), connect(server)
    store.set("k", "v")
    waiting = Work(lambda: clone.get("never"))
    server.close()
    assert isinstance(waiting.result(), StoreNetworkError)
    for _ in range(2):
        with pytest.raises(StoreNetworkError, match=rf"127\.0\.0\.1:{store.port} has ended"):
            store.get("k")
    with pytest.raises(StoreNetworkError, match="has ended"):
        store.set("k", "v")


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"\2", "nothing but 0 or 1"),
        (wire.READY + wire.U64.pack(1 << 40), "more than 1073741824 bytes"),
        (wire.READY + wire.U64.pack(100) + b"only a part", "the server closed it"),
    ],
)
def test_an_answer_that_cannot_be_ends_the_connection(play: Callable[..., TCPStore], reply: bytes, reason: str) -> None:
    def part(peer: Peer) -> None:
        peer.hear(wire.request(wire.CHECK, [b"/k"]) + wire.request(wire.GET, [b"/k"]))
        peer.say(reply)

    store = play(part)
    for _ in range(2):
        with pytest.raises(StoreNetworkError, match=reason):
            store.get("k")


def test_an_answer_may_come_in_pieces(play: Callable[..., TCPStore]) -> None:
    def part(peer: Peer) -> None:
        peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.hear(wire.request(wire.CHECK, [b"/k"]) + wire.request(wire.GET, [b"/k"]))
        for byte in wire.READY + wire.packed(b"value"):
            peer.say(bytes([byte]))
        peer.hear(ADD_N)
        peer.say(wire.I64.pack(3))

    store = play(part)
    assert (store.get("k"), store.add("n", 1)) == (b"value", 3)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("operation", "arguments"), [("add", ("n", 1)), ("multi_set", (list("abcd"), [bytes(wire.MAX_VALUE_BYTES)] * 4))]
)
def test_a_server_that_does_nothing_is_lost_when_the_time_is_over(
    play: Callable[..., TCPStore], operation: str, arguments: tuple[Any, ...]
) -> None:
    is_over = threading.Event()
    store = play(lambda peer: is_over.wait(TIMEOUT_S) and None, timeout=0.05)  # type: ignore[func-returns-value]
    try:
        with pytest.raises(StoreNetworkError, match=r"no answer came in time|did not take a request within 0.2 s"):
            getattr(store, operation)(*arguments)
    finally:
        is_over.set()
    with pytest.raises(StoreNetworkError, match="has ended"):
        store.num_keys()


def test_a_conversation_that_is_interrupted_cannot_be_taken_up_again(store: TCPStore) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            store.get("never")
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(StoreNetworkError, match="interrupted"):
        store.num_keys()


def test_closing_ends_the_waiting_of_other_threads(store: TCPStore, wait_until: Callable[..., object]) -> None:
    waiting = Work(lambda: store.get("never"))
    wait_until(store._clients[os.getpid()]._lock.locked)
    store.close()
    assert "closed on this side" in str(waiting.result())
    with pytest.raises(StoreNetworkError, match="closed on this side"):
        store.num_keys()
    store.close()


def run_in_fork(work: Callable[[], object]) -> object:
    """What `work` gives in a forked process, by pickle."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, pickle.dumps(work()))
        except BaseException as error:  # whatever it is, the test in the parent must see it
            os.write(writer, pickle.dumps(repr(error)))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        result = pickle.load(answer)
    os.waitpid(pid, 0)
    return result


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_has_a_connection_of_its_own(store: TCPStore, wait_until: Callable[..., object]) -> None:
    """Even while a thread of the parent, which the child does not have, is in the middle of a conversation."""
    store.set("k", "v")
    waiting = Work(lambda: store.get("later"))
    wait_until(store._clients[os.getpid()]._lock.locked)

    def use() -> list[object]:
        store.set("later", "w")
        return [store.get("k"), [store.add("n", 1) for _ in range(3)], len(store._clients), store.close()]

    assert run_in_fork(use) == [b"v", [1, 2, 3], 1, None]
    assert waiting.result() == b"w"
    assert store.add("n", 1) == 4
    store.close()
    assert "was closed" in str(run_in_fork(store.num_keys))


def test_it_can_be_sent_to_another_process(store: TCPStore) -> None:
    store.set_timeout(7)
    with contextlib.closing(pickle.loads(pickle.dumps(store))) as twin:
        twin.set("k", "v")
        assert (twin.timeout_s, twin.host, twin.port, store.get("k")) == (7, store.host, store.port, b"v")


# --- reaching the server ---------------------------------------------------------------------------------------------------


def test_a_server_may_come_after_its_clients(connect: Callable[..., TCPStore], monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))  # nobody is answered there before it listens
    is_refused = threading.Event()
    next_s = Backoff.next_s
    monkeypatch.setattr(Backoff, "next_s", lambda backoff: is_refused.set() or next_s(backoff))
    connecting = Work(lambda: connect(listener.getsockname()[1]).add("n", 1))
    assert is_refused.wait(TIMEOUT_S)
    listener.listen()
    server = TcpStoreServer([listener])
    server.start()
    assert connecting.result() == 1
    server.close()


def test_who_cannot_reach_a_server_is_told_where_how_long_and_why(connect: Callable[..., TCPStore]) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        port, begun = unheard.getsockname()[1], time.monotonic()
        with pytest.raises(StoreNetworkError, match=rf"127\.0\.0\.1:{port} within 0.3 s: Connection refused"):
            connect(port, timeout=0.3)
    assert 0.3 <= time.monotonic() - begun < AT_ONCE_S


def test_a_name_is_looked_up_until_it_is_known(
    server: TcpStoreServer, connect: Callable[..., TCPStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P06: the name service may know the server's name only later."""
    answers: list[Any] = [socket.gaierror(-2, "Name or service not known")] * 3
    resolve = tcp_store.resolve

    def look_up(host: str, port: int) -> object:
        if answers:
            raise answers.pop()
        return resolve(host, port)

    monkeypatch.setattr(tcp_store, "resolve", look_up)
    assert connect(server).add("n", 1) == 1
    answers += [socket.gaierror(-2, "Name or service not known")] * 1000
    with pytest.raises(StoreNetworkError, match=r"within 0.1 s: Name or service not known"):
        connect(server, timeout=0.1)


@pytest.mark.parametrize(("reply", "reason"), [(b"HTTP/1.1 400", "not a TCPStore"), (b"", "no answer")])
def test_somebody_else_at_the_address_is_not_taken_for_a_store(
    connect: Callable[..., TCPStore], reply: bytes, reason: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        is_over = threading.Event()
        listener.settimeout(0.05)

        def answer() -> None:
            with contextlib.ExitStack() as connections:
                while not is_over.is_set():
                    with contextlib.suppress(TimeoutError):
                        connections.enter_context(listener.accept()[0]).sendall(reply)

        work = Work(answer)
        try:
            with pytest.raises(StoreNetworkError, match=reason):
                connect(listener.getsockname()[1], timeout=0.2)
        finally:
            is_over.set()
        assert work.result() is None


def test_a_socket_that_met_itself_is_not_a_connection(connect: Callable[..., TCPStore], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may choose the very port that is dialled, and then answers itself."""
    with socket.socket() as chosen:
        chosen.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]

    def bind_there(sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))

    monkeypatch.setattr(tcp_store, "tune", bind_there)
    with pytest.raises(StoreNetworkError, match="nobody listens there"):
        connect(port, timeout=0)


# --- being the host --------------------------------------------------------------------------------------------------------


def test_a_master_serves_others_until_it_is_closed(connect: Callable[..., TCPStore]) -> None:
    master = connect(0, is_master=True)
    assert master.port > 0
    worker = connect(master.port)
    worker.set("k", "v")
    assert master.get("k") == b"v"
    master.close()
    assert is_refused("127.0.0.1", master.port)
    with pytest.raises(StoreNetworkError):
        worker.get("k")


def test_a_master_that_is_forgotten_ends_its_server() -> None:
    master = TCPStore("127.0.0.1", 0, is_master=True)
    port = master.port
    del master
    assert is_refused("127.0.0.1", port)


def test_a_master_that_is_never_closed_does_not_hold_up_the_end_of_its_process() -> None:
    program = "from rallypoint.store.tcp_store import TCPStore; s = TCPStore('127.0.0.1', 0, None, True); print(s.add('n', 1))"
    ended = subprocess.run([sys.executable, "-c", program], timeout=TIMEOUT_S, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1\n", "")


def test_a_master_in_a_forked_process_is_a_client(connect: Callable[..., TCPStore]) -> None:
    master = connect(0, is_master=True)
    master.set("k", "v")
    assert run_in_fork(lambda: [master.get("k"), master.close()]) == [b"v", None]
    assert master.get("k") == b"v"


def test_a_master_listens_at_the_address_it_was_given_and_at_no_other(connect: Callable[..., TCPStore]) -> None:
    """P36."""
    master = connect(0, is_master=True)
    assert is_refused("127.0.0.2", master.port)


def test_a_master_by_an_address_of_ipv6() -> None:
    """P43."""
    try:
        with contextlib.closing(TCPStore("::1", 0, is_master=True)) as master:
            with contextlib.closing(TCPStore("::1", master.port)) as worker:
                assert worker.add("n", 1) == 1
            master.close()
            with pytest.raises(StoreNetworkError, match=rf"\[::1\]:{master.port}"):
                TCPStore("::1", master.port, timeout=0)
    except StoreNetworkError as error:
        pytest.skip(f"no IPv6 here: {error}")


@pytest.mark.parametrize("is_multi_tenant", [False, True])
def test_an_address_that_cannot_be_had_is_said_at_once(connect: Callable[..., TCPStore], is_multi_tenant: bool) -> None:
    with pytest.raises(StoreNetworkError, match=r"192\.0\.2\.1 is no address of this machine"):
        TCPStore("192.0.2.1", 0, is_master=True, multi_tenant=is_multi_tenant)
    master = connect(0, is_master=True)
    with pytest.raises(StoreNetworkError, match=rf"port {master.port}: .*in use"):
        connect(master.port, is_master=True, multi_tenant=is_multi_tenant)


def test_tenants_share_one_server_until_the_last_has_gone(connect: Callable[..., TCPStore]) -> None:
    first = connect(0, is_master=True, multi_tenant=True)
    second = connect(first.port, is_master=True, multi_tenant=True)
    first.set("k", "v")
    assert second.get("k") == b"v"
    first.close()
    assert second.get("k") == b"v"
    second.close()
    assert is_refused("127.0.0.1", first.port)
    third = connect(first.port, is_master=True, multi_tenant=True)
    assert not third.check(["k"])


def test_a_master_waits_for_the_others_and_they_do_not(connect: Callable[..., TCPStore]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    master = Work(lambda: connect(port, world_size=3, is_master=True, master_listen_fd=listener.detach()))
    first = connect(port, world_size=3)
    assert master.thread.is_alive()
    connect(port, world_size=3, wait_for_workers=False)  # is not counted
    assert first.compare_set("k", "", "v") == b"v"
    connect(port, world_size=3)
    assert master.result().get("k") == b"v"
    assert (first.list_keys(), first.num_keys()) == (["k"], 2)  # the count of those who came is nobody's key


def test_a_master_that_waits_in_vain_says_for_how_many(connect: Callable[..., TCPStore]) -> None:
    with pytest.raises(StoreTimeoutError, match=r"waited 0.05 s in vain: 1 of 2 clients joined"):
        connect(0, world_size=2, is_master=True, timeout=0.05)
    with contextlib.closing(TCPStore("127.0.0.1", 0, -1, True)) as anyone:
        assert anyone.num_keys() == 0
    with pytest.raises(ValueError, match="size 0"):
        TCPStore("127.0.0.1", 0, 0, True)


def test_a_master_takes_over_a_socket_that_listens(connect: Callable[..., TCPStore]) -> None:
    """P13: a port that was handed out stays held."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.set_inheritable(True)
    fd = listener.detach()
    master = connect(0, is_master=True, master_listen_fd=fd)
    assert (master.port, os.get_inheritable(fd), connect(port).add("n", 1)) == (port, False, 1)
    master.close()
    assert is_refused("127.0.0.1", port)


def test_a_socket_that_does_not_listen_is_left_to_its_owner(connect: Callable[..., TCPStore]) -> None:
    with socket.socket() as other:
        with pytest.raises(StoreNetworkError, match="does not listen"):
            connect(0, is_master=True, master_listen_fd=other.fileno())
        assert other.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0
    with pytest.raises(StoreNetworkError, match="Bad file descriptor"):
        connect(0, is_master=True, master_listen_fd=1 << 20)
