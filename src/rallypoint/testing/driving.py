"""How the contract's tests drive an engine: in one line each, with a deadline, and waiting as an agent would."""

from __future__ import annotations

import math
import select
import time
from concurrent.futures import ThreadPoolExecutor

from rallypoint.coordination.engine import Coordination
from rallypoint.coordination.model import Event, Get, Outcome, Put, Snapshot, Transaction

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rallypoint.coordination.model import Item, Operation

    Connect = Callable[[], Coordination]

__all__ = [
    "EVERY_BYTE", "MOST_PUTS", "TIMEOUT_S", "at_once", "do", "events_until", "get", "keys", "put", "raises", "read", "same",
    "soon", "wait",
]  # fmt: skip

TIMEOUT_S = 10.0
EVERY_BYTE = bytes(range(256))
MOST_PUTS = 100  # in one transaction


def events_until(
    client: Coordination,
    predicate: Callable[[list[Event]], object],
    timeout_s: float = TIMEOUT_S,
    keep: Sequence[Coordination] = (),
) -> list[Event]:
    """What `client` is told until `predicate` holds for all of it; the leases of those in `keep` are kept meanwhile."""
    deadline = time.monotonic() + timeout_s
    events = client.take_events()
    while not predicate(events):
        assert time.monotonic() < deadline, f"not told in {timeout_s:g} s; told was {events!r:.2000}"
        wait([client, *keep], deadline)
        events += client.take_events()
        for other in keep:
            other.take_events()
    return events


def wait(clients: Sequence[Coordination], deadline: float) -> bool:
    """Until one has something to say, or wants to be called, or the deadline; whether one has something."""
    poll = select.poll()
    for client in clients:
        poll.register(client.fileno(), select.POLLIN)
    wake_at = min(deadline, *(client.wake_at() for client in clients))
    return bool(poll.poll(max(0, math.ceil(1000 * (wake_at - time.monotonic())))))


def raises(error: type[Exception], call: Callable[..., object], *args: object) -> bool:
    try:
        call(*args)
    except error:
        return True
    return False


def at_once(*jobs: Callable[[], object]) -> None:
    """Each in a thread of its own, to the end; an error of one is raised here."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        for running in [pool.submit(job) for job in jobs]:
            running.result()


def same(got: object, expected: object) -> None:
    """An assertion that says both sides also where pytest does not rewrite it."""
    assert got == expected, f"\ngot      {got!r:.2000}\nexpected {expected!r:.2000}"


def soon() -> float:
    return time.monotonic() + TIMEOUT_S


def do(client: Coordination, *operations: Operation) -> Outcome:
    return client.transact(Transaction((), operations), soon())


def put(client: Coordination, key: str, value: bytes = b"", lease: int = 0) -> int:
    """The revision that it made."""
    return do(client, Put(key, value, lease)).revision


def get(client: Coordination, key: str) -> Item | None:
    return do(client, Get(key)).items[0]


def read(client: Coordination, prefix: str) -> Snapshot:
    return client.read(prefix, soon())


def keys(found: Snapshot | list[Event]) -> list[str]:
    return [one.key for one in (found.items if isinstance(found, Snapshot) else found)]
