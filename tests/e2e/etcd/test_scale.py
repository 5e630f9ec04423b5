"""Many nodes, and many generations, in a real etcd: what it costs, and what it leaves behind."""

from __future__ import annotations

import http.client
import re
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.etcd.conftest import all_keys
from tests.etcd_cluster import Cluster, Member, start_cluster
from tests.pace import is_kept

from rallypoint.protocol.agent_machine import Regroup
from rallypoint.rendezvous.dynamic import DynamicRendezvous
from rallypoint.rendezvous.handler import RendezvousParameters
from rallypoint.rendezvous.registry import get_rendezvous_handler

STEP_S = 10.0

# --- generations -----------------------------------------------------------------------------------------------------------

RESERVED = b"\xff"  # what says how a lease has ended goes with that lease, or a minute later


def handler_at(endpoint: str, run_id: str) -> DynamicRendezvous:
    quick = {"last_call_timeout": 0, "scale_up_window": 0, "max_membership_changes": 1_000_000}
    handler = get_rendezvous_handler(RendezvousParameters("etcd", endpoint, run_id, 1, 2, **quick))
    assert isinstance(handler, DynamicRendezvous)
    return handler


def meet(*handlers: DynamicRendezvous) -> None:
    """Until each of them has a seat among all of them; as agents do, whose workers end at once when they are told to."""
    deadline = time.monotonic() + STEP_S
    waiting = dict.fromkeys(handlers)
    while waiting:
        assert time.monotonic() < deadline
        for handler in list(waiting):
            info = handler.poll_rendezvous()
            if info is not None and info.world_size == len(handlers):
                del waiting[handler]
            elif info is not None:
                wait_for_regroup(handler)
        select.select([handler.wakeup_fd() for handler in waiting], (), (), 0.05)


def wait_for_regroup(handler: DynamicRendezvous) -> None:
    deadline = time.monotonic() + STEP_S
    while not isinstance(handler.observe(), Regroup):
        assert time.monotonic() < deadline
        select.select([handler.wakeup_fd()], (), (), 0.05)


@pytest.mark.parametrize("generations", [20, pytest.param(2000, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
def test_generations_leave_nothing_behind(shared_cluster: Cluster, tmp_path: Path, generations: int):
    """A guest comes and leaves again and again; the keys of the job become no more, and when it is over there are none."""
    run_id = f"churn-{tmp_path.name}"
    counts = []

    def keys_of_job() -> list[bytes]:
        return [key for key in all_keys(shared_cluster) if f"/{run_id}/".encode() in key]

    began = time.monotonic()
    stayer = handler_at(shared_cluster.endpoint, run_id)
    meet(stayer)
    for _ in range(generations // 2):
        guest = handler_at(shared_cluster.endpoint, run_id)
        wait_for_regroup_of(stayer, guest)
        meet(stayer, guest)
        guest.depart("the guest has seen enough")
        guest.leave()
        wait_for_regroup(stayer)
        meet(stayer)
        counts.append(sum(RESERVED not in key for key in keys_of_job()))
    took_s = time.monotonic() - began
    print(f"{generations} generations: {1000 * took_s / generations:.0f} ms each; keys after each: {Counter(counts)}")
    settled = counts[len(counts) // 4]
    assert max(counts[len(counts) // 4 :]) <= settled + 1
    stayer.shutdown()
    assert [key for key in keys_of_job() if RESERVED not in key] == []


def wait_for_regroup_of(stayer: DynamicRendezvous, guest: DynamicRendezvous) -> None:
    """The guest's coming ends the generation of the one who is there."""
    assert guest.poll_rendezvous() is None
    wait_for_regroup(stayer)


# --- nodes -----------------------------------------------------------------------------------------------------------------

PROCESSES = 4
MEETING_S = 5.0
COUNTED = ("Range", "Txn", "Put", "DeleteRange", "LeaseGrant", "Watch")  # keepalives depend on how long it takes

NODES = """
import select, sys, threading, time
from rallypoint.base import report
from rallypoint.rendezvous.handler import RendezvousParameters
from rallypoint.rendezvous.registry import get_rendezvous_handler

report.set_sink(lambda level, text: None)
threading.stack_size(256 * 1024)
endpoint, run_id, nodes, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
parameters = RendezvousParameters("etcd", endpoint, run_id, nodes, nodes)
handlers = [get_rendezvous_handler(parameters) for _ in range(count)]
print("ready", flush=True)
sys.stdin.readline()
began = time.monotonic()
waiting = {handler.wakeup_fd(): handler for handler in handlers if handler.poll_rendezvous() is None}
poll = select.poll()
for fd in waiting:
    poll.register(fd, select.POLLIN)
while waiting:
    for fd, _ in poll.poll():
        if waiting[fd].poll_rendezvous() is not None:
            poll.unregister(fd)
            del waiting[fd]
print(began, time.monotonic(), flush=True)
sys.stdin.readline()
for handler in handlers:
    handler.leave()
"""


@pytest.fixture
def quiet_member(tmp_path: Path) -> Iterator[Member]:
    """With nobody else in it whose requests would be counted."""
    with start_cluster(tmp_path / "etcd") as cluster:
        yield cluster.members[0]


def requests_to(member: Member) -> int:
    """How many requests it has been sent, of those that a meeting takes."""
    with closing(http.client.HTTPConnection("127.0.0.1", member.client_port, timeout=STEP_S)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    counts = re.findall(r'^grpc_server_started_total\{grpc_method="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    return sum(int(float(count)) for method, count in counts if method in COUNTED)


def meeting(member: Member, script: Path, nodes: int) -> tuple[float, float]:
    """Seconds from the first join to the last seat, and requests to etcd for each node."""
    command = [sys.executable, str(script), member.endpoint, f"meeting-of-{nodes}", str(nodes), str(nodes // PROCESSES)]
    with started(command) as processes:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        before = requests_to(member)
        say(processes, "go")
        times = [tuple(map(float, process.stdout.readline().split())) for process in processes]
        requests = requests_to(member) - before
        say(processes, "end")
        assert [process.wait(60.0) for process in processes] == [0] * PROCESSES
    return max(end for _, end in times) - min(began for began, _ in times), requests / nodes


def say(processes: list[Any], word: str) -> None:
    for process in processes:
        process.stdin.write(f"{word}\n")
        process.stdin.flush()


@contextmanager
def started(command: list[str]) -> Iterator[list[Any]]:
    processes: list[Any] = []
    try:
        for _ in range(PROCESSES):
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(("few", "many"), [(8, 32), pytest.param(16, 128, marks=pytest.mark.soak)])
def test_many_nodes_meet(quiet_member: Member, script: Any, few: int, many: int):
    """Within seconds; and what each of them asks of etcd does not depend on how many there are."""
    program = script(NODES, "nodes.py")
    found = {nodes: meeting(quiet_member, program, nodes) for nodes in (few, many)}
    for nodes, (took_s, requests) in found.items():
        print(f"{nodes} nodes met in {took_s:.2f} s, with {requests:.1f} requests for each")
    assert is_kept(found[many][0], MEETING_S)
    assert found[many][1] <= 1.25 * found[few][1]
