"""Who runs a node's checks while the agent goes on: it is never waited for by anything that must happen.

The checks run in a thread, because any of them may hang; when they are due, and what follows from them, is decided in
`preflight.rules`. The one of the network comes last, and only once this node has a place among the others: it needs some of them.
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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.preflight.neighbours import Neighbours

__all__ = ["Attendant"]

_DOUBTERS_MAX = 64


class Attendant:
    """Of one node. All but `fileno`, `doubt` and `look_again` is for one thread."""

    def __init__(
        self,
        specs: Sequence[Spec],
        run: Callable[[Sequence[Spec]], list[Finding]] = run_all,
    ) -> None:
        self._own = [spec for spec in specs if not rules.is_of_network(spec)]
        self._network = next((spec for spec in specs if rules.is_of_network(spec)), None)
        self._run = run
        self.neighbours: Neighbours | None = None  # who find others to measure the way to
        self._fitness = Fitness()
        self._bell = WakeFd()
        self._found: list[Finding] | None = None
        self._advice = ""
        self._warned: set[str] = set()
        self._doubted_at: dict[str, float] = {}  # by whom
        self._is_doubted = False

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

    @property
    def needs_others(self) -> bool:
        """Whether what is checked is not done before this node has a place among others."""
        return self._network is not None and self.neighbours is not None

    def suspect(self) -> None:
        """Workers have failed here, by themselves."""
        self._fitness = rules.suspected(self._fitness)

    def doubt(self, by: str) -> None:
        """Another node has found the way to this one bad; from any thread."""
        now = time.monotonic()
        if rules.may_doubt(self._doubted_at.get(by), now) and len(self._doubted_at) < _DOUBTERS_MAX:
            self._doubted_at[by] = now
            self.look_again()

    def look_again(self) -> None:
        """There is more to be seen than there was; from any thread."""
        self._is_doubted = True
        self._bell.set()

    def look(self) -> None:
        """Take in what was found, and start what is due."""
        now = time.monotonic()
        self._bell.clear()
        found, self._found = self._found, None
        if found is not None:
            self._fitness = rules.finished(self._fitness, found, now)
            self._advice = next((f" ({one.advice})" for one in found if one.state == "bad" and one.advice), "")
            self._tell(found)
        if self._is_doubted and not self.is_checking:
            self._is_doubted = False
            self.suspect()
        if rules.is_due(self._fitness, now):
            self._fitness = rules.started(self._fitness)
            threading.Thread(target=self._work, name="rallypoint-preflight", daemon=True).start()

    def _tell(self, found: Sequence[Finding]) -> None:
        report.debug("; ".join(f"{one.check}: {one.what}" for one in found))
        for line in rules.warnings(found):
            if line not in self._warned:
                self._warned.add(line)
                report.warn(line)

    def _work(self) -> None:
        found = self._run(self._own)
        if self._network is not None:
            found += self._of_network(rules.least_of(self._network))
        self._found = found
        self._bell.set()

    def _of_network(self, least: int) -> list[Finding]:
        if self.neighbours is None:
            return [Finding(rules.NETWORK, "unknown", "this job has no other nodes to measure the way to")]
        return self.neighbours.examine(least)

    def next_look_at(self) -> float | None:
        return rules.next_look_at(self._fitness)

    def fileno(self) -> int:
        return self._bell.fileno()

    def close(self) -> None:
        """A thread that is still looking rings no bell any more."""
        if self.neighbours is not None:
            self.neighbours.close()
        self._bell.close()
