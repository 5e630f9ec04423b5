"""Members of the etcd cluster die under a running job, one at a time or most of them at once. P04."""

from __future__ import annotations

import base64
import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.e2e.etcd.conftest import LEASE_S
from tests.etcd_cluster import Cluster

from rallypoint.coordination.engine import UnreachableError
from rallypoint.coordination.etcd.engine import EtcdCoordination
from rallypoint.coordination.etcd.gateway import EtcdAccess
from rallypoint.coordination.model import Put, Transaction
from rallypoint.rendezvous.etcd import parse_endpoints

ELECTION_S = 20.0
FENCE_S = 12.0  # an election takes 2 s, and on a busy machine more than twice that: within 3 s nobody can promise an answer
TRY_S = 0.3
ADDED_STALL_S = 1.0
OUR_PREFIX = "/beside/"


class Pulse:
    """Writes again and again, in a thread of its own, one number after the other; knows when each was acknowledged."""

    def __init__(self, write: Callable[[int], None]) -> None:
        self._write, self._is_over = write, False
        self.acknowledged: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._is_over:
            number += 1
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, AssertionError, UnreachableError):
                self._write(number)
                self.acknowledged.append((time.monotonic(), number))
            time.sleep(0.01)  # many a second, and not as many as there can be

    def has_beaten_since(self, when: float) -> bool:
        return bool(self.acknowledged) and self.acknowledged[-1][0] > when

    def longest_gap_s(self, since: float) -> float:
        times = [at for at, _ in self.acknowledged if at > since]
        return max(later - earlier for earlier, later in zip([since, *times], times, strict=False))

    def end(self) -> None:
        self._is_over = True
        self._thread.join()


