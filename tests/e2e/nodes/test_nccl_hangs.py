"""A rank of a program that uses NCCL leaves the others: its stacks tell nothing, and NCCL does (P30). Real agents and workers.

There is no GPU here. What NCCL and torch do in a worker is done by a thread of it: it has a pipe, writes its dump once it hears
something there, and in one of them the RAS service answers for all. What they say has the form that was recorded on a GPU.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.nodes.conftest import Job, Node

LIMIT_S, ON_TOP_S = 3.0, 2.0
NODES, WORKERS, LEAVER = 3, 2, 3
WORLD = NODES * WORKERS

TRAINER = """
import json, os, pickle, socket, sys, threading, time
from rallypoint import worker

folder, rank, world, dump_s = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), float(sys.argv[2])
launched, done = 0, 0

def record():
    pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + f"{rank}.pipe"
    os.mkfifo(pipe)
    fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    open(f"{folder}/records.{rank}", "w").write(str(os.getpid()))
    while True:
        time.sleep(0.05)
        if os.read(fd, 100):
            time.sleep(dump_s)
            config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))}}
            entries = [{"process_group": ("0", "default_pg"), "collective_seq_id": one, "is_p2p": False, "retired": one <= done,
                        "profiling_name": "nccl:all_reduce", "state": "completed" if one <= done else "scheduled"}
                       for one in range(1, launched + 1)]
            dump = {"version": "2.10", "pg_config": config, "entries": entries}
            with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(rank), "wb") as file:
                pickle.dump(dump, file, protocol=2)

def count():
    host, _, port = os.environ["NCCL_RAS_ADDR"].rpartition(":")
    pids = [int(open(f"{folder}/records.{one}").read()) for one in range(world)]
    ranks = [{"rank": one, "host": "10.0.0.7", "pid": pids[one], "collective_counts": {"AllReduce": 5 if one == LEAVER else 6}}
             for one in range(world)]
    with socket.create_server((host, int(port))) as listener:
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                for line in lines:
                    if line.startswith(b"STATUS"):
                        connection.sendall(json.dumps({"communicators": [{"hash": "0xabc", "ranks": ranks}]}).encode())
                        break
                    connection.sendall(b"SERVER PROTOCOL 2\\n" if line.startswith(b"CLIENT") else b"OK\\n")

def wait_for_the_gpu():
    while True:
        sum(range(1000))

threading.Thread(target=record, daemon=True).start()
while not all(os.path.exists(f"{folder}/records.{one}") for one in range(world)):
    time.sleep(0.01)
if rank == 0 and "NCCL_RAS_ADDR" in os.environ:
    threading.Thread(target=count, daemon=True).start()
done = launched = 5
if rank == LEAVER:
    time.sleep(0.5)  # it is not the one that has been silent for longest
worker.progress(5)
os.write(1, f"last {time.monotonic_ns()}\\n".encode())
if rank != LEAVER:
    launched = 6
wait_for_the_gpu()
"""


@pytest.fixture
def start_three(start_rallyrun: Any, script: Any, tmp_path: Path, free_port: Callable[[], int]) -> Callable[..., list[Node]]:
    def start(dump_s: float, env: dict[str, str] | None, nodes: int = NODES) -> list[Node]:
        orders = tmp_path / "orders"
        orders.mkdir()
        program = script(TRAINER.replace("LEAVER", str(LEAVER)), "trainer.py")

        def launch(args: list[Any], *more: Any, **how: Any) -> Any:
            return start_rallyrun([*args, str(dump_s)], *more, **how)

        job = Job(launch, program, orders, free_port())
        flags = [["--hang-timeout", f"{LIMIT_S:g}", "--log-dir", str(tmp_path / str(node))] for node in range(nodes)]
        starts = [job.start_host, *[job.start] * (nodes - 1)]
        return [one(*flags[node], "--node-rank", str(node), nnodes=str(nodes), env=env) for node, one in enumerate(starts)]

    return start


def check(nodes: list[Node], tmp_path: Path, named: str) -> None:
    """All name it, end with the code of a failure, and have the dumps of their own workers."""
    assert [node.wait() for node in nodes] == [1] * len(nodes)
    for number, node in enumerate(nodes):
        assert re.search(rf"rallyrun: Cause: rank {LEAVER} \(.*: it hung: .*; {re.escape(named)}", node.stderr), node.stderr
        [attempt] = (tmp_path / str(number)).glob("*_*/attempt_0")
        own = {f"nccl_trace_rank_{rank}" for rank in range(number * WORKERS, (number + 1) * WORKERS)}
        found = {one.name for one in attempt.iterdir()}
        assert own <= found or number != LEAVER // WORKERS, found  # the others may be stopped before theirs are written


def test_p30_the_ras_service_tells_all_nodes_who_never_came(
    start_three: Any, tmp_path: Path, free_port: Callable[[], int], numbers: Any, within: Any
) -> None:
    """P30: all main threads look alike, and are busy; dumps take their time, which nobody who is told waits for."""
    nodes = start_three(1.0, {"NCCL_RAS_ADDR": f"127.0.0.1:{free_port()}"})
    for node in nodes:
        node.wait_for_line(f"rank {LEAVER} (", 60.0)
    named_at = time.monotonic()
    last_s = max(number for node in nodes for number in numbers("last", node.agent.stdout)) / 1e9
    why = "never came to collective 6 (AllReduce) of communicator 0xabc, in which ranks 0-2, 4-5 wait (NCCL)"
    check(nodes, tmp_path, why)
    home = nodes[LEAVER // WORKERS]
    recorder = f"Flight Recorder of ranks 2-3: rank {LEAVER} never came to collective 6 (all_reduce) of process group 0 "
    assert recorder in home.stderr
    assert home.stderr.index(") hangs: ") < home.stderr.index(recorder)
    [stacks] = (tmp_path / str(LEAVER // WORKERS)).glob("*_*/attempt_0/stacks.txt")
    assert "rank 3: collective 5 (all_reduce, completed)" in stacks.read_text()
    within("from the last step until all nodes named the rank", named_at - last_s, LIMIT_S + ON_TOP_S)


def test_p30_on_one_node_the_dumps_alone_decide(start_rallyrun: Any, script: Any, tmp_path: Path) -> None:
    """P30: no RAS service answers there; the worker that never came is named, and not the one that was silent for longest."""
    orders = tmp_path / "orders"
    orders.mkdir()
    program = script(TRAINER.replace("LEAVER", "1"), "trainer.py")
    flags = ["--standalone", "--nproc-per-node", "3", "--hang-timeout", f"{LIMIT_S:g}", "--log-dir", tmp_path / "logs"]
    job = start_rallyrun([*flags, program, orders, "0.2"])
    assert job.wait() == 1
    assert "never came to collective 6 (all_reduce) of process group 0 (default_pg) of ranks 0-2" in job.stderr
    assert re.search(r"trainer\.py FAILED: rank 1 was ended by rallypoint: it hung: ", job.stderr), job.stderr
    assert [line for line in job.stderr.splitlines() if ") hangs: " in line and "rank 1 " not in line] == []
    [attempt] = (tmp_path / "logs").glob("*_*/attempt_0")
    assert {f"nccl_trace_rank_{rank}" for rank in range(3)} <= set(os.listdir(attempt))
