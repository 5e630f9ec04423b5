"""A real browser, and a job's page in it. It needs Debian's chromium, Playwright and axe-core, which `make test-all` fetches."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
AXE = ROOT / "build" / "browser" / "axe.min.js"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PATIENCE_MS = 60_000


@contextmanager
def open_browser(profile: Path) -> Iterator[Any]:
    """Skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None or not AXE.exists():
        pytest.skip("chromium or axe-core is not installed")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch_persistent_context(
            profile, executable_path=chromium, headless=True, args=FLAGS, timeout=PATIENCE_MS
        )
        opened.set_default_timeout(PATIENCE_MS)
        yield opened
        opened.close()


class Shown:
    """A job's page in a tab of its own, and what the browser complains of."""

    def __init__(self, browser: Any, address: str, width: int = 1600, scheme: str = "light") -> None:
        self.complaints: list[str] = []
        self.url = address.partition("?")[0]
        self.tab = browser.new_page()
        self.tab.on("console", lambda said: self.complaints.append(said.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.emulate_media(color_scheme=scheme)
        self.tab.set_viewport_size({"width": width, "height": 900})
        self.tab.goto(address)
        self.tab.wait_for_selector(".workers td")

    def text(self, selector: str) -> str:
        return str(self.tab.inner_text(selector))

    def wait_for_text(self, selector: str, text: str) -> None:
        arguments = [selector, text]
        self.tab.wait_for_function("([where, what]) => document.querySelector(where).textContent.includes(what)", arg=arguments)

    def violations(self) -> list[str]:
        """What axe-core finds to be hard to use; the browser's own world has it, whatever the page forbids."""
        session = self.tab.context.new_cdp_session(self.tab)
        frame = session.send("Page.getFrameTree")["frameTree"]["frame"]["id"]
        world = session.send("Page.createIsolatedWorld", {"frameId": frame, "worldName": "axe"})["executionContextId"]
        run = "axe.run().then(found => found.violations.map(one => one.id + ': ' + one.nodes.map(node => node.html).join(' | ')))"
        session.send("Runtime.evaluate", {"contextId": world, "expression": AXE.read_text()})
        told = session.send(
            "Runtime.evaluate", {"contextId": world, "expression": run, "awaitPromise": True, "returnByValue": True}
        )
        session.detach()
        return list(told["result"]["value"])
