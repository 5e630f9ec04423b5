"""An etcd cluster on the job's own nodes: real agents, each with a member, all of them on this machine. P04."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.nodes.conftest import MEMBER, Job, Node
from tests.etcd_cluster import any_binary, binary_of
from tests.pace import is_under
from tests.ports import free_port_pairs

from rallypoint.coordination.etcd import member as etcd_member
from rallypoint.coordination.etcd.gateway import EtcdAccess
from rallypoint.coordination.etcd.member import Plan, PortTaken, UnreachableName, claim_endpoint, plan_cluster
from rallypoint.coordination.etcd.server import ENV_ETCD_BINARY
from rallypoint.errors import ExitCode, UsageError
from rallypoint.rendezvous.etcd import parse_endpoints

LOOPBACK = "127.0.0.1"
CONF = "bootstrap=true,fence=3,last_call_timeout=0.5,keep_alive_interval=0.5"
REQUEST_S = 2.0


def free_endpoints(count: int) -> str:
    """Endpoints on this machine, each with two ports that nobody uses."""
    return ",".join(f"{LOOPBACK}:{port}" for port in free_port_pairs(count))


class Cluster(Job):
    """A job whose agents run their own etcd; what its members say, and where their processes are."""

    def __init__(self, start: Callable[..., Any], member: Path, folder: Path, binary: str, size: int) -> None:
        super().__init__(start, member, folder, port=0)
        self.endpoint = free_endpoints(size)
        self.names = self.endpoint.split(",")
        self.binary = binary

    def start(
        self, *flags: str, nnodes: str = "1:3", workers: int = 1, conf: str = CONF, host: str = "", run_id: str = "a-job",
        env: dict[str, str] | None = None,
    ) -> Node:  # fmt: skip
        meeting = ["--rdzv-backend", "etcd", "--rdzv-endpoint", self.endpoint, "--rdzv-conf", conf, "--rdzv-id", run_id]
        size = ["--nnodes", nnodes, "--nproc-per-node", str(workers)]
        environ = {ENV_ETCD_BINARY: self.binary, **(env or {})}
        return Node(self._start([*size, *meeting, *flags, self._member, self.folder], environ), workers)

    def start_all(self, **options: Any) -> list[Node]:
        nodes = [self.start(**options) for _ in range(3)]
        for node in nodes:
            node.wait_for_world(3)
        return nodes

    def member_of(self, node: Node) -> str:
        """The name of the member that an agent runs."""
        line = str(node.wait_for_line("this node runs the etcd member at"))
        return line.partition(" at ")[2].partition(";")[0]

    def pid_of(self, name: str) -> int | None:
        """The etcd of a member, if it runs."""
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            except OSError:
                continue
            if words[:1] == [self.binary.encode()] and f"--name={name}".encode() in words:
                return int(entry.name)
        return None

    def ask(self, name: str, path: str) -> dict[str, Any]:
        """What one member answers; nothing if it does not."""
        connection = http.client.HTTPConnection(name, timeout=REQUEST_S)
        try:
            connection.request("POST", path, b"{}")
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            return {}
        finally:
            connection.close()
        return answer

    def members(self, asked: str) -> dict[str, str]:
        """The identities of the members that have come up, by their names, as one of them knows them."""
        listed = self.ask(asked, "/v3/cluster/member/list").get("members", [])
        return {member["name"]: member["ID"] for member in listed if member.get("clientURLs")}

    def all_members(self, asked: str) -> dict[str, str]:
        """The same once all have come up, and nothing before."""
        found = self.members(asked)
        return found if len(found) == len(self.names) else {}

    def is_healthy(self, name: str) -> bool:
        """Whether it is in a cluster that has a leader, and has all that this has."""
        status = self.ask(name, "/v3/maintenance/status")
        return status.get("leader", "0") != "0" and "raftAppliedIndex" in status


@pytest.fixture
def make_cluster(start_rallyrun: Callable[..., Any], script: Callable[..., Path], tmp_path: Path) -> Callable[..., Cluster]:
    def make(binary: str | None = None, size: int = 3) -> Cluster:
        folder = tmp_path / "orders"
        folder.mkdir()
        return Cluster(start_rallyrun, script(MEMBER, "member.py"), folder, binary or any_binary(), size)

    return make


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster()


# --- plans and claims ------------------------------------------------------------------------------------------------------


def plan_of(endpoint: str, run_id: str = "a-job", **access: Any) -> Plan:
    return plan_cluster(EtcdAccess(parse_endpoints(endpoint), **access), run_id)


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("a,b", "2 endure the loss of no more than 1 do"),
        ("a,b,c,d", "4 endure the loss of no more than 3 do"),
        ("a,b,c,d,e,f,g", "more only make it slower"),
        ("a,b,a", "for itself"),
        ("a:2379,a:2380,b", "for itself"),
        ("a:65535", "for itself"),
        ("a:0", "for itself"),
    ],
)
def test_a_cluster_of_no_use_is_refused(endpoint: str, why: str):
    with pytest.raises(UsageError, match=why):
        plan_of(endpoint)


def test_members_have_no_tls_and_no_users():
    with pytest.raises(UsageError, match="speak http"):
        plan_of("a", protocol="https")
    with pytest.raises(UsageError, match="speak http"):
        plan_of("a", user="somebody", password="secret")


def test_every_node_plans_the_same_cluster():
    plan = plan_of("a,b:3000,[::1]:4000")
    assert plan.initial_cluster() == "a:2379=http://a:2380,b:3000=http://b:3001,[::1]:4000=http://[::1]:4001"
    assert plan == plan_of("a,b:3000,[::1]:4000")
    assert plan.token != plan_of("a,b:3000,[::1]:4000", run_id="another").token


def test_each_agent_of_a_machine_takes_another_endpoint():
    plan = plan_of(free_endpoints(3))
    claims = [claim_endpoint(plan) for _ in range(4)]
    assert [claim and claim.index for claim in claims] == [0, 1, 2, None]
    assert claims[1] is not None
    claims[1].close()
    claims[3] = claim_endpoint(plan)
    assert claims[3] is not None
    assert claims[3].index == 1
    for claim in claims:
        if claim is not None:
            claim.close()


def test_another_machines_endpoints_are_not_ours():
    assert claim_endpoint(plan_of("198.51.100.1,203.0.113.1,no-such-name.invalid")) is None


@pytest.mark.parametrize("next_port", [0, 1])
def test_a_port_that_something_else_has_cannot_be_claimed(next_port: int):
    plan = plan_of(free_endpoints(1))
    port = plan.endpoints[0][1] + next_port
    with socket.create_server((LOOPBACK, port)), pytest.raises(PortTaken, match=f"{LOOPBACK}:{port} is taken"):
        claim_endpoint(plan)


def test_a_name_that_others_cannot_reach_us_by_is_not_claimed(monkeypatch: pytest.MonkeyPatch):
    """Debian gives a machine's own name to its loopback."""
    monkeypatch.setattr(etcd_member, "resolve", lambda host, port: [(int(socket.AF_INET), ("127.0.1.1", port))])
    with pytest.raises(UnreachableName, match=r"the endpoint node1 is 127\.0\.1\.1 on this machine"):
        claim_endpoint(plan_of("node1,node2,node3"))


