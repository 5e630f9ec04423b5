"""The page of behaviours and the suite agree: what the page promises is shown by the test that it names."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "behaviours.md"
ID = re.compile(r"\b(?:[PF]\d\d|[VMm]\d{1,2})\b")
SHOWN = re.compile(r"^\| (\w+) \| [^|]+ \| [^|]+ \| `([^`|]+)::(\w+)` \|$", re.MULTILINE)
NOT_SETTLED = re.compile(r"^\| ([PFVMm]\d+) \| [^|]+ \|$", re.MULTILINE)


def rows() -> list[tuple[str, str, str]]:
    return SHOWN.findall(PAGE.read_text())


@functools.cache
def claims(path: Path) -> dict[str, set[str]]:
    """For each test of a file, and for "" as the file itself, the ids that its docstring or its name tells."""
    tree = ast.parse(path.read_text())
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {"": _ids(tree), **{test.name: _ids(test) for test in tests}}


def _ids(node: ast.Module | ast.FunctionDef) -> set[str]:
    """In a name M1 and m1 cannot be told apart, so there they count for nothing."""
    in_name = [] if isinstance(node, ast.Module) else re.findall(r"(?<=_)[pfv]\d{1,2}(?=_|$)", node.name.lower())
    return {*ID.findall(ast.get_docstring(node) or ""), *map(str.upper, in_name)}


def test_every_line_of_the_page_is_understood() -> None:
    told = [line for line in PAGE.read_text().splitlines() if ID.match(line, 2)]
    assert len(told) == len(rows()) + len(NOT_SETTLED.findall(PAGE.read_text()))


def test_each_id_stands_there_once() -> None:
    ids = [row[0] for row in rows()] + NOT_SETTLED.findall(PAGE.read_text())
    assert sorted(ids) == sorted(set(ids))
    assert {f"P{number:02}" for number in range(1, 49)} <= set(ids)


@pytest.mark.parametrize(("behaviour", "file", "test"), rows(), ids=[row[0] for row in rows()])
def test_what_is_promised_is_shown(behaviour: str, file: str, test: str) -> None:
    claimed = claims(TESTS / file)
    assert test in claimed, f"{file} has no such test"
    assert behaviour in claimed[test] | claimed[""]


def test_what_a_test_claims_to_show_is_on_the_page() -> None:
    on_page = {row[0] for row in rows()}
    for path in sorted(TESTS.rglob("test_*.py")):
        for test, ids in claims(path).items():
            assert ids <= on_page, f"{path.relative_to(TESTS)} {test}: {sorted(ids - on_page)} not on the page"
