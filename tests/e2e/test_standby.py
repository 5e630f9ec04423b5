"""Processes on standby: they wait in `rallypoint.worker.ready`, and are the next workers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import RunRallyrun, StartRallyrun
from tests.ports import free_port

Script = Callable[..., Path]

ON_STANDBY = "on standby, with"

# Each attempt ends when the test says so, by the death of rank 1.
PROGRAM = """
    import os, pathlib, sys, time
    print("prepares", os.environ["LOCAL_RANK"], "RANK" in os.environ, flush=True)
    print("also on stderr", file=sys.stderr)
    from rallypoint import worker

    worker.ready()
    rank, attempt, folder = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], pathlib.Path(sys.argv[1])
    print("rank", rank, "attempt", attempt, "pid", os.getpid(), "sits in", os.getcwd(), flush=True)
    while not (folder / "finish").exists():
        if rank == "1" and (folder / f"die {attempt}").exists():
            raise ValueError("as ordered")
        time.sleep(0.01)
        worker.heartbeat()
"""


def pids_of(stdout: str, attempt: int) -> list[int]:
    return [int(pid) for pid in re.findall(rf"rank \d attempt {attempt} pid (\d+)", stdout)]


def workers_are_there(node: Any, attempt: int) -> Callable[[], bool]:
    return lambda: len(pids_of(node.stdout, attempt)) == 2


def children_of(pid: int) -> list[int]:
    """All that is below a process."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(one) for one in path.read_text().split()] if path.exists() else []
    return found + [one for child in found for one in children_of(child)]


@pytest.mark.parametrize("more", [(), ("--preload", "decimal"), ("--hang-timeout", "30")], ids=["plain", "preloaded", "watched"])
def test_they_are_the_workers_after_a_restart(
    more: tuple[str, ...], start_rallyrun: StartRallyrun, script: Script, tmp_path: Path
) -> None:
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "--restart-backoff", "0", "--standby", *more]
    node = start_rallyrun([*flags, "--log-dir", tmp_path / "logs", "--tee", "3", script(PROGRAM), tmp_path])
    for attempt in range(3):
        node.wait_for(workers_are_there(node, attempt))
        node.wait_for(lambda count=attempt + 1: node.stderr.count(ON_STANDBY) == count)
        waiting = set(children_of(node.pid)) - set(pids_of(node.stdout, attempt))
        (tmp_path / f"die {attempt}").touch()
        node.wait_for(workers_are_there(node, attempt + 1))
        assert set(pids_of(node.stdout, attempt + 1)) <= waiting, "they were there before"
        assert f"ValueError: as ordered; restarting all workers (restart {attempt + 1} of 3)" in node.stderr
    (tmp_path / "finish").touch()
    assert node.wait() == 0, node.stderr
    (logs,) = (tmp_path / "logs").glob("*_*/attempt_2/1/stdout.log")
    prepared, began = logs.read_text().splitlines()
    assert prepared == "prepares 1 False", "before they had a place"
    assert began.startswith("rank 1 attempt 2 pid ")
    assert logs.with_name("stderr.log").read_text().startswith("also on stderr\nTraceback")


# Ten megabytes in each of two slots. What a process has mapped of them when its turn has come it tells before it asks for them.
SAVES = """
    import os, pathlib, re, sys, time
    from rallypoint import worker
    from rallypoint.worker import checkpoint

    worker.ready()
    rank, attempt, folder = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], pathlib.Path(sys.argv[1])
    mapped = len(re.findall("memfd:rally-checkpoint", open("/proc/self/maps").read()))
    found = checkpoint.load()
    first = 0 if found is None else found.step + 1
    assert found is None or found.state == bytes([int(rank), found.step]) * 5_000_000
    for step in range(first, first + 3):
        checkpoint.save(step, bytes([int(rank), step]) * 5_000_000)
    print("rank", rank, "attempt", attempt, "pid", os.getpid(), "had mapped", mapped, "and begins at", first, flush=True)
    while not (folder / "finish").exists():
        if rank == "1" and (folder / f"die {attempt}").exists():
            os.kill(os.getpid(), 9)
        time.sleep(0.01)
"""


