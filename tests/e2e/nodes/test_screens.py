"""What a person sees, on real screens, of a job of three nodes that loses a worker and then a node.

The page in Chromium, light and dark, on a phone and on a desk, and ``rallypoint top`` on a small and on a large terminal.
Pictures are left in `tmp_path`.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S
from tests.e2e.nodes.conftest import Job, Node
from tests.e2e.terminals import Terminal, terminal_with
from tests.web.browsing import Shown, open_browser

pytestmark = [pytest.mark.root, pytest.mark.xdist_group("browser"), pytest.mark.timeout(400)]

WORKERS = 4
CONF = "last_call_timeout=0.2,keep_alive_interval=5"  # a killed agent is not found to be silent first, however busy the machine
TOP = [sys.executable, "-m", "rallypoint", "top", "a-job"]
TRAINS = """
import logging, os, sys, time
from rallypoint import worker

def train(step):
    worker.progress(step)
    if step % 20 == 0:
        logging.info("rank %s: step %d, loss %.3f", rank, step, 40 / (step + 20))
    try:
        os.rename(f"{folder}/order.{rank}", f"{folder}/taken.{rank}")
    except FileNotFoundError:
        time.sleep(0.05)
    else:
        exec(open(f"{folder}/taken.{rank}").read())

folder, rank = sys.argv[1], os.environ["RANK"]
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
for step in range(1, 1_000_000):
    train(step)
"""


class Screens:
    """All that somebody could look at."""

    def __init__(self, pages: dict[str, Shown], terminals: dict[str, Terminal], folder: Path) -> None:
        self._pages, self._terminals, self._folder = pages, terminals, folder

    def until_all_tell(self, nodes: int, restarts: int, why: str, generation: int) -> None:
        ranks = nodes * WORKERS
        summary = {"Phase": "running", "Nodes": f"{nodes}", "Workers": f"{ranks}", "Restarts": f"{restarts} of 2"}
        for page in self._pages.values():
            for name, value in {**summary, "Generation": f"{generation}"}.items():
                page.wait_for_text("#summary", f"{name}{value}")
            page.wait_for_text("#restarts", why)
            page.tab.wait_for_function("count => document.querySelectorAll('.workers tbody tr').length === count", arg=ranks)
        headline = f"{nodes} nodes, {ranks} ranks, {restarts} of 2 restarts, generation {generation}"
        for screen in self._terminals.values():
            screen.until_shown(headline, "RANK", "steps/s")
            screen.until(lambda shown: why in restarts_panel(shown))

    def leave_pictures(self, name: str) -> None:
        for where, page in self._pages.items():
            (self._folder / f"{name}-{where}.png").write_bytes(page.tab.screenshot(full_page=True))
        for where, screen in self._terminals.items():
            screen.rest()
            (self._folder / f"{name}-{where}.txt").write_text("\n".join(screen.text))

    def check(self) -> None:
        """Nothing is wider than its screen, hard to read, or complained of by the browser."""
        for page in self._pages.values():
            assert page.tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
            assert page.violations() == []
            assert page.complaints == []


def restarts_panel(shown: list[str]) -> str:
    """What stands below the title of that panel, as one line; a large terminal has the log to the left of it."""
    title = next((number for number, line in enumerate(shown) if line.endswith("restarts")), len(shown))
    column = shown[title].rindex("restarts") if title < len(shown) else 0
    return " ".join(" ".join(line[column:] for line in shown[title + 1 :]).split())


@pytest.fixture
def job(start_rallyrun: Callable[..., Any], script: Callable[..., Path], tmp_path: Path, free_port: Callable[[], int]) -> Job:
    folder = tmp_path / "orders"
    folder.mkdir()
    return Job(start_rallyrun, script(TRAINS, "train.py"), folder, free_port())


@pytest.fixture
def nodes(job: Job, tmp_path: Path) -> list[Node]:
    flags = ["--max-restarts", "2", "--redirects", "3", "--hang-timeout", "600", "--log-dir", str(tmp_path / "logs")]
    host = job.start_host("--web", *flags, nnodes="2:3", workers=WORKERS, conf=CONF)
    return [host, *(job.start(*flags, nnodes="2:3", workers=WORKERS, conf=CONF) for _ in range(2))]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def screens(browser: Any, nodes: list[Node], tmp_path: Path) -> Iterator[Screens]:
    address = nodes[0].wait_for_line("the job's page").partition("page: ")[2].strip()
    with ExitStack() as stack:
        kinds = [(scheme, width) for scheme in ("light", "dark") for width in (400, 1600)]
        pages = {f"{scheme}-{width}": Shown(browser, address, width, scheme) for scheme, width in kinds}
        sizes = {"80x24": (80, 24), "140x40": (140, 40)}
        terminals = {name: stack.enter_context(terminal_with(TOP, *size)) for name, size in sizes.items()}
        yield Screens(pages, terminals, tmp_path)
        for page in pages.values():
            page.tab.close()


def generation_of(node: Node, size: int, after: int) -> int:
    """Of the first world of this size after that one."""
    pattern = re.compile(rf"generation (\d+) started: {size} nodes")

    def find() -> int:
        return next((number for number in map(int, pattern.findall(node.stderr)) if number > after), 0)

    return int(node.agent.wait_for(find) or find())


def test_all_screens_tell_the_same_story(screens: Screens, nodes: list[Node], job: Job) -> None:
    host = nodes[0]
    first = generation_of(host, 3, 0)
    for screen in screens._terminals.values():
        screen.until_shown("3 nodes, 12 ranks", "loss ")
    screens._terminals["80x24"].press("\t")  # to the restarts, for which a large one has room beside the log
    job.order(5, "sys.exit(7)")
    second = generation_of(host, 3, first)
    screens.until_all_tell(3, 1, "exited with code 7", second)
    for page in screens._pages.values():
        page.tab.select_option("#log-rank", "11")
        page.tab.check("#follow-log")
        page.wait_for_text("#log", "rank 11: step 20, ")
        page.tab.uncheck("#follow-log")
        page.tab.click("#ask-stacks")
        page.wait_for_text("#stacks", ", main thread:")
        page.wait_for_text("#stacks", "train.py:")
    screens.leave_pictures("worker-lost")
    screens.check()

    lost = next(node for node in nodes[1:] if node.agent.process.poll() is None)
    lost.kill()
    third = generation_of(host, 2, second)
    screens.until_all_tell(2, 1, "was lost: its agent was killed", third)
    for page in screens._pages.values():
        assert page.tab.input_value("#log-rank") == "11"  # whose log is still shown
        assert "kept" in page.text("#generations")
    screens.leave_pictures("node-lost")
    screens.check()
    for node in nodes:
        if node is not lost:
            node.agent.send_signal(signal.SIGTERM)
    for node in nodes:
        node.agent.process.wait(PATIENCE_S)
    for page in screens._pages.values():
        page.wait_for_text("#connection", "ended at")
