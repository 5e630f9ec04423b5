"""Who runs a node's checks while the agent goes on: it is never waited for by anything that must happen.

The checks run in a thread, because any of them may hang; when they are due, and what follows from them, is decided in
`preflight.rules`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from rallypoint.base import report
from rallypoint.net.wake_fd import WakeFd
from rallypoint.preflight import rules
from rallypoint.preflight.checks import run_all
from rallypoint.preflight.rules import Finding, Fitness, Spec

__all__ = ["Attendant"]


class Attendant:
    """Of one node. All but `fileno` is for one thread."""

    def __init__(self, specs: Sequence[Spec], run: Callable[[Sequence[Spec]], list[Finding]] = run_all) -> None:
        self._specs = specs
        self._run = run
        self._fitness = Fitness()
        self._bell = WakeFd()
        self._found: list[Finding] | None = None
        self._advice = ""

    @property
    def why_unfit(self) -> str:
        """Why this node cannot have a seat now; empty if it can."""
        return self._fitness.told

    @property
    def news(self) -> str:
        """The same for whoever sits here, with what to do about it; empty while nothing was found."""
        unfit = self._fitness.why
        return f"this machine is not fit to run workers: {unfit}{self._advice}" if unfit else ""

    @property
    def is_checking(self) -> bool:
        return self._fitness.phase == "running"

    def suspect(self) -> None:
        """Workers have failed here, by themselves."""
        self._fitness = rules.suspected(self._fitness)

    def look(self) -> None:
        """Take in what was found, and start what is due."""
        now = time.monotonic()
        found, self._found = self._found, None
        if found is not None:
            self._bell.clear()
            self._fitness = rules.finished(self._fitness, found, now)
            self._advice = next((f" ({one.advice})" for one in found if one.state == "bad" and one.advice), "")
            report.debug("; ".join(f"{one.check}: {one.what}" for one in found))
        if rules.is_due(self._fitness, now):
            self._fitness = rules.started(self._fitness)
            threading.Thread(target=self._work, name="rallypoint-preflight", daemon=True).start()

    def _work(self) -> None:
        self._found = self._run(self._specs)
        self._bell.set()

    def next_look_at(self) -> float | None:
        return rules.next_look_at(self._fitness)

    def fileno(self) -> int:
        return self._bell.fileno()

    def close(self) -> None:
        """A thread that is still looking rings no bell any more."""
        self._bell.close()
