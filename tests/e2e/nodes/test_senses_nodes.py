"""What the agents of several nodes sense of a job together: who hangs, how ready each node is, and where the time went."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from pathlib import Path
from typing import Any

import pytest

from rallypoint.cli.explain import explain_main

LIMIT_S = 3.0  # on a busy machine one that works may well get no turn for a second
ON_TOP_S = 5.0  # to find a hang takes less than a second longer than its limit; a busy machine has leave to need more
STEPS = 10

ENDING = """
os.write(1, f"ended {time.monotonic_ns()}\\n".encode())
sys.exit()
"""

HANGING = """
def hang():
    os.write(1, f"last {time.monotonic_ns()}\\n".encode())
    time.sleep(60)
"""

# Everybody makes progress beside the others, but for one, which stops in the middle of it.
APART = """
from rallypoint import worker
for step in range(10 ** 6):
    worker.progress(step)
    if int(rank) == HANGS and step == STEPS:
        hang()
    time.sleep(0.02)
"""

# Nobody goes on before all others have come as far; whoever waits is silent too.
TOGETHER = """
from rallypoint.store.tcp_store import TCPStore
if TELLS_STEPS:
    from rallypoint import worker
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=30)
def meet(step):
    store.set(f"{step} {rank}", "here")
    store.wait([f"{step} {other}" for other in range(int(os.environ["WORLD_SIZE"]))])
for step in range(10 ** 6):
    if int(rank) == HANGS and step == STEPS:
        hang()
    meet(step)
    if TELLS_STEPS:
        worker.progress(step)
    time.sleep(0.02)
