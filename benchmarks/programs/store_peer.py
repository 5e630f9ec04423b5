"""One end of a store that speaks the protocol of torch's TCPStore, by our classes or by torch's, which are called alike.

``store_peer.py serve KIND`` prints the port that it serves a store at. ``store_peer.py use KIND RANK PORT...`` connects to the
stores at all of these ports, says "ready", and then measures for each line ``OPERATION PLACE STARTS_AT SECONDS``: it repeats the
operation on the store at that place among the ports for so long, and prints how often it did and when it was done, on the
machine's monotonic clock. Either ends when its stdin does.
"""

from __future__ import annotations

import importlib
import resource
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

HOST = "127.0.0.1"
BACKLOG = 4096
TIMEOUT = timedelta(seconds=60)
VALUE = "v" * 20
MANY_KEYS = [f"many{number}" for number in range(8)]
BETWEEN_LOOKS = 10  # operations, each with an answer, from one look at the clock to the next
UNANSWERED = 500  # sets, which have none, until an operation with one shows that they are done


class Work(NamedTuple):
    operation: Callable[[], object]
    times: int
    settle: Callable[[], object]  # returns when all of them are done


def store_class(kind: str) -> Any:
    module = "rallypoint.store.tcp_store" if kind == "rallyrun" else "torch.distributed"
    return importlib.import_module(module).TCPStore


def serve(kind: str) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    listener = listening_socket()
    port = listener.getsockname()[1]
    store = store_class(kind)(HOST, port, None, True, TIMEOUT, False, master_listen_fd=listener.detach())
    print(store.port, flush=True)
    sys.stdin.read()


def listening_socket() -> socket.socket:
    """One of IPv4 alone: on the one that it opens itself, torch's server asks a name server about every client that comes."""
    listener = socket.socket()
    listener.bind((HOST, 0))
    listener.listen(BACKLOG)
    return listener


def use(kind: str, rank: str, *ports: str) -> None:
    make = store_class(kind)
    works = [works_of(make(HOST, int(port), None, False, TIMEOUT, False), f"own{rank}") for port in ports]
    print("ready", flush=True)
    for line in sys.stdin:
        operation, place, starts_at, seconds = line.split()
        print(repeat(works[int(place)][operation], float(starts_at), float(seconds)), time.monotonic(), flush=True)


def works_of(store: Any, key: str) -> dict[str, Work]:
    store.set(key, VALUE)
    store.multi_set(MANY_KEYS, [VALUE] * len(MANY_KEYS))
    answered: dict[str, Callable[[], object]] = {
        "get": lambda: store.get(key),
        "add": lambda: store.add("counter", 1),
        "check": lambda: store.check([key]),
        "wait": lambda: store.wait([key]),
        "multi_get": lambda: store.multi_get(MANY_KEYS),
    }
    works = {name: Work(operation, BETWEEN_LOOKS, lambda: None) for name, operation in answered.items()}
    return {"set": Work(lambda: store.set(key, VALUE), UNANSWERED, store.num_keys), **works}


def repeat(work: Work, starts_at: float, seconds: float) -> int:
    """How often it was done in that time, which all clients begin at once."""
    operation, settle, count = work.operation, work.settle, 0
    time.sleep(max(0.0, starts_at - time.monotonic()))
    while time.monotonic() < starts_at + seconds:
        for _ in range(work.times):
            operation()
        settle()
        count += work.times
    return count


def main() -> None:
    purpose, *arguments = sys.argv[1:]
    if purpose == "serve":
        serve(*arguments)
    else:
        use(*arguments)


if __name__ == "__main__":
    main()
