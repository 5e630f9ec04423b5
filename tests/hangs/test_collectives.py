"""Which rank never came to the collective in which the others wait: from what NCCL has recorded, on a real GPU and by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.hangs.collectives import Group, Taken, absence, groups_of_dumps, groups_of_ras, told
from rallypoint.hangs.nccl import read_dump

# Four processes with torch 2.11 and NCCL 2.28 on an H200: two groups of two, all in step, until rank 3 went elsewhere.
RECORDED = Path(__file__).parent / "recorded"
PIDS = {428: 0, 429: 1, 430: 2, 431: 3}


def dumps(*ranks: int) -> dict[int, Any]:
    return {rank: read_dump(str(RECORDED / f"nccl_trace_rank_{rank}")) for rank in ranks}


def ras() -> Any:
    return json.loads((RECORDED / "ras.json").read_text())


def test_the_dumps_of_a_real_hang_name_the_rank_that_never_came() -> None:
    groups = groups_of_dumps(dumps(0, 1, 2, 3))
    found = absence(groups)
    assert found is not None
    assert found.ranks == (3,)
    group = "process group 0 (default_pg) of ranks 0-3"
    assert found.why == f"never came to collective 6 (all_reduce) of {group}, in which ranks 0-2 wait (NCCL)"
    assert told(groups) == [
        f"{group}:",
        "  ranks 0-2: collective 6 (all_reduce, scheduled)",
        "  rank 3: collective 5 (all_reduce, completed)",
    ]


def test_dumps_of_ranks_that_are_equally_far_blame_nobody() -> None:
    """As on a node on which all wait for a rank of another."""
    assert absence(groups_of_dumps(dumps(0, 1))) is None
    assert told(groups_of_dumps(dumps(0, 1))) == []


def test_the_ras_service_of_a_real_hang_names_the_rank_that_never_came() -> None:
    found = absence(groups_of_ras(ras(), PIDS, 4))
    assert found is not None
    assert found.ranks == (3,)
    communicator = "communicator 0x3f98a01e602938b8"
    assert found.why == f"never came to collective 6 (AllReduce) of {communicator}, in which ranks 0-2 wait (NCCL)"


def test_ranks_of_other_nodes_are_known_by_the_communicator_of_all() -> None:
    """A node that has only the processes of ranks 0 and 1 names rank 3, and calls it so."""
    found = absence(groups_of_ras(ras(), {428: 0, 429: 1}, 4))
    assert found is not None
    assert found.ranks == (3,)


def test_where_no_communicator_has_all_ranks_only_our_own_are_told() -> None:
    groups = groups_of_ras(ras(), {428: 10, 429: 11}, 16)
    assert {rank for group in groups for rank in group.taken} == {10, 11}
    assert absence(groups) is None


def test_the_job_of_somebody_else_at_the_same_port_is_none_of_ours() -> None:
    assert groups_of_ras(ras(), {1: 0, 2: 1}, 4) == ()


def pending(count: int, what: str = "all_reduce") -> Taken:
    return Taken(count, what, "scheduled")


def done(count: int, what: str = "all_reduce") -> Taken:
    return Taken(count, what, "completed", is_done=True)


@pytest.mark.parametrize(
    ("groups", "ranks", "why"),
    [
        # Rank 1 is late for rank 0, as it waits in another group for rank 2, which waits for nobody.
        (
            [Group("a", {0: pending(4), 1: done(3)}), Group("b", {1: pending(9), 2: done(8)})],
            (2,),
            "never came to collective 9 (all_reduce) of b, in which rank 1 waits",
        ),
        # Two groups in two orders: each waits for the other.
        (
            [Group("a", {0: pending(4), 1: done(3)}), Group("b", {1: pending(9), 0: done(8)})],
            (0, 1),
            "they wait for each other",
        ),
        # It never called the first one.
        ([Group("a", {0: pending(1), 1: Taken(0, is_done=True)})], (1,), "never came to collective 1 (all_reduce) of a"),
        # One calls something else at the same place.
        (
            [Group("a", {0: pending(4), 1: pending(4), 2: pending(4, "broadcast")})],
            (2,),
            "calls broadcast as collective 4 of a, where ranks 0-1 call all_reduce",
        ),
    ],
)
def test_who_is_to_blame(groups: list[Group], ranks: tuple[int, ...], why: str) -> None:
    found = absence(groups)
    assert found is not None
    assert found.ranks == ranks
    assert found.why.startswith(why)


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [Group("a", {0: done(4), 1: done(3)})],  # nobody waits
        [Group("a", {0: pending(4), 1: pending(4)})],  # all are there: the network, or a rank that is not recorded
        [Group("a", {0: pending(4), 1: pending(4, "broadcast")})],  # one against one
    ],
)
def test_nothing_is_said_where_nothing_tells(groups: list[Group]) -> None:
    assert absence(groups) is None


JUNK: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.tuples(st.text(max_size=2), st.text(max_size=2)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from((
                "entries", "pg_config", "process_group", "collective_seq_id", "ranks", "communicators", "host", "pid", "rank",
                "collective_counts", "hash", "state",
            )),
            inner,
            max_size=6,
        )
    ),
    max_leaves=30,
)  # fmt: skip


@given(JUNK, JUNK)
def test_whatever_a_program_writes_is_borne(one: Any, another: Any) -> None:
    groups = [*groups_of_dumps({0: one, 1: another}), *groups_of_ras(one, {1: 0}, 2), *groups_of_ras(another, {}, 0)]
    absence(groups)
    told(groups)
