"""How many workers fit here: without torch, or with what an imported torch says."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rallypoint.errors import UsageError
from rallypoint.hardware import devices


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A root folder to be filled with what a driver shows."""
    (tmp_path / "dev").mkdir()
    for name in ("null", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


def add_gpus(host: Path, count: int) -> None:
    for index in range(count):
        (host / "dev" / f"nvidia{index}").touch()


def add_cards(host: Path, *vendors: str) -> None:
    for index, vendor in enumerate(vendors):
        device = host / "sys/class/drm" / f"renderD{128 + index}" / "device"
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (None, 12),
        ("", 0),
        ("0,1,2", 3),
        (" 0, 11 ", 2),
        ("0,12,1", 1),
        ("-1", 0),
        ("1,-1,2", 1),
        ("2,2", 0),
        ("none", 0),
        ("GPU-8a3c,GPU-91bb", 2),
        ("MIG-1,MIG-2,MIG-3", 3),
    ],
)
def test_gpus_are_counted_as_cuda_counts_them(host: Path, mask: str | None, visible: int):
    add_gpus(host, 12)
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    assert devices.visible_gpus(str(host), environ) == visible


def test_no_gpu(host: Path):
    assert devices.visible_gpus(str(host), {}) == 0
    assert devices.visible_gpus(str(host), {"CUDA_VISIBLE_DEVICES": "0"}) == 0
    assert devices.visible_gpus(str(host), {"CUDA_VISIBLE_DEVICES": "GPU-8a3c"}) == 0


def test_gpus_that_nobody_has_used_since_boot(host: Path):
    for bus in ("0000:17:00.0", "0000:65:00.0"):
        (host / "proc/driver/nvidia/gpus" / bus).mkdir(parents=True)
    assert devices.visible_gpus(str(host), {}) == 2


def test_xpus_are_intel_render_nodes(host: Path):
    add_cards(host, "0x8086", "0x10de", "0x8086")
    assert devices.visible_xpus(str(host), {}) == 2
    assert devices.visible_xpus(str(host), {"ZE_AFFINITY_MASK": "1"}) == 1
    assert devices.visible_xpus(str(host / "dev"), {}) == 0


def add_kfd_nodes(host: Path, *simd_counts: int) -> None:
    for index, count in enumerate(simd_counts):
        node = host / "sys/class/kfd/kfd/topology/nodes" / str(index)
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count {0 if count else 64}\nsimd_count {count}\nname gfx942\n")


@pytest.mark.parametrize(
    ("environ", "visible"),
    [
        ({}, 4),
        ({"HIP_VISIBLE_DEVICES": "0,3"}, 2),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "1"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "0,2"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "GPU-2c1d"}, 1),
        ({"HIP_VISIBLE_DEVICES": "-1"}, 0),
    ],
)
def test_p40_amd_gpus_are_nodes_with_simd_units(host: Path, environ: dict[str, str], visible: int):
    """A processor is a node too, and one whose properties are closed to this container is not ours."""
    add_kfd_nodes(host, 0, 304, 304, 304, 0, 304)
    (host / "sys/class/kfd/kfd/topology/nodes/6").mkdir()
    assert devices.visible_amd_gpus(str(host), environ) == visible


def add_accelerator(host: Path, index: int, device_node: str, vendor: str, driver: str) -> None:
    device = host / "sys/class/accel" / f"accel{index}" / "device"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "driver").symlink_to(f"../../bus/pci/drivers/{driver}")
    if device_node:
        (host / device_node).parent.mkdir(exist_ok=True)
        (host / device_node).touch()


def test_p40_gaudis_have_their_driver_and_a_device_node(host: Path):
    for index in range(4):
        add_accelerator(host, index, f"dev/accel/accel{index}", "0x1da3", "habanalabs")
    add_accelerator(host, 4, "dev/accel/accel4", "0x8086", "intel_vpu")
    add_accelerator(host, 5, "", "0x1da3", "habanalabs")
    (host / "dev/accel/accel_controlD0").touch()
    assert devices.visible_gaudis(str(host), {}) == 4
    assert devices.visible_gaudis(str(host), {"HABANA_VISIBLE_MODULES": "0,1"}) == 2
    assert devices.visible_tpus(str(host), {}) == 0


def test_p40_ascend_npus_are_device_nodes(host: Path):
    for name in ("davinci0", "davinci1", "davinci10", "davinci_manager"):
        (host / "dev" / name).touch()
    assert devices.visible_npus(str(host), {}) == 3
    assert devices.visible_npus(str(host), {"ASCEND_RT_VISIBLE_DEVICES": "2"}) == 1


