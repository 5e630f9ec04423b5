"""How busy the GPUs are that processes of this machine use, from NVIDIA's own library where its driver has brought it.

It is asked with ctypes: a call takes microseconds, where starting ``nvidia-smi`` takes a second on a large machine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["GpuMeter"]

LIBRARY = "libnvidia-ml.so.1"
MOST_DEVICES = 64
MOST_PROCESSES = 1024
UNKNOWN_MEMORY = (1 << 64) - 1  # what the library says where the driver does not tell


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class GpuMeter:
    """Reads all devices; where there is no such library, or no driver, there is nothing to read."""

    def __init__(self, library: Any = None) -> None:
        self._library = library if library is not None else _load()
        self._devices = self._find_devices() if self._library is not None else []

    def read(self) -> dict[int, tuple[float, int]]:
        """For each process how busy its devices are on average, in percent, whoever keeps them so; and its memory on them.

        In a container that has process ids of its own, the driver may know its processes by others.
        """
        shares: dict[int, list[float]] = {}
        sizes: dict[int, int] = {}
        for device in self._devices:
            use = _Utilization()
            if self._library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(use)):
                continue
            for pid, size in self._processes(device):
                shares.setdefault(pid, []).append(float(use.gpu))
                sizes[pid] = sizes.get(pid, 0) + size
        return {pid: (sum(found) / len(found), sizes[pid]) for pid, found in shares.items()}

    def memory_of(self, pids: Collection[int]) -> int:
        """What these processes have on all devices together, as far as the driver knows them by these ids."""
        return sum(size for device in self._devices for pid, size in self._processes(device) if pid in pids)

    def _find_devices(self) -> list[ctypes.c_void_p]:
        count, devices = ctypes.c_uint(), []
        if self._library.nvmlInit_v2() or self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        for index in range(min(count.value, MOST_DEVICES)):
            device = ctypes.c_void_p()
            if not self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
                devices.append(device)
        return devices

    def _processes(self, device: ctypes.c_void_p) -> list[tuple[int, int]]:
        count, found = ctypes.c_uint(MOST_PROCESSES), (_Process * MOST_PROCESSES)()
        if self._library.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), found):
            return []
        known = found[: min(count.value, MOST_PROCESSES)]
        return [(one.pid, 0 if one.used_bytes == UNKNOWN_MEMORY else one.used_bytes) for one in known]


def _load() -> Any:
    try:
        library = ctypes.CDLL(LIBRARY)
        return library if hasattr(library, "nvmlDeviceGetComputeRunningProcesses_v3") else None  # older ones have other records
    except OSError:
        return None
