"""Five machines under random faults of every kind that we know: one generation at a time, right ranks, and success in the end."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.network.journal import Journal
from tests.network.machines import Network
from tests.network.soak import KINDS, Happened, Slot, Soak, prepare

pytestmark = pytest.mark.root

NODES = 5
SEED = "RALLY_SEED"
ONLY = "RALLY_FAULTS"  # kinds, with commas between; all where it is not set
TIMES = "RALLY_TIMES"  # how many of them
MARK = "RALLY_SOAK_MARK"
EFFECT_S = 4.0  # after a fault; it has disturbed nobody if the world that it found goes on by then


@pytest.fixture
def machines(network: Callable[[int], Network]) -> Iterator[tuple[Network, list[Slot]]]:
    """Five of them, each with a disk; the disks are gone after the test."""
    net = network(NODES)
    slots = prepare(net)
    yield net, slots
    for slot in slots:
        if slot.disk is not None:
            slot.disk.remove()
    assert str(net.folder) not in Path("/proc/mounts").read_text()


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """``marked()``: every process alive that this test led to, however far it has moved."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)

    def alive() -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                    found.append((path / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue  # it is gone
        return found

    return alive


def listeners(net: Network) -> list[str]:
    """Who still listens on any machine."""
    found = []
    for node in net.nodes:
        command = ["ip", "netns", "exec", node.namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found += [f"{node.name}: {line}" for line in text.splitlines() if line.split()[3] == "0A"]
    return found


# --- what is told at the end -----------------------------------------------------------------------------------------------


def whole_worlds(journal: Journal) -> list[tuple[float, float]]:
    """From when until when each world was whole."""
    lives = [workers for workers in journal.generations() if len(workers) == workers[0]["world_size"]]
    times = [(max(one["began"] for one in workers), min(map(journal.last_beat, workers))) for workers in lives]
    return sorted(one for one in times if one[0] < one[1])


def recovery_s(fault: Happened, worlds: list[tuple[float, float]]) -> float | None:
    """From the fault to the next whole world; None if the one that ran went on."""
    running = [end for begin, end in worlds if begin <= fault.at < end]
    later = [begin for begin, _ in worlds if begin > fault.at]
    if not later or (running and running[0] > fault.at + fault.length_s + EFFECT_S):
        return None
    return later[0] - fault.at


def summary(happened: list[Happened], journal: Journal) -> str:
    worlds = whole_worlds(journal)
    gaps = [later[0] - earlier[1] for earlier, later in itertools.pairwise(worlds)]
    lines = [f"{'fault':<26}{'times':>6}{'led to':>8}{'median':>9}{'worst':>9}   new worlds, and the time until they were whole"]
    for kind in KINDS:
        of_kind = [one for one in happened if one.kind == kind]
        took = [value for one in of_kind if (value := recovery_s(one, worlds)) is not None]
        times = f"{median(took):>7.2f} s{max(took):>7.2f} s" if took else f"{'-':>9}{'-':>9}"
        lines.append(f"{kind:<26}{len(of_kind):>6}{len(took):>8}{times}")
    lines.append(f"{len(happened)} faults, {len(journal.generations())} generations, {len(journal.starts())} workers")
    lines.append(f"{len(worlds)} worlds were whole; longest time without one: {max(gaps, default=0.0):.2f} s")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(24, marks=pytest.mark.timeout(300)),
        pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(4500)]),
    ],
)
def test_random_faults_of_every_kind(faults: int, machines: Any, marked: Any, wait_until: Any, capsys: Any) -> None:
    """V1-V5, M1-M6 among others: no two generations at once, no job that ends, nothing that is left."""
    net, slots = machines
    seed = int(os.environ.get(SEED) or random.SystemRandom().randrange(10**9))
    print(f"{SEED}={seed}")
    kinds = os.environ.get(ONLY)
    soak = Soak(net, slots, seed, kinds.split(",") if kinds else list(KINDS))
    try:
        soak.start()
        soak.run(int(os.environ.get(TIMES) or faults))
        soak.heal()
        assert soak.finish() == [0] * NODES
        wait_until(lambda: not marked())
        assert listeners(net) == []
    finally:
        soak.close()
        text = summary(soak.happened, net.journal)
        with capsys.disabled():
            print(f"\n{SEED}={seed}\n{text}")
        overlaps = net.journal.overlaps()
        print("\n".join(map(str, overlaps)))
    assert overlaps == []
    net.journal.check_ranks()
