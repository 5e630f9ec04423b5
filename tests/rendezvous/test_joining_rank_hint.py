"""Which rank a node asks for: given by the user, or found in a scheduler's variables; and the name that it keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.rendezvous.joining import RankHint, find_rank_hint, stable_name

SLURM = {"SLURM_NODEID": "3", "SLURM_JOB_NUM_NODES": "4"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "5"}


@pytest.mark.parametrize(("explicit", "environ", "hint"), [
    (None, {}, None),
    (0, {}, (0, "node_rank", True)),
    (7, {**SLURM, **KUBERNETES}, (7, "node_rank", True)),
    (None, SLURM, (3, "SLURM_NODEID", False)),
    (None, {"SLURM_NODEID": "3", "SLURM_NNODES": "4"}, (3, "SLURM_NODEID", False)),
    (None, {**SLURM, "SLURM_JOB_NUM_NODES": "1"}, None),
    (None, {"SLURM_NODEID": "3"}, None),
    (None, KUBERNETES, (5, "JOB_COMPLETION_INDEX", False)),
    (None, {**KUBERNETES, **SLURM, "SLURM_JOB_NUM_NODES": "1"}, (5, "JOB_COMPLETION_INDEX", False)),
    (None, {"JOB_COMPLETION_INDEX": ""}, None),
    (None, {"JOB_COMPLETION_INDEX": "-1"}, None),
    (None, {"JOB_COMPLETION_INDEX": "\u0661"}, None),
    (None, {"JOB_COMPLETION_INDEX": "9" * 30}, None),
])  # fmt: skip
def test_the_rank_that_is_asked_for(explicit: int | None, environ: dict[str, str], hint: tuple[int, str, bool] | None) -> None:
    """P27"""
    assert find_rank_hint(explicit, environ) == (hint and RankHint(*hint))


@given(st.text())
def test_a_strange_variable_is_no_hint_and_no_error(text: str) -> None:
    hint = find_rank_hint(None, {"JOB_COMPLETION_INDEX": text})
    assert hint is None or 0 <= hint.rank < 1_000_000


def test_the_name_stays_when_the_agent_is_started_anew() -> None:
    """P27: a rank that was given is a name; one that was found may move, so the machine's name is taken."""
    assert stable_name(find_rank_hint(3, {}), "host-7") == "rank3"
    assert stable_name(find_rank_hint(None, SLURM), "host-7") == "host-7"
    assert stable_name(None, "host-7") == "host-7"
