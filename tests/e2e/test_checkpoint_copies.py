"""Copies of snapshots on another node: a whole node is lost, another comes, and the job goes on where it was."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import RunningRallyrun, StartRallyrun
from tests.ports import free_port

Script = Callable[..., Path]

STEPS = 40

# A step of one rank begins when all have done the step before it, as those of a training do. Each waits for the word of the test.
COUNTS = """
    import os, pathlib, sys, time
    from rallypoint import TCPStore
    from rallypoint.worker import checkpoint

    rank, world, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), pathlib.Path(sys.argv[1])
    found = checkpoint.load()
    total, first = (0, 0) if found is None else (found.state["total"], found.step + 1)
    print(f"rank {rank} begins at {first} with {total} in generation {os.environ['RALLYPOINT_GENERATION']}", flush=True)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    for step in range(first, int(sys.argv[2])):
        while not (folder / f"up to {10 * (step // 10)}").exists():
            time.sleep(0.01)
        store.set(f"{step}/{rank}", "")
        store.wait([f"{step}/{one}" for one in range(world)])
        total += step * (rank + 1)
        checkpoint.save(step, {"total": total, "ballast": bytes(100_000)})
        print(f"rank {rank} has done {step}", flush=True)
    print(f"rank {rank} has {total} at the end", flush=True)
"""


@pytest.mark.parametrize("preload", [(), ("--preload", "decimal")], ids=["fresh", "warm"])
def test_a_lost_node_is_replaced_and_nothing_but_a_step_is_lost(
    preload: tuple[str, ...], start_rallyrun: StartRallyrun, script: Script, tmp_path: Path
) -> None:
    program, port = script(COUNTS), free_port()
    meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    flags = ["--nproc-per-node", "2", "--max-restarts", "0", *preload, "--checkpoint-memory", "64M", "--checkpoint-copies", "1"]
    command = [*meeting, *flags, program, tmp_path, str(STEPS)]
    host = start_rallyrun(command)
    host.wait_for_line("this node hosts the coordination store")
    others = [start_rallyrun(command)]
    for done in range(0, STEPS, 10):
        (tmp_path / f"up to {done}").touch()
        for node in (host, others[-1]):
            node.wait_for(lambda node=node, step=done + 9: node.stdout.count(f"has done {step}\n") == 2, 60)
        if done + 10 < STEPS:
            others[-1].process.kill()
            others.append(start_rallyrun(command))
    assert host.wait() == 0, host.stderr
    assert others[-1].wait() == 0, others[-1].stderr
    told = host.stdout + "".join(node.stdout for node in others)
    for rank in range(4):
        assert f"rank {rank} has {(rank + 1) * sum(range(STEPS))} at the end\n" in told
    begins = re.findall(r"rank (\d+) begins at (\d+) with (\d+) in generation (\d+)", told)
    assert len(begins) == 4 * (STEPS // 10)
    for rank, first, total, generation in (map(int, one) for one in begins):
        at = 10 * (generation - 1)
        assert first in range(max(0, at - 1), at + 1), "at most one step is done again"
        assert total == (rank + 1) * sum(range(first))
    assert all(re.search(r"2 snapshots of step \d+ fetched from other nodes", node.stderr) for node in others[1:])
    assert "--checkpoint-copies:" not in host.stderr


SAVES_AND_WAITS = """
    import os, signal
    from rallypoint.worker import checkpoint

    found = checkpoint.load()
    print("rank", os.environ["RANK"], "finds", found and (found.step, found.state), flush=True)
    for step in range(3) if found is None else ():
        checkpoint.save(step, f"{os.environ['RANK']} at {step}")
    if found is None:
        print("all is saved", flush=True)
        signal.pause()
"""


def test_what_a_lost_node_had_saved_is_left_to_the_next_job_by_its_partner(
    start_rallyrun: StartRallyrun, script: Script, tmp_path: Path
) -> None:
    """The node is lost for good, and the job is stopped while it waits for another."""
    program, folder = script(SAVES_AND_WAITS), tmp_path / "kept"
    flags = ["--checkpoint-memory", "32M", "--checkpoint-copies", "1", "--checkpoint-dir", folder]

    def start_nodes() -> list[RunningRallyrun]:
        meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
        host = start_rallyrun([*meeting, "--nproc-per-node", "1", *flags, program])
        host.wait_for_line("this node hosts the coordination store")
        return [host, start_rallyrun([*meeting, "--nproc-per-node", "1", *flags, program])]

    port = free_port()
    host, other = start_nodes()
    for node in (host, other):
        node.wait_for_line("all is saved")
    other.process.kill()
    host.wait_for(lambda: "waiting: " in host.stderr.partition(" was lost: ")[2])
    host.send_signal(signal.SIGTERM)
    assert host.wait() == 128 + signal.SIGTERM
    assert re.search(r"[23] copies of other nodes' snapshots written to .*/kept, as a node may be lost", host.stderr)
    assert {path.name.partition(".")[0] for path in folder.iterdir()} == {"rank-0-of-2", "copy-of-rank-1-of-2"}
    port = free_port()
    nodes = start_nodes()
    assert [node.wait() for node in nodes] == [0, 0]
    found = re.findall(r"rank (\d) finds \((\d), '(\d) at (\d)'\)", "".join(node.stdout for node in nodes))
    assert sorted(rank for rank, *_ in found) == ["0", "1"]
    assert all(rank == whose and step == of for rank, step, whose, of in found)
    assert len({step for _, step, *_ in found}) == 1
    assert list(folder.iterdir()) == [], "the work is done"


def test_with_one_node_it_is_said_that_there_are_no_copies(start_rallyrun: StartRallyrun, script: Script) -> None:
    program = script("from rallypoint.worker import checkpoint\ncheckpoint.save(0, 1)\nprint(checkpoint.load())\n")
    node = start_rallyrun(["--standalone", "--checkpoint-memory", "16M", "--checkpoint-copies", "1", program])
    assert node.wait() == 0
    assert node.stdout == "Snapshot(step=0, state=1)\n"
    assert node.stderr.count("there is no other node to keep copies of what workers save") == 1
