"""The table of differences is complete in itself, and the page for those who come from torchrun shows it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.compat.make_surface import SURFACE

from rallypoint.compat.differences import DIFFERENCES, markdown

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-torchrun.md"


def test_each_is_about_a_name_that_torch_has() -> None:
    modules = json.loads(SURFACE.read_text())["modules"]
    assert [one for one in DIFFERENCES if one.name not in modules.get(one.module, {})] == []


def test_each_is_there_once_and_says_everything() -> None:
    counted = Counter((one.module, one.name, one.aspect) for one in DIFFERENCES)
    assert [key for key, count in counted.items() if count > 1] == []
    assert [one for one in DIFFERENCES if not all(one)] == []


def test_the_page_shows_them() -> None:
    """F19: to renew it, put what `markdown()` gives into the page."""
    assert f"\n{markdown()}\n" in PAGE.read_text()
