"""Each case runs on torch and on rallypoint, and its facts are compared; what differs must stand in the table of differences.

What torch answers is kept in facts.json, so that rallypoint can be compared with it where there is no torch:

    python -m tests.compat.conformance.record
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from tests.compat.conformance.comparing import Disagreement, disagreements
from tests.compat.conformance.running import FACTS, PARTS, PYTHON, run_sides
from tests.compat.make_surface import SURFACE

from rallypoint.compat.differences import DIFFERENCES

FOLDER = Path(__file__).parent
KNOWN = {one.aspect for one in DIFFERENCES}


def recorded() -> dict[str, Any]:
    """What torch answered; on another Python without what its argparse says."""
    kept = json.loads(FACTS.read_text())
    return {case: facts for case, facts in kept["cases"].items() if kept["python"] == PYTHON or not case.startswith("arguments.")}


def of_recorded(facts: dict[str, Any]) -> dict[str, Any]:
    known = recorded()
    return {case: found for case, found in facts.items() if case in known or json.loads(FACTS.read_text())["python"] == PYTHON}


def told(found: list[Disagreement]) -> str:
    return "\n".join(str(one) for one in found)


@pytest.fixture(scope="module")
def without_torch() -> dict[str, Any]:
    return of_recorded(run_sides("without")["without"])


def test_rallypoint_without_torch_does_what_torch_does(without_torch: dict[str, Any]) -> None:
    unknown = [one for one in disagreements(recorded(), without_torch) if one.aspect not in KNOWN]
    assert not unknown, told(unknown)


def test_every_difference_is_one(without_torch: dict[str, Any]) -> None:
    """A difference that is no more must leave the table."""
    differing = {one.aspect for one in disagreements(recorded(), without_torch)}
    of_cases = {one.aspect for one in DIFFERENCES if one.aspect.partition(": ")[0] in recorded()}
    assert of_cases - differing == set()


@pytest.mark.torch
def test_both_do_the_same_where_torch_is() -> None:
    """Torch itself answers as it was recorded, and rallypoint behind its names in the same way."""
    found = run_sides("torch", "beside")
    if version("torch").partition("+")[0] == json.loads(FACTS.read_text())["torch"]:
        changed = disagreements(recorded(), of_recorded(found["torch"]))
        assert not changed, told(changed)
    unknown = [one for one in disagreements(found["torch"], found["beside"]) if one.aspect not in KNOWN]
    assert not unknown, told(unknown)


def test_every_family_is_run() -> None:
    found = {path.stem.removeprefix("cases_") for path in FOLDER.glob("cases_*.py")}
    assert found == {family for families in PARTS for family in families}


# --- coverage --------------------------------------------------------------------------------------------------------------


def names_used(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that the cases import from torch's modules, and those that they replace by a path."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            for alias in node.names:
                yield str(node.module), alias.name
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("torch.distributed."):
            module, _, name = node.value.rpartition(".")
            yield module, name


def test_every_public_name_has_a_case() -> None:
    """Aliases have one in common, which compares each with its original; so have constants, with their values."""
    surface = json.loads(SURFACE.read_text())["modules"]
    used = {pair for path in FOLDER.glob("cases_*.py") for pair in names_used(ast.parse(path.read_text()))}
    homes = {(surface.get(module, {}).get(name, {}).get("home", module), name) for module, name in used}
    wanted = {
        (m, name) for m, names in surface.items() for name, facts in names.items() if facts["kind"] in ("class", "function")
    }
    assert sorted(wanted - homes - used) == []