def mappings_of(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}/maps").read_text().count("memfd:rally-checkpoint")
    except OSError:  # it has ended meanwhile
        return 0


@pytest.mark.parametrize("preload", [(), ("--preload", "decimal")], ids=["fresh", "warm"])
def test_they_have_their_snapshots_mapped_before_their_turn(
    preload: tuple[str, ...], start_rallyrun: StartRallyrun, script: Script, tmp_path: Path
) -> None:
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "--restart-backoff", "0", "--standby", *preload]
    node = start_rallyrun([*flags, "--checkpoint-memory", "100M", script(SAVES), tmp_path])
    for attempt in range(2):
        node.wait_for(workers_are_there(node, attempt))
        node.wait_for(lambda count=attempt + 1: node.stderr.count(ON_STANDBY) == count)
        running = set(pids_of(node.stdout, attempt))
        node.wait_for(lambda running=running: sorted(map(mappings_of, {*children_of(node.pid)} - running))[-2:] == [2, 2])
        (tmp_path / f"die {attempt}").touch()
        node.wait_for(workers_are_there(node, attempt + 1))
    (tmp_path / "finish").touch()
    assert node.wait() == 0, node.stderr
    told = re.findall(r"attempt (\d) pid \d+ had mapped (\d) and begins at (\d)", node.stdout)
    assert sorted(told) == [("0", "0", "0")] * 2 + [("1", "2", "3")] * 2 + [("2", "2", "6")] * 2


# What only one process can have: a port, and a lock, which a child in a session of its own has too. And much to be cleared away.
POSSESSES = """
    import fcntl, mmap, os, pathlib, signal, socket, sys, time
    from rallypoint import worker

    worker.ready()
    attempt, folder = os.environ["TORCHELASTIC_RESTART_COUNT"], pathlib.Path(sys.argv[1])
    lock = open(folder / "lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    listener = socket.create_server(("127.0.0.1", int(sys.argv[2])), reuse_port=False)
    memory = mmap.mmap(-1, 1 << 29, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    if os.fork() == 0:
        os.setsid()
        signal.pause()
    print("rank 0 attempt", attempt, "pid", os.getpid(), flush=True)
    while not (folder / "finish").exists():
        if (folder / f"die {attempt}").exists():
            os.kill(os.getpid(), 9)
        time.sleep(0.01)
"""


def test_nothing_is_held_any_more_by_those_whose_places_they_take(
    start_rallyrun: StartRallyrun, script: Script, tmp_path: Path
) -> None:
    """Also by one that takes the kernel a while to clear away: nobody begins before all of the generation before are gone."""
    flags = ["--standalone", "--nproc-per-node", "1", "--max-restarts", "1", "--restart-backoff", "0", "--standby"]
    node = start_rallyrun([*flags, script(POSSESSES), tmp_path, str(free_port())])
    node.wait_for_line(ON_STANDBY)
    (tmp_path / "die 0").touch()
    node.wait_for(lambda: pids_of(node.stdout, 1))
    (tmp_path / "finish").touch()
    assert node.wait() == 0, node.stderr


def test_a_program_that_never_says_that_it_is_ready_is_restarted_as_always(rallyrun: RunRallyrun, script: Script) -> None:
    program = script("import os, sys\nsys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')")
    ended = rallyrun(["--standalone", "--max-restarts", "1", "--restart-backoff", "0", "--standby", program])
    assert ended.returncode == 0, ended.stderr
    assert "standby" not in ended.stderr


