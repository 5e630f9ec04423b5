"""A thousand groups of workers, started and ended in every way, in one process that is none the worse for it."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rallypoint import DefaultLogsSpecs, LocalElasticAgent, Std, WorkerSpec, WorkerState, start_processes
from rallypoint.protocol.restarts import RestartPolicy
from rallypoint.rendezvous.one_node import LocalRendezvous

# What a worker may do: end well or badly, early or late, by a signal, deaf to signals, with children or daemons, talkative.
PROGRAMS = (
    "exit 0",
    "exit 3",
    "kill -KILL $$",
    "kill -SEGV $$",
    "exec sleep 60",
    "sleep 60 & exec sleep 60",
    "trap '' TERM INT; sleep 60 & wait",
    "setsid sh -c 'sleep 60 & exec sleep 60' & exit 0",
    "i=0; while [ $i -lt 200 ]; do echo line $i; echo line $i >&2; i=$((i + 1)); done; exit 1",
    "exec no-such-program",
)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL, None)
# The first cycles import what is imported once, and let the interpreter's own caches grow.
WARM_UP = 5


class Holdings:
    """What this process holds: descriptors, threads, children; and how many temporary files there are."""

    def __init__(self, processes: Any, tmpdir: Path) -> None:
        self._processes = processes
        self._tmpdir = tmpdir

    def now(self) -> dict[str, Any]:
        gc.collect()
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "children": {pid: name for pid, (name, _) in self._processes.children(os.getpid()).items()},
            "temporary files": sorted(str(path) for path in self._tmpdir.iterdir()),
        }


@pytest.fixture
def holdings(processes: Any, private_tmpdir: Path) -> Holdings:
    return Holdings(processes, private_tmpdir)


@pytest.fixture
def silent(capfd: pytest.CaptureFixture[str]) -> Callable[[], None]:
    """What thousands of workers say need not be kept."""
    return lambda: capfd.readouterr() and None


def one_group(dice: random.Random, log_dir: str | None) -> None:
    """Start some workers, perhaps wait for them, perhaps kill one, and end them."""
    workers = dice.randint(1, 4)
    logs = DefaultLogsSpecs(log_dir, redirects=dice.choice(list(Std)), tee=dice.choice(list(Std)))
    args = {rank: ("-c", dice.choice(PROGRAMS)) for rank in range(workers)}
    group = start_processes("cycle", "sh", args, {rank: {} for rank in range(workers)}, logs)
    group.ends_with_failure = False  # but below, with little patience
    try:
        match dice.randrange(4):
            case 0:
                group.wait(timeout=dice.uniform(0, 0.05))
            case 1:
                group.wait(timeout=0)
            case 2:
                kill_if_there(dice.choice(list(group.pids().values())))
    finally:
        group.close(dice.choice(SIGNALS), timeout=dice.choice((0, 0.02)))
    logs.discard_if_empty()


def kill_if_there(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def run_cycles(count: int, holdings: Holdings, silent: Callable[[], None], log_dir: Path, seed: int) -> None:
    dice = random.Random(seed)
    before: dict[str, Any] = {}
    for number in range(WARM_UP + count):
        if number == WARM_UP:
            before = holdings.now()
        one_group(dice, dice.choice((str(log_dir), os.devnull)))
        silent()
    assert holdings.now() == before


@pytest.mark.parametrize("seed", [1, 2])
def test_groups_leave_nothing(holdings: Holdings, silent: Any, tmp_path: Path, marked: Any, seed: int):
    """P09: no process, descriptor, thread or temporary file after 60 groups of random workers."""
    run_cycles(30, holdings, silent, tmp_path / "logs", seed)
    assert marked() == []


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_thousand_groups_leave_nothing(holdings: Holdings, silent: Any, tmp_path: Path, marked: Any):
    """P09: the same after a thousand."""
    run_cycles(1000, holdings, silent, tmp_path / "logs", seed=3)
    assert marked() == []


def agent_of(program: str, restarts: int, workers: int, log_dir: str | None) -> LocalElasticAgent:
    spec = WorkerSpec(
        role="cycle",
        local_world_size=workers,
        rdzv_handler=LocalRendezvous("cycles"),
        entrypoint="sh",
        args=("-c", program),
        max_restarts=restarts,
    )
    logs = DefaultLogsSpecs(log_dir, tee=Std.ALL if log_dir else Std.NONE)
    return LocalElasticAgent(spec, logs, shutdown_timeout=0.02, restart_policy=RestartPolicy(restarts, backoff_s=0.0))


# The last rank fails in each attempt but the last; the others wait, with children and with daemons, to be stopped.
FAILS_UNTIL_THE_LAST = """
[ "$TORCHELASTIC_RESTART_COUNT" = "$TORCHELASTIC_MAX_RESTARTS" ] && exit 0
[ "$RANK" = $((WORLD_SIZE - 1)) ] && kill -KILL $$
sleep 60 & setsid sleep 60 &
exec sleep 60
"""


def run_agent(restarts: int, holdings: Holdings, silent: Callable[[], None], log_dir: Path) -> None:
    agent_of(FAILS_UNTIL_THE_LAST, WARM_UP, 2, str(log_dir)).run()
    before = holdings.now()
    for folder in (str(log_dir), None):
        result = agent_of(FAILS_UNTIL_THE_LAST, restarts // 2, 3, folder).run()
        assert result.state == WorkerState.SUCCEEDED
        silent()
    assert holdings.now() == before


def test_restarts_leave_nothing(holdings: Holdings, silent: Any, tmp_path: Path, marked: Any):
    """P09: one agent, 60 restarts of groups with children and daemons."""
    run_agent(60, holdings, silent, tmp_path / "logs")
    assert marked() == []


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_thousand_restarts_leave_nothing(holdings: Holdings, silent: Any, tmp_path: Path, marked: Any):
    """P09: the same for a thousand."""
    run_agent(1000, holdings, silent, tmp_path / "logs")
    assert marked() == []


@pytest.mark.timeout(30)
@pytest.mark.parametrize("start_method", ["spawn", "fork", "forkserver"])
def test_functions_leave_nothing(holdings: Holdings, silent: Any, tmp_path: Path, marked: Any, start_method: str):
    """P09: functions bring memory files and pickles with them, which go too."""

    def cycle(number: int) -> None:
        logs = DefaultLogsSpecs(str(tmp_path / "logs"), tee=Std.ALL)
        args = dict.fromkeys(range(2), (60 if number % 2 else 0,))
        group = start_processes("cycle", time.sleep, args, {0: {}, 1: {}}, logs, start_method=start_method)
        if number % 2 == 0:
            result = group.wait(timeout=20)
            assert result is not None
            assert not result.is_failed()
        group.close(signal.SIGTERM, timeout=0.5)

    cycle(0)
    cycle(1)
    before = holdings.now()
    for number in range(6):
        cycle(number)
    silent()
    assert holdings.now() == before
    assert marked() == []
