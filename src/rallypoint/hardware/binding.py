"""Which CPUs each worker gets: near its device, never outside of what this process may use.

A machine is a list of CPUs, each with its NUMA node, its socket, its physical core (which SMT siblings share) and its last-level
cache. First every worker is given a node: that of its device, or, for a worker without one, a node by an even spread over the
cores that workers with devices leave. Then the mode says what each worker gets of its node:

- ``node``: all of its CPUs;
- ``socket``: all CPUs of the socket, or sockets, that the node is part of;
- ``exclusive``: whole physical cores that no other worker has; what cannot be divided evenly goes to the first workers;
- ``core-complex``: the CPUs of one last-level cache, in turn.

Invariants: no worker gets a CPU that is not in the topology, and none gets no CPU at all; in ``exclusive`` no two workers have a
core in common; without devices, ``exclusive`` is refused only where there are fewer cores than workers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import accumulate

from rallypoint.base.records import Value
from rallypoint.base.text import many
from rallypoint.errors import UsageError

__all__ = ["AffinityMode", "Binding", "Cpu", "Device", "Plan", "Topology", "bind", "parse_cpus"]

_MOST_CPUS = 1 << 16  # more than any kernel can be built for
_FAR = 255  # what the kernel writes for a node that cannot be reached


class AffinityMode(str, Enum):
    """What a worker is bound to; the values are those of ``--numa-binding``."""

    NODE = "node"
    SOCKET = "socket"
    EXCLUSIVE = "exclusive"
    CORE_COMPLEX = "core-complex"


class Cpu(Value):
    """One logical CPU; its core and its cache are named by the lowest CPU that they belong to."""

    number: int
    node: int
    socket: int
    core: int
    cache: int


class Topology(Value):
    """The CPUs that may be used, and how far the nodes are from each other, as far as that is known."""

    cpus: tuple[Cpu, ...]
    distances: Mapping[int, Mapping[int, int]]


class Device(Value):
    """What a worker computes on, and the node that it is attached to, if that is known."""

    name: str
    node: int | None


class Binding(Value):
    local_rank: int
    cpus: tuple[int, ...]
    why: str


class Plan(Value):
    """The CPUs of every worker, by local rank, and what the user should know about them."""

    bindings: tuple[Binding, ...]
    notes: tuple[str, ...]


class _Place(Value):
    local_rank: int
    node: int
    reason: str


class _Share(Value):
    cpus: tuple[Cpu, ...]
    what: str


def bind(topology: Topology, mode: AffinityMode, devices: Sequence[Device | None]) -> Plan:
    """A plan for workers with these devices, in the order of their local ranks; UsageError where it cannot be had."""
    bindings: list[Binding] = []
    notes: list[str] = []
    places = _place(topology, devices)
    for node in sorted({place.node for place in places}):
        here = [place for place in places if place.node == node]
        for place, share in zip(here, _shares(topology, mode, node, here), strict=True):
            numbers = tuple(sorted(cpu.number for cpu in share.cpus))
            bindings.append(Binding(place.local_rank, numbers, f"{share.what}; {place.reason}"))
        if mode is AffinityMode.CORE_COMPLEX:
            notes += _cache_notes(topology, node, len(here))
    return Plan(tuple(sorted(bindings, key=lambda binding: binding.local_rank)), tuple(notes))


def parse_cpus(text: str) -> tuple[int, ...]:
    """The numbers in a list as the kernel writes it, such as ``0-3,8``; the inverse of `ranges`."""
    numbers: set[int] = set()
    for piece in filter(None, text.strip().split(",")):
        first, _, last = piece.partition("-")
        start, end = int(first), int(last or first)
        if not 0 <= start <= end < _MOST_CPUS:
            raise ValueError(f"{piece!r} is not a range of CPUs")
        numbers.update(range(start, end + 1))
    return tuple(sorted(numbers))


def _place(topology: Topology, devices: Sequence[Device | None]) -> list[_Place]:
    """The node of each worker, those with a device first."""
    settled, rest = [], []
    for rank, device in enumerate(devices):
        if device is not None and device.node is not None:
            settled.append(_beside(topology, rank, device.name, device.node))
        else:
            rest.append((rank, f"{device.name} names no node" if device else "it has no device"))
    nodes = _spread(len(rest), _free_cores(topology, settled))
    spread = [
        _Place(rank, node, f"{why}, and such workers are spread over the nodes")
        for (rank, why), node in zip(rest, nodes, strict=True)
    ]
    return settled + spread


def _beside(topology: Topology, rank: int, name: str, node: int) -> _Place:
    usable = {cpu.node for cpu in topology.cpus}
    if node in usable:
        return _Place(rank, node, f"{name} is on node {node}")
    distance = topology.distances.get(node, {})
    nearest = min(usable, key=lambda other: (distance.get(other, _FAR), other))
    return _Place(rank, nearest, f"{name} is on node {node}, which has no CPU that may be used; node {nearest} is the nearest")


def _free_cores(topology: Topology, settled: Sequence[_Place]) -> dict[int, int]:
    """For each node the cores that are left when each worker that is there already has one; all cores, if none is left."""
    cores = {node: len(_cores(_cpus_of(topology, node))) for node in sorted({cpu.node for cpu in topology.cpus})}
    free = {node: max(0, count - sum(place.node == node for place in settled)) for node, count in cores.items()}
    return free if any(free.values()) else cores


def _spread(workers: int, free: Mapping[int, int]) -> list[int]:
    """A node for each worker, in the order of the nodes, evenly over the cores; with enough of them none is met twice."""
    nodes, ends = list(free), list(accumulate(free.values()))
    return [nodes[bisect_right(ends, worker * ends[-1] // workers)] for worker in range(workers)]


def _shares(topology: Topology, mode: AffinityMode, node: int, workers: Sequence[_Place]) -> list[_Share]:
    """What each of the workers that are on one node gets, in their order."""
    cpus = _cpus_of(topology, node)
    match mode:
        case AffinityMode.NODE:
            return [_Share(cpus, f"all of node {node}")] * len(workers)
        case AffinityMode.SOCKET:
            return [_socket_share(topology, cpus)] * len(workers)
        case AffinityMode.EXCLUSIVE:
            return _exclusive_shares(node, cpus, workers)
        case AffinityMode.CORE_COMPLEX:
            return _cache_shares(node, cpus, len(workers))


def _socket_share(topology: Topology, cpus: Sequence[Cpu]) -> _Share:
    sockets = sorted({cpu.socket for cpu in cpus})
    names = " and ".join(map(str, sockets))
    return _Share(tuple(cpu for cpu in topology.cpus if cpu.socket in sockets), f"all of socket {names}")


def _exclusive_shares(node: int, cpus: Sequence[Cpu], workers: Sequence[_Place]) -> list[_Share]:
    cores = _cores(cpus)
    each, more = divmod(len(cores), len(workers))
    if not each:
        ranks = ", ".join(str(place.local_rank) for place in workers)
        raise UsageError(
            f"exclusive: {len(workers)} workers (local ranks {ranks}) belong to node {node}, which has"
            f" {many(len(cores), 'physical core')} that may be used;"
            " start fewer workers, allow more CPUs, or bind to the node instead"
        )
    ends = [each * (position + 1) + min(position + 1, more) for position in range(len(workers))]
    parts = [cores[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [
        _Share(tuple(cpu for core in part for cpu in core), f"{len(part)} of {len(cores)} cores of node {node}") for part in parts
    ]


def _cache_shares(node: int, cpus: Sequence[Cpu], workers: int) -> list[_Share]:
    """The fullest caches come first: of some, all CPUs but a few may be forbidden to us."""
    caches = _groups(cpus, "cache")
    fullest = sorted(range(len(caches)), key=lambda index: -len(_cores(caches[index])))
    chosen = [fullest[worker % len(caches)] for worker in range(workers)]
    return [_Share(caches[index], f"last-level cache {index + 1} of {len(caches)} of node {node}") for index in chosen]


def _cache_notes(topology: Topology, node: int, workers: int) -> list[str]:
    caches = len(_groups(_cpus_of(topology, node), "cache"))
    if caches == 1:
        return [f"core-complex: node {node} has one last-level cache, so that its workers are bound to all of its CPUs"]
    if workers > caches:
        return [f"core-complex: node {node} has {caches} last-level caches for {workers} workers, so that some share one"]
    return []


def _cpus_of(topology: Topology, node: int) -> tuple[Cpu, ...]:
    return tuple(cpu for cpu in topology.cpus if cpu.node == node)


def _cores(cpus: Sequence[Cpu]) -> list[tuple[Cpu, ...]]:
    """Physical cores, those of one cache beside each other."""
    return sorted(_groups(cpus, "core"), key=lambda core: (core[0].cache, core[0].number))


def _groups(cpus: Sequence[Cpu], what: str) -> list[tuple[Cpu, ...]]:
    """The CPUs that share a core or a cache, by the lowest number in each group."""
    found: dict[int, list[Cpu]] = {}
    for cpu in cpus:
        found.setdefault(getattr(cpu, what), []).append(cpu)
    return sorted((tuple(group) for group in found.values()), key=lambda group: group[0].number)
