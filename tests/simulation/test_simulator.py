"""A whole cluster, thousands of times: crashes, pauses, cuts, resets, lost messages and bad clocks, and no rule is ever broken.

``make simulate SEEDS=0:100000`` runs many more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.simulation.__main__ import main, run_seeds
from tests.simulation.cluster import LEAST_FAULTS, LEAST_S, Cluster, Failure, simulate
from tests.simulation.scale import PHASES, SIZES, exponent, measure
from tests.simulation.threads import Bell, Thread
from tests.simulation.world import Clock, Violation, World

ROOT = Path(__file__).parents[2]
SEEDS, BATCH = 1000, 50
HAPPENS = (
    "agents killed", "breaks", "ended by departure", "ended by failure", "ended by finished", "ended by join",
    "ended by loss", "ended by sick", "fences", "generations that go on from another store's", "histories too short",
    "host lost: crash", "host lost: kill", "host lost: terminate", "hosts back",
    "jobs begun anew, as nobody remembered in time", "jobs closed", "jobs failed", "jobs finished", "jobs host_left",
    "leases lost", "licences over", "memories", "nodes back within their fence", "nodes deleted", "nodes expelled",
    "nodes expired", "nodes that have all saved", "nodes vouched", "notices", "refused", "replies lost", "requests lost",
    "restarts", "second holders refused", "sick nodes", "starts refused by the warden", "stays for the workers of others",
    "stores given up", "testimonies", "timedout",
)  # fmt: skip
EVENTFUL_SEEDS = (10, 22, 67, 142, 144, 1054, 2744, 3002, 3011, 3013)


def in_two_processes(begin: int) -> object:
    """It computes all the time: at most two do so beside the many tests that wait for something, and begin early."""
    return pytest.param(begin, marks=pytest.mark.xdist_group(f"seeds {begin // BATCH % 2}"))


@pytest.mark.timeout(600)  # seconds of computing, which take minutes where many others compute
@pytest.mark.parametrize("begin", [in_two_processes(begin) for begin in range(0, SEEDS, BATCH)])
def test_no_seed_breaks_a_rule(begin: int) -> None:
    """P02, P03, P04, P07, P14, P26, P27, P41, P46, P48: all members hold the same world, no two generations run at once, ranks
    are right and kept, budgets hold, success is everybody's, and nothing waits for ever, whatever goes wrong; also inside of an
    agent, as in V1 to V5, and where the store is lost and another takes its place.
    """
    tally: Counter[str] = Counter()
    for happened, failures in run_seeds(begin, begin + BATCH):
        assert not failures, str(failures[0])
        tally.update(happened)
    assert tally["seeds"] == BATCH


def test_everything_happens() -> None:
    """A simulator in which nothing happens finds nothing. Where faults fall otherwise, ``--histogram`` finds other such seeds."""
    tally: Counter[str] = Counter()
    for seed in EVENTFUL_SEEDS:
        tally.update(simulate(seed))
    assert not [what for what in HAPPENS if not tally[what]]


@pytest.mark.parametrize("seed", range(5))
def test_each_seed_is_long_and_bad_enough(seed: int) -> None:
    tally = simulate(seed)
    assert tally["faults"] >= LEAST_FAULTS
    assert tally["virtual seconds"] >= LEAST_S
    assert Cluster(f"{seed}.0").setup.nodes >= 5


def test_a_seed_tells_the_same_story_every_time() -> None:
    """Also in another process, in which sets have another order."""
    program = (
        "from tests.simulation.cluster import *\n"
        "for seed in range(4):\n"
        "    cluster = Cluster(f'{seed}.0')\n"
        "    cluster.run()\n"
        "    print(sorted(cluster.world.tally.items()), [str(one) for one in cluster.world.trace])\n"
    )
    stories = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": salt},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for salt in ("1", "2")
    ]
    assert stories[0] == stories[1]
    assert len(stories[0]) > 1000


def test_a_violation_says_how_to_see_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:1", "--bug", "generation_before_seats"]) == 1
    shown = capsys.readouterr().out
    command = next(line for line in shown.splitlines() if line.startswith("reproduce: "))
    assert command == "reproduce: python -m tests.simulation --seeds 0:1 --trace --bug generation_before_seats"
    assert "seed 0 at" in shown
    assert "0 seeds without a violation, 1 with one" in shown


def test_the_histogram_counts_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--histogram"]) == 0
    shown = capsys.readouterr().out
    assert "  generations" in shown
    assert "2 seeds without a violation, 0 with one" in shown


def test_a_clock_never_wakes_anybody_too_early() -> None:
    clock = Clock(12345.678, 0.9951)
    for time in (12345.7, 12400.0, 99999.9):
        assert clock.read(clock.when(time)) >= time


def test_a_thread_sleeps_until_its_time_has_come_or_something_else() -> None:
    world, clock, bell, woken = World(0), Clock(1000.0, 1.25), Bell(), []
    thread = Thread(world, clock, lambda _: True)
    bell.on_set = thread.look

    def run() -> None:
        for timeout_s in (2.5, 100.0):
            thread.wait([bell], timeout_s)
            woken.append(round(world.now, 3))

    world.at(7.0, bell.set)
    thread.start(run)
    world.run(1000.0)
    assert woken == [2.0, 7.0]
    assert thread.has_ended


def test_a_thread_that_spins_breaks_a_rule() -> None:
    thread, bell = Thread(World(0), Clock(), lambda _: True), Bell()
    bell.set()

    def run() -> None:
        while True:
            thread.wait([bell], 10.0)

    with pytest.raises(Violation, match="a thread spins"):
        thread.start(run)


def test_a_thread_that_is_killed_goes_on_nowhere() -> None:
    world, done = World(0), []
    thread = Thread(world, Clock(), lambda _: True)

    def run() -> None:
        try:
            thread.wait([], 10.0)
            done.append("woken")
        finally:
            done.append("closed")

    thread.start(run)
    thread.kill()
    world.run(1000.0)
    assert done == ["closed"]


def test_a_failure_can_come_from_another_process() -> None:
    found = [failure for _, failures in run_seeds(0, 2, jobs=2, bug="generation_before_seats") for failure in failures]
    assert len(found) == 2
    for failure in found:
        assert isinstance(failure, Failure)
        assert "reproduce:" in str(failure)


def test_a_node_costs_the_same_however_many_there_are() -> None:
    """P22: operations and bytes grow with the number of nodes, also when one failure has N victims, and at the end."""
    costs = {count: measure(count) for count in SIZES}
    for phase in PHASES:
        for what in ("operations", "bytes"):
            totals = [getattr(costs[count][phase], what) for count in SIZES]
            assert exponent(list(SIZES), totals) <= 1.1, (phase, what, totals)
    assert costs[1024]["meet"].operations <= 6 * 1024
