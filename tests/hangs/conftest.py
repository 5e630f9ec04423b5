"""``watching(limits, size)`` gives workers under a watch, and ends them with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.hangs.watching import Watching


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Callable[..., Watching]]:
    opened: list[Watching] = []

    def open_watch(limits: str = "1", size: int = 1) -> Watching:
        opened.append(Watching(tmp_path / "attempt", limits, size))
        return opened[-1]

    (tmp_path / "attempt").mkdir()
    yield open_watch
    for one in opened:
        one.close()
