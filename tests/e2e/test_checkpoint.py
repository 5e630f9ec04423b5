"""Snapshots in the agent's memory: a restarted group goes on where the last step was that all of its ranks had saved."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import RunRallyrun, StartRallyrun
from tests.ports import free_port

Script = Callable[..., Path]

# A step of one rank begins when all have done the step before it, as those of a training do.
COUNTS = """
    def steps_together(first):
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        for step in range(first, 30):
            store.set(f"{step}/{rank}", "")
            store.wait([f"{step}/{one}" for one in range(int(os.environ["WORLD_SIZE"]))])
            yield step

    import os
    from rallypoint import TCPStore
    from rallypoint.worker import checkpoint

    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    found = checkpoint.load()
    total, first = (0, 0) if found is None else (found.state["total"], found.step + 1)
    print(f"rank {rank} attempt {attempt} begins at {first} with {total}", flush=True)
    for step in steps_together(first):
        total += step * (rank + 1)
        checkpoint.save(step, {"total": total})
        if rank == 1 and step == 10 * attempt + 9 and attempt < 2:
            os.kill(os.getpid(), 9)
    print(f"rank {rank} has {total}", flush=True)
"""


def begins(stdout: str) -> dict[tuple[int, int], tuple[int, int]]:
    found = re.findall(r"rank (\d+) attempt (\d+) begins at (\d+) with (\d+)", stdout)
    return {(int(rank), int(attempt)): (int(first), int(total)) for rank, attempt, first, total in found}


def check(stdout: str) -> None:
    """At most one step is repeated after each of the two kills: the one that not all had saved."""
    found = begins(stdout)
    assert sorted(found) == [(rank, attempt) for rank in range(2) for attempt in range(3)]
    for attempt in range(3):
        first, _ = found[0, attempt]
        assert first in ({0} if attempt == 0 else {10 * attempt - 1, 10 * attempt})
        assert [found[rank, attempt] for rank in range(2)] == [(first, (rank + 1) * sum(range(first))) for rank in range(2)]
    assert f"rank 0 has {sum(range(30))}\n" in stdout
    assert f"rank 1 has {2 * sum(range(30))}\n" in stdout


@pytest.mark.parametrize("preload", [(), ("--preload", "decimal")], ids=["fresh", "warm"])
def test_a_restarted_group_goes_on_where_it_was(preload: tuple[str, ...], rallyrun: RunRallyrun, script: Script) -> None:
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "--restart-backoff", "0", *preload]
    ended = rallyrun([*flags, "--checkpoint-memory", "16M", script(COUNTS)])
    assert ended.returncode == 0, ended.stderr
    check(ended.stdout)


def test_ranks_on_two_nodes_agree(start_rallyrun: StartRallyrun, script: Script) -> None:
    program, port = script(COUNTS), free_port()
    meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    flags = ["--nproc-per-node", "1", "--max-restarts", "2", "--restart-backoff", "0", "--checkpoint-memory", "8M"]
    nodes = [start_rallyrun([*meeting, *flags, program]) for _ in range(2)]
    assert [node.wait() for node in nodes] == [0, 0]
    check("".join(node.stdout for node in nodes))


ENDS_TOO_SOON = """
    import os, signal, sys
    from rallypoint import TCPStore
    from rallypoint.worker import checkpoint

    rank, found = os.environ["RANK"], checkpoint.load()
    print("rank", rank, "finds", found and (found.step, found.state), flush=True)
    if found is None:
        checkpoint.save(41, "rank " + rank)
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store.set("saved by " + rank, "")
        store.wait(["saved by 0", "saved by 1"])
        print("all have saved", flush=True)
        if rank == "1" and sys.argv[1] == "fails":
            sys.exit(1)
        signal.pause()
