"""Ranks from membership: by table, and against a count that is too simple to be wrong."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.protocol.worker_plan import Member, WorkerRanks, assign_ranks

members = st.lists(st.builds(Member, st.sampled_from(["trainer", "reader", "ps"]), st.integers(1, 6)), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("nodes", "group_rank", "expected"),
    [
        ([Member("trainer", 1)], 0, [WorkerRanks(0, 0, 0, 1, 1)]),
        ([Member("trainer", 2)], 0, [WorkerRanks(0, 0, 0, 2, 2), WorkerRanks(1, 1, 1, 2, 2)]),
        ([Member("trainer", 2), Member("trainer", 1)], 1, [WorkerRanks(0, 2, 2, 3, 3)]),
        ([Member("reader", 2), Member("trainer", 1)], 1, [WorkerRanks(0, 2, 0, 3, 1)]),
        (
            [Member("reader", 1), Member("trainer", 2), Member("reader", 2)],
            2,
            [WorkerRanks(0, 3, 1, 5, 3), WorkerRanks(1, 4, 2, 5, 3)],
        ),
    ],
    ids=["alone", "two workers", "second of the role", "first of its role", "roles interleaved"],
)
def test_ranks(nodes: list[Member], group_rank: int, expected: list[WorkerRanks]) -> None:
    assert list(assign_ranks(nodes, group_rank)) == expected


def test_uneven_workers_make_one_world() -> None:
    """P41: 2+3+3 gives a world of 8 with right ranks."""
    nodes = [Member("default", count) for count in (2, 3, 3)]
    ranks = [[worker.global_rank for worker in assign_ranks(nodes, group_rank)] for group_rank in range(3)]
    assert ranks == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert {worker.world_size for group_rank in range(3) for worker in assign_ranks(nodes, group_rank)} == {8}


@settings(deadline=None)
@given(members)
def test_global_ranks_are_each_given_once_in_the_order_of_the_nodes(nodes: list[Member]) -> None:
    world = [worker for group_rank in range(len(nodes)) for worker in assign_ranks(nodes, group_rank)]
    assert [worker.global_rank for worker in world] == list(range(len(world)))
    assert {worker.world_size for worker in world} == {sum(node.local_world_size for node in nodes)}


@settings(deadline=None)
@given(members)
def test_role_ranks_are_each_given_once_within_the_role(nodes: list[Member]) -> None:
    sizes: Counter[str] = Counter()
    for node in nodes:
        sizes[node.role] += node.local_world_size
    given_so_far: Counter[str] = Counter()
    for group_rank, node in enumerate(nodes):
        for worker in assign_ranks(nodes, group_rank):
            assert worker.role_rank == given_so_far[node.role]
            assert worker.role_world_size == sizes[node.role]
            given_so_far[node.role] += 1
    assert given_so_far == sizes


@settings(deadline=None)
@given(members, st.data())
def test_the_ranks_of_one_node_are_contiguous(nodes: list[Member], data: st.DataObject) -> None:
    group_rank = data.draw(st.integers(0, len(nodes) - 1))
    ours = assign_ranks(nodes, group_rank)
    count = nodes[group_rank].local_world_size
    assert [worker.local_rank for worker in ours] == list(range(count))
    assert [worker.global_rank - ours[0].global_rank for worker in ours] == list(range(count))
    assert [worker.role_rank - ours[0].role_rank for worker in ours] == list(range(count))


@settings(deadline=None)
@given(members, st.data())
def test_what_another_role_is_called_changes_no_rank(nodes: list[Member], data: st.DataObject) -> None:
    group_rank = data.draw(st.integers(0, len(nodes) - 1))
    mine = nodes[group_rank].role
    renamed = [node if node.role == mine else node.replace(role=f"other {node.role}") for node in nodes]
    assert assign_ranks(renamed, group_rank) == assign_ranks(nodes, group_rank)
