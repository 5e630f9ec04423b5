"""What the kernel tells about this machine: its CPUs, and where its GPUs are attached.

Everything is read below a root folder, so that any machine can be described by a few files. What is not there, as in a container
or on a laptop, is taken for the simplest case: one NUMA node, one socket, a cache for each socket, a core for each CPU, and GPUs
of which nobody knows where they are. The list that stands in the folder of one CPU is believed for all that are in it; on a
machine with hundreds of CPUs that saves thousands of files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from rallypoint.base import defaults
from rallypoint.base.records import Value
from rallypoint.hardware import devices
from rallypoint.hardware.binding import Cpu, Device, Topology, parse_cpus
from rallypoint.hardware.devices import names_in, read_text

__all__ = ["read_topology", "worker_devices"]

_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"
_PCI = "sys/bus/pci/devices"


class _Found(Value):
    """A device that the driver lists, and the name by which a mask may call it."""

    device: Device
    uuid: str


class _Gpus(Value):
    """All GPUs of the kind that workers use here, in the order in which its library counts them, before any mask."""

    kind: str
    found: tuple[_Found, ...]


def read_topology(root: str = "/", allowed: Iterable[int] | None = None) -> Topology:
    """The CPUs that are online and allowed (not given: to this process), and the distances between the nodes."""
    usable = set(os.sched_getaffinity(0) if allowed is None else allowed)
    numbers = sorted(usable & set(_cpu_list(root, f"{_CPUS}/online"))) or sorted(usable)
    nodes = _nodes(root)
    node_of = {cpu: node for node, cpus in nodes.items() for cpu in cpus}
    core_of = _leaders(numbers, lambda cpu: _siblings(root, cpu, "core_cpus_list", "thread_siblings_list"))
    socket_of = _leaders(numbers, lambda cpu: _siblings(root, cpu, "package_cpus_list", "core_siblings_list") or numbers)
    first_of = {socket_of[cpu]: cpu for cpu in reversed(numbers)}  # a socket's lowest CPU may be offline, and tell nothing
    socket_names = {socket: _socket_name(root, cpu) for socket, cpu in first_of.items()}
    cache_of = _leaders(
        numbers, lambda cpu: _last_level_cache(root, cpu) or [one for one in numbers if socket_of[one] == socket_of[cpu]]
    )
    first_node = min(nodes, default=0)
    cpus = [Cpu(cpu, node_of.get(cpu, first_node), socket_names[socket_of[cpu]], core_of[cpu], cache_of[cpu]) for cpu in numbers]
    return Topology(tuple(cpus), {node: _distances(root, node, sorted(nodes)) for node in nodes})


def worker_devices(environs: Sequence[Mapping[str, str]], root: str = "/") -> list[Device | None]:
    """The GPU of each worker, given their environments in the order of local ranks.

    It is the one at its LOCAL_RANK among those that its environment lets it see.
    """
    gpus = _read_gpus(root)
    return [_device_of(gpus, rank, environ) for rank, environ in enumerate(environs)]


def _device_of(gpus: _Gpus, rank: int, environ: Mapping[str, str]) -> Device | None:
    visible = _visible(gpus, environ)
    index = environ.get(defaults.ENV_LOCAL_RANK, "")
    position = int(index) if index.isdecimal() else rank
    return visible[position].device if position < len(visible) else None


def _visible(gpus: _Gpus, environ: Mapping[str, str]) -> Sequence[_Found]:
    match gpus.kind:
        case "AMD":
            ours = _masked(gpus.found, environ.get(devices.ENV_ROCR_VISIBLE_DEVICES))
            return _masked(ours, devices.amd_mask(environ))
        case "Intel":
            return _masked(gpus.found, environ.get(defaults.ENV_ZE_AFFINITY_MASK) or None)
        case _:
            return _masked(gpus.found, environ.get(defaults.ENV_CUDA_VISIBLE_DEVICES))


def _masked(found: Sequence[_Found], mask: str | None) -> list[_Found]:
    return [_named(found, entry) for entry in devices.choose(mask, len(found))]


def _named(found: Sequence[_Found], entry: str) -> _Found:
    """The device that a mask means, by its number or by the beginning of its name; a part of a GPU may name the whole."""
    index = entry.partition(".")[0]
    if index.isdecimal():
        return found[int(index)]
    whole = entry.removeprefix("MIG-").partition("/")[0] if entry.startswith("MIG-GPU-") else entry
    meant = [one for one in found if one.uuid.lower().startswith(whole.lower())]
    return meant[0] if len(meant) == 1 else _Found(Device(f"the device {entry}", None), "")


def _read_gpus(root: str) -> _Gpus:
    """NVIDIA's, else AMD's, else Intel's: a card for the screen that stands beside a compute card is not what workers use."""
    for kind, read in (("NVIDIA", _nvidia_gpus), ("AMD", _amd_gpus)):
        if found := read(root):
            return _Gpus(kind, tuple(found))
    return _Gpus("Intel", tuple(_intel_gpus(root)))


