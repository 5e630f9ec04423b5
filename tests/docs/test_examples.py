"""The examples in the documentation work: they are run, page by page, each page in an empty folder.

A comment before a code block says what it is: ``<!-- file: NAME -->`` is written to that file, ``<!-- run -->`` is run by bash
(``<!-- run: CODE -->`` must end with that code), and every line of ``<!-- prints -->`` must be among those that the run before
it printed, where ``…`` stands for anything.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^<!-- (file|run|prints)(?:: (\S+))? -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"^<!-- .* -->$", re.MULTILINE)
RUN_TIMEOUT_S = 30.0


class Block(NamedTuple):
    kind: str
    detail: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*match.groups(default="")) for match in BLOCK.finditer(page.read_text())]


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    commands = str(Path(sys.executable).parent)
    env = {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-c", text], cwd=folder, env=env, timeout=RUN_TIMEOUT_S, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def matches(expected: str, printed: str) -> bool:
    """Anywhere in a line: two workers that print to one console can share it."""
    pattern = ".*".join(map(re.escape, expected.split("…")))
    return re.search(pattern, printed) is not None


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_examples_work(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    printed = ""
    for block in blocks(page):
        if block.kind == "file":
            (folder / block.detail).write_text(block.text)
        elif block.kind == "run":
            ended = run(block.text, folder)
            printed = ended.stdout
            assert ended.returncode == int(block.detail or 0), f"{block.text}\n{printed}"
        else:
            missing = [line for line in block.text.splitlines() if not matches(line, printed)]
            assert missing == [], f"not printed; this was:\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_mark_is_misspelt(page: Path) -> None:
    """A comment that marks no block would leave an example untested."""
    assert len(MARK.findall(page.read_text())) == len(blocks(page))
