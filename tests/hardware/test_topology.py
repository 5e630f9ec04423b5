"""P40: who gets which CPUs on several kinds of machine, each described by the files that its kernel would show."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.hardware.machines import Machine, dgx, epyc, hybrid, laptop

from rallypoint import affinity
from rallypoint.affinity import AffinityMode, NumaOptions, cpus_of_workers, plan_binding, read_options
from rallypoint.base.text import ranges
from rallypoint.errors import UsageError
from rallypoint.hardware.binding import Plan
from rallypoint.hardware.topology import read_topology, worker_devices

NODE, SOCKET, EXCLUSIVE, CORE_COMPLEX = AffinityMode


@pytest.fixture(autouse=True)
def no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        monkeypatch.delenv(name, raising=False)


def plan(machine: Machine, mode: AffinityMode, workers: int, allowed: Any = range(128), **env: str) -> Plan:
    return plan_binding(mode, dict.fromkeys(range(workers), env), str(machine.root), allowed)


def cpus(machine: Machine, mode: AffinityMode, workers: int, allowed: Any = range(128), **env: str) -> list[str]:
    return [ranges(binding.cpus) for binding in plan(machine, mode, workers, allowed, **env).bindings]


def device_names(machine: Machine, workers: int, **env: str) -> list[str]:
    found = worker_devices([env] * workers, str(machine.root))
    return [device.name.split()[-1] if device else "none" for device in found]


# --- a laptop --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "workers", "expected"),
    [
        (NODE, 2, ["0-7", "0-7"]),
        (SOCKET, 1, ["0-7"]),
        (EXCLUSIVE, 1, ["0-7"]),
        (EXCLUSIVE, 2, ["0-3", "4-7"]),
        (EXCLUSIVE, 3, ["0-3", "4-5", "6-7"]),
        (EXCLUSIVE, 4, ["0-1", "2-3", "4-5", "6-7"]),
        (CORE_COMPLEX, 2, ["0-7", "0-7"]),
    ],
)
def test_p40_laptop(tmp_path: Path, mode: AffinityMode, workers: int, expected: list[str]) -> None:
    """SMT siblings stay together, and what cannot be divided goes to the first worker."""
    assert cpus(laptop(tmp_path), mode, workers) == expected


def test_p40_too_few_cores_are_refused_with_the_numbers(tmp_path: Path) -> None:
    words = r"5 workers \(local ranks 0, 1, 2, 3, 4\) belong to node 0, which has 4 physical cores"
    with pytest.raises(UsageError, match=words):
        plan(laptop(tmp_path), EXCLUSIVE, 5)


def test_p40_one_cache_for_all_is_told(tmp_path: Path) -> None:
    assert plan(laptop(tmp_path), CORE_COMPLEX, 2).notes == (
        "core-complex: node 0 has one last-level cache, so that its workers are bound to all of its CPUs",
    )


# --- two sockets, four nodes, eight NVIDIA GPUs ----------------------------------------------------------------------------


NODE_CPUS = ["0-7,32-39", "8-15,40-47", "16-23,48-55", "24-31,56-63"]
NODES_OF_GPUS = [1, 1, 0, 0, 3, 3, 2, 2]


def test_p40_each_worker_gets_the_node_of_its_gpu(tmp_path: Path) -> None:
    machine = dgx(tmp_path)
    assert cpus(machine, NODE, 8) == [NODE_CPUS[node] for node in NODES_OF_GPUS]
    assert plan(machine, NODE, 8).bindings[0].why == "all of node 1; NVIDIA GPU 0000:0f:00.0 is on node 1"


def test_p40_socket_is_wider_than_node(tmp_path: Path) -> None:
    halves = ["0-15,32-47", "16-31,48-63"]
    assert cpus(dgx(tmp_path), SOCKET, 8) == [halves[node // 2] for node in NODES_OF_GPUS]


def test_p40_exclusive_shares_a_node_between_the_workers_of_its_gpus(tmp_path: Path) -> None:
    machine = dgx(tmp_path)
    assert cpus(machine, EXCLUSIVE, 4) == ["8-11,40-43", "12-15,44-47", "0-3,32-35", "4-7,36-39"]
    everyone = [binding.cpus for binding in plan(machine, EXCLUSIVE, 8).bindings]
    assert sorted(cpu for one in everyone for cpu in one) == list(range(64))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("6,7", ["0000:bc:00.0", "0000:c7:00.0", "none"]),
        ("GPU-44,GPU-00aa", ["0000:86:00.0", "0000:0f:00.0", "none"]),
        ("MIG-GPU-33aa/1/0,MIG-deadbeef", ["0000:4e:00.0", "MIG-deadbeef", "none"]),
        ("", ["none"] * 3),
        ("2,99,1", ["0000:45:00.0", "none", "none"]),
    ],
)
def test_p40_the_mask_says_which_gpu_a_worker_has(tmp_path: Path, mask: str, expected: list[str]) -> None:
    assert device_names(dgx(tmp_path), 3, CUDA_VISIBLE_DEVICES=mask) == expected


def test_p40_a_virtual_local_rank_has_the_only_gpu_that_it_sees(tmp_path: Path) -> None:
    machine = dgx(tmp_path)
    envs = {rank: {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": str(gpu)} for rank, gpu in enumerate([7, 0])}
    bound = plan_binding(NODE, envs, str(machine.root), range(64)).bindings
    assert [ranges(one.cpus) for one in bound] == [NODE_CPUS[2], NODE_CPUS[1]]


def test_p40_a_launcher_above_does_not_choose_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")
    assert cpus(dgx(tmp_path), NODE, 3) == [NODE_CPUS[node] for node in NODES_OF_GPUS[:3]]


def test_p40_a_cpu_job_is_spread_over_the_nodes(tmp_path: Path) -> None:
    machine = dgx(tmp_path)
    assert cpus(machine, NODE, 4, CUDA_VISIBLE_DEVICES="") == NODE_CPUS
    assert cpus(machine, NODE, 2, CUDA_VISIBLE_DEVICES="") == [NODE_CPUS[0], NODE_CPUS[2]]
    assert cpus(machine, NODE, 5, CUDA_VISIBLE_DEVICES="") == [NODE_CPUS[node] for node in (0, 0, 1, 2, 3)]
    assert plan(machine, NODE, 1, CUDA_VISIBLE_DEVICES="").bindings[0].why == (
        "all of node 0; it has no device, and such workers are spread over the nodes"
    )


def test_p40_more_workers_than_gpus_go_where_cores_are_free(tmp_path: Path) -> None:
    """Two workers have GPUs on node 1; six more find the other nodes, and none is refused a core of its own."""
    bound = plan(dgx(tmp_path), EXCLUSIVE, 32, CUDA_VISIBLE_DEVICES="0,1").bindings
    assert sorted(cpu for one in bound for cpu in one.cpus) == list(range(64))
    assert all(len(one.cpus) == 2 for one in bound)


def test_p40_a_container_with_some_of_the_gpus(tmp_path: Path) -> None:
    """The driver lists all of them, but only those with a device node can be used."""
    machine = laptop(tmp_path)
    machine.add_nvidia("0000:17:00.0", 0, minor=0, has_device_node=False)
    machine.add_nvidia("0000:65:00.0", 0, minor=1)
    assert device_names(machine, 2) == ["0000:65:00.0", "none"]


# --- many caches, AMD GPUs -------------------------------------------------------------------------------------------------


def test_p40_core_complex_gives_each_worker_a_cache_near_its_gpu(tmp_path: Path) -> None:
    machine = epyc(tmp_path)
    assert cpus(machine, CORE_COMPLEX, 4) == ["16-19", "20-23", "0-3", "4-7"]
    assert plan(machine, CORE_COMPLEX, 4).notes == ()
    assert plan(machine, CORE_COMPLEX, 4).bindings[2].why == (
        "last-level cache 1 of 4 of node 0; AMD GPU 0001:23:00.0 is on node 0"
    )


def test_p40_more_workers_than_caches_take_turns(tmp_path: Path) -> None:
    bound = plan(epyc(tmp_path), CORE_COMPLEX, 10, HIP_VISIBLE_DEVICES="-1")
    assert [ranges(one.cpus) for one in bound.bindings][:5] == ["0-3", "4-7", "8-11", "12-15", "0-3"]
    assert bound.notes[0] == "core-complex: node 0 has 4 last-level caches for 5 workers, so that some share one"


def test_p40_caches_that_are_mostly_forbidden_come_last(tmp_path: Path) -> None:
    assert cpus(epyc(tmp_path), CORE_COMPLEX, 3, allowed=[3, *range(4, 12)], HIP_VISIBLE_DEVICES="-1") == ["4-7", "8-11", "3"]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ["0000:c1:00.0", "0000:c6:00.0", "0001:23:00.0"]),
        ({"HIP_VISIBLE_DEVICES": "3,2"}, ["0001:26:00.0", "0001:23:00.0", "none"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["0000:c6:00.0", "none", "none"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, ["0001:26:00.0", "none", "none"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-ABC2"}, ["0001:23:00.0", "none", "none"]),
    ],
)
def test_p40_amd_masks(tmp_path: Path, env: dict[str, str], expected: list[str]) -> None:
    assert device_names(epyc(tmp_path), 3, **env) == expected


# --- what is odd -----------------------------------------------------------------------------------------------------------


def test_p40_holes_in_the_numbers_and_cores_of_two_kinds(tmp_path: Path) -> None:
    machine = hybrid(tmp_path)
    assert cpus(machine, NODE, 1) == ["0-4,8-11"]
    assert cpus(machine, EXCLUSIVE, 7) == ["0-1", "2-3", "4", "8", "9", "10", "11"]
    with pytest.raises(UsageError, match=r"8 workers .* 7 physical"):
        plan(machine, EXCLUSIVE, 8)


def test_p40_offline_cpus_are_left_out(tmp_path: Path) -> None:
    """Sibling 0 is offline, and with it what it could tell about its core and socket."""
    machine = laptop(tmp_path)
    machine.set_online([1, 2, 3, 6, 7])
    for file in (tmp_path / "sys/devices/system/cpu/cpu0/topology").iterdir():
        file.unlink()
    assert cpus(machine, NODE, 1) == ["1-3,6-7"]
    assert cpus(machine, EXCLUSIVE, 3) == ["1", "2-3", "6-7"]


def test_p40_a_restricted_mask_is_never_left(tmp_path: Path) -> None:
    """A container with CPUs of one node, and GPUs of all: those are bound to the nearest CPUs that there are."""
    machine = dgx(tmp_path)
    allowed = {*range(4), *range(32, 36), 20, 21}
    bound = plan(machine, NODE, 8, allowed).bindings
    assert all(set(one.cpus) <= allowed for one in bound)
    assert [ranges(one.cpus) for one in bound] == ["0-3,32-35"] * 4 + ["20-21"] * 4
    assert bound[0].why == (
        "all of node 0; NVIDIA GPU 0000:0f:00.0 is on node 1, which has no CPU that may be used; node 0 is the nearest"
    )
    assert cpus(machine, SOCKET, 8, allowed) == ["0-3,32-35"] * 4 + ["20-21"] * 4


def test_p40_half_a_core_is_a_core(tmp_path: Path) -> None:
    assert cpus(laptop(tmp_path), EXCLUSIVE, 2, allowed=[1, 4, 5]) == ["1", "4-5"]


def test_p40_a_gpu_of_which_nobody_knows_the_node(tmp_path: Path) -> None:
    machine = dgx(tmp_path)
    machine.write("sys/bus/pci/devices/0000:0f:00.0/numa_node", "-1")
    bound = plan(machine, NODE, 2).bindings
    assert [ranges(one.cpus) for one in bound] == [NODE_CPUS[0], NODE_CPUS[1]]
    assert bound[0].why.endswith("NVIDIA GPU 0000:0f:00.0 names no node, and such workers are spread over the nodes")


def test_p40_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    """No sysfs at all: one node, one socket, one cache, every CPU a core."""
    bare = Machine(tmp_path)
    assert [cpus(bare, mode, 2, allowed=range(4)) for mode in (NODE, SOCKET, CORE_COMPLEX)] == [["0-3", "0-3"]] * 3
    assert cpus(bare, EXCLUSIVE, 2, allowed=range(4)) == ["0-1", "2-3"]


def test_p40_files_that_make_no_sense_count_as_missing(tmp_path: Path) -> None:
    machine = laptop(tmp_path)
    for path in ("cpu/online", "cpu/cpu0/topology/core_cpus_list", "node/node0/cpulist", "node/node0/distance"):
        machine.write(f"sys/devices/system/{path}", "0-99999999999,x")
    assert cpus(machine, NODE, 1, allowed=range(8)) == ["0-7"]


def test_p40_the_older_names_of_the_files(tmp_path: Path) -> None:
    machine = laptop(tmp_path)
    for cpu in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        (folder / "core_cpus_list").rename(folder / "thread_siblings_list")
        (folder / "package_cpus_list").rename(folder / "core_siblings_list")
    assert cpus(machine, EXCLUSIVE, 4) == ["0-1", "2-3", "4-5", "6-7"]


def test_p40_intel_gpus_count_by_their_place_on_the_bus(tmp_path: Path) -> None:
    machine = dgx(tmp_path)
    for folder in (tmp_path / "proc/driver/nvidia/gpus").iterdir():
        (folder / "information").unlink()
        folder.rmdir()
    for node in (tmp_path / "dev").iterdir():
        node.unlink()
    machine.add_drm(128, "0x8086", "0000:9a:00.0", 2)
    machine.add_drm(129, "0x1a03", "0000:03:00.0", 0)
    machine.add_drm(130, "0x8086", "0000:29:00.0", 0)
    assert device_names(machine, 3) == ["0000:29:00.0", "0000:9a:00.0", "none"]
    assert device_names(machine, 1, ZE_AFFINITY_MASK="1.0") == ["0000:9a:00.0"]


def test_p40_reading_a_large_machine_opens_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One CPU of a group speaks for the others: a file or so for each, not one for each cache of each."""
    from rallypoint.hardware import topology

    opened = []
    read_text = topology.read_text
    monkeypatch.setattr(topology, "read_text", lambda path: (opened.append(path), read_text(path))[1])
    assert len(read_topology(str(epyc(tmp_path).root), range(128)).cpus) == 32
    assert len(opened) < 4 * 32