def _nvidia_gpus(root: str) -> list[_Found]:
    """In the order of the bus, as CUDA counts equal ones; of those that the driver lists a container has but some."""
    minors = devices.nvidia_minors(root)
    found = []
    for address in sorted(names_in(root, devices.NVIDIA_GPUS), key=str.lower):
        lines = read_text(os.path.join(root, devices.NVIDIA_GPUS, address, "information")).splitlines()
        facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        minor = facts.get("Device Minor", "")
        if not (minors and minor.isdecimal() and int(minor) not in minors):
            found.append(_Found(_on_bus(root, "NVIDIA", address), facts.get("GPU UUID", "")))
    return found or [_Found(Device(f"NVIDIA GPU {minor}", None), "") for minor in minors]


def _amd_gpus(root: str) -> list[_Found]:
    found = []
    for node in devices.amd_nodes(root):
        place = node.get("location_id", 0)
        address = f"{node.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
        found.append(_Found(_on_bus(root, "AMD", address), f"GPU-{node.get('unique_id', 0):x}"))
    return found


def _intel_gpus(root: str) -> list[_Found]:
    addresses = [os.path.basename(os.path.realpath(os.path.join(card, "device"))) for card in devices.intel_cards(root)]
    return [_Found(_on_bus(root, "Intel", address), "") for address in sorted(addresses)]


def _on_bus(root: str, kind: str, address: str) -> Device:
    """A PCI device; firmware that does not know its node makes the kernel say -1."""
    node = read_text(os.path.join(root, _PCI, address.lower(), "numa_node"))
    return Device(f"{kind} GPU {address}", int(node) if node.isdecimal() else None)


def _nodes(root: str) -> dict[int, tuple[int, ...]]:
    names = [name.removeprefix("node") for name in names_in(root, _NODES) if name.startswith("node")]
    return {int(name): _cpu_list(root, f"{_NODES}/node{name}/cpulist") for name in names if name.isdecimal()}


def _distances(root: str, node: int, nodes: Sequence[int]) -> dict[int, int]:
    texts = read_text(os.path.join(root, _NODES, f"node{node}", "distance")).split()
    return dict(zip(nodes, map(int, texts), strict=True)) if len(texts) == len(nodes) and all(map(str.isdecimal, texts)) else {}


def _leaders(cpus: Sequence[int], siblings_of: Callable[[int], Sequence[int]]) -> dict[int, int]:
    """For each CPU the lowest one of its group, of which any member tells the others."""
    leaders: dict[int, int] = {}
    for cpu in cpus:
        if cpu not in leaders:
            group = {cpu, *siblings_of(cpu)}
            leaders.update(dict.fromkeys(group, min(group)))
    return leaders


def _siblings(root: str, cpu: int, name: str, older_name: str) -> tuple[int, ...]:
    folder = f"{_CPUS}/cpu{cpu}/topology"
    return _cpu_list(root, f"{folder}/{name}") or _cpu_list(root, f"{folder}/{older_name}")


def _socket_name(root: str, cpu: int) -> int:
    text = read_text(os.path.join(root, _CPUS, f"cpu{cpu}", "topology", "physical_package_id"))
    return int(text) if text.isdecimal() else 0


def _last_level_cache(root: str, cpu: int) -> tuple[int, ...]:
    """Those who share the cache of the highest level; a CPU may have fewer levels than its neighbours."""
    folder = f"{_CPUS}/cpu{cpu}/cache"
    levels = {}
    for index in names_in(root, folder):
        level = read_text(os.path.join(root, folder, index, "level"))
        if level.isdecimal() and read_text(os.path.join(root, folder, index, "type")) != "Instruction":
            levels[int(level)] = f"{folder}/{index}/shared_cpu_list"
    return _cpu_list(root, levels[max(levels)]) if levels else ()


def _cpu_list(root: str, path: str) -> tuple[int, ...]:
    try:
        return parse_cpus(read_text(os.path.join(root, path)))
    except ValueError:
        return ()
