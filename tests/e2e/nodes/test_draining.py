"""A node that has to leave: all workers of the job hear of it, save at one step, and then it goes. Real agents and signals.

The workers go step by step together, through their store, as those that train in parallel do.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.nodes.conftest import Job, Node
from tests.pace import is_kept

PROMISED_S = 1.0  # from a notice until every worker of the job knows
PREEMPTED, UNSAVED = 75, 76
TRAINER = """
import json, os, signal, sys, time
from rallypoint import worker
from rallypoint.store.tcp_store import TCPStore

folder, rank, world = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=60)
generation, restarts = int(os.environ["RALLYPOINT_GENERATION"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def tell(what, **more):
    told = {"what": what, "rank": rank, "generation": generation, "at": time.monotonic(), **more}
    os.write(1, f"TOLD {json.dumps(told)}\\n".encode())

def is_there(name):
    return os.path.exists(f"{folder}/{name}")

signal.signal(signal.SIGUSR2, lambda *_: tell("signalled"))
worker.on_drain(lambda left_s: tell("called", left_s=left_s))
tell("started", world=world, restarts=restarts)
has_heard = False
for step in range(10**9):
    store.set(f"{step}.{rank}", "")
    store.multi_get([f"{step}.{one}" for one in range(world)])
    time.sleep(0.002)
    if not has_heard and (left_s := worker.draining()) is not None:
        has_heard = True
        tell("heard", left_s=left_s)
    if worker.save_point(step):
        while is_there("slow"):
            time.sleep(0.005)
        tell("saved", step=step)
        if is_there("say"):
            worker.saved()
        if is_there("end"):
            break
    if step == 20:
        tell("trains")
    if is_there("finish"):
        store.set(f"{step + 1}.{rank}", "")  # others may have looked before it was there
        break
"""


class Trainers(Job):
    """Agents whose workers train; what all of them have told."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.nodes: list[Node] = []

    def start(self, *flags: str, **options: Any) -> Node:
        self.nodes.append(super().start("--drain-forward", "USR2", *flags, **options))
        return self.nodes[-1]

    def told(self, what: str, later: int = 0) -> dict[int, dict[str, Any]]:
        """By rank, in the newest generation of both nodes, or so many generations later."""
        lines = (line for node in self.nodes for line in re.findall(r"^TOLD (.*)\n", node.agent.stdout, re.MULTILINE))
        told = [json.loads(line) for line in lines]
        newest = max((one["generation"] for one in told if one.get("world") == 4), default=0)
        return {one["rank"]: one for one in told if one["what"] == what and one["generation"] == newest + later}

    def wait_until_all(self, what: str, workers: int, later: int = 0) -> dict[int, dict[str, Any]]:
        self.nodes[0].agent.wait_for(lambda: len(self.told(what, later)) >= workers)
        return self.told(what, later)

    def start_two(self, *flags: str, grace_s: float = 60.0, nnodes: str = "1:2") -> tuple[Node, Node]:
        """A host, and a node that will have to leave; their workers train."""
        grace = ("--drain-grace", str(grace_s))
        host = self.start_host(*grace, nnodes=nnodes)
        other = self.start(*grace, *flags, nnodes=nnodes)
        self.wait_until_all("trains", 4)
        return host, other

    def put(self, name: str) -> None:
        (self.folder / name).touch()


@pytest.fixture
def trainers(
    start_rallyrun: Callable[..., Any], script: Callable[..., Path], tmp_path: Path, free_port: Callable[[], int]
) -> Trainers:
    folder = tmp_path / "orders"
    folder.mkdir()
    return Trainers(start_rallyrun, script(TRAINER, "trainer.py"), folder, free_port())


# Ways to give notice, each of which returns when it was given.


def by_term(_: Trainers, node: Node) -> float:
    noticed_at = time.monotonic()
    node.send_signal(signal.SIGTERM)
    return noticed_at


def by_a_signal(_: Trainers, node: Node) -> float:
    noticed_at = time.monotonic()
    node.send_signal(signal.SIGUSR1)
    return noticed_at


def by_command(_: Trainers, node: Node) -> float:
    """The last thing that the command does, after it has looked for the job and asked all nodes."""
    drain = [sys.executable, "-m", "rallypoint", "drain", "1", "a-job"]
    told = subprocess.run(drain, capture_output=True, text=True, timeout=60, check=False)
    assert "was told to stop its workers and leave" in told.stdout, told.stderr
    return time.monotonic()


def by_file(trainers: Trainers, _: Node) -> float:
    noticed_at = time.monotonic()
    trainers.put("notice")
    return noticed_at


def by_http(_: Trainers, node: Node) -> float:
    how = node.wait_for_line("to give this node notice: curl").partition("notice: ")[2]
    asked = ["curl", "-s", "-w", " %{http_code}", *re.findall(r"'[^']*'|\S+", how)[1:]]
    noticed_at = time.monotonic()
    told = subprocess.run([one.strip("'") for one in asked], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.endswith("when all workers have saved\n 202")
    without = subprocess.run([*asked[:4], "-X", "POST", asked[-1]], capture_output=True, text=True, timeout=60, check=True)
    assert without.stdout.endswith(" 401")
    return noticed_at


def check_that_all_saved(trainers: Trainers, noticed_at: float) -> None:
    """In time, and at the same step."""
    for what in ("heard", "called", "signalled"):
        told = trainers.wait_until_all(what, 4)
        assert is_kept(max(one["at"] for one in told.values()) - noticed_at, PROMISED_S), (what, noticed_at, told)
    saved = trainers.wait_until_all("saved", 4)
    assert len({one["step"] for one in saved.values()}) == 1, saved


@pytest.mark.parametrize(
    ("give_notice", "how_they_say_it"),
    [(by_term, "say"), (by_a_signal, "next"), (by_command, "end"), (by_file, "say"), (by_http, "next")],
)
def test_p17_all_save_at_one_step_and_the_node_leaves(
    trainers: Trainers, give_notice: Callable[[Trainers, Node], float], how_they_say_it: str
) -> None:
    """P17: whichever way the notice comes, and however workers say that they have saved; no restart is spent on it."""
    trainers.put(how_they_say_it)
    flags = ("--drain-signals", "USR1", "--drain-file", str(trainers.folder / "notice"), "--health-port", "0")
    host, other = trainers.start_two(*flags)
    noticed_at = give_notice(trainers, other)
    assert other.wait() == PREEMPTED
    check_that_all_saved(trainers, noticed_at)
    (trainers.folder / how_they_say_it).unlink()
    started = trainers.wait_until_all("started", 2, later=1)
    assert {(one["world"], one["restarts"]) for one in started.values()} == {(2, 0)}
    trainers.wait_until_all("trains", 2, later=1)
    trainers.put("finish")
    assert host.wait() == 0


def test_the_deadline_is_kept_and_the_others_go_on(trainers: Trainers) -> None:
    """Workers that do not save in time are stopped as by a signal, and that is no failure either."""
    trainers.put("slow")
    host, other = trainers.start_two(grace_s=1.0)
    noticed_at = time.monotonic()
    other.send_signal(signal.SIGTERM)
    assert other.wait() == UNSAVED
    assert time.monotonic() - noticed_at >= 1.0
    assert "1 s after the notice not all workers have said that they have saved" in other.stderr
    assert {one["restarts"] for one in trainers.wait_until_all("started", 2, later=1).values()} == {0}
    trainers.put("finish")
    assert host.wait() == 0


def test_a_second_notice_does_not_wait(trainers: Trainers) -> None:
    trainers.put("slow")
    host, other = trainers.start_two("--drain-signals", "USR1", grace_s=600.0)
    other.send_signal(signal.SIGUSR1)
    trainers.wait_until_all("heard", 4)
    time.sleep(0.6)  # what comes within half a second is the same notice; this is not waited for, but the point
    other.send_signal(signal.SIGTERM)
    assert other.wait() == UNSAVED
    assert "there was another notice, SIGTERM was received" in other.stderr
    trainers.wait_until_all("started", 2, later=1)
    trainers.put("finish")
    assert host.wait() == 0


@pytest.mark.parametrize("who", ["all", "too many"])
def test_a_job_that_cannot_go_on_asks_to_be_started_again(trainers: Trainers, who: str) -> None:
    """On every node, with notice or without, all of whose workers have saved at one step."""
    trainers.put("say")
    host, other = trainers.start_two(nnodes="1:2" if who == "all" else "2")
    noticed_at = time.monotonic()
    for node in (host, other) if who == "all" else (other,):
        node.send_signal(signal.SIGTERM)
    assert [host.wait(), other.wait()] == [PREEMPTED, PREEMPTED]
    check_that_all_saved(trainers, noticed_at)
    assert "the job was preempted: node" in host.stderr
    assert "Traceback" not in host.stderr + other.stderr


def test_a_job_of_which_all_nodes_have_too_little_time_says_so_on_all_of_them(trainers: Trainers) -> None:
    """Whichever node's time is over first, and whether it hosts the store: nobody is told that all have saved."""
    trainers.put("slow")
    nodes = trainers.start_two(grace_s=1.0)
    for node in nodes:
        node.send_signal(signal.SIGTERM)
    assert [node.wait() for node in nodes] == [UNSAVED, UNSAVED]
    for node in nodes:
        assert f"exit code {UNSAVED}: start it again to go on from its last checkpoint" in node.stderr
        assert "Traceback" not in node.stderr


@pytest.mark.soak
def test_twenty_notices_in_a_row(trainers: Trainers) -> None:
    """The same host, and a new node each time, which has to leave as soon as it trains."""
    trainers.put("say")
    host = trainers.start_host("--drain-grace", "60")
    for _ in range(20):
        other = trainers.start("--drain-grace", "60")
        other.wait_for_line("TOLD")
        trainers.wait_until_all("trains", 4)
        noticed_at = time.monotonic()
        other.send_signal(signal.SIGTERM)
        assert other.wait() == PREEMPTED
        check_that_all_saved(trainers, noticed_at)
        for what in ("heard", "called", "saved"):
            print(f"{what} by all {max(one['at'] for one in trainers.told(what).values()) - noticed_at:.3f} s after the notice")
        again = trainers.wait_until_all("started", 2, later=1)
        assert {one["restarts"] for one in again.values()} == {0}
    trainers.put("finish")
    assert host.wait() == 0