"""


@pytest.mark.parametrize("how", ["fails", "is stopped"])
def test_a_job_that_ends_too_soon_leaves_its_snapshots_to_the_next(
    how: str, start_rallyrun: StartRallyrun, rallyrun: RunRallyrun, script: Script, tmp_path: Path
) -> None:
    folder, program = tmp_path / "kept", script(ENDS_TOO_SOON)
    flags = ["--standalone", "--nproc-per-node", "2", "--checkpoint-memory", "16M", "--checkpoint-dir", folder]
    first = start_rallyrun([*flags, program, how])
    if how == "is stopped":
        first.wait_for(lambda: first.stdout.count("all have saved") == 2)
        first.send_signal(signal.SIGTERM)
    assert first.wait() == (1 if how == "fails" else 128 + signal.SIGTERM)
    assert f"2 snapshots of this node's workers written to {folder}" in first.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0-of-2.0", "rank-1-of-2.0"]
    second = rallyrun([*flags, program, how])
    assert second.returncode == 0, second.stderr
    assert sorted(second.stdout.splitlines()) == [f"rank {rank} finds (41, 'rank {rank}')" for rank in range(2)]
    assert list(folder.iterdir()) == [], "the work is done"


def test_a_folder_that_cannot_be_used_costs_only_what_would_be_in_it(
    rallyrun: RunRallyrun, script: Script, tmp_path: Path
) -> None:
    (tmp_path / "a file").write_text("")
    flags = ["--standalone", "--checkpoint-memory", "16M", "--checkpoint-dir", tmp_path / "a file" / "kept"]
    program = script("from rallypoint.worker import checkpoint; checkpoint.save(1, 2); raise SystemExit(3)")
    ended = rallyrun([*flags, program])
    assert ended.returncode == 1
    assert f"--checkpoint-dir {tmp_path}/a file/kept: what was saved last is lost: Not a directory" in ended.stderr
    assert "exited with code 3" in ended.stderr


def test_a_save_that_does_not_block_is_complete_after_the_next_or_a_wait(rallyrun: RunRallyrun, script: Script) -> None:
    program = script(
        """
        import os
        from rallypoint.worker import checkpoint

        found = checkpoint.load()
        print(found and found.step, flush=True)
        first = 0 if found is None else found.step + 1
        for step in range(first, first + 3):
            checkpoint.save(step, "state", blocking=False)
        if first == 0:
            os.kill(os.getpid(), 9)
        checkpoint.wait()
        checkpoint.wait()
        if first == 2:
            os.kill(os.getpid(), 9)
        """
    )
    ended = rallyrun(["--standalone", "--max-restarts", "2", "--restart-backoff", "0", "--checkpoint-memory", "8M", program])
    assert (ended.returncode, ended.stdout) == (0, "None\n1\n4\n"), ended.stderr


def test_what_does_not_fit_is_told_to_the_program(rallyrun: RunRallyrun, script: Script) -> None:
    program = script("from rallypoint.worker import checkpoint\ncheckpoint.save(0, bytes(10_000_000))\n")
    ended = rallyrun(["--standalone", "--checkpoint-memory", "8M", program])
    assert ended.returncode == 1
    assert "CheckpointMemoryError: a snapshot of rank 0 takes 10," in ended.stderr
    assert "--checkpoint-memory leaves 8,388,608 bytes to each worker" in ended.stderr


def test_without_memory_nothing_is_kept_and_that_is_told_once(rallyrun: RunRallyrun, script: Script) -> None:
    program = script(
        """
        from rallypoint.worker import checkpoint
        print(checkpoint.load())
        for step in range(3):
            checkpoint.save(step, "state")
        print(checkpoint.load())
        """
    )
    ended = rallyrun(["--standalone", program])
    assert (ended.returncode, ended.stdout) == (0, "None\nNone\n")
    assert ended.stderr.count("checkpoint.save() keeps nothing: the job was started without --checkpoint-memory") == 1


@pytest.mark.parametrize("step", [-1, 1.0, "1", None, True])
def test_a_step_is_a_whole_number(step: Any) -> None:
    from rallypoint.errors import UsageError
    from rallypoint.worker import checkpoint

    with pytest.raises(UsageError, match="step must be a whole number"):
        checkpoint.save(step, {})
