"""BENCHMARKS.md says what was measured, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from benchmarks import page
from benchmarks.__main__ import PARTS
from benchmarks.figures import Figure, told
from benchmarks.plots import bars

ROOT = Path(__file__).parents[2]
MACHINE = {"date": "2027-01-15", "commit": "0123456789ab", "processor": "A processor", "memory": "8 GiB"}
FIGURES = [
    Figure("start: exec to the last first line, 8 workers", "ms", {"floor": [10.0, 12.0], "rallyrun": [12.5, 11.0, 14.0]}),
    Figure("rendezvous of 64 nodes: first join to last seat", "s", {"rallyrun": [0.1], "torchrun": [2.0]}),
    Figure("goodput: warm", "%", {"rallyrun": [90.0, 95.0], "torchrun": [50.0, 40.0]}, more_is_better=True),
]


@pytest.fixture
def texts() -> dict[str, str]:
    document: dict[str, Any] = json.loads(json.dumps(told(FIGURES, MACHINE)))
    return page.texts(document)


def test_every_figure_stands_on_the_page_with_its_spread(texts: dict[str, str]) -> None:
    text = texts["BENCHMARKS.md"]
    assert "| exec to the last first line, 8 workers | ms | 12.5<br>11 to 14 | 11<br>10 to 12 |" in text
    assert "| goodput" not in text
    assert "2027-01-15, commit 0123456789ab" in text
    assert "- seed 1: " in text
    for part in ("start", "rendezvous", "goodput"):
        assert f"`python -m benchmarks --only {part}`" in text
        assert f"](docs/images/benchmarks/{part}.svg)" in text
    assert "## Memory" not in text, "what was not measured is not told of"


def test_every_part_has_its_place_on_the_page() -> None:
    assert set(PARTS) <= set(page.PARTS)


def test_the_pictures_are_those_that_the_page_shows(texts: dict[str, str]) -> None:
    assert {path for path in texts if path.endswith(".svg")} == {
        f"docs/images/benchmarks/{part}.svg" for part in ("start", "rendezvous", "goodput")
    }
    for path, picture in texts.items():
        if path.endswith(".svg"):
            assert {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(picture).iter()} <= {
                "svg", "title", "style", "rect", "text", "path",
            }  # fmt: skip


def test_bars_begin_at_zero_and_share_a_scale() -> None:
    picture = ElementTree.fromstring(bars([("a <name>", "ms", {"us": [1.0, 2.0, 3.0], "them": [8.0], "absent": []})], "us"))
    ours, theirs = (element for element in picture.iter() if element.get("class") in ("ours", "other"))
    assert ours.get("class") == "ours"
    assert float(ours.get("width", 0)) * 4 == float(theirs.get("width", 0))
    assert [element.text for element in picture.iter() if element.get("class") == "name"] == ["a <name>, ms"]


def test_what_is_published_is_what_was_measured() -> None:
    """The page of the repository, if there is one, is made of the figures that stand beside it."""
    kept = {path: (ROOT / path).exists() for path in (page.PAGE, page.DATA)}
    assert len(set(kept.values())) == 1, kept
    expected = page.texts(json.loads((ROOT / page.DATA).read_text())) if kept[page.DATA] else {}
    assert {path: (ROOT / path).read_text() for path in expected} == expected


def test_a_busy_machine_publishes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times = iter([(100.0, 1000.0), (150.0, 1100.0)])
    (tmp_path / ".git").touch()
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "_git", lambda *_: "")
    monkeypatch.setattr(page, "LOOK_S", 0.0)
    monkeypatch.setattr(page, "_processor_time", lambda: next(times))
    assert page.why_not_published() == "this machine has something else to do: 50% of its processors' time"


def test_code_without_a_commit_publishes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(page, "ROOT", tmp_path)
    assert page.why_not_published() == "this is no clone of the repository, so there is no commit to name"
    (tmp_path / ".git").touch()
    monkeypatch.setattr(page, "_git", lambda *_: " M src/rallypoint/worker.py")
    assert page.why_not_published() == "the code has changes that no commit has: src/rallypoint/worker.py"
