"""Machines as trees of files: what the kernel of each kind of machine would show under its root."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rallypoint.base.text import ranges

OTHER_SOCKET_DISTANCE = 21
SAME_SOCKET_DISTANCE = 12


class Machine:
    """A root folder that is filled with CPUs, nodes and GPUs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def add_cpu(
        self, cpu: int, core: Sequence[int], socket: Sequence[int], socket_name: int, caches: dict[int, Sequence[int]]
    ) -> None:
        folder = f"sys/devices/system/cpu/cpu{cpu}"
        self.write(f"{folder}/topology/core_cpus_list", ranges(core))
        self.write(f"{folder}/topology/package_cpus_list", ranges(socket))
        self.write(f"{folder}/topology/physical_package_id", str(socket_name))
        # As on real machines, the first level is there twice, and the instructions' one comes after the data's.
        for index, (level, kind) in enumerate([(1, "Data"), (1, "Instruction"), *((level, "Unified") for level in caches)]):
            shared = core if level == 1 else caches[level]
            self.write(f"{folder}/cache/index{index}/level", str(level))
            self.write(f"{folder}/cache/index{index}/type", kind)
            self.write(f"{folder}/cache/index{index}/shared_cpu_list", ranges(shared))

    def set_online(self, cpus: Sequence[int]) -> None:
        self.write("sys/devices/system/cpu/online", ranges(cpus))

    def add_node(self, node: int, cpus: Sequence[int], distances: Sequence[int]) -> None:
        self.write(f"sys/devices/system/node/node{node}/cpulist", ranges(cpus))
        self.write(f"sys/devices/system/node/node{node}/distance", " ".join(map(str, distances)))
        self.write("sys/devices/system/node/has_cpu", "0")

    def add_nvidia(self, address: str, node: int, minor: int, uuid: str = "", has_device_node: bool = True) -> None:
        facts = f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 300\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}"
        self.write(f"proc/driver/nvidia/gpus/{address}/information", facts)
        self.write(f"sys/bus/pci/devices/{address}/numa_node", str(node))
        if has_device_node:
            self.write(f"dev/nvidia{minor}", "")

    def add_amd(self, kfd_node: int, address: str, node: int, unique_id: int = 0) -> None:
        domain, bus, rest = address.split(":")
        device, function = rest.split(".")
        place = int(bus, 16) << 8 | int(device, 16) << 3 | int(function)
        facts = f"cpu_cores_count 0\nsimd_count 304\ndomain {int(domain, 16)}\nlocation_id {place}\nunique_id {unique_id}"
        self.write(f"sys/class/kfd/kfd/topology/nodes/{kfd_node}/properties", facts)
        self.write(f"sys/bus/pci/devices/{address}/numa_node", str(node))

    def add_kfd_cpu(self, kfd_node: int) -> None:
        self.write(f"sys/class/kfd/kfd/topology/nodes/{kfd_node}/properties", "cpu_cores_count 16\nsimd_count 0")

    def add_drm(self, minor: int, vendor: str, address: str, node: int) -> None:
        self.write(f"sys/bus/pci/devices/{address}/numa_node", str(node))
        self.write(f"sys/bus/pci/devices/{address}/vendor", vendor)
        card = self.root / f"sys/class/drm/renderD{minor}"
        card.mkdir(parents=True)
        (card / "device").symlink_to(self.root / f"sys/bus/pci/devices/{address}")


def laptop(root: Path) -> Machine:
    """One node, four cores with two threads each, siblings side by side: 0 1, 2 3, 4 5, 6 7."""
    machine = Machine(root)
    everyone = range(8)
    for cpu in everyone:
        core = [cpu & ~1, cpu | 1]
        machine.add_cpu(cpu, core, everyone, 0, {2: core, 3: everyone})
    machine.set_online(everyone)
    machine.add_node(0, everyone, [10])
    return machine


def dgx(root: Path) -> Machine:
    """Two sockets of two nodes, eight cores in each, SMT siblings 32 further on, and eight NVIDIA GPUs, two to a node."""
    machine = Machine(root)
    for cpu in range(64):
        node = cpu % 32 // 8
        socket = [one for one in range(64) if one % 32 // 16 == node // 2]
        core = [cpu % 32, cpu % 32 + 32]
        machine.add_cpu(cpu, core, socket, node // 2, {2: core, 3: socket})
    machine.set_online(range(64))
    for node in range(4):
        cpus = [cpu for cpu in range(64) if cpu % 32 // 8 == node]
        distances = [
            10 if other == node else SAME_SOCKET_DISTANCE if other // 2 == node // 2 else OTHER_SOCKET_DISTANCE
            for other in range(4)
        ]
        machine.add_node(node, cpus, distances)
    # The numbers of the device nodes do not follow the bus, as on some boards.
    for gpu, (bus, node) in enumerate([("0f", 1), ("18", 1), ("45", 0), ("4e", 0), ("86", 3), ("90", 3), ("bc", 2), ("c7", 2)]):
        machine.add_nvidia(f"0000:{bus}:00.0", node, minor=gpu ^ 1, uuid=f"GPU-{gpu}{gpu}aa")
    return machine


def epyc(root: Path) -> Machine:
    """Two sockets, a node each, with four last-level caches of four cores, no SMT, and four AMD GPUs, two to a node."""
    machine = Machine(root)
    for cpu in range(32):
        socket = range(16) if cpu < 16 else range(16, 32)
        complex_ = range(cpu // 4 * 4, cpu // 4 * 4 + 4)
        machine.add_cpu(cpu, [cpu], socket, cpu // 16, {2: [cpu], 3: complex_})
    machine.set_online(range(32))
    machine.add_node(0, range(16), [10, 32])
    machine.add_node(1, range(16, 32), [32, 10])
    machine.add_kfd_cpu(0)
    machine.add_kfd_cpu(1)
    for gpu, (address, node) in enumerate([("0000:c1:00.0", 1), ("0000:c6:00.0", 1), ("0001:23:00.0", 0), ("0001:26:00.0", 0)]):
        machine.add_amd(gpu + 2, address, node, unique_id=0xABC0 + gpu)
    return machine


def hybrid(root: Path) -> Machine:
    """Two fast cores with SMT, 0 1 and 2 3; a hole, as SMT was switched off on a third; four slow ones, 8 to 11, with one L2."""
    machine = Machine(root)
    present = [0, 1, 2, 3, 4, 8, 9, 10, 11]
    for cpu in present:
        core = [cpu & ~1, cpu | 1] if cpu < 4 else [cpu]
        l2 = range(8, 12) if cpu >= 8 else core
        machine.add_cpu(cpu, core, present, 0, {2: l2, 3: present})
    machine.set_online(present)
    machine.add_node(0, present, [10])
    return machine
