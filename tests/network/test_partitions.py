"""Networks that fail: silent machines, one-way cuts, flapping links, a host out of reach, no names, clocks that disagree.

All times are read on one clock: the nodes are namespaces of one machine.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.pace import is_under

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

LEASE_S = 3.0
LEASES_AND_RESTART_S = LEASE_S + 1.5  # a second is promised, the rest is for a busy machine
FENCE_ALLOWANCE_S = 0.5
NAMES = Path("/etc/netns")  # see the fixture
PORT = 29400
WaitUntil = Callable[..., Any]


def clock() -> float:
    return time.clock_gettime(time.CLOCK_TAI)


def pass_time(until: float, wait_until: WaitUntil) -> None:
    """Let time go by: it is what the test is about."""
    wait_until(lambda: clock() >= until, 60)


def two_nodes(network: Any, wait_until: WaitUntil, conf: str = "", **second: Any) -> tuple[Any, list[dict[str, Any]]]:
    """A job that runs on two nodes, the first of which hosts the store, and its workers."""
    net = network(2)
    host, other = net.nodes
    host.start("--nnodes", "1:2", conf=conf)
    wait_until(lambda: net.journal.whole_world(1), 15)
    other.start("--nnodes", "1:2", conf=conf, **second)
    return net, wait_until(lambda: net.journal.whole_world(2), 15)


def finish(net: Any) -> None:
    """The workers end, and so do all agents, well."""
    net.journal.finish()
    for node in net.nodes:
        assert node.agents[-1].wait(15) == 0, node.agents[-1].text
    net.journal.check_ranks()


def check_regrouped(net: Any, workers: list[dict[str, Any]], cut_at: float, wait_until: WaitUntil) -> None:
    """After a cut the host goes on alone in time, and no worker of the cut node runs by then."""
    smaller = wait_until(lambda: net.journal.whole_world(1, since=cut_at), 15)
    regrouped_s = max(worker["began"] for worker in smaller) - cut_at
    lost = [net.journal.last_beat(worker) for worker in workers if worker["node"] == "node1"]
    fenced_s, first_start_s = max(lost) - cut_at, min(worker["began"] for worker in smaller) - cut_at
    print(f"regrouped after {regrouped_s:.2f} s; the cut node's workers ran for {fenced_s:.2f} s")
    assert {worker["node"] for worker in smaller} == {"node0"}
    assert is_under(regrouped_s, LEASES_AND_RESTART_S)
    assert is_under(fenced_s, LEASE_S + FENCE_ALLOWANCE_S)
    assert fenced_s < first_start_s, "workers of two generations ran at once"


def check_rejoined(net: Any, healed_at: float, wait_until: WaitUntil) -> list[dict[str, Any]]:
    larger = wait_until(lambda: net.journal.whole_world(2, since=healed_at), 20)
    print(f"both nodes again {max(worker['began'] for worker in larger) - healed_at:.2f} s after healing")
    return larger


@pytest.mark.parametrize(
    ("sent", "received"), [(True, True), (True, False), (False, True)], ids=["both ways", "to the host", "from the host"]
)
def test_silent_machine_P02(network: Any, wait_until: WaitUntil, sent: bool, received: bool) -> None:
    """P02: the others go on within the lease and a second; the cut node has killed its workers by then, and comes back."""
    net, workers = two_nodes(network, wait_until)
    cut_at = net.nodes[1].cut(sent=sent, received=received)
    check_regrouped(net, workers, cut_at, wait_until)
    check_rejoined(net, net.nodes[1].heal(), wait_until)
    finish(net)


def test_short_cuts_disturb_nobody(network: Any, wait_until: WaitUntil) -> None:
    """Cuts of half a second, every 1.5 s for 10 s, are shorter than the lease: nothing restarts."""
    net, workers = two_nodes(network, wait_until)
    ends_at = clock() + 10.0
    while (begins_at := clock()) < ends_at:
        net.nodes[1].cut()
        pass_time(begins_at + 0.5, wait_until)
        net.nodes[1].heal()
        pass_time(begins_at + 1.5, wait_until)
    assert net.journal.whole_world(2) == workers
    finish(net)


def test_long_cuts_regroup_each_time(network: Any, wait_until: WaitUntil) -> None:
    """Cuts of twice the lease: the job shrinks and grows with each, with the right ranks in each generation, and finishes."""
    net, workers = two_nodes(network, wait_until)
    for _ in range(2):
        cut_at = net.nodes[1].cut()
        check_regrouped(net, workers, cut_at, wait_until)
        pass_time(cut_at + 2 * LEASE_S, wait_until)
        workers = check_rejoined(net, net.nodes[1].heal(), wait_until)
    finish(net)
    assert [workers[0]["group_world_size"] for workers in net.journal.generations()] == [1, 2, 1, 2, 1, 2]


def test_host_out_of_reach_ends_the_others_P07(network: Any, wait_until: WaitUntil) -> None:
    """P07: a node that has not heard of the store for its time ends with one line; the host, which has enough nodes, goes on."""
    net, workers = two_nodes(network, wait_until, conf="store_timeout=5,host_timeout=0")
    cut_at = net.nodes[0].cut()
    other = net.nodes[1].agents[0]
    assert other.wait(LEASE_S + 10.0) not in (0, None)
    took_s = clock() - cut_at
    print(f"ended {took_s:.2f} s after the cut")
    assert is_under(took_s, LEASE_S + 5.0 + 1.5)
    last = [line for line in other.text.splitlines() if line.startswith("rallyrun: ")][-1]
    assert "10.77.0.1:29400" in last
    assert "5 s" in last
    assert "Traceback" not in other.text
    check_regrouped(net, workers, cut_at, wait_until)
    net.journal.finish()
    assert net.nodes[0].agents[0].wait(15) == 0


@pytest.mark.parametrize("address", ["10.77.0.1", "10.78.0.1", "[fd00:77::1]"], ids=["cable", "second address", "IPv6"])
def test_addresses_are_enough_P05_P06(network: Any, wait_until: WaitUntil, address: str) -> None:
    """P05, P06: the host knows itself by any address of any interface, and no name is looked up: nobody would answer."""
    net = network(2)
    began = clock()
    for node in net.nodes:
        node.start("--nnodes", "2", endpoint=f"{address}:29400")
    workers = wait_until(lambda: net.journal.whole_world(2), 15)
    took_s = max(worker["began"] for worker in workers) - began
    print(f"both nodes run workers after {took_s:.2f} s")
    assert is_under(took_s, 3.0)  # no lookup was waited for
    assert not net.nodes[0].knows("node1")
    assert "hosts the coordination store" in net.nodes[0].agents[0].text
    assert "hosts the coordination store" not in net.nodes[1].agents[0].text
    masters = {worker["master_addr"] for worker in workers}
    assert len(masters) == 1
    assert masters <= {"10.77.0.1", "10.77.0.2", "10.78.0.1", "fd00:77::1", "fd00:77::2"}
    finish(net)


def test_clocks_that_disagree_P48(network: Any, wait_until: WaitUntil) -> None:
    """P48: a node 15 minutes, and a day of uptime, ahead of the host is as good as any other, before a cut and after it."""
    net, workers = two_nodes(network, wait_until, skewed=True)
    ahead, others = ([worker for worker in workers if worker["node"] == node] for node in ("node1", "node0"))
    assert ahead[0]["uptime"] - others[0]["uptime"] > 80_000
    assert ahead[0]["wall"] - others[0]["wall"] > 800
    pass_time(clock() + LEASE_S + 1.0, wait_until)
    assert net.journal.whole_world(2) == workers
    cut_at = net.nodes[1].cut()
    check_regrouped(net, workers, cut_at, wait_until)
    check_rejoined(net, net.nodes[1].heal(), wait_until)
    finish(net)


# --- names that lie --------------------------------------------------------------------------------------------------------


def debian(net: Any) -> None:
    """The host's /etc/hosts gives its own name to the loopback, as Debian's does; the other knows its address."""
    for node, address in zip(net.nodes, ("127.0.1.1", net.nodes[0].address), strict=True):
        (NAMES / node.namespace / "hosts").write_text(f"127.0.0.1 localhost\n{address} node0\n")


def test_m9_with_a_secret_the_hosts_own_name_will_do(network: Any, wait_until: WaitUntil, tmp_path: Path) -> None:
    """M9: the store listens everywhere, and the workers' store where the others can reach it."""
    net = network(2)
    debian(net)
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    host, other = net.nodes
    host.start("--nnodes", "2", "--secret-file", str(secret), "--node-rank", "0", endpoint=f"node0:{PORT}")
    other.start("--nnodes", "2", "--secret-file", str(secret), "--node-rank", "1", endpoint=f"node0:{PORT}")
    workers = wait_until(lambda: net.journal.whole_world(2), 15)
    assert {worker["master_addr"] for worker in workers} == {host.address}
    reach = f"import socket; socket.create_connection(({host.address!r}, {workers[0]['master_port']}), timeout=5)"
    subprocess.run(["ip", "netns", "exec", other.namespace, sys.executable, "-c", reach], check=True, timeout=20)
    finish(net)
    assert "only this machine can reach the store" not in net.said()


def test_m9_without_a_secret_both_sides_are_told(network: Any, wait_until: WaitUntil) -> None:
    """M9: the host at once, with an address that would do; the other after a moment, with what it may be."""
    net = network(2)
    debian(net)
    host, other = (node.start("--nnodes", "2", endpoint=f"node0:{PORT}") for node in net.nodes)
    wait_until(lambda: "hosts the coordination store" in host.text)
    why = "node0 is 127.0.1.1 here (see /etc/hosts): only this machine can reach the store"
    what_to_do = "use its address, e.g. 10.77.0.1, as the endpoint, or give a secret with --secret FILE"
    wait_until(lambda: f"{why}; {what_to_do}" in host.text)
    wait_until(lambda: "its own /etc/hosts may say that node0 is 127.0.1.1; then use its address as the endpoint" in other.text)
