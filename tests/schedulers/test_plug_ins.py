"""Schedulers of a site's own, by entry points: what they say goes the way of what the built-in ones say."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from rallypoint.base import environment
from rallypoint.cli import arguments, command_line
from rallypoint.errors import UsageError
from rallypoint.schedulers import plug_ins

JOB = {"GRID_JOB": "17"}
Read = Callable[[Mapping[str, str]], Any]


class PlugIn:
    def __init__(self, name: str, read: Read) -> None:
        self.name, self.value, self._read = name, f"our_{name}:read", read

    def load(self) -> Read:
        return self._read


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> Callable[[Read], None]:
    """Makes this the plug-in ``grid`` of this process."""

    def install(read: Read) -> None:
        found = [PlugIn("grid", read)]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found if group == "rallypoint.schedulers" else [])

    return install


def taken(monkeypatch: pytest.MonkeyPatch, *flags: str) -> Any:
    monkeypatch.setattr(environment, "own", JOB)
    return arguments.with_scheduler(command_line.parse([*flags, "train.py"], JOB))


def test_what_it_says_is_taken_where_the_user_says_nothing(
    monkeypatch: pytest.MonkeyPatch, grid: Callable[[Read], None], capsys: pytest.CaptureFixture[str]
) -> None:
    grid(
        lambda environ: {"nnodes": 2, "nproc_per_node": 8, "rdzv_endpoint": "n1:29400", "rdzv_id": f"grid-{environ['GRID_JOB']}"}
    )
    args = taken(monkeypatch, "--scheduler", "grid", "--nproc-per-node", "4")
    assert (args.nnodes, args.nproc_per_node, args.rdzv_id) == ("2", "4", "grid-17")
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", "n1:29400")
    assert args.from_scheduler["nnodes"] == "the plug-in our_grid:read"


def test_nodes_that_cannot_meet_are_told_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, grid: Callable[[Read], None]
) -> None:
    grid(lambda _: {"nnodes": 2})
    with pytest.raises(UsageError, match="grid: its plug-in says no rdzv_endpoint; add --rdzv-backend c10d"):
        taken(monkeypatch, "--scheduler", "grid")


@pytest.mark.parametrize(("read", "said"), [
    (lambda environ: {"nnodes": environ["GRID_HOSTS"]}, r"--scheduler grid \(our_grid:read\) failed: KeyError: 'GRID_HOSTS'"),
    (lambda _: None, r"--scheduler grid \(our_grid:read\) failed: TypeError"),
    (lambda _: {"nodes": 2}, r"--scheduler grid \(our_grid:read\) says nodes; it can say nnodes, nproc_per_node, rdzv_endpoint"),
])  # fmt: skip
def test_one_that_cannot_tell_is_named(
    monkeypatch: pytest.MonkeyPatch, grid: Callable[[Read], None], read: Read, said: str
) -> None:
    grid(read)
    with pytest.raises(UsageError, match=said):
        taken(monkeypatch, "--scheduler", "grid")


def test_a_name_that_nobody_has_is_refused_with_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch, grid: Callable[[Read], None]
) -> None:
    grid(lambda _: {})
    assert plug_ins.available()[-1] == "grid"
    with pytest.raises(UsageError, match=r"--scheduler: there is no 'slum'; available: auto, none, openmpi, slurm, .*, grid$"):
        taken(monkeypatch, "--scheduler", "slum")


def test_it_is_asked_by_name_only(monkeypatch: pytest.MonkeyPatch, grid: Callable[[Read], None]) -> None:
    grid(lambda _: pytest.fail("nobody has named it"))
    assert taken(monkeypatch).from_scheduler == {}
