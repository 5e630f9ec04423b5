"""Helpers around stores: barriers, gathering, and the stores that they make."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Any

from tests.compat.conformance.harness import case, outcome, plain, store, together


@case
def gathering_from_all() -> dict[str, Any]:
    from torch.distributed.elastic.utils.store import get_all, synchronize

    shared = store()
    for rank in range(3):
        shared.set(f"prefix{rank}", f"data{rank}")
    alone = outcome(synchronize, store(), b"x", 0, 1, "alone")
    gathered = together(*[lambda rank=rank: synchronize(shared, f"v{rank}".encode(), rank, 3, "sync", 60) for rank in range(3)])
    return {
        "get all": together(*[lambda rank=rank: get_all(shared, rank, "prefix", 3) for rank in range(3)]),
        "synchronize": gathered,
        "alone": alone,
    }


@case
def gathering_leaves_these_keys() -> dict[str, Any]:
    from torch.distributed.elastic.utils.store import synchronize

    shared = store()
    together(*[lambda rank=rank: synchronize(shared, b"d", rank, 2, "p/", 60) for rank in range(2)])
    return {
        "keys": sorted(key for key in ("p/0", "p/1", "p/.FINISHED", "p/.num_members", "p/.last_member") if shared.check([key]))
    }


@case
def gathering_that_lacks_one() -> dict[str, Any]:
    from torch.distributed.elastic.utils.store import synchronize

    shared = store()
    started_at = time.monotonic()
    facts = {"raises": outcome(synchronize, shared, b"d", 0, 2, "p", timeout=1)}
    return {**facts, "in time": 0.5 < time.monotonic() - started_at < 5, "timeout kept": shared.timeout == timedelta(seconds=300)}


@case
def a_barrier_of_all() -> dict[str, Any]:
    from torch.distributed.elastic.utils.store import barrier

    shared = store()
    return {
        "three": together(*[lambda: barrier(shared, 3, "b", 60)] * 3),
        "alone": outcome(barrier, store(), 1, "c", 5),
        "named": together(
            *[
                lambda rank=rank: barrier(store=shared, world_size=2, key_prefix="d", barrier_timeout=60, rank=rank)
                for rank in range(2)
            ]
        ),
        "again": together(*[lambda: barrier(shared, 2, "e", 60)] * 2),
    }


@case
def a_barrier_that_lacks_some() -> dict[str, Any]:
    from torch.distributed.elastic.utils.store import barrier

    shared = store()
    plain_one = outcome(barrier, shared, 2, "b", 0.5)
    other = store()
    traced = together(
        lambda: barrier(other, 3, "t", 1.0, 0, lambda rank: f"host-{rank}", 0.5),
        lambda: barrier(other, 3, "t", 1.0, 1, lambda rank: f"host-{rank}", 0.5),
    )
    third = store()
    helper = threading.Thread(target=lambda: outcome(barrier, third, 3, "u", 1.0, 1, str, 0.5), daemon=True)
    helper.start()
    named = outcome(barrier, third, 3, "u", 1.0, 0, lambda rank: f"host-{rank}", 0.5, words=("host-2", "host-1"))
    helper.join(5)
    return {"raises": plain_one, "traced": traced, "named": named}


@case
def a_timeout_for_a_while() -> dict[str, Any]:
    from torch.distributed.elastic.utils.store import store_timeout

    shared = store()
    before = shared.timeout
    with store_timeout(shared, 7):
        within = shared.timeout
    after = shared.timeout

    def failing() -> None:
        with store_timeout(shared, 3):
            raise KeyError("x")

    failed = outcome(failing)
    return {
        "before": before.total_seconds(),
        "within": within.total_seconds(),
        "after": after == before,
        "failed": failed,
        "after that": shared.timeout == before,
    }


@case
def a_store_between_processes() -> dict[str, Any]:
    from torch.distributed.elastic.utils.distributed import create_c10d_store

    server = create_c10d_store(is_server=True, server_addr="localhost", server_port=0, timeout=5, wait_for_workers=False)
    client = create_c10d_store(False, "localhost", server.port, timeout=5)
    server.set("k", "v")
    facts = {
        "kind": type(server).__name__,
        "port": server.port > 0,
        "read": plain(client.get("k")),
        "host": server.host,
        "number": client.add("n", 2),
    }
    free = create_c10d_store(True, "localhost", timeout=5)
    facts["free port"] = free.port > 0
    return facts


@case
def a_store_that_cannot_be_made() -> dict[str, Any]:
    from torch.distributed.elastic.utils.distributed import create_c10d_store

    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        facts = {"taken": outcome(create_c10d_store, True, "localhost", port, timeout=2, retries=1, wait_for_workers=False)}
    with socket.socket() as nobody:
        nobody.bind(("localhost", 0))
        facts["nobody there"] = outcome(create_c10d_store, False, "localhost", nobody.getsockname()[1], timeout=1, retries=1)
    return facts


class Noting:
    """A store that notes what it is asked for, and answers as if all were there."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    @property
    def timeout(self) -> int:
        self.calls.append(["timeout"])
        return 1234

    def set_timeout(self, timeout: Any) -> None:
        self.calls.append(["set_timeout", timeout.total_seconds() if isinstance(timeout, timedelta) else timeout])

    def set(self, key: str, value: Any) -> None:
        self.calls.append(["set", key])

    def get(self, key: str) -> str:
        self.calls.append(["get", key])
        return "value"

    def multi_get(self, keys: list[str]) -> list[str]:
        self.calls.append(["multi_get", *keys])
        return ["value"] * len(keys)

    def add(self, key: str, value: int) -> int:
        self.calls.append(["add", key, value])
        return 3

    def wait(self, keys: list[str], *_: Any) -> None:
        self.calls.append(["wait", *keys])

    def check(self, keys: list[str]) -> bool:
        self.calls.append(["check", *keys])
        return True


