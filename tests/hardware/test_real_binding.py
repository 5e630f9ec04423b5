"""P40: real workers on this machine are where the plan puts them, from their first instruction and with all their children."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rallypoint import affinity
from rallypoint.affinity import AffinityMode, NumaOptions
from rallypoint.errors import UsageError, WorkerStartError
from rallypoint.hardware.binding import parse_cpus
from rallypoint.hardware.topology import read_topology
from rallypoint.output.log_specs import DefaultLogsSpecs, Std
from rallypoint.processes.context import RunProcsResult
from rallypoint.processes.subprocesses import start_processes

EXCLUSIVE = NumaOptions(AffinityMode.EXCLUSIVE)
NO_SUCH_CPU = 8000
ASK_THE_KERNEL = ["grep", "Cpus_allowed_list", "/proc/self/status"]
WAIT_S = 20

two_cores = pytest.mark.skipif(len({cpu.core for cpu in read_topology().cpus}) < 2, reason="needs two cores")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunProcsResult]:
    """``run(entrypoint, *args, workers=2, …)``: a group of workers to its end, with its output in files."""

    def start(entrypoint: Any, *args: Any, workers: int = 2, **settings: Any) -> RunProcsResult:
        ranks = range(workers)
        context = start_processes(
            "worker", entrypoint, dict.fromkeys(ranks, args), {rank: {"LOCAL_RANK": str(rank)} for rank in ranks},
            DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.ALL), **settings,
        )  # fmt: skip
        try:
            result = context.wait(WAIT_S)
            assert result is not None
            return result
        finally:
            context.close()

    return start


def listed(text: str | bytes) -> set[int]:
    """The CPUs in a line of /proc/self/status."""
    line = text.decode() if isinstance(text, bytes) else text
    return set(parse_cpus(line.split()[-1]))


def cores() -> list[set[int]]:
    """This machine's physical cores, each with its CPUs that we may use."""
    found: dict[int, set[int]] = {}
    for cpu in read_topology().cpus:
        found.setdefault(cpu.core, set()).add(cpu.number)
    return list(found.values())


def assert_disjoint_and_complete(first: set[int], second: set[int]) -> None:
    assert first
    assert second
    assert not first & second
    assert first | second <= os.sched_getaffinity(0)
    assert all(core <= first or core <= second or not core & (first | second) for core in cores())


@two_cores
def test_p40_a_program_and_its_children_have_cpus_of_their_own(run: Callable[..., RunProcsResult]) -> None:
    shell = "grep Cpus_allowed_list /proc/$$/status; grep Cpus_allowed_list /proc/self/status"
    result = run("sh", "-c", shell, numa_options=EXCLUSIVE)
    assert not result.is_failed()
    own, of_child = zip(*(Path(result.stdouts[rank]).read_text().splitlines() for rank in range(2)), strict=True)
    assert own == of_child
    assert_disjoint_and_complete(*map(listed, own))


@two_cores
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_p40_a_function_has_cpus_of_its_own(run: Callable[..., RunProcsResult], method: str) -> None:
    values = run(os.sched_getaffinity, 0, numa_options=EXCLUSIVE, start_method=method).return_values
    assert_disjoint_and_complete(values[0], values[1])


@two_cores
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_p40_what_a_function_starts_stays_there(run: Callable[..., RunProcsResult], method: str) -> None:
    values = run(subprocess.check_output, ASK_THE_KERNEL, numa_options=EXCLUSIVE, start_method=method).return_values
    assert_disjoint_and_complete(listed(values[0]), listed(values[1]))


def test_p40_without_options_nobody_is_bound(run: Callable[..., RunProcsResult]) -> None:
    assert run(os.sched_getaffinity, 0).return_values == dict.fromkeys(range(2), os.sched_getaffinity(0))


def test_p40_node_is_all_that_one_node_has(run: Callable[..., RunProcsResult]) -> None:
    topology = read_topology()
    nodes = [{cpu.number for cpu in topology.cpus if cpu.node == node} for node in {cpu.node for cpu in topology.cpus}]
    values = run(os.sched_getaffinity, 0, workers=1, numa_options=NumaOptions(AffinityMode.NODE)).return_values
    assert values[0] in nodes


def test_p40_a_launcher_that_is_bound_itself_binds_within(run: Callable[..., RunProcsResult]) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        values = run(os.sched_getaffinity, 0, workers=1, numa_options=EXCLUSIVE).return_values
    finally:
        os.sched_setaffinity(0, before)
    assert values == {0: {max(before)}}


def test_p40_too_few_cores_are_refused_before_any_worker_starts(run: Callable[..., RunProcsResult], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\d+ workers .* physical core"):
        run("touch", str(tmp_path / "started"), workers=len(cores()) + 1, numa_options=EXCLUSIVE)
    assert not (tmp_path / "started").exists()


@pytest.fixture(params=[(NO_SUCH_CPU,), (min(os.sched_getaffinity(0)), NO_SUCH_CPU)], ids=["all gone", "one gone"])
def gone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """CPUs that are in the plan of worker 1, and went offline before it was started."""
    cpus: tuple[int, ...] = request.param
    monkeypatch.setattr(affinity, "cpus_of_workers", lambda options, envs: {1: cpus})
    return cpus


def test_p40_a_binding_that_fails_names_worker_and_cpus(run: Callable[..., RunProcsResult], gone: tuple[int, ...]) -> None:
    names = ",".join(map(str, gone))
    with pytest.raises(
        WorkerStartError, match=f"worker 1 could not be started: .*bound to CPUs {names}: {NO_SUCH_CPU} went offline"
    ):
        run("true", numa_options=EXCLUSIVE)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_p40_a_binding_that_fails_may_be_done_without(
    run: Callable[..., RunProcsResult], gone: tuple[int, ...], method: str
) -> None:
    options = NumaOptions(AffinityMode.EXCLUSIVE, should_fall_back_if_binding_fails=True)
    result = run(os.sched_getaffinity, 0, numa_options=options, start_method=method)
    assert result.return_values[1] == os.sched_getaffinity(0)
    (line,) = Path(result.stderrs[1]).read_text().splitlines()
    assert line.startswith("rallyrun: worker 1 runs without being bound: ")
    assert Path(result.stderrs[0]).read_text() == ""


def test_p40_a_start_without_binding_loads_nothing_of_it(tmp_path: Path) -> None:
    program = (
        "import sys; from rallypoint import start_processes, DefaultLogsSpecs;"
        "context = start_processes('w', 'true', {0: ()}, {0: {}}, DefaultLogsSpecs(sys.argv[1]));"
        "context.wait(); context.close();"
        "print([name for name in sys.modules if name.endswith(('affinity', 'topology', 'dry_run'))])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "logs")]
    assert subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout == "[]\n"
