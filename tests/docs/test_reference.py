"""The pages that are made of the code are those of this code, and what stands beside them names the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from tools import reference

import rallypoint
from rallypoint.story import event_records

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_made_of_the_code_is_that_of_this_code(name: str) -> None:
    """If not: python -m tools.reference"""
    assert (DOCS / name).read_text() == reference.PAGES[name]()


def test_every_public_name_is_told_with_its_types() -> None:
    page = (DOCS / reference.API).read_text()
    headings = set(re.findall(r"^### (\w+)$", page, re.MULTILINE))
    assert set(rallypoint.__all__) - headings == {"__version__"}
    assert "launch(\n" in page
    assert "-> list[Any]" in page
    assert " at 0x" not in page


def test_signatures_are_told_as_they_would_be_written() -> None:
    def simple(a: int, *rest: str, b: float = 1.5, c: list[int] | None = None) -> bool: ...  # type: ignore[empty-body]

    def only_named(*, key): ...  # type: ignore[no-untyped-def]

    assert (
        reference.signature_of("simple", simple)
        == "simple(a: int, *rest: str, b: float = 1.5, c: list[int] | None = None) -> bool"
    )
    assert reference.signature_of("only_named", only_named) == "only_named(*, key)"


def test_the_table_of_metrics_names_those_that_there_are() -> None:
    """As the code writes them: without the endings that Prometheus adds to a counter and to what is told of the agent."""
    exposition = pytest.importorskip("rallypoint.health.exposition", reason="the extra [metrics] has what it needs")
    tree = ast.parse((ROOT / "src" / "rallypoint" / "health" / "exposition.py").read_text())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    named = set(re.findall(r"`rallypoint_(\w+)", (DOCS / "health.md").read_text()))
    plain = {name.removesuffix("_total") for name in named}
    assert {name for name in plain if not {name, f"rallypoint_{name.removesuffix('_info')}"} & texts} == set()
    assert {name for name, *_ in (*exposition.GAUGES, *exposition.COUNTERS)} <= plain


def test_the_table_of_events_names_those_that_there_are() -> None:
    told = set(re.findall(r"^\| `(rallypoint\.[\w.]+)` \|", (DOCS / "events.md").read_text(), re.MULTILINE))
    assert told >= event_records.KNOWN
