"""Writes the events of a run as an agent does, at times that the test chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rallypoint.story import phases
from rallypoint.story.event_records import Told, read_told

BEGIN_MS = 1_800_000_000_000


class AgentLog:
    """One agent; the times are seconds since its run began."""

    def __init__(
        self, hostname: str = "alpha", run_id: str = "job", begin_ms: float = BEGIN_MS, pid: int = 7, **facts: Any
    ) -> None:
        self.begin_ms = begin_ms
        self.lines: list[dict[str, Any]] = []
        self.ledger = phases.open_ledger(0.0)
        facts = {"version": "1.0", "local_world_size": 2, "max_restarts": 3, "entry_point": "train.py", **facts}
        self.tell("run.started", 0.0, schema=1, run_id=run_id, hostname=hostname, pid=pid, **facts)

    def tell(self, name: str, t: float, **metadata: Any) -> None:
        self.note(f"rallypoint.{name}", t, t=t, **metadata)

    def note(self, name: str, at_s: float, **metadata: Any) -> None:
        """An event of another kind, which has no time of its own."""
        timestamp = round(self.begin_ms + 1000 * at_s)
        self.lines.append({"name": name, "source": "AGENT", "timestamp": timestamp, "metadata": metadata})

    def phase(self, t: float, phase: str, why: str = "", kept_s: float | None = None) -> None:
        before = self.ledger
        facts = {"phase": phase, "previous": before.phase, "lasted_s": t - before.since, "why": why}
        self.ledger = phases.enter(before, phase, t, None if kept_s is None else before.since + kept_s)
        self.tell("phase", t, **facts, **({} if kept_s is None else {"kept_s": kept_s}))

    def run(self, t: float, generation: int, nodes: int = 1, group_rank: int = 0, restarts: int = 0, took_s: float = 0.2) -> None:
        """A generation meets and starts, so that its workers run at t."""
        if self.ledger.phase != phases.WAITING:
            self.phase(t - took_s, phases.WAITING, "the run begins")
        self.phase(t - took_s / 2, phases.STARTING, f"this is node {group_rank} of {nodes}")
        ranks = [2 * group_rank, 2 * group_rank + 1]
        size = {"group_rank": group_rank, "group_world_size": nodes, "world_size": 2 * nodes, "restarts": restarts}
        self.tell("generation", t, generation=generation, **size, ranks=ranks, pids=[100 + rank for rank in ranks])
        self.phase(t, phases.RUNNING, "all workers were started")

    def stop(self, t: float, why: str, kept_s: float = 0.0, took_s: float = 0.1, restarts: int = 0, delay_s: float = 0.0) -> None:
        """The workers are stopped, to be started again."""
        self.phase(t, phases.STOPPING, why, kept_s)
        self.tell("restart", t, why=why, restarts=restarts, delay_s=delay_s)
        self.phase(t + took_s, phases.WAITING, why)

    def end(self, t: float, succeeded: bool = True, why: str = "all workers succeeded", stopping_s: float = 0.0) -> None:
        if succeeded and self.ledger.phase == phases.RUNNING:
            self.phase(t - stopping_s, phases.WAITING, "all workers of this node succeeded")
        if self.ledger.phase != phases.STOPPING:
            self.phase(t - stopping_s, phases.STOPPING, why, 0.0 if self.ledger.phase == phases.RUNNING else None)
        self.ledger = phases.enter(self.ledger, phases.DONE, t)
        self.tell("run.ended", t, succeeded=succeeded, why=why, seconds=self.ledger.seconds, wall_s=t)

    def events(self) -> tuple[Told, ...]:
        return tuple(map(read_told, self.lines))

    def text(self) -> str:
        return "".join(json.dumps(line) + "\n" for line in self.lines)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "events.jsonl").write_text(self.text())
        return folder


def clean_run(**facts: Any) -> AgentLog:
    log = AgentLog(**facts)
    log.run(0.21, 1)
    log.end(10.21)
    return log


def long_story() -> list[AgentLog]:
    """Two failures, the loss of a node and its return, as two nodes that stay and the two agents of the third tell it."""
    alpha, beta = AgentLog("alpha"), AgentLog("beta", begin_ms=BEGIN_MS + 300, pid=8)
    gamma, successor = AgentLog("gamma", pid=9), AgentLog("gamma", begin_ms=BEGIN_MS + 60_000, pid=10)
    for rank, log, early_s in ((0, alpha, 0.0), (1, beta, 0.3), (2, gamma, 0.0)):
        log.run(1.0 - early_s, 1, nodes=3, group_rank=rank, took_s=0.6)

    failed = "rank 2 (pid 102) failed: ValueError: bad batch"
    beta.tell("worker.failed", 9.8, generation=1, rank=2, local_rank=0, pid=102, exitcode=1, message="ValueError: bad batch",
              log_file="/logs/job_b/attempt_0/0/stderr.log", ago_s=0.1)  # fmt: skip
    beta.stop(9.8, f"{failed}; the workers of all nodes are stopped", kept_s=4.0)
    for log in (alpha, gamma):
        log.stop(10.15, f"{failed}; restart 1 of 3", kept_s=4.0, restarts=1)
    for rank, log, early_s in ((0, alpha, 0.0), (1, beta, 0.3), (2, gamma, 0.0)):
        log.run(11.0 - early_s, 2, nodes=3, group_rank=rank, restarts=1)

    for log, early_s in ((alpha, 0.0), (beta, 0.3)):  # the node of the third agent dies, and its agent says nothing
        log.stop(30.0 - early_s, "node 2 (gamma, ranks 4-5) was lost: not heard of in time")
        log.run(31.0 - early_s, 3, nodes=2, group_rank=0 if log is alpha else 1, restarts=1)
        log.stop(61.0 - early_s, "1 node waiting to join; restarting all workers in the larger world", kept_s=29.0)
    for rank, log, early_s in ((0, alpha, 0.0), (1, beta, 0.3), (2, successor, 60.0)):
        log.run(62.0 - early_s, 4, nodes=3, group_rank=rank, restarts=1)

    alpha.tell(
        "worker.failed", 70.0, generation=4, rank=0, local_rank=0, pid=100, exitcode=-9, message="Signal 9 (SIGKILL)", ago_s=0.0
    )
    for log, early_s in ((alpha, 0.0), (beta, 0.3), (successor, 60.0)):
        log.stop(
            70.0 - early_s, "rank 0 (pid 100) failed: Signal 9 (SIGKILL); restart 2 of 3, after 1 s", restarts=2, delay_s=1.0
        )
    for rank, log, early_s in ((0, alpha, 0.0), (1, beta, 0.3), (2, successor, 60.0)):
        log.run(72.0 - early_s, 5, nodes=3, group_rank=rank, restarts=2)
        log.end(100.0 - early_s)
    return [alpha, beta, gamma, successor]