"""


def events(logs: Path, name: str) -> list[dict[str, Any]]:
    """Those of the only run in this folder, as far as their lines are whole."""
    files = list(logs.glob("*_*/events.jsonl"))
    lines = [line for file in files for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [event["metadata"] for event in map(json.loads, lines) if event["name"] == f"rallypoint.{name}"]


def start_two(job: Any, tmp_path: Path, workers: int) -> list[Any]:
    """Two nodes that watch for hangs; the first is the host of the store."""
    flags = [["--hang-timeout", f"{LIMIT_S:g}", "--log-dir", str(tmp_path / name)] for name in ("first", "second")]
    return [
        job.start_host(*flags[0], nnodes="2", workers=workers),
        job.start(*flags[1], nnodes="2", workers=workers),
    ]


def order_all(job: Any, size: int, text: str, **values: object) -> None:
    settings = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    for rank in range(size):
        job.order(rank, f"{settings}STEPS = {STEPS}\n{HANGING}{text}")


def check_verdict(nodes: list[Any], where: int, rank: int, numbers: Any, tmp_path: Path) -> None:
    """The rank is named by the node where it hangs, in time, and both nodes have the same verdict."""
    nodes[where].wait_for_line(") hangs: ")
    found_at = time.monotonic()
    [last_ns] = numbers("last", nodes[where].agent.stdout)
    assert found_at - last_ns / 1e9 < LIMIT_S + ON_TOP_S
    assert [node.wait() for node in nodes] == [1, 1]
    for node in nodes:
        assert f"Cause: rank {rank} (" in node.stderr
        assert "it hung: " in node.stderr
    folders = [tmp_path / "first", tmp_path / "second"]
    [hung] = events(folders[where], "worker.hung")
    assert hung["rank"] == rank
    assert events(folders[1 - where], "worker.hung") == []
    assert "hang (<string>:" in Path(hung["stacks"]).read_text()


def test_one_that_hangs_is_blamed_by_both_nodes_while_all_others_go_on(job: Any, numbers: Any, tmp_path: Path) -> None:
    """P30"""
    nodes = start_two(job, tmp_path, workers=2)
    starts = nodes[1].wait_for_world(4)
    nodes[0].wait_for_world(4)
    order_all(job, 4, APART, HANGS=starts[1].rank)
    check_verdict(nodes, 1, starts[1].rank, numbers, tmp_path)


@pytest.mark.parametrize(("where", "tells_steps"), [(0, True), (1, False)], ids=["with heartbeats", "without"])
def test_one_that_hangs_is_blamed_by_both_nodes_while_all_others_wait_for_it(
    job: Any, numbers: Any, tmp_path: Path, where: int, tells_steps: bool
) -> None:
    """P30: all are silent, on both nodes, and only one of the nodes has a worker that stands elsewhere than the others."""
    nodes = start_two(job, tmp_path, workers=3)
    ranks = [[start.rank for start in node.wait_for_world(6)] for node in nodes]
    order_all(job, 6, TOGETHER, HANGS=ranks[where][1], TELLS_STEPS=tells_steps)
    check_verdict(nodes, where, ranks[where][1], numbers, tmp_path)


def test_a_hang_is_found_where_nothing_tells_the_nodes_apart(job: Any, numbers: Any, tmp_path: Path) -> None:
    """P30: one worker on each node, and both are silent; it is said that the one that is named may only wait for the other."""
    nodes = start_two(job, tmp_path, workers=1)
    ranks = [node.wait_for_world(2)[0].rank for node in nodes]
    order_all(job, 2, TOGETHER, HANGS=ranks[1], TELLS_STEPS=False)
    nodes[0].agent.wait_for(lambda: any(") hangs: " in node.stderr for node in nodes))
    found_at = time.monotonic()
    [last_ns] = numbers("last", nodes[1].agent.stdout)
    assert found_at - last_ns / 1e9 < LIMIT_S + ON_TOP_S
    assert [node.wait() for node in nodes] == [1, 1]
    assert any("nothing tells the workers of 2 nodes apart; it may wait for one of another node" in node.stderr for node in nodes)


def ready(port: int) -> tuple[int, dict[str, Any]]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)) as client:
        client.request("GET", "/readyz")
        answer = client.getresponse()
        return answer.status, json.loads(answer.read())


def test_p44_a_node_is_ready_when_all_nodes_have_met(job: Any, wait_until: Any, free_port: Any, tmp_path: Path) -> None:
    """Alone it waits and is not ready; it is again when the other was lost, and ready when another takes its place."""
    conf = "last_call_timeout=0.2,keep_alive_interval=0.5,keep_alive_max_attempt=3"
    health = [free_port() for _ in range(3)]

    def start(place: int, start_one: Any) -> Any:
        flags = ["--health-port", str(health[place]), "--log-dir", str(tmp_path / str(place)), "--max-restarts", "3"]
        return start_one(*flags, nnodes="2", conf=conf)

    first = start(0, job.start_host)
    status, told = ready(health[0])
    assert (status, told["phase"], told["generation"], told["ranks"]) == (503, "waiting", 0, [])
    second = start(1, job.start)
    second.wait_for_world(4)
    wait_until(lambda: all(ready(port)[0] == 200 for port in health[:2]))
    both = [ready(port)[1] for port in health[:2]]
    assert [one["generation"] for one in both] == [1, 1]
    assert sorted(both[0]["ranks"] + both[1]["ranks"]) == [0, 1, 2, 3]
    assert [one["world_size"] for one in both] == [4, 4]
    second.kill()
    wait_until(lambda: ready(health[0])[1]["phase"] == "waiting", 15.0)
    assert ready(health[0])[0] == 503
    third = start(2, job.start)
    third.wait_for_world(4)
    wait_until(lambda: all(ready(port)[0] == 200 for port in (health[0], health[2])))
    told = ready(health[0])[1]
    formed = events(tmp_path / "0", "generation")[-1]
    assert (told["generation"], told["ranks"], told["restarts"]) == (formed["generation"], formed["ranks"], formed["restarts"])
    assert told["generation"] == events(tmp_path / "2", "generation")[-1]["generation"] > 1
    job.finish()
    assert [node.wait() for node in (first, third)] == [0, 0]


def test_p44_the_story_of_a_run_accounts_for_the_time_seen_from_outside(
    job: Any, wait_until: Any, numbers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """m12. Two failures, a lost node and a scale-up: the seconds of all phases are those of the run.

    They are no more than from before an agent's start to after its end, and no less than from when its first words were seen to
    the end of the last worker. On any machine the run lies between the two, however late the test looks.
    """
    started_at: dict[int, float] = {}
    spoke_at: dict[int, float] = {}
    ended_at: dict[int, float] = {}

    def start() -> Any:
        begins_at = time.monotonic()
        node = job.start("--log-dir", str(tmp_path / "logs"), "--max-restarts", "5", "--restart-backoff", "0", nnodes="2:3")
        node.wait_for_line(": 2 to 3 nodes")
        started_at[node.agent.pid], spoke_at[node.agent.pid] = begins_at, time.monotonic()
        return node

    def have_ended(nodes: list[Any]) -> bool:
        for node in nodes:
            if node.agent.process.poll() is not None:
                ended_at.setdefault(node.agent.pid, time.monotonic())
        return len(ended_at) == len(nodes)

    def meet(nodes: list[Any], since: float) -> None:
        for node in nodes:
            node.wait_for_world(2 * len(nodes), since)

    nodes = [start()]
    nodes[0].wait_for_line("this node hosts the coordination store")
    nodes += [start(), start()]
    meet(nodes, 0.0)
    for _ in range(2):
        now = time.monotonic()
        job.order(1, "raise ValueError('bad batch')")
        meet(nodes, now)
    killed_at = nodes.pop().kill()
    meet(nodes, killed_at)
    nodes.append(start())
    meet(nodes, started_at[nodes[-1].agent.pid])
    for rank in range(6):
        job.order(rank, ENDING)
    wait_until(lambda: have_ended(nodes), 30.0)
    assert [node.wait() for node in nodes] == [0, 0, 0]

    assert explain_main([str(tmp_path / "logs"), "--json"]) == 0
    story = json.loads(capsys.readouterr().out)
    kinds = [entry["kind"] for entry in story["timeline"]]
    assert (kinds.count("failed"), kinds.count("silent"), story["succeeded"]) == (2, 1, True)
    accounts = {account["pid"]: account for account in story["nodes"]}
    assert len(accounts) == 4
    workers_ended_at = [ns / 1e9 for node in nodes for ns in numbers("ended", node.agent.stdout)]
    assert len(workers_ended_at) == 6
    for node in nodes:
        pid, account = node.agent.pid, accounts[node.agent.pid]
        told_s = sum(account["seconds"].values())
        least_s, most_s = max(workers_ended_at) - spoke_at[pid], ended_at[pid] - started_at[pid]
        print(f"told: {told_s:.3f} s, seen from outside: {least_s:.3f} s to {most_s:.3f} s")
        assert told_s == pytest.approx(account["wall_s"], rel=0.01)
        assert least_s <= told_s <= most_s
