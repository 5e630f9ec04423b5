"""How busy GPUs are, from a library that answers as NVIDIA's does."""

from __future__ import annotations

import ctypes
from typing import Any

from rallypoint.hardware import gpu_use
from rallypoint.hardware.gpu_use import GpuMeter

GIB = 1 << 30


class Library:
    """Devices with their use, and the memory of each process on them; None for one that cannot be read."""

    def __init__(self, devices: list[tuple[int | None, dict[int, int]]], init: int = 0) -> None:
        self._devices, self._init = devices, init

    def nvmlInit_v2(self) -> int:
        return self._init

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self._devices)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, device: Any) -> int:
        device._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetUtilizationRates(self, device: ctypes.c_void_p, use: Any) -> int:
        percent = self._devices[(device.value or 0) - 1][0]
        if percent is None:
            return 3
        use._obj.gpu = percent
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: ctypes.c_void_p, count: Any, found: Any) -> int:
        processes = self._devices[(device.value or 0) - 1][1]
        count._obj.value = len(processes)
        for index, (pid, size) in enumerate(processes.items()):
            found[index].pid, found[index].used_bytes = pid, size
        return 0


def test_each_process_has_the_use_of_its_devices_and_its_own_memory() -> None:
    library = Library([(80, {7: GIB, 8: 2 * GIB}), (40, {7: GIB}), (None, {9: GIB}), (5, {6: gpu_use.UNKNOWN_MEMORY})])
    assert GpuMeter(library).read() == {7: (60.0, 2 * GIB), 8: (80.0, 2 * GIB), 6: (5.0, 0)}


def test_the_memory_of_some_processes_is_that_on_all_devices() -> None:
    library = Library([(80, {7: GIB, 8: 2 * GIB}), (40, {7: GIB, 6: gpu_use.UNKNOWN_MEMORY}), (None, {9: GIB})])
    for pids, size in (({7}, 2 * GIB), ({7, 9}, 3 * GIB), ({6}, 0), ({1}, 0), (set[int](), 0)):
        assert GpuMeter(library).memory_of(pids) == size


def test_a_driver_that_does_not_answer_has_no_devices() -> None:
    assert GpuMeter(Library([(80, {7: GIB})], init=9)).read() == {}


def test_without_the_library_there_is_nothing_to_read(monkeypatch: Any) -> None:
    monkeypatch.setattr(gpu_use, "LIBRARY", "libno-such-thing.so.1")
    assert GpuMeter().read() == {}