def test_p40_tpus_have_device_nodes_of_their_own(host: Path):
    for index in range(4):
        add_accelerator(host, index, f"dev/accel{index}", "0x1ae0", "apex")
    add_accelerator(host, 4, "dev/accel4", "0x8086", "other")
    assert devices.visible_tpus(str(host), {}) == 4
    assert devices.visible_tpus(str(host), {"TPU_VISIBLE_CHIPS": "0"}) == 1
    assert devices.visible_gaudis(str(host), {}) == 0


def test_p40_tpus_that_are_passed_through(host: Path):
    (host / "dev/vfio").mkdir()
    for group, vendor in enumerate(("0x1ae0", "0x10de", "0x1ae0")):
        device = host / f"sys/kernel/iommu_groups/{group}/devices/0000:00:0{group}.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor)
        (host / "dev/vfio" / str(group)).touch()
    (host / "dev/vfio/vfio").touch()
    assert devices.visible_tpus(str(host), {}) == 2


@pytest.mark.parametrize(
    ("kinds", "workers"),
    [
        (("visible_gpus", "visible_amd_gpus"), {"auto": 2, "gpu": 2}),
        (("visible_amd_gpus", "visible_gaudis"), {"auto": 3, "gpu": 3}),
        (("visible_gaudis", "visible_npus"), {"auto": 4}),
        (("visible_npus", "visible_tpus"), {"auto": 5}),
        (("visible_tpus",), {"auto": 6}),
        (("visible_xpus",), {"auto": 9, "xpu": 7}),
    ],
)
def test_p40_which_devices_auto_and_gpu_mean(monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...], workers: dict[str, int]):
    counts = {
        "visible_gpus": 2,
        "visible_amd_gpus": 3,
        "visible_gaudis": 4,
        "visible_npus": 5,
        "visible_tpus": 6,
        "visible_xpus": 7,
    }
    for name, count in counts.items():
        monkeypatch.setattr(devices, name, lambda count=count if name in kinds else 0: count)
    monkeypatch.setattr(devices, "allowed_cpus", lambda: 9)
    monkeypatch.setattr(devices, "imported_torch", lambda: None)  # which a test before this one may have imported
    assert {asked: devices.determine_local_world_size(asked) for asked in workers} == workers


def test_p40_masks_on_a_machine_of_amd(host: Path):
    assert devices.mask_variables(str(host)) == ("CUDA_VISIBLE_DEVICES",)
    add_kfd_nodes(host, 0, 304)
    assert devices.mask_variables(str(host)) == ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    add_gpus(host, 1)
    assert devices.mask_variables(str(host)) == ("CUDA_VISIBLE_DEVICES",)


def test_cpus_are_those_that_may_be_used():
    assert devices.determine_local_world_size("cpu") == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("gpus", "workers"), [(3, 3), (0, 5)])
def test_auto_prefers_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int, workers: int):
    monkeypatch.setattr(devices, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(devices, "allowed_cpus", lambda: 5)
    monkeypatch.setattr(devices, "imported_torch", lambda: None)
    assert devices.determine_local_world_size("auto") == workers


@pytest.mark.parametrize(("asked", "workers"), [("1", 1), (" 8 ", 8), (4, 4)])
def test_numbers(asked: str, workers: int):
    assert devices.determine_local_world_size(asked) == workers


@pytest.mark.parametrize(("asked", "words"), [
    ("many", "auto, cpu, gpu, xpu"), ("", "auto, cpu, gpu, xpu"), ("1.5", "'1.5'"),
])  # fmt: skip
def test_what_is_no_number_of_workers_is_refused(asked: str, words: str):
    with pytest.raises(UsageError, match=words):
        devices.determine_local_world_size(asked)


def test_no_visible_gpu_is_explained(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "visible_gpus", lambda: 0)
    with pytest.raises(UsageError, match="driver shows none"):
        devices.determine_local_world_size("gpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES is '-1'"):
        devices.determine_local_world_size("gpu")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "9")
    with pytest.raises(UsageError, match="HIP_VISIBLE_DEVICES is '9'"):
        devices.determine_local_world_size("gpu")


def fake_devices(count: int) -> SimpleNamespace:
    return SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count)


def test_an_imported_torch_is_asked(monkeypatch: pytest.MonkeyPatch):
    torch = SimpleNamespace(cuda=fake_devices(2), xpu=fake_devices(3), accelerator=fake_devices(4))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert [devices.determine_local_world_size(kind) for kind in ("gpu", "xpu", "auto")] == [2, 3, 4]


def test_an_imported_torch_without_devices(monkeypatch: pytest.MonkeyPatch):
    torch = SimpleNamespace(cuda=fake_devices(0), xpu=fake_devices(0), accelerator=fake_devices(0))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert devices.determine_local_world_size("auto") == devices.allowed_cpus()
    with pytest.raises(UsageError, match="no gpu"):
        devices.determine_local_world_size("gpu")