@case
def what_a_store_is_asked_for() -> dict[str, Any]:
    from torch.distributed.elastic.utils.store import barrier, get_all, synchronize

    facts = {}
    for rank in (0, 1):
        for name, call in (
            ("get_all", lambda one, r=rank: get_all(one, r, "p/", 3)),
            ("synchronize", lambda one, r=rank: synchronize(one, b"d", r, 3, "p/")),
            ("barrier", lambda one, r=rank: barrier(one, 3, "p/", rank=r)),
        ):
            noting = Noting()
            facts[f"{name} {rank}"] = [outcome(call, noting), noting.calls]
    noting = Noting()
    facts["barrier of nobody"] = [outcome(barrier, noting, 3, "p/"), noting.calls]
    return facts


@case
def a_server_that_waits_for_nobody() -> dict[str, Any]:
    from torch.distributed.elastic.utils.distributed import create_c10d_store

    return {
        "no port, two": outcome(create_c10d_store, True, "localhost", world_size=2, timeout=1),
        "nobody comes": outcome(create_c10d_store, True, "localhost", 0, world_size=2, timeout=1),
    }


class Least:
    """A store with no more than these functions ask for, and nobody else in it."""

    timeout = 5.0

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set_timeout(self, timeout: Any) -> None:
        self.timeout = timeout

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def wait(self, keys: Any, timeout: Any = None) -> None:
        if not all(key in self.values for key in keys):
            raise RuntimeError("waited in vain")

    def multi_get(self, keys: Any) -> list[bytes]:
        return [self.values[key] for key in keys]


@case
def a_store_of_the_least_kind() -> dict[str, Any]:
    """Without ``check``, which names those that are missing where a store has it."""
    from torch.distributed.elastic.utils.store import barrier, get_all, synchronize

    def gather() -> Any:
        one = Least()
        one.set("p/0", b"d")
        return get_all(one, 0, "p/", 1)

    return {
        "get_all": outcome(gather),
        "synchronize": outcome(lambda: synchronize(Least(), b"d", 0, 1, "p/")),
        "barrier": outcome(lambda: barrier(Least(), 1, "p/")),
        "barrier with rank": outcome(lambda: barrier(Least(), 1, "p/", rank=0)),
        "barrier of two": outcome(lambda: barrier(Least(), 2, "p/", barrier_timeout=0.1)),
        "barrier of two with rank": outcome(lambda: barrier(Least(), 2, "p/", barrier_timeout=0.1, rank=0)),
    }