# --- jobs ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["3.5", "3.4"])
def test_agents_form_a_cluster_and_take_it_along(make_cluster: Any, private_tmpdir: Path, version: str):
    """P04: nothing outside the job is needed, and nothing of it is left."""
    cluster = make_cluster(binary_of(version))
    nodes = cluster.start_all()
    assert sorted(map(cluster.member_of, nodes)) == sorted(cluster.names)
    cluster.finish()
    began = time.monotonic()
    assert [node.wait() for node in nodes] == [0, 0, 0]
    assert is_under(time.monotonic() - began, 5)
    assert [cluster.pid_of(name) for name in cluster.names] == [None] * 3
    assert list(private_tmpdir.glob("rallypoint_etcd_*")) == []


def test_one_endpoint_is_a_cluster_of_one_and_others_are_its_clients(make_cluster: Any):
    cluster = make_cluster(size=1)
    nodes = [cluster.start(nnodes="2") for _ in range(2)]
    for node in nodes:
        node.wait_for_world(2)
    assert sum("this node runs the etcd member" in node.stderr for node in nodes) == 1
    cluster.finish()
    assert [node.wait() for node in nodes] == [0, 0]


def test_a_member_that_comes_back_without_its_data_is_replaced(cluster: Cluster, wait_until: Any, private_tmpdir: Path):
    """P04: kill -9 of an agent takes its member along; then of another, which the cluster endures only if it was healed."""
    nodes = cluster.start_all()
    victim = nodes.pop()
    name, other = cluster.member_of(victim), cluster.member_of(nodes[0])
    before = wait_until(lambda: cluster.all_members(other))
    killed_at = victim.kill()
    wait_until(lambda: cluster.pid_of(name) is None)
    for node in nodes:
        node.wait_for_world(2, since=killed_at)
    back = cluster.start()
    assert back.wait_for_line("comes back without its data: it is replaced")
    for node in (*nodes, back):
        node.wait_for_world(3, since=killed_at)
    after = wait_until(lambda: cluster.all_members(other))
    assert after.keys() == before.keys()
    assert {one for one in after if after[one] != before[one]} == {name}
    wait_until(lambda: cluster.is_healthy(name))
    killed_at = nodes.pop().kill()
    for node in (*nodes, back):
        node.wait_for_world(2, since=killed_at)
    cluster.finish()
    assert [node.wait() for node in (*nodes, back)] == [0, 0]
    for left in private_tmpdir.glob("rallypoint_*"):  # by those that were killed, who had no time to
        shutil.rmtree(left)


