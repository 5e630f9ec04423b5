"""The examples in the documentation work: they are run, page by page, each page in an empty folder.

A comment before a code block says what it is: ``<!-- file: NAME -->`` is written to that file, ``<!-- run -->`` is run by bash
(``<!-- run: CODE -->`` must end with that code, and finds a free port in ``PORT``), and every line of ``<!-- prints -->`` must
be among those that the run before it printed, where ``…`` stands for anything. ``<!-- shows -->`` is all that it printed, from
the box on where there is one, but for what differs each time, such as process ids; ``python -m tests.docs.test_examples PAGE``
writes these blocks anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^<!-- (file|run|prints|shows)(?:: (\S+))? -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"^<!-- .* -->$", re.MULTILINE)
RUN_TIMEOUT_S = 60.0


class Block(NamedTuple):
    kind: str
    detail: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*match.groups(default="")) for match in BLOCK.finditer(page.read_text())]


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    commands = str(Path(sys.executable).parent)
    env = {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "PORT": str(free_port())}
    return subprocess.run(
        ["bash", "-c", text], cwd=folder, env=env, timeout=RUN_TIMEOUT_S, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def shown(printed: str, folder: Path) -> str:
    """What a page shows of it: the same, whoever runs it wherever and whenever."""
    lines = printed.splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith("=" * 80)), 0)
    text = "\n".join(lines[begin:]) + "\n"
    for pattern, word in (
        (re.escape(str(folder)), "/job"),
        (rf"\b{re.escape(os.uname().nodename)}\b", "node0"),
        (r"\b(pid:? |PID |process )\d+", r"\g<1>4711"),
        (r"\d{4}-\d\d-\d\dT[0-9:.]+[+-]\d{4}", "2027-01-15T08:00:00.000+0000"),
        (r"\d+\.\d+ s\b", "1.0 s"),
        (r"\d\.\d times", "2.0 times"),
        (r"/logs/[0-9a-z]+_[0-9a-f]{8}", "/logs/none_a1b2c3d4"),
        (r":\d{5}\b", ":29400"),
        ("not heard of in time", "its agent was killed"),  # as a busy machine may find first
        (r"thread 0x[0-9a-f]+", "thread 0x00007f0123456789"),
        (r"this is node \d", "this is node 0"),
        (r"node \d \(node0, ranks \d-\d\)", "node 1 (node0, ranks 2-3)"),
    ):
        text = re.sub(pattern, word, text)
    return text


def rewritten(page: Path, folder: Path) -> str:
    """The page with what its runs show now."""
    text, printed = page.read_text(), ""
    for match in BLOCK.finditer(text):
        block = Block(*match.groups(default=""))
        if block.kind == "file":
            (folder / block.detail).write_text(block.text)
        elif block.kind == "run":
            printed = run(block.text, folder).stdout
        elif block.kind == "shows":
            text = text.replace(match[0], match[0].replace(block.text, shown(printed, folder)), 1)
    return text


def matches(expected: str, printed: str) -> bool:
    """Anywhere in a line: two workers that print to one console can share it."""
    pattern = ".*".join(map(re.escape, expected.split("…")))
    return re.search(pattern, printed) is not None


@pytest.mark.timeout(900)  # for a whole page; each of its runs has a minute
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
        elif block.kind == "shows":
            assert shown(printed, folder) == block.text
        else:
            missing = [line for line in block.text.splitlines() if not matches(line, printed)]
            assert missing == [], f"not printed; this was:\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_mark_is_misspelt(page: Path) -> None:
    """A comment that marks no block would leave an example untested."""
    assert len(MARK.findall(page.read_text())) == len(blocks(page))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as temporary:
            Path(name).write_text(rewritten(Path(name), Path(temporary)))
