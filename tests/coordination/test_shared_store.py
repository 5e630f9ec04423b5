"""The store of one generation on a coordination engine: it does what the one in memory does, for many threads and processes."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.coordination import shared_store
from rallypoint.coordination.embedded.client import EmbeddedCoordination
from rallypoint.coordination.embedded.server import CoordinationServer
from rallypoint.coordination.engine import Coordination, CoordinationError, RefusedError, UnreachableError
from rallypoint.coordination.model import Outcome, Transaction
from rallypoint.coordination.shared_store import MOST_GETS, VALUE_BYTES, SharedStore
from rallypoint.net.endpoint import open_listeners
from rallypoint.store.barriers import barrier, synchronize
from rallypoint.store.hash_store import HashStore
from rallypoint.store.interface import QueueEmptyError, Store, StoreError, StoreTimeoutError
from rallypoint.testing.memory import MemoryCoordination, MemoryEngine

Connect = Callable[[], Coordination]
Make = Callable[..., SharedStore]
Result = TypeVar("Result")
Client = TypeVar("Client", bound=MemoryCoordination)
PREFIX = "data/3.17/"


def connect_to(host: str, port: int) -> Coordination:
    """A function of a module, as it has to be to be pickled."""
    client = EmbeddedCoordination(host, port, "job", b"secret")
    client.connect(time.monotonic() + 10)
    return client


@contextlib.contextmanager
def embedded_engine() -> Iterator[Connect]:
    sockets = open_listeners("127.0.0.1", 0, is_host=True, wildcard_allowed=False)
    assert sockets is not None
    server = CoordinationServer(sockets, "job", b"secret")
    server.start()
    try:
        yield functools.partial(connect_to, *server.addresses[0])
    finally:
        server.stop()


@contextlib.contextmanager
def memory_engine() -> Iterator[Connect]:
    engine = MemoryEngine()
    yield engine.connect
    assert not engine.clients, "a connection was left"


@pytest.fixture(params=[memory_engine, embedded_engine], ids=["memory", "embedded"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    with request.param() as connect:
        yield connect


@contextlib.contextmanager
def stores_on(connect: Connect) -> Iterator[Make]:
    """Makes stores, and closes them in the end."""
    with contextlib.ExitStack() as stores:

        def make(prefix: str = PREFIX, timeout_s: float = 20.0) -> SharedStore:
            store = SharedStore(connect, prefix, timeout_s)
            stores.callback(store.close)
            return store

        yield make


@pytest.fixture
def make(connect: Connect) -> Iterator[Make]:
    with stores_on(connect) as make:
        yield make


@pytest.fixture
def store(make: Make) -> SharedStore:
    return make()


def at_once(count: int, work: Callable[[int], Result]) -> list[Result]:
    """What ``work(0)`` to ``work(count - 1)`` return, run beside each other."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def join(engine: MemoryEngine, client: Client) -> Client:
    engine.clients.append(client)
    return client


class Watching(MemoryCoordination):
    """Says when somebody waits, and can be cut off at that moment."""

    def __init__(self, engine: MemoryEngine) -> None:
        super().__init__(engine)
        self.watches = threading.Event()

    def watch(self, prefix: str, from_revision: int, deadline: float) -> None:
        super().watch(prefix, from_revision, deadline)
        self.disconnect()
        self.watches.set()


# --- one operation at a time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [b"", bytes(range(256)), b"\0\xff" * (VALUE_BYTES // 2), "größer", bytearray(b"x"), memoryview(b"y")]
)
def test_values_of_any_bytes(store: SharedStore, value: bytes | str) -> None:
    store.set("k", value)
    assert store.get("k") == (value.encode() if isinstance(value, str) else bytes(value))


@pytest.mark.parametrize("key", ["", "/", "k/value", "k/queue", "größer", "a b\n\0", "k" * 900])
def test_keys_of_any_text_stay_apart(store: SharedStore, key: str) -> None:
    store.set("k", "other")
    store.set(key, "mine")
    store.queue_push(key, "first")
    assert (store.get("k"), store.get(key), store.queue_pop(key)) == (b"other", b"mine", b"first")
    assert sorted(store.list_keys()) == sorted(["k", key])
    assert store.num_keys() == 2