def test_an_etcd_that_is_killed_is_started_again(cluster: Cluster, wait_until: Any):
    """P04: with the data that it has; the job does not notice."""
    nodes = cluster.start_all()
    name, other = cluster.member_of(nodes[0]), cluster.member_of(nodes[1])
    wait_until(lambda: len(cluster.members(other)) == 3)
    before, pid = cluster.members(other), cluster.pid_of(name)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: cluster.pid_of(name) not in (None, pid) and cluster.is_healthy(name), 20.0)
    assert cluster.members(other) == before
    cluster.finish()
    assert [node.wait() for node in nodes] == [0, 0, 0]
    assert [len(node.starts()) for node in nodes] == [1, 1, 1]


def test_an_etcd_whose_data_are_lost_is_replaced_while_its_agent_lives(cluster: Cluster, wait_until: Any, private_tmpdir: Path):
    nodes = cluster.start_all()
    name, other = cluster.member_of(nodes[0]), cluster.member_of(nodes[1])
    wait_until(lambda: len(cluster.members(other)) == 3)
    before, pid = cluster.members(other), cluster.pid_of(name)
    (data,) = private_tmpdir.glob(f"rallypoint_etcd_*_{name.replace(':', '_')}_*/data")
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    shutil.rmtree(data)
    os.kill(pid, signal.SIGKILL)

    def is_replaced() -> bool:
        now = cluster.members(other)  # once: it changes under our eyes
        return len(now) == 3 and now.get(name, before[name]) != before[name]

    wait_until(is_replaced, 20.0)
    wait_until(lambda: cluster.is_healthy(name))
    cluster.finish()
    assert [node.wait() for node in nodes] == [0, 0, 0]
    assert [len(node.starts()) for node in nodes] == [1, 1, 1]


def test_ctrl_c_everywhere_is_quick(cluster: Cluster):
    nodes = cluster.start_all()
    began = time.monotonic()
    for node in nodes:
        node.send_signal(signal.SIGINT)
    assert [node.wait() for node in nodes] == [130, 130, 130]
    assert is_under(time.monotonic() - began, 5)


def test_an_agent_that_is_stopped_leaves_the_others_a_cluster(cluster: Cluster):
    nodes = cluster.start_all()
    stopped_at = time.monotonic()
    assert nodes.pop().end(signal.SIGTERM) == 143
    assert is_under(time.monotonic() - stopped_at, 6)
    for node in nodes:
        node.wait_for_world(2, since=stopped_at)
    cluster.finish()
    assert [node.wait() for node in nodes] == [0, 0]


# --- what can go wrong -----------------------------------------------------------------------------------------------------


def test_too_few_members_are_named(cluster: Cluster):
    node = cluster.start(conf=f"{CONF},join_timeout=2")
    assert node.wait() == ExitCode.RENDEZVOUS_FAILED
    assert f"2 of 3 members are missing: {', '.join(cluster.names[1:])}" in node.stderr
    assert "Traceback" not in node.stderr


def test_without_an_etcd_to_run_nothing_is_waited_for(cluster: Cluster):
    node = cluster.start(env={ENV_ETCD_BINARY: "/no/such/etcd"})
    assert node.wait() == ExitCode.RENDEZVOUS_FAILED
    assert f"{ENV_ETCD_BINARY} names /no/such/etcd, which is no program" in node.stderr
    assert "Traceback" not in node.stderr


def test_a_port_that_something_else_has_is_named(cluster: Cluster):
    host, _, port = cluster.names[0].rpartition(":")
    with socket.create_server((host, int(port))):
        node = cluster.start()
        assert node.wait() == ExitCode.RENDEZVOUS_FAILED
    assert f"{cluster.names[0]} is taken by something else" in node.stderr
    assert "Traceback" not in node.stderr


def test_an_even_number_of_members_is_bad_usage(make_cluster: Any):
    node = make_cluster(size=2).start()
    assert node.wait() == ExitCode.USAGE
    assert "a cluster has 1, 3 or 5 members" in node.stderr