class PlainWriter:
    """As simple as a client of etcd can be: it goes to the next member when one does not answer."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._next = cluster, 0

    def __call__(self, number: int) -> None:
        member = self._cluster.members[self._next]
        try:
            body = b'{"key": "YmVzaWRl", "value": "%s"}' % encoded(number)
            answer = member.request("POST", "/v3/kv/put", body, timeout_s=TRY_S)
            assert "header" in answer
        except (OSError, http.client.HTTPException, ValueError, AssertionError):
            self._next = (self._next + 1) % len(self._cluster.members)
            raise


def encoded(number: int) -> bytes:
    return base64.b64encode(str(number).encode())


@pytest.fixture
def engine(mortal_cluster: Cluster) -> Iterator[EtcdCoordination]:
    """A client as each agent has one."""
    engine = EtcdCoordination(EtcdAccess(parse_endpoints(mortal_cluster.endpoint)), OUR_PREFIX)
    engine.connect(time.monotonic() + ELECTION_S)
    yield engine
    engine.close()


@pytest.fixture
def pulses(mortal_cluster: Cluster, engine: EtcdCoordination) -> Iterator[tuple[Pulse, Pulse]]:
    """What etcd itself does, and what our client of it does, written beside the job."""

    def transact(number: int) -> None:
        engine.transact(Transaction((), (Put("number", str(number).encode()),)), time.monotonic() + ELECTION_S)

    both = Pulse(PlainWriter(mortal_cluster)), Pulse(transact)
    yield both
    for pulse in both:
        pulse.end()


def test_five_agents_outlive_the_leader_and_another_member(
    mortal_job: Any, pulses: Any, check_worlds: Any, wait_until: Any, alive: Any, within: Any
):
    """P04, P32: kill -9 of etcd's leader disturbs no worker; of another member with an agent, only that agent's loss is seen."""
    job, cluster, (plain, ours) = mortal_job, mortal_job.cluster, pulses
    conf = conf_of(FENCE_S, 30.0)
    nodes = [job.start(nnodes="3:5", workers=1, conf=conf) for _ in range(5)]
    workers = [node.wait_for_world(5)[0] for node in nodes]

    leader = cluster.members[cluster.leader()]
    leader.kill()
    killed_at = time.monotonic()
    wait_until(lambda: all(pulse.has_beaten_since(killed_at + LEASE_S + FENCE_S) for pulse in pulses), 2 * ELECTION_S)
    own_s, ours_s = (pulse.longest_gap_s(killed_at) for pulse in pulses)
    print(f"stall after the leader's death: etcd's own {own_s:.2f} s, ours {ours_s:.2f} s")
    within("what our client adds to etcd's own stall", ours_s - own_s, ADDED_STALL_S)
    assert all(alive(worker.pid) for worker in workers)
    assert check_worlds(*nodes) == 1, "nobody was restarted for it"
    cluster.replace(leader)

    victim = cluster.members[(cluster.leader() + 1) % 3]
    lost = nodes.pop()
    victim.kill()
    lost_at = lost.kill()
    after = [node.wait_for_world(4, since=lost_at, timeout_s=FENCE_S + ELECTION_S)[0] for node in nodes]
    print(f"from the loss of a member and an agent to the smaller world: {max(one.at for one in after) - lost_at:.2f} s")
    assert sorted(one.rank for one in after) == [0, 1, 2, 3]
    cluster.replace(victim)

    late = job.start(nnodes="3:5", workers=1, conf=conf)
    for node in (*nodes, late):
        node.wait_for_world(5, since=late.began_at)
    job.finish()
    assert [node.wait() for node in (*nodes, late)] == [0] * 5
    assert check_worlds(*nodes, lost, late) == 3
    assert job.left_keys() == []
    for pulse in (plain, ours):
        pulse.end()
    assert int(cluster.witness().get("beside")) >= plain.acknowledged[-1][1], "nothing that was acknowledged is lost"
    assert int(cluster.witness().get(f"{OUR_PREFIX}number")) >= ours.acknowledged[-1][1]


# --- most members at once --------------------------------------------------------------------------------------------------

AWAY = "etcd does not answer"
BACK = "etcd answers again"
NO_QUORUM = "its quorum is lost"
STEP_DOWN_S = 1.5  # a leader without followers goes on for so long, and answers keepalives


def conf_of(fence_s: float, store_timeout_s: float) -> str:
    """Nobody begins without those who are slow to start: that would be a world of its own."""
    return f"last_call_timeout=30,keep_alive_interval=0.5,fence={fence_s:g},store_timeout={store_timeout_s:g}"


def lines_with(node: Any, text: str) -> list[str]:
    return [line for line in node.stderr.splitlines() if text in line]


@pytest.mark.parametrize(
    ("fence_s", "away_s"), [(12.0, 0.0), pytest.param(30.0, 20.0, marks=pytest.mark.soak)], ids=["briefly", "for 20 s"]
)
def test_a_lost_quorum_that_comes_back(
    mortal_job: Any, check_worlds: Any, alive: Any, wait_until: Any, fence_s: float, away_s: float
):
    """P04: two of three members are away for less than the fence; each agent says so once, workers go on, and so does the job."""
    job, (kept, *away), conf = mortal_job, mortal_job.cluster.members, conf_of(fence_s, fence_s)
    nodes = [job.start("--max-restarts", "1", nnodes="2", workers=1, conf=conf) for _ in range(2)]
    workers = [node.wait_for_world(2)[0] for node in nodes]
    for member in away:
        member.kill()
    killed_at = time.monotonic()
    for node in nodes:
        assert NO_QUORUM in node.wait_for_line(AWAY)
    print(f"it was said {time.monotonic() - killed_at:.1f} s after the loss of the quorum")
    wait_until(lambda: time.monotonic() >= killed_at + away_s, away_s + 1.0)
    for member in away:
        member.start(wait=False)
    kept.wait_healthy()
    for node in nodes:
        node.wait_for_line(BACK)
    print(f"it was back after {time.monotonic() - killed_at:.1f} s")
    assert [(len(lines_with(node, AWAY)), len(lines_with(node, BACK))) for node in nodes] == [(1, 1), (1, 1)]
    assert all(alive(worker.pid) for worker in workers)
    assert check_worlds(*nodes) == 1

    failed_at = time.monotonic()
    job.order(0, "sys.exit(1)")
    for node in nodes:
        node.wait_for_world(2, since=failed_at)
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]
    assert check_worlds(*nodes) == 2
    assert job.left_keys() == []


@pytest.mark.parametrize("fence_s", [5.0, pytest.param(30.0, marks=pytest.mark.soak)])
def test_a_quorum_that_is_lost_for_longer_than_the_fence(
    mortal_job: Any, alive: Any, wait_until: Any, within: Any, fence_s: float
):
    """P04: workers whom the others may take for dead are killed; without a store there is no job, and one line says so."""
    job, (_, *away) = mortal_job, mortal_job.cluster.members
    nodes = [job.start(nnodes="2", workers=1, conf=conf_of(fence_s, fence_s)) for _ in range(2)]
    workers = [node.wait_for_world(2)[0] for node in nodes]
    for member in away:
        member.kill()
    killed_at = time.monotonic()
    wait_until(lambda: not any(alive(worker.pid) for worker in workers), fence_s + 10.0)
    took_s = time.monotonic() - killed_at
    within("from the loss of the quorum to the end of the workers", took_s, fence_s + STEP_DOWN_S)
    assert took_s > fence_s / 2
    codes = [node.wait(2 * fence_s + 15.0) for node in nodes]
    print(f"the agents ended after {time.monotonic() - killed_at:.1f} s with {codes}")
    assert 0 not in codes
    for node in nodes:
        (error,) = lines_with(node, "rallyrun: error:")
        assert "the coordination store" in error
        assert NO_QUORUM in error
        assert len(lines_with(node, AWAY)) == 1
        assert "Traceback" not in node.stderr
