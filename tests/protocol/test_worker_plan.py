"""Each worker's environment, arguments and prefix: the contract with programs that were written for torchrun."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.protocol.worker_plan import Group, WorkerRanks, plan_worker, substitute

GROUP = Group(
    role="trainer",
    group_rank=1,
    group_world_size=3,
    local_world_size=4,
    master_addr="10.0.0.1",
    master_port=29500,
    restart_count=2,
    generation=5,
    max_restarts=5,
    run_id="job-7",
    use_agent_store=False,
    signals_to_handle="SIGTERM,SIGINT",
    hostname="node17",
    prefix_template=None,
    virtual_local_rank=False,
    visible_devices=None,
    extra_env={},
    inherited={},
)
RANKS = WorkerRanks(local_rank=2, global_rank=6, role_rank=4, world_size=12, role_world_size=9)

ENVIRONMENT = {
    "LOCAL_RANK": "2",
    "RANK": "6",
    "GROUP_RANK": "1",
    "ROLE_RANK": "4",
    "ROLE_NAME": "trainer",
    "LOCAL_WORLD_SIZE": "4",
    "WORLD_SIZE": "12",
    "GROUP_WORLD_SIZE": "3",
    "ROLE_WORLD_SIZE": "9",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "RALLYPOINT_GENERATION": "5",
    "TORCHELASTIC_MAX_RESTARTS": "5",
    "TORCHELASTIC_RUN_ID": "job-7",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}


def environment(**changes: Any) -> dict[str, str]:
    return plan_worker(GROUP.replace(**changes), RANKS, []).env


# --- environment -----------------------------------------------------------------------------------------------------------


def test_a_worker_finds_exactly_these_variables() -> None:
    assert environment() == ENVIRONMENT


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_agent_store": True}, {"TORCHELASTIC_USE_AGENT_STORE": "True"}),
        ({"inherited": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}),
        ({"inherited": {"RANK": "77", "HOME": "/home/me"}}, {}),
        ({"extra_env": {"OMP_NUM_THREADS": "1"}}, {"OMP_NUM_THREADS": "1"}),
        ({"extra_env": {"MASTER_PORT": "1"}}, {"MASTER_PORT": "1"}),
        ({"visible_devices": "4,5,6,7"}, {}),
    ],
    ids=["agent store", "the user's own NCCL setting", "a launcher above us", "added", "laid over", "devices untouched"],
)
def test_what_changes_the_environment(changes: dict[str, Any], expected: dict[str, str]) -> None:
    assert environment(**changes) == {**ENVIRONMENT, **expected}


@pytest.mark.parametrize(
    ("visible", "device"),
    [(None, "2"), ("", "2"), ("4,5,6,7", "6"), ("GPU-a,GPU-b,GPU-c", "GPU-c"), ("3", "2")],
    ids=["unset", "empty", "numbers", "names", "fewer than workers"],
)
def test_a_virtual_local_rank_is_0_with_one_device_each(visible: str | None, device: str) -> None:
    env = environment(virtual_local_rank=True, visible_devices=visible)
    assert env == {**ENVIRONMENT, "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": device}


ranks = st.builds(WorkerRanks, *[st.integers(0, 10_000)] * 5)
texts = st.text(st.characters(exclude_characters="\0\n\r", exclude_categories=("Cs",)), max_size=20)
groups = st.builds(
    Group, texts, st.integers(0, 9), st.integers(1, 9), st.integers(1, 99), texts, st.integers(0, 65535), st.integers(0, 9),
    st.integers(1, 99), st.integers(0, 9), texts, st.booleans(), texts, texts, st.one_of(st.none(), texts), st.booleans(),
    st.one_of(st.none(), st.lists(st.integers(0, 7).map(str), max_size=4).map(",".join)),
    st.dictionaries(st.sampled_from(["A", "B", "OMP_NUM_THREADS"]), texts),
    st.dictionaries(st.sampled_from(["A", "RANK"]), texts),
)  # fmt: skip


@settings(deadline=None)
@given(groups, ranks)
def test_a_plan_holds_texts_only_and_all_names_of_the_contract(group: Group, one: WorkerRanks) -> None:
    env = plan_worker(group, one, []).env
    assert all(isinstance(name, str) and isinstance(value, str) for name, value in env.items())
    assert ENVIRONMENT.keys() <= env.keys()
    added = env.keys() - ENVIRONMENT.keys() - group.extra_env.keys()
    assert added == ({"CUDA_VISIBLE_DEVICES"} if group.virtual_local_rank else set())
    assert group.extra_env.items() <= env.items()


@settings(deadline=None)
@given(groups, st.integers(1, 5))
def test_workers_of_one_node_differ_only_in_their_ranks_and_devices(group: Group, count: int) -> None:
    plans = [plan_worker(group, WorkerRanks(local, 7 + local, 3 + local, 40, 20), ["x"]) for local in range(count)]
    own = {"LOCAL_RANK", "RANK", "ROLE_RANK", "CUDA_VISIBLE_DEVICES"}
    shared = [{name: value for name, value in plan.env.items() if name not in own} for plan in plans]
    assert all(one == shared[0] for one in shared)
    assert [plan.local_rank for plan in plans] == list(range(count))
    assert len({plan.env["RANK"] for plan in plans}) == count


# --- arguments -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], []),
        (["--device=${local_rank}"], ["--device=3"]),
        (["${local_rank}${local_rank}", "a"], ["33", "a"]),
        (["$local_rank", "${LOCAL_RANK}", "${rank}", "$${x}"], ["$local_rank", "${LOCAL_RANK}", "${rank}", "$${x}"]),
        ([3, None, b"${local_rank}", ["${local_rank}"]], [3, None, b"${local_rank}", ["${local_rank}"]]),
    ],
    ids=["none", "in a flag", "twice", "nothing else is a macro", "only text"],
)
def test_the_macro_in_arguments(args: list[Any], expected: list[Any]) -> None:
    assert substitute(args, 3) == expected
    assert plan_worker(GROUP, RANKS.replace(local_rank=3), args).args == tuple(expected)


def test_with_a_virtual_local_rank_the_macro_still_tells_workers_apart() -> None:
    group = GROUP.replace(virtual_local_rank=True)
    assert plan_worker(group, RANKS, ["${local_rank}"]).args == ("2",)


@settings(deadline=None)
@given(st.lists(st.one_of(texts.filter(lambda text: "${local_rank}" not in text), st.integers(), st.none())))
def test_arguments_without_the_macro_are_left_as_they_are(args: list[Any]) -> None:
    assert substitute(args, 1) == args


# --- prefix ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "prefix"),
    [
        (None, None),
        ("", ""),
        ("[${role_name}${local_rank}]:", "[trainer2]:"),
        ("${hostname}:${rank}/${local_rank}|", "node17:6/2|"),
        ("${unknown} $ 5% ${", "${unknown} $ 5% ${"),
    ],
    ids=["none", "empty", "role and local rank", "host and ranks", "what it does not know stays"],
)
def test_the_prefix_template(template: str | None, prefix: str | None) -> None:
    """P33: the prefix can name host, role and both ranks."""
    assert plan_worker(GROUP.replace(prefix_template=template), RANKS, []).prefix == prefix