@pytest.mark.parametrize("operation", ["set", "append", "queue_push"])
def test_what_is_too_large_is_refused_by_name(store: SharedStore, operation: str) -> None:
    with pytest.raises(StoreError, match=f"'k' would have .* may have {VALUE_BYTES}"):
        getattr(store, operation)("k", bytes(VALUE_BYTES + 1))
    with pytest.raises(StoreError, match=r"'kkk.*too long.*1024 bytes"):
        getattr(store, operation)("k" * 1024, b"")
    assert store.num_keys() == 0


def test_a_value_or_a_queue_cannot_grow_without_end(store: SharedStore) -> None:
    store.append("k", bytes(VALUE_BYTES))
    with pytest.raises(StoreError, match=r"value of 'k' would have"):
        store.append("k", b"x")
    store.queue_push("q", b"\0" * (VALUE_BYTES - 4))
    with pytest.raises(StoreError, match=r"queue of 'q' would have"):
        store.queue_push("q", b"x")
    assert store.queue_pop("q") == b"\0" * (VALUE_BYTES - 4)


def test_what_is_no_number_cannot_be_added_to(store: SharedStore) -> None:
    store.set("n", "many")
    with pytest.raises(StoreError, match=r"'n'.*many"):
        store.add("n", 1)


def test_queues_are_first_in_first_out_and_are_there_only_while_they_hold_something(store: SharedStore) -> None:
    for value in ("1", "", "3"):
        store.queue_push("q", value)
    assert (store.queue_len("q"), store.check(["q"]), store.num_keys()) == (3, True, 0)
    store.wait(["q"], 0)
    assert [store.queue_pop("q"), store.queue_pop("q"), store.queue_pop("q", block=False)] == [b"1", b"", b"3"]
    assert (store.queue_len("q"), store.check(["q"])) == (0, False)
    with pytest.raises(QueueEmptyError, match="'q'"):
        store.queue_pop("q", block=False)


def test_a_store_that_is_not_used_does_not_connect() -> None:
    def connect() -> Coordination:
        raise AssertionError("it connected")

    store = SharedStore(connect, PREFIX)
    store.set_timeout(timedelta(seconds=7))
    twin = store.clone()
    twin.wait([], 0)
    assert twin.check([])
    store.close()
    assert twin.timeout == timedelta(seconds=7)
    assert SharedStore(connect, PREFIX).timeout == timedelta(seconds=300)
    assert store.has_extended_api()


def test_a_store_that_was_closed_says_so(store: SharedStore) -> None:
    store.set("k", "v")
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get("k")


def test_one_thread_needs_one_connection() -> None:
    engine = MemoryEngine()
    store = SharedStore(engine.connect, PREFIX)
    for _ in range(3):
        store.add("n", 1)
        store.wait(["n"])
        with pytest.raises(StoreTimeoutError):
            store.wait(["never"], 0)
    assert len(engine.clients) == 1
    del store
    assert not engine.clients, "the connection of a store that nobody has any more is closed"


# --- against the store in memory -------------------------------------------------------------------------------------------

keys = st.sampled_from(["a", "b", "a/value"])
values = st.one_of(st.binary(max_size=3), st.integers(-9, 9).map(lambda n: str(n).encode()))
operations = st.one_of(
    st.tuples(st.sampled_from(["set", "append", "queue_push"]), keys, values),
    st.tuples(st.just("add"), keys, st.integers(-99, 99)),
    st.tuples(st.just("compare_set"), keys, values, values),
    st.tuples(st.sampled_from(["delete_key", "queue_len", "get", "queue_pop"]), keys),
    st.tuples(st.just("queue_pop"), keys, st.just(False)),
    st.tuples(st.sampled_from(["check", "wait", "multi_get"]), st.lists(keys, unique=True)),
    st.tuples(st.just("multi_set"), st.lists(keys, min_size=2, max_size=2), st.lists(values, min_size=1, max_size=2)),
    st.tuples(st.just("num_keys")),
)


def result_of(store: Store, operation: str, *args: object) -> object:
    """What came of it. Of several keys that are missing a store may name all, or the first that it asked for."""
    try:
        return getattr(store, operation)(*args)
    except (StoreError, ValueError) as error:
        return type(error), "" if operation == "multi_get" else str(error)


