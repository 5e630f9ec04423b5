"""The page in a real browser: every width and colour scheme, hostile text, a thousand ranks, and who cannot see or use a mouse.

One browser serves all tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.web.browsing import Shown, open_browser
from tests.web.made_jobs import MadeJob, served

from rallypoint.health.server import HealthCheckServer
from rallypoint.inspection.log_ends import LogFile

pytestmark = [pytest.mark.root, pytest.mark.xdist_group("browser"), pytest.mark.timeout(300)]

CELLS_OF_A_LOOK = 3 * 1000 + 50  # three of each rank, and what is told of the whole job
COUNT_CHANGES = """() => {
  window.changes = {elements: 0, texts: 0, looks: 0};
  const ofEachLook = document.querySelector(".workers td:nth-child(3)").firstChild;
  const count = (records) => records.forEach((record) => {
    if (record.target === ofEachLook) changes.looks += 1;
    if (record.type === "characterData") changes.texts += 1;
    else changes.elements += [...record.addedNodes, ...record.removedNodes].filter((node) => node.nodeType === 1).length;
  });
  new MutationObserver(count).observe(document.body, {childList: true, characterData: true, subtree: true});
}"""
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title = 1</script>"\'&amp; ' + "wide" * 60


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def show(browser: Any, job: MadeJob, server: HealthCheckServer, width: int = 1600, scheme: str = "light") -> Shown:
    return Shown(browser, job.site.address("127.0.0.1", server.port), width, scheme)


@pytest.fixture
def job(tmp_path: Path) -> MadeJob:
    made = MadeJob(nodes=2, workers=4)
    path = tmp_path / "stderr.log"
    path.write_text(f"first line\n{HOSTILE}\n")
    made.logs[0, "stderr"] = LogFile(str(path), None)
    return made


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_every_width_and_scheme(browser: Any, job: MadeJob, width: int, scheme: str, tmp_path: Path) -> None:
    with served(job) as server:
        shown = show(browser, job, server, width, scheme)
        shown.tab.click("#ask-log")
        shown.tab.click("#ask-stacks")
        shown.tab.wait_for_selector("#log:not([hidden])")
        shown.tab.wait_for_selector("#stacks:not([hidden])")
        shown.tab.click("summary")
        shown.tab.wait_for_selector("#phases td")
        assert shown.text("h1") == "job-7"
        assert shown.text("#connection") == "live"
        assert "exited with code 3" in shown.text("#restarts")
        assert "train (/job/train.py:7)" in shown.text("#stacks")
        assert shown.tab.locator("#timeline span").count() == 4
        assert shown.text("#generations").split("\n") == ["gen. 1: 0.0 % kept", "gen. 2"]
        assert shown.tab.evaluate("document.documentElement.scrollWidth") <= width
        assert shown.violations() == []
        (tmp_path / f"{scheme}-{width}.png").write_bytes(shown.tab.screenshot(full_page=True))
        assert shown.complaints == []
        shown.tab.close()


def test_hostile_text_stays_text(browser: Any, job: MadeJob) -> None:
    """Whoever names a job, a node or a reason, or writes a line, cannot do anything here."""
    job.of_node = {"job": HOSTILE, "node": HOSTILE, "why": HOSTILE, "command": HOSTILE, "log_dir": HOSTILE, "phase": "stopping"}
    job.stack_note = HOSTILE
    with served(job) as server:
        shown = show(browser, job, server, 400)
        shown.tab.click("#ask-log")
        shown.tab.click("#ask-stacks")
        shown.wait_for_text("#log", HOSTILE)
        shown.wait_for_text("#stacks", HOSTILE)
        for selector in ("#job", "#command", "caption", "#log", "#stacks"):
            assert HOSTILE in (shown.tab.text_content(selector) or "")
        assert shown.tab.locator("img, main script, main iframe").count() == 0
        assert shown.tab.title() == f"stopping: {HOSTILE}"
        assert shown.tab.evaluate("document.documentElement.scrollWidth") <= 400
        assert shown.complaints == []
        shown.tab.close()


def test_the_token_leaves_the_address_and_the_page_can_be_loaded_again(browser: Any, job: MadeJob) -> None:
    with served(job) as server:
        shown = show(browser, job, server)
        assert shown.tab.url == shown.url
        shown.tab.reload()
        shown.tab.wait_for_selector(".workers td")
        assert shown.tab.url == shown.url
        assert browser.cookies() == []
        stranger = browser.new_page()
        stranger.goto(shown.url)
        assert "needs its token" in stranger.inner_text("h1")
        assert "job-7" not in stranger.content()
        for page in (stranger, shown.tab):  # a token of another job that had this port
            page.goto(f"{shown.url}?token=stale")
            assert "needs its token" in page.inner_text("h1")
            page.close()


def test_a_thousand_ranks(browser: Any, job: MadeJob) -> None:
    """A refresh makes nothing anew, and changes what has changed, once: 20 to 30 ms, as the benchmark of what is seen tells."""
    job.size = 125, 8
    with served(job) as server:
        shown = show(browser, job, server)
        assert shown.tab.locator(".workers tbody tr").count() == 1000

        def wait_for_looks(looks: int) -> None:
            step = 10 * (job.looks + looks) + 1
            is_shown = "step => Number(document.querySelector('.workers td:nth-child(3)').textContent) >= step"
            shown.tab.wait_for_function(is_shown, arg=step)

        wait_for_looks(2)
        shown.tab.evaluate(COUNT_CHANGES)
        wait_for_looks(4)
        changes = shown.tab.evaluate("changes")
        assert changes["elements"] == 0
        assert changes["looks"] > 0
        assert 1000 <= changes["texts"] / changes["looks"] <= CELLS_OF_A_LOOK, changes
        shown.tab.close()


def test_without_a_mouse_and_in_a_tab_that_nobody_sees(browser: Any, job: MadeJob, wait_until: Any) -> None:
    with served(job) as server:
        shown = show(browser, job, server)
        shown.tab.keyboard.press("Tab")
        assert shown.tab.evaluate("document.activeElement.textContent") == "Skip to the workers"
        shown.tab.focus("#ask-stacks")
        assert shown.tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        shown.tab.keyboard.press("Enter")
        shown.tab.wait_for_selector("#stacks:not([hidden])")
        assert shown.text("#announced") == "The job is running, generation 2"
        assert shown.tab.locator(".node:visible").count() == 2
        shown.tab.check("#unusual")
        assert shown.tab.locator(".node:visible").count() == 0
        hide = "() => { Object.defineProperty(document, 'hidden', {get: () => %s, configurable: true});"
        hide += " document.dispatchEvent(new Event('visibilitychange')); }"
        shown.tab.evaluate(hide % "true")
        wait_until(lambda: job.site._feed._thread is None)
        looks = job.looks
        shown.tab.evaluate(hide % "false")
        wait_until(lambda: job.looks > looks)
        shown.tab.close()


def test_a_job_that_ends_and_one_that_is_gone(browser: Any, job: MadeJob) -> None:
    """What was last seen stays."""
    job.of_node = {"why": "all workers have succeeded"}
    with served(job) as server:
        ended = show(browser, job, server)
        job.site.close()
        ended.wait_for_text("#connection", "ended at")
        ended.wait_for_text("#notices", "This node is done: all workers have succeeded")
        assert ended.text("h1") == "job-7"
        ended.tab.close()
    another = MadeJob()
    with served(another) as server:
        shown = show(browser, another, server)
        server.stop()
        shown.wait_for_text("#connection", "the job has ended, or cannot be reached")
        assert shown.text("h1") == "job-7"
        shown.tab.close()
