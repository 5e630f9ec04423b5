"""Views of jobs that were never run, and a source that shows them one after the other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

from rallypoint.errors import RallypointError
from rallypoint.inspection.view import Happening, JobView, NodeView, WorkerView, job_of
from rallypoint.tui import model
from rallypoint.tui.lines import LogPlace, Question
from rallypoint.tui.model import Gpu, Watch
from rallypoint.tui.source import Tail

HERE = "host-0"
MIB = 1 << 20


def worker(rank: int, local_rank: int, at_s: float, **more: object) -> WorkerView:
    """One that takes ten steps in a second and half a core."""
    own: dict[str, object] = {
        "state": "running", "step": 100 + int(10 * at_s), "silent_s": 0.1, "cpu_s": 5 + at_s / 2,
        "memory_bytes": (200 + rank % 100) * MIB,
    }  # fmt: skip
    return WorkerView(rank=rank, local_rank=local_rank, pid=4000 + rank, **{**own, **more})  # type: ignore[arg-type]


def node(number: int, workers: Sequence[WorkerView], at_s: float = 0.0, **more: object) -> NodeView:
    own: dict[str, object] = {
        "node": f"host-{number}", "id": f"id-{number}", "phase": "running", "phase_s": 60.0 + at_s, "uptime_s": 600.0 + at_s,
        "generation": 2, "node_rank": number, "restarts": 1, "max_restarts": 3, "hosts_store": number == 0,
        "log_dir": "/logs/run", "attempt_dir": "/logs/run/attempt_1", "seconds": {"running": 550.0, "starting": 50.0},
        "workers": tuple(workers),
        "history": (Happening(60.0 + at_s, "restart", "rank 3 failed with exit code 7: ValueError: no more data"),),
    }  # fmt: skip
    return NodeView(job="tri", hostname=f"host-{number}", pid=3000 + number, **{**own, **more})  # type: ignore[arg-type]


def job(
    nodes: int = 3, local_size: int = 2, at_s: float = 0.0, note: str = "", silent: Sequence[str] = (), **more: object
) -> JobView:
    """`more` is for every node."""
    found = [
        node(number, [worker(number * local_size + local, local, at_s) for local in range(local_size)], at_s, **more)
        for number in range(nodes)
    ]
    return job_of(found, silent, note)


def look(views: Sequence[JobView], name: str = "tri", every_s: float = 1.0) -> Watch:
    """After so many looks, the first of them at 0."""
    watch = Watch(name)
    for index, view in enumerate(views):
        watch = model.seen(watch, view, index * every_s)
    return watch


class Recording:
    """A source without a job."""

    here = HERE

    def __init__(
        self, views: Sequence[JobView | str] | Iterator[JobView | str], gpus: Mapping[int, Gpu] | None = None, refuses: str = ""
    ) -> None:
        """A text among the views: there is no job then, for this reason. After the last of a sequence it stays the same."""
        self._views = itertools.chain(views, itertools.repeat(views[-1])) if isinstance(views, Sequence) else views
        self._gpus = gpus or {}
        self._refuses = refuses
        self.looks = 0
        self.asked: list[Question] = []
        self.shown: list[tuple[str, ...]] = []

    def look(self, before: Watch) -> Watch:
        self.looks += 1
        view = next(self._views)
        return model.missed(before, view) if isinstance(view, str) else model.seen(before, view, time.monotonic())

    def gpus(self) -> Mapping[int, Gpu]:
        return self._gpus

    def tail(self, place: LogPlace, choice: int, most: int) -> Tail:
        if not place.files:
            return Tail(place.who, (place.otherwise,))
        name = ("stdout.log", "stderr.log")[choice % 2]
        return Tail(f"{place.who}: {name}", tuple(f"{place.who.partition(',')[0]} says line {index}" for index in range(50)))

    def ask(self, question: Question) -> str:
        self.asked.append(question)
        if self._refuses:
            raise RallypointError(self._refuses)
        return f"told to {question.what}"

    def stacks(self, words: Sequence[str]) -> str:
        self.shown.append(tuple(words))
        return "\n".join(
            [f"=== process of {' '.join(words)}", *(f'  File "train.py", line {line} in step' for line in range(40))]
        )
