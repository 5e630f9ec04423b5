"""What holds for every generation, however nodes come, go and fail; and what is written down about them."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from rallypoint.coordination.embedded.client import EmbeddedCoordination
from rallypoint.rendezvous.handler import RendezvousInfo, RendezvousParameters
from rallypoint.rendezvous.registry import get_rendezvous_handler

DAY_S = 86_400.0
SEAT = re.compile(r"^rallyrun: generation (\d+) started: (\d+) nodes?, (\d+) workers?; this is node (\d+)", re.MULTILINE)


def check_generations(nodes: list[Any]) -> int:
    """All that the nodes of a job said, and all that their workers found, agree; the number of generations."""
    seats: dict[int, list[tuple[int, int, int]]] = {}
    for node in nodes:
        for found in SEAT.findall(node.stderr):
            number, size, world, rank = map(int, found)
            seats.setdefault(number, []).append((rank, size, world))
    for number, told in seats.items():
        assert len({(size, world) for _, size, world in told}) == 1, (number, told)
        assert len({rank for rank, _, _ in told}) == len(told), (number, told)

    worlds: dict[tuple[str, str], list[Any]] = {}
    for node in nodes:
        for start in node.starts():
            worlds.setdefault(start.master, []).append(start)
    for starts in worlds.values():
        assert len({(start.world, start.env["GROUP_WORLD_SIZE"], start.restarts) for start in starts}) == 1
        ranks = [start.rank for start in starts]
        assert len(set(ranks)) == len(ranks)
        assert set(ranks) <= set(range(starts[0].world))
    return len(seats)


def test_all_members_of_a_generation_hold_the_same_world(job: Any):
    """P46: nodes of one and two workers; joins, kills, departures and failures at once, not one after the other."""
    options = {"nnodes": "1:4", "conf": "last_call_timeout=0.2,restart_backoff=0"}
    restarts = ("--max-restarts", "50")
    nodes = [job.start_host(*restarts, workers=1, **options)]
    members = list(nodes)
    for turn in range(6):
        joiners = [job.start(*restarts, workers=workers, **options) for workers in (1, 2)]
        nodes += joiners
        if turn % 2:
            job.order(0, "raise ValueError('boom')")
        members += joiners
        size = sum(node.workers for node in members)
        for node in members:
            node.wait_for_world(size, since=joiners[0].began_at)
        victim = members.pop()
        if turn % 3:
            victim.kill()
        else:
            victim.end()
        while len(members) > 2:
            members.pop().end()
    for node in members:
        node.wait_for_world(sum(one.workers for one in members), since=joiners[0].began_at)
    job.finish()
    assert [node.wait() for node in members] == [0, 0]
    generations = check_generations(nodes)
    print("generations:", generations)
    assert generations > 6  # one for each turn at least; how many more depends on what came together


# --- what is written down --------------------------------------------------------------------------------------------------


def numbers_in(value: object) -> Iterator[float]:
    match value:
        case bool():
            return
        case int() | float():
            yield float(value)
        case list():
            for one in value:
                yield from numbers_in(one)
        case dict():
            for one in value.values():
                yield from numbers_in(one)


def test_nothing_written_down_is_a_time_of_day(job: Any, wait_until: Any):
    """P48: with all that a job writes, a failure included, there is no time of any clock to compare with another host's.

    What skewed and drifting clocks cannot do is shown by simulation.
    """
    nodes = [job.start_host("--max-restarts", "1", nnodes="2"), job.start("--max-restarts", "1", nnodes="2")]
    for node in nodes:
        node.wait_for_world(4)
    failed_at = time.monotonic()
    job.order(2, "raise ValueError('boom')")
    for node in nodes:
        node.wait_for_world(4, since=failed_at)
    with closing(EmbeddedCoordination("127.0.0.1", job.port, "a-job", None)) as store:
        store.connect(time.monotonic() + 5.0)
        store.watch("", 1, time.monotonic() + 5.0)  # all that was ever written
        written: list[Any] = []
        wait_until(lambda: written.extend(store.take_events()) or any("/failures/" in event.key for event in written))
    values = [json.loads(event.item.value) for event in written if event.item and event.item.value[:1] in (b"{", b"[")]
    found = [number for value in values for number in numbers_in(value)]
    assert len(found) > 20
    assert not [number for number in found if abs(number - time.time()) < DAY_S]
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]


class Meeting:
    """A handler's next rendezvous, in a thread of its own."""

    def __init__(self, handler: Any) -> None:
        self._infos: list[RendezvousInfo] = []
        self._thread = threading.Thread(target=lambda: self._infos.append(handler.next_rendezvous()))
        self._thread.start()

    def info(self) -> RendezvousInfo:
        self._thread.join(10.0)
        return self._infos[0]


def test_a_generation_sees_nothing_of_another(free_port: Any, wait_until: Any):
    """P16: the stores of two generations have no key in common; the older one can neither read nor change the newer one's."""
    settings = {"last_call_timeout": 0.1}
    params = RendezvousParameters("c10d", f"127.0.0.1:{free_port()}", "a-job", 1, 2, **settings)
    first, second = get_rendezvous_handler(params), get_rendezvous_handler(params)
    try:
        alone = Meeting(first).info()
        with closing(alone.store.clone()) as stale:
            stale.set("key", b"old")
            joining = Meeting(second)
            wait_until(first.num_nodes_waiting)
            ours, theirs = Meeting(first).info(), joining.info()
            assert (ours.world_size, theirs.world_size) == (2, 2)
            assert not ours.store.check(["key"])
            ours.store.set("key", b"new")
            stale.set("key", b"of a node that was left behind")
            assert theirs.store.get("key") == b"new"
    finally:
        for handler in (second, first):
            handler.shutdown()