def test_one_that_ends_before_its_time_is_told_of_and_harms_nobody(
    start_rallyrun: StartRallyrun, script: Script, tmp_path: Path
) -> None:
    program = script("import os\nrank = os.environ['RANK']\n" + textwrap.dedent(PROGRAM))
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--restart-backoff", "0", "--standby"]
    node = start_rallyrun([*flags, program, tmp_path])
    line = node.wait_for_line("--standby: a process on standby")
    assert "ended with exit code 1: KeyError: 'RANK'" in line
    assert "there will be no other" in node.wait_for_line("; there will be no other")
    (tmp_path / "die 0").touch()
    node.wait_for(workers_are_there(node, 1))
    (tmp_path / "finish").touch()
    assert node.wait() == 0, node.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_they_end_with_the_launcher(
    number: signal.Signals, start_rallyrun: StartRallyrun, script: Script, tmp_path: Path, wait_until: Any, alive: Any
) -> None:
    flags = ["--standalone", "--nproc-per-node", "2", "--standby"]
    node = start_rallyrun([*flags, script(PROGRAM), tmp_path])
    node.wait_for_line(ON_STANDBY)
    everybody = children_of(node.pid)
    assert len(everybody) >= 6, "two wardens with two each"
    node.send_signal(number)
    node.wait()
    wait_until(lambda: not any(alive(pid) for pid in everybody))


def test_their_warden_answers_for_them_once_they_are_workers(
    start_rallyrun: StartRallyrun, script: Script, tmp_path: Path, within: Any
) -> None:
    """P32: of two nodes; after a restart, an agent is killed, and the other goes on by proof and not by waiting."""
    program, port = script(PROGRAM), free_port()
    meeting = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    conf = ["--rdzv-conf", "last_call_timeout=2,fence=30"]
    flags = ["--nproc-per-node", "1", "--max-restarts", "1", "--restart-backoff", "0", "--standby"]
    nodes = [start_rallyrun([*meeting, *conf, *flags, program, tmp_path]) for _ in range(2)]
    for node in nodes:
        node.wait_for_line(ON_STANDBY)
    (tmp_path / "die 0").touch()
    for node in nodes:
        node.wait_for(lambda node=node: len(pids_of(node.stdout, 1)) == 1)
    host, other = sorted(nodes, key=lambda node: "hosts the coordination store" not in node.stderr)
    other.wait_for(lambda: other.stderr.count(ON_STANDBY) == 2)
    workers = pids_of(other.stdout, 1)
    killed_at = os.times().elapsed
    other.process.kill()
    host.wait_for(lambda: host.stdout.count("attempt 1") == 2)
    within("until the other goes on", os.times().elapsed - killed_at, 10.0)  # a third of the fence
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers), "they were gone before"
    (tmp_path / "finish").touch()
    assert host.wait() == 0, host.stderr


def test_functions_cannot_be_on_standby_and_that_is_said(script: Script) -> None:
    """Through the API: the function runs all the same."""
    program = script(
        """
        import time
        from rallypoint import LaunchConfig, elastic_launch, worker
        from rallypoint.base import defaults
        defaults.STANDBY_AFTER_S = 0.1

        def run():
            worker.ready()
            time.sleep(1.0)
            return "done"

        if __name__ == "__main__":
            config = LaunchConfig(1, 1, 1, run_id="x", rdzv_backend="c10d", rdzv_endpoint="localhost:0", standby=True)
            print(elastic_launch(config, run)())
        """
    )
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "{0: 'done'}\n", ended.stderr
    assert "--standby: only programs can be on standby, not functions" in ended.stderr


def test_a_first_attempt_that_fails_before_it_is_ready_costs_no_later_standby(
    start_rallyrun: StartRallyrun, script: Script, tmp_path: Path
) -> None:
    early = "import os, sys\nif os.environ.get('TORCHELASTIC_RESTART_COUNT') == '0':\n    sys.exit(3)\n"
    program = script(early + textwrap.dedent(PROGRAM))
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--restart-backoff", "0", "--standby"]
    node = start_rallyrun([*flags, program, tmp_path])
    node.wait_for(workers_are_there(node, 1))
    node.wait_for_line(ON_STANDBY)
    (tmp_path / "finish").touch()
    assert node.wait() == 0, node.stderr