@given(steps=st.lists(operations, max_size=30))
def test_it_does_and_says_what_the_store_in_memory_does(steps: list[tuple[str, object]]) -> None:
    with memory_engine() as connect, stores_on(connect) as make:
        store, model = make(timeout_s=0), HashStore()
        model.set_timeout(0)
        for operation, *args in steps:
            assert result_of(store, operation, *args) == result_of(model, operation, *args)
            assert sorted(store.list_keys()) == sorted(model.list_keys())


# --- waiting ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.set("k", "5"),
        lambda store: store.add("k", 5),
        lambda store: store.append("k", "5"),
        lambda store: store.compare_set("k", "", "5"),
        lambda store: store.multi_set(["j", "k"], ["4", "5"]),
    ],
    ids=["set", "add", "append", "compare_set", "multi_set"],
)
def test_every_write_wakes_who_waits_also_on_the_same_store(make: Make, write: Callable[[Store], object]) -> None:
    store, other = make(), make()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(store.get, "k"), pool.submit(other.get, "k"), pool.submit(other.multi_get, ["k", "k"])]
        done = pool.submit(store.wait, ["k"])
        write(store)
        assert [one.result(20) for one in waiting] == [b"5", b"5", [b"5", b"5"]]
        assert done.result(20) is None


def test_each_pushed_value_is_popped_once(make: Make) -> None:
    store = make()
    with ThreadPoolExecutor(8) as pool:
        poppers = [pool.submit(make().queue_pop, "q") for _ in range(8)]
        for number in range(8):
            store.queue_push("q", str(number))
        assert sorted(popper.result(20) for popper in poppers) == [str(number).encode() for number in range(8)]


def test_who_waits_does_not_ask_again_and_again(wait_until: Callable[[Callable[[], object]], object]) -> None:
    asked = 0

    class Counting(MemoryCoordination):
        def transact(self, transaction: Transaction, deadline: float) -> Outcome:
            nonlocal asked
            asked += 1
            return super().transact(transaction, deadline)

    engine = MemoryEngine()
    with stores_on(lambda: join(engine, Counting(engine))) as make, stores_on(engine.connect) as make_other:
        store, other = make(), make_other()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.wait, ["k3"])
            wait_until(lambda: asked)
            for number in range(4):
                other.set(f"k{number}", "v")
            waiting.result(20)
        assert asked == 1


@pytest.mark.parametrize("count", [3, MOST_GETS + 50])
def test_wait_names_the_keys_that_did_not_come(store: SharedStore, count: int) -> None:
    store.set("key1", "1")
    names = [f"key{number}" for number in range(count)]
    with pytest.raises(StoreTimeoutError, match=rf"0\.02 s for 'key0', 'key2'.*\(1 of {count} keys") as caught:
        store.wait(names, timedelta(seconds=0.02))
    assert isinstance(caught.value, TimeoutError)
    assert "'key1'" not in str(caught.value)


@pytest.mark.parametrize("operation", ["get", "queue_pop"])
def test_the_stores_own_timeout_ends_a_wait(make: Make, operation: str) -> None:
    with pytest.raises(StoreTimeoutError, match=r"0\.01 s.*'k'"):
        getattr(make(timeout_s=0.01), operation)("k")


def test_an_endless_timeout_is_taken(make: Make) -> None:
    store = make()
    store.set_timeout(timedelta.max)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "k")
        store.set("k", "v")
        assert waiting.result(20) == b"v"


@pytest.mark.parametrize("others", [0, 280], ids=["a little", "more than is remembered"])
def test_a_wait_outlives_a_broken_connection(others: int) -> None:
    """Whoever was cut off for so long that the engine has forgotten what happened looks again."""
    engine = MemoryEngine()
    client = join(engine, Watching(engine))
    with stores_on(lambda: client) as make, stores_on(engine.connect) as make_other, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(make().get, "k")
        assert client.watches.wait(20)
        other = make_other()
        other.set("k", "v")
        for _ in range(others):
            other.set("j", bytes(VALUE_BYTES))
        client.reconnect()
        assert waiting.result(20) == b"v"


