"""Which snapshots go where: whoever lacks one of the moment that all can have gets it from who has it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.checkpoint.moves import (
    Holding,
    Inventory,
    Plan,
    decode_inventory,
    decode_plan,
    encode,
    partner_of,
    plan_moves,
)


def node(ranks: tuple[int, ...], *holds: Holding) -> Inventory:
    return Inventory("10.0.0.1", 29400, "ab", ranks, holds)


@pytest.mark.parametrize(
    ("nodes", "plan"),
    [
        ([node((0,)), node((1,))], Plan(None, {})),
        ([node((0,), (0, 1, 5)), node((1,), (1, 1, 5))], Plan((1, 5), {})),
        ([node((0,), (0, 1, 5)), node((1,))], Plan(None, {})),
        ([node((0,), (0, 1, 5), (1, 1, 5)), node((1,))], Plan((1, 5), {1: (0,)})),
        ([node((0,)), node((1,), (0, 1, 5), (1, 1, 5))], Plan((1, 5), {0: (1,)})),
        ([node((0,), (0, 1, 5), (1, 1, 5)), node((1,), (1, 1, 6))], Plan((1, 5), {1: (0,)})),
        ([node((0,), (0, 1, 5), (0, 1, 6)), node((1,), (1, 1, 5), (1, 2, 6))], Plan((1, 5), {})),
        ([node((0,), (1, 1, 5)), node((1,), (0, 1, 5), (1, 1, 5))], Plan((1, 5), {0: (1,)})),
        ([node((2,), (0, 3, 7)), node((0,), (1, 3, 7)), node((1,), (2, 3, 7))], Plan((3, 7), {2: (2,), 0: (0,), 1: (1,)})),
        ([node((0,), (0, 1, 5)), node((1,), (9, 1, 5), (1, 1, 5))], Plan((1, 5), {})),
    ],
)
def test_a_plan(nodes: list[Inventory], plan: Plan) -> None:
    assert plan_moves(nodes) == plan


def test_everybody_has_a_partner_and_is_one() -> None:
    assert [partner_of(node, 3) for node in range(3)] == [1, 2, 0]
    assert [partner_of(node, 2) for node in range(2)] == [1, 0]
    assert partner_of(0, 1) is None


@given(st.integers(2, 6), st.integers(1, 3), st.data())
def test_whichever_node_is_lost_its_ranks_are_found(nodes: int, workers: int, data: st.DataObject) -> None:
    """Where every node has its own and its neighbour's, as the lines let it be when the step is saved for the second time."""
    ranks = [tuple(range(workers * one, workers * (one + 1))) for one in range(nodes)]
    lost = data.draw(st.integers(0, nodes - 1))
    places = data.draw(st.permutations(range(nodes)))
    holds = [[(rank, 1, 4) for owner in (one, (one - 1) % nodes) for rank in ranks[owner]] for one in range(nodes)]
    inventories = [node(ranks[place], *(holds[one] if one != lost else [])) for one, place in enumerate(places)]
    plan = plan_moves(inventories)
    assert plan.moment == (1, 4)
    for one in inventories:
        for rank in one.ranks:
            sources = [one] if rank not in plan.moves else [inventories[source] for source in plan.moves[rank]]
            assert all((rank, 1, 4) in source.holds for source in sources)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(-(2**40), 99), st.integers(0, 2**40))))
def test_what_is_told_is_read_as_it_was(holds: list[Holding]) -> None:
    told = node((0, 1), *holds)
    assert decode_inventory(encode(told)) == told
    plan = plan_moves([told, node((3,))])
    assert decode_plan(encode(plan)) == plan
    assert decode_plan(encode(Plan((2, 3), {4: (5, 6)}))) == Plan((2, 3), {4: (5, 6)})


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[" * 100_000, b'{"moment":1,"moves":[]}', b'{"moment":[1,"2"],"moves":[]}', b'{"moment":[1],"moves":[]}',
     b'{"moment":null,"moves":[[1]]}', b'{"moment":null,"moves":[[1,[-1]]]}', b'{"moment":[1,1e99],"moves":[]}', b"\xff"],
    ids=range(10),
)  # fmt: skip
def test_what_is_no_plan_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_plan(data)
    with pytest.raises(ValueError, match=r"."):
        decode_inventory(data)
