"""Who sits where: ranks are kept, hints are honoured, and everything adds up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.protocol.generation import Node, Seated, arrange, natural, preferred, seats
from rallypoint.protocol.job_records import NodeRecord


def node(
    node_id: str,
    arrival: int = 0,
    *,
    name: str = "",
    hint: int = -1,
    explicit: bool = False,
    workers: int = 1,
    role: str = "default",
) -> Node:
    return Node(node_id, NodeRecord(name or node_id, "10.0.0.1", 1, role, workers, 0, hint, explicit), arrival, since=0.0)


def order(chosen: list[Node], before: dict[str, Seated] | None = None) -> list[str]:
    return [one.id for one in arrange(chosen, before or {})]


def sat(**ranks: int) -> dict[str, Seated]:
    return {name: Seated(name, rank) for name, rank in ranks.items()}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["node10", "node2", "node1"], ["node1", "node2", "node10"]),
        (["b", "a", "c"], ["a", "b", "c"]),
        (["rack2-1", "rack1-10", "rack1-9"], ["rack1-9", "rack1-10", "rack2-1"]),
        (["10.0.0.10", "10.0.0.9"], ["10.0.0.9", "10.0.0.10"]),
    ],
)
def test_names_are_in_natural_order(names: list[str], expected: list[str]) -> None:
    """P27: node2 comes before node10."""
    assert sorted(names, key=natural) == expected
    assert order([node(name, at) for at, name in enumerate(names)]) == expected


@pytest.mark.parametrize(
    ("chosen", "before", "expected"),
    [
        pytest.param([node("c"), node("a"), node("b")], sat(a=2, b=1, c=0), ["c", "b", "a"], id="ranks are kept"),
        pytest.param([node("a"), node("c")], sat(a=0, b=1, c=2), ["a", "c"], id="a rank that is no more is given up"),
        pytest.param([node("x"), node("c")], sat(a=0, b=1, c=1), ["x", "c"], id="a newcomer fills the gap"),
        pytest.param(
            [node("c"), node("new", name="a"), node("b")], sat(a=0, b=1, c=2), ["new", "b", "c"], id="a name takes its old rank"
        ),
        pytest.param(
            [node("a"), node("new", name="a")], sat(a=0), ["a", "new"], id="a name whose process lives takes nothing from it"
        ),
        pytest.param([node("a", hint=1), node("b", hint=0)], {}, ["b", "a"], id="hints that were found"),
        pytest.param([node("a", hint=7), node("b", hint=3)], {}, ["b", "a"], id="hints beyond the world still order"),
        pytest.param([node("a"), node("b", hint=0)], sat(a=0), ["a", "b"], id="a found hint does not drive a member away"),
        pytest.param(
            [node("a"), node("b", hint=0, explicit=True)], sat(a=0), ["b", "a"], id="an explicit hint does, as its owner said so"
        ),
        pytest.param([node("z", 1), node("a", 2)], {}, ["a", "z"], id="by name, not by arrival"),
    ],
)
def test_everybody_gets_the_place_that_is_theirs(chosen: list[Node], before: dict[str, Seated], expected: list[str]) -> None:
    """P27: ranks are kept where the node is still there, and hints are honoured."""
    assert order(chosen, before) == expected


def test_members_come_first_when_there_is_no_room_for_all() -> None:
    """P26: whoever is beyond the most waits, in the order of arrival; a member is not driven out by a joiner."""
    candidates = [node("new", 1), node("hinted", 9, hint=5, explicit=True), node("b", 8), node("newer", 2), node("a", 7)]
    assert [one.id for one in preferred(candidates, sat(a=1, b=0))] == ["b", "a", "hinted", "new", "newer"]


def test_uneven_workers_and_roles() -> None:
    """P41: 2 + 3 + 3 workers make a world of 8 with right ranks, in the world and in each role."""
    chosen = [node("a", workers=2, role="t"), node("b", workers=3, role="r"), node("c", workers=3, role="t")]
    found = seats(4, 17, chosen)
    assert [(one.group_rank, one.first_rank, one.first_role_rank) for one in found.values()] == [(0, 0, 0), (1, 2, 0), (2, 5, 2)]
    assert [one.role_world_size for one in found.values()] == [5, 3, 5]
    assert {(one.generation, one.attempt, one.group_world_size, one.world_size) for one in found.values()} == {(4, 17, 3, 8)}


candidates = st.lists(
    st.builds(
        node,
        st.uuids().map(str),
        st.integers(0, 50),
        name=st.sampled_from([f"node{number}" for number in range(12)]),
        hint=st.integers(-1, 12),
        explicit=st.booleans(),
        workers=st.integers(1, 8),
        role=st.sampled_from(["default", "reader"]),
    ),
    max_size=10,
    unique_by=lambda one: one.id,
)


@st.composite
def meetings(draw: st.DrawFn) -> tuple[list[Node], dict[str, Seated]]:
    """Some nodes, and some seats of the last generation: theirs, and those of nodes that are gone."""
    chosen = draw(candidates)
    gone = draw(st.lists(st.uuids().map(str), max_size=5))
    before = draw(st.permutations([*(one.id for one in chosen), *gone]))[: draw(st.integers(0, 12))]
    names = {one.id: one.record.name for one in chosen}
    return chosen, {node_id: Seated(names.get(node_id, f"node{rank}"), rank) for rank, node_id in enumerate(before)}


@given(meetings())
def test_everybody_sits_exactly_once(meeting: tuple[list[Node], dict[str, Seated]]) -> None:
    chosen, before = meeting
    found = arrange(chosen, before)
    assert sorted(one.id for one in found) == sorted(one.id for one in chosen)


@given(meetings())
def test_members_keep_their_ranks_unless_somebody_insists(meeting: tuple[list[Node], dict[str, Seated]]) -> None:
    chosen, before = meeting
    wanted = {one.record.rank_hint for one in chosen if one.record.hint_is_explicit}
    for rank, one in enumerate(arrange(chosen, before)):
        old = before[one.id].group_rank if one.id in before else -1
        if 0 <= old < len(chosen) and old not in wanted and not one.record.hint_is_explicit:
            assert rank == old


@given(meetings())
def test_the_order_in_which_nodes_are_listed_changes_nothing_for_members(
    meeting: tuple[list[Node], dict[str, Seated]],
) -> None:
    """Two leaders that know the same draw up the same seats."""
    chosen, before = meeting
    chosen = [one.replace(arrival=at, record=one.record.replace(hint_is_explicit=False)) for at, one in enumerate(chosen)]
    forward, backward = preferred(chosen, before), preferred(reversed(chosen), before)
    assert forward == backward
    assert arrange(forward, before) == arrange(backward, before)


@given(candidates)
def test_ranks_add_up(chosen: list[Node]) -> None:
    found = seats(1, 2, chosen)
    workers = {one.id: one.record for one in chosen}
    ranks = [rank for key, seat in found.items() for rank in range(seat.first_rank, seat.first_rank + workers[key].workers)]
    assert ranks == list(range(len(ranks)))
    assert all(seat.world_size == len(ranks) for seat in found.values())
    for role in ("default", "reader"):
        own = [
            rank
            for key, seat in found.items()
            if workers[key].role == role
            for rank in range(seat.first_role_rank, seat.first_role_rank + workers[key].workers)
        ]
        assert own == list(range(len(own)))
        assert all(seat.role_world_size == len(own) for key, seat in found.items() if workers[key].role == role)