def test_a_wait_says_when_the_store_is_out_of_reach() -> None:
    engine = MemoryEngine()
    with stores_on(lambda: join(engine, Watching(engine))) as make:
        store = make(timeout_s=0.05)
        with pytest.raises(StoreTimeoutError, match=r"out of reach.*disconnected"):
            store.get("k")


# --- generations -----------------------------------------------------------------------------------------------------------


def test_a_stale_generation_sees_nothing_of_the_new_one(make: Make) -> None:
    """P16: every generation has its own keys, also where the name of one begins like another's."""
    old, new, other = make("data/3.1/", 0.05), make("data/3.17/"), make("data/3.170/")
    new.set("k", "new")
    new.queue_push("q", "new")
    other.add("n", 5)
    assert (old.check(["k"]), old.check(["q"]), old.num_keys(), old.list_keys()) == (False, False, 0, [])
    with pytest.raises(StoreTimeoutError):
        old.get("k")
    old.set("k", "old")
    assert not old.delete_key("n")
    assert (new.get("k"), new.list_keys(), other.add("n", 1)) == (b"new", ["k"], 6)


# --- many at once ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_shared", [True, False], ids=["one store", "a store each"])
def test_adding_from_eight_threads_sums_up(make: Make, is_shared: bool) -> None:
    shared = make()
    stores = [shared if is_shared else make() for _ in range(8)]

    def work(number: int) -> list[int]:
        seen = [stores[number].add("n", 1) for _ in range(5)]
        stores[number].append("a", "x")
        return seen

    seen = [count for counts in at_once(8, work) for count in counts]
    assert sorted(seen) == list(range(1, 41))
    assert (shared.get("n"), shared.get("a")) == (b"40", b"x" * 8)


@pytest.mark.parametrize("world_size", [2, 8])
def test_barriers_and_synchronize(make: Make, world_size: int) -> None:
    stores = [make() for _ in range(world_size)]

    def work(rank: int) -> list[bytes]:
        barrier(stores[rank], world_size, "start", 20, rank)
        stores[rank].barrier("second", world_size, 20)
        return synchronize(stores[rank], f"data {rank}".encode(), rank, world_size, "agents/", 20)

    assert at_once(world_size, work) == [[f"data {rank}".encode() for rank in range(world_size)]] * world_size


def test_a_barrier_says_who_is_missing(make: Make) -> None:
    def work(rank: int) -> str:
        with pytest.raises(StoreTimeoutError) as caught:
            barrier(make(), 4, "exit", 0.5, rank)
        return str(caught.value)

    for message in at_once(2, work):
        assert "2 of 4 came, missing_ranks=[2, 3]" in message


def add_in_a_process(store: SharedStore, times: int) -> None:
    for _ in range(times):
        store.add("n", 1)
    store.set(f"process {multiprocessing.current_process().name}", "done")
    store.close()


def test_processes_that_were_forked_connect_anew() -> None:
    with embedded_engine() as connect, stores_on(connect) as make:
        store = make()
        store.add("n", 1)  # so that there is a connection which a child must not use
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=add_in_a_process, args=(store, 10), name=f"{number}") for number in range(2)]
        for process in processes:
            process.start()
        for _ in range(10):
            store.add("n", 1)
        store.wait(["process 0", "process 1"], 20)
        for process in processes:
            process.join(20)
            assert process.exitcode == 0
            process.close()
        assert store.get("n") == b"31"


def test_a_pickled_store_keeps_its_prefix_and_its_timeout() -> None:
    with embedded_engine() as connect, stores_on(connect) as make:
        store = make(timeout_s=7)
        store.set("k", "v")
        with contextlib.closing(pickle.loads(pickle.dumps(store))) as twin:
            assert (twin.get("k"), twin.timeout_s) == (b"v", 7)


# --- broken connections ----------------------------------------------------------------------------------------------------


