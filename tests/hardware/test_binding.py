"""Which CPUs each worker gets: the rules, on any machine that hypothesis can think of."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.base.text import ranges
from rallypoint.errors import UsageError
from rallypoint.hardware.binding import AffinityMode, Cpu, Device, Topology, bind, parse_cpus

cpu_sets = st.sets(st.integers(0, 400), min_size=1, max_size=40)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Machines whose sockets have nodes, whose nodes have caches, whose caches have cores, of which some CPUs may be used."""
    threads, cores, caches, nodes, sockets = (draw(st.integers(1, most)) for most in (2, 3, 3, 2, 2))
    total_cores = cores * caches * nodes * sockets
    everyone = []
    for core in range(total_cores):
        cache, node = core // cores, core // (cores * caches)
        first_in_cache = cache * cores
        for thread in range(threads):
            everyone.append(Cpu(core + thread * total_cores, node, node // nodes, core, first_in_cache))
    kept = draw(st.sets(st.sampled_from(range(len(everyone))), min_size=1))
    cpus = sorted((everyone[index] for index in kept), key=lambda cpu: cpu.number)
    return Topology(tuple(cpus), {})


devices = st.lists(
    st.one_of(st.none(), st.builds(Device, st.just("GPU"), st.one_of(st.none(), st.integers(0, 5)))), min_size=1, max_size=8
)
modes = st.sampled_from(AffinityMode)


@settings(deadline=None)
@given(topologies(), modes, devices)
def test_every_worker_gets_some_of_the_cpus_that_may_be_used(
    topology: Topology, mode: AffinityMode, own: list[Device | None]
) -> None:
    try:
        plan = bind(topology, mode, own)
    except UsageError:
        assert mode is AffinityMode.EXCLUSIVE
        return
    usable = {cpu.number for cpu in topology.cpus}
    assert [binding.local_rank for binding in plan.bindings] == list(range(len(own)))
    for binding in plan.bindings:
        assert binding.cpus
        assert set(binding.cpus) <= usable
        assert list(binding.cpus) == sorted(set(binding.cpus))
        assert binding.why
    assert bind(topology, mode, own) == plan


@settings(deadline=None)
@given(topologies(), modes, devices)
def test_a_device_draws_its_worker_to_its_node(topology: Topology, mode: AffinityMode, own: list[Device | None]) -> None:
    if mode in (AffinityMode.EXCLUSIVE, AffinityMode.SOCKET):
        mode = AffinityMode.NODE
    node_of = {cpu.number: cpu.node for cpu in topology.cpus}
    for device, binding in zip(own, bind(topology, mode, own).bindings, strict=True):
        nodes = {node_of[cpu] for cpu in binding.cpus}
        assert len(nodes) == 1
        if device is not None and device.node in node_of.values():
            assert nodes == {device.node}


@settings(deadline=None)
@given(topologies(), st.integers(1, 30))
def test_exclusive_without_devices_needs_no_more_than_a_core_for_each(topology: Topology, workers: int) -> None:
    core_of = {cpu.number: cpu.core for cpu in topology.cpus}
    cores = len(set(core_of.values()))
    if workers > cores:
        with pytest.raises(UsageError, match="physical core"):
            bind(topology, AffinityMode.EXCLUSIVE, [None] * workers)
        return
    plan = bind(topology, AffinityMode.EXCLUSIVE, [None] * workers)
    shares = [{core_of[cpu] for cpu in binding.cpus} for binding in plan.bindings]
    assert sum(map(len, shares)) == len(set().union(*shares))
    assert all(
        cpu in plan.bindings[rank].cpus for rank, share in enumerate(shares) for cpu, core in core_of.items() if core in share
    )
    if workers >= len({cpu.node for cpu in topology.cpus}) and len(topology.cpus) == len(core_of):
        sizes_by_node = {}
        node_of = {cpu.number: cpu.node for cpu in topology.cpus}
        for binding, share in zip(plan.bindings, shares, strict=True):
            sizes_by_node.setdefault(node_of[binding.cpus[0]], []).append(len(share))
        assert all(max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True) for sizes in sizes_by_node.values())


@settings(deadline=None)
@given(topologies(), st.integers(1, 12))
def test_workers_without_a_device_stand_in_the_order_of_the_nodes(topology: Topology, workers: int) -> None:
    node_of = {cpu.number: cpu.node for cpu in topology.cpus}
    nodes = [node_of[binding.cpus[0]] for binding in bind(topology, AffinityMode.NODE, [None] * workers).bindings]
    assert nodes == sorted(nodes)


@settings(deadline=None)
@given(topologies(), devices)
def test_a_socket_holds_the_node_and_the_node_the_cache(topology: Topology, own: list[Device | None]) -> None:
    socket, node, cache = (
        [set(binding.cpus) for binding in bind(topology, mode, own).bindings]
        for mode in (AffinityMode.SOCKET, AffinityMode.NODE, AffinityMode.CORE_COMPLEX)
    )
    assert all(c <= n <= s for c, n, s in zip(cache, node, socket, strict=True))


@given(cpu_sets)
def test_lists_of_cpus_are_written_and_read(cpus: set[int]) -> None:
    assert parse_cpus(ranges(cpus)) == tuple(sorted(cpus))


@pytest.mark.parametrize(("text", "cpus"), [("", ()), ("0", (0,)), ("0-2,5\n", (0, 1, 2, 5)), ("5,0-1", (0, 1, 5))])
def test_lists_as_the_kernel_writes_them(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["a", "3-1", "-1", "0-99999999", "1-2-3", "0;1"])
def test_what_is_no_list_of_cpus(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_cpus(text)


def test_a_node_over_two_sockets_takes_both() -> None:
    """Firmware can hide the nodes of a machine; then a socket cannot be told from the whole."""
    topology = Topology(tuple(Cpu(number, 0, number // 2, number, number // 2 * 2) for number in range(4)), {})
    (binding,) = bind(topology, AffinityMode.SOCKET, [None]).bindings
    assert binding.cpus == (0, 1, 2, 3)
    assert binding.why.startswith("all of socket 0 and 1; ")


def test_the_nearest_node_is_taken_where_the_devices_own_has_no_cpus() -> None:
    topology = Topology(tuple(Cpu(number, number, 0, number, 0) for number in range(3)), {7: {0: 30, 1: 20, 2: 20}})
    assert bind(topology, AffinityMode.NODE, [Device("GPU", 7)]).bindings[0].cpus == (1,)
    assert bind(topology, AffinityMode.NODE, [Device("GPU", 9)]).bindings[0].cpus == (0,)