# --- options ---------------------------------------------------------------------------------------------------------------


def test_p40_options_of_torch_are_understood() -> None:
    theirs = SimpleNamespace(affinity_mode=SimpleNamespace(value="core-complex"), should_fall_back_if_binding_fails=True)
    assert read_options(theirs) == NumaOptions(CORE_COMPLEX, should_fall_back_if_binding_fails=True)
    assert read_options(NumaOptions("node")) == NumaOptions(NODE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"), [("node", "must be NumaOptions"), (SimpleNamespace(affinity_mode="all"), "one of node")]
)
def test_p40_other_options_are_refused(given: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_options(given)


def test_p40_a_refusal_becomes_one_warning_where_workers_may_run_unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(affinity.report, "warn", told.append)
    monkeypatch.setattr(affinity, "_told", set())
    envs: dict[int, dict[str, str]] = {rank: {} for rank in range(5000)}
    options = NumaOptions(EXCLUSIVE, should_fall_back_if_binding_fails=True)
    assert [cpus_of_workers(options, envs) for _ in range(3)] == [{}] * 3
    assert len(told) == 1
    assert told[0].startswith("workers run without being bound to CPUs: exclusive: ")
    with pytest.raises(UsageError, match="exclusive"):
        cpus_of_workers(NumaOptions(EXCLUSIVE), envs)