class Unreliable(MemoryCoordination):
    """A client whose requests are lost, or whose answers are, or whose requests come late, as `faults` says."""

    def __init__(self, engine: MemoryEngine, faults: Iterator[str]) -> None:
        super().__init__(engine)
        self._faults = faults
        self._late: list[Transaction] = []

    def transact(self, transaction: Transaction, deadline: float) -> Outcome:
        fault = next(self._faults, "none")
        if fault == "request lost":
            raise UnreachableError(fault)
        if fault == "request late":
            self._late.append(transaction)
            raise UnreachableError(fault)
        outcome = super().transact(transaction, deadline)
        if fault == "late ones come":
            for late in self._late:
                super().transact(late, deadline)
        if fault == "answer lost":
            raise UnreachableError(fault)
        return outcome


FAULTS = ["none", "none", "request lost", "answer lost", "request late", "late ones come"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(FAULTS), max_size=25))
def test_no_change_is_lost_or_done_twice_however_the_connection_breaks(faults: list[str]) -> None:
    engine = MemoryEngine()
    coming = iter([*faults, "late ones come"])
    with pytest.MonkeyPatch.context() as patch, stores_on(lambda: join(engine, Unreliable(engine, coming))) as make:
        patch.setattr(shared_store, "LONGEST_PAUSE_S", 0.0)
        store = make()
        assert [store.add("n", 1) for _ in range(4)] == [1, 2, 3, 4]
        for value in ("x", "y"):
            store.append("a", value)
            store.queue_push("q", value)
        assert [store.queue_pop("q"), store.queue_pop("q")] == [b"x", b"y"]
        assert [store.compare_set("c", "", "1"), store.compare_set("c", "1", "2")] == [b"1", b"2"]
        store.set("s", "1")
        store.set("s", "2")
        assert [store.delete_key("s"), store.delete_key("s")] == [True, False]
        for _ in coming:
            store.check(["n"])
        assert (store.get("n"), store.get("a"), store.get("c")) == (b"4", b"xy", b"2")
        assert not store.check(["s"])
        assert store.queue_len("q") == 0


def test_a_late_request_does_not_count_in_a_key_that_was_deleted_meanwhile() -> None:
    """The key looks as it did when the request was sent; the mark of the connection does not."""
    engine = MemoryEngine()
    faults = iter(["none", "request late", "none", "none", "none", "none", "late ones come"])
    with stores_on(lambda: join(engine, Unreliable(engine, faults))) as make:
        store = make()
        assert store.add("n", 1) == 1
        assert store.delete_key("n")
        assert not store.check(["never"])
        assert not store.check(["n"])


@pytest.mark.parametrize("error", [RefusedError("wrong secret"), UnreachableError("nobody there"), CoordinationError("full")])
def test_what_an_engine_raises_becomes_an_error_of_the_store(error: CoordinationError) -> None:
    def connect() -> Coordination:
        raise error

    with pytest.raises(StoreError, match=str(error)):
        SharedStore(connect, PREFIX).set("k", "v")


def test_a_connection_that_failed_for_good_is_not_used_again() -> None:
    engine = MemoryEngine()

    class Cut(MemoryCoordination):
        def transact(self, transaction: Transaction, deadline: float) -> Outcome:
            raise RefusedError("cut off")

    clients = iter([Cut(engine), MemoryCoordination(engine)])
    with stores_on(lambda: join(engine, next(clients))) as make:
        store = make()
        with pytest.raises(StoreError, match="cut off"):
            store.set("k", "v")
        assert not engine.clients
        store.set("k", "v")


def test_limits_of_an_engine_are_errors_of_the_store() -> None:
    engine = MemoryEngine()

    class Narrow(MemoryCoordination):
        def transact(self, transaction: Transaction, deadline: float) -> Outcome:
            if transaction.compares:
                raise ValueError("a value of more than 3 bytes")
            return super().transact(transaction, deadline)

    with stores_on(lambda: join(engine, Narrow(engine))) as make, pytest.raises(StoreError, match="more than 3 bytes"):
        make().set("k", "four")


def test_closing_leaves_a_connection_to_who_is_using_it(wait_until: Callable[[Callable[[], object]], object]) -> None:
    engine = MemoryEngine()
    store = SharedStore(engine.connect, PREFIX, 20.0)
    with stores_on(engine.connect) as make, ThreadPoolExecutor(1) as pool:
        other = make()
        waiting = pool.submit(store.get, "k")
        wait_until(lambda: engine.clients)
        store.close()
        other.set("k", "v")
        assert waiting.result(20) == b"v"
    assert not engine.clients
