"""From events to spans: whatever a run does, every span that begins ends, within the one above it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.telemetry.spans import COUNTERS, GAUGES, HEARD, Begin, Course, End, Happen, Measure, Step, hear

STARTED = {"t": 0.25, "hostname": "a", "pid": 1, "entry_point": "train.py"}
FACTS: dict[str, dict[str, Any]] = {
    "generation": {
        "generation": 1, "group_rank": 0, "group_world_size": 2, "world_size": 4, "restarts": 0, "after": "", "why": "",
    },
    "worker.failed": {"t": 1.0, "rank": 1, "ago_s": 0.5, "message": "bad"},
    "worker.hung": {"t": 1.0, "rank": 1, "still_s": 5.0},
    "timer.expired": {"t": 1.0, "pid": 7},
    "restart": {"t": 1.0, "why": "rank 1 failed", "restarts": 1, "delay_s": 0.0},
}  # fmt: skip
PHASES = ("starting", "waiting", "running", "stopping")


class Run:
    def __init__(self) -> None:
        self.course, self.now_ms, self.phase = Course(), 10_000.0, "starting"
        self.steps: list[Step] = []
        self.see("run.started", **STARTED)

    def see(self, name: str, **facts: Any) -> None:
        assert f"rallypoint.{name}" in HEARD
        self.now_ms += 1_000
        self.course, steps = hear(self.course, f"rallypoint.{name}", self.now_ms, facts)
        self.steps += steps

    def enter(self, phase: str, kept_s: float | None = None) -> None:
        kept = {} if kept_s is None else {"kept_s": kept_s}
        self.see("phase", previous=self.phase, phase=phase, why=f"to {phase}", lasted_s=4.0, **kept)
        self.phase = phase

    def end(self, succeeded: bool = True) -> None:
        self.see("run.ended", succeeded=succeeded, outcome="succeeded" if succeeded else "failed", why="so it is")

    def spans(self) -> list[tuple[str, float, float, str]]:
        """By their ends: name, begin, end, and what was wrong."""
        begun: dict[str, Begin] = {}
        found = []
        for step in self.steps:
            if isinstance(step, Begin):
                begun[step.key] = step
            elif isinstance(step, End):
                first = begun.pop(step.key)
                found.append((first.name.removeprefix("rallypoint."), first.at_ms, step.at_ms, step.problem))
        return found


def test_a_run_with_a_failure() -> None:
    run = Run()  # 11.0 s; it began a quarter of a second before
    run.enter("waiting")
    run.enter("starting")
    run.see("generation", **FACTS["generation"])
    run.enter("running")
    run.see("worker.failed", **FACTS["worker.failed"])
    run.enter("stopping", kept_s=1.0)
    run.enter("waiting")
    run.enter("starting")
    run.see("generation", **{**FACTS["generation"], "generation": 2, "after": "failure"})
    run.enter("running")
    run.enter("waiting")  # the others are not done
    run.end()
    assert run.spans() == [
        ("starting", 10_750, 12_000, ""),
        ("waiting", 12_000, 13_000, ""),
        ("starting", 13_000, 15_000, ""),
        ("running", 15_000, 17_000, ""),
        ("stopping", 17_000, 18_000, ""),
        ("generation", 14_000, 18_000, "to stopping"),
        ("waiting", 18_000, 19_000, ""),
        ("starting", 19_000, 21_000, ""),
        ("running", 21_000, 22_000, ""),
        ("waiting", 22_000, 23_000, ""),
        ("generation", 20_000, 23_000, ""),
        ("run", 10_750, 23_000, ""),
    ]
    (failed,) = (step for step in run.steps if isinstance(step, Happen))
    assert (failed.key, failed.name, failed.at_ms) == ("generation", "rallypoint.worker.failed", 15_500)  # half a second ago
    spent = [step for step in run.steps if isinstance(step, Measure) and step.name == "rallypoint.phase.duration"]
    assert sum(step.value for step in spent if step.attributes == {"rallypoint.phase": "lost"}) == 3.0


SEEN = st.one_of(st.sampled_from(PHASES), st.sampled_from(sorted(FACTS)))


@given(st.lists(SEEN, max_size=30), st.booleans())
def test_every_span_ends_and_the_whole_run_last(story: list[str], succeeded: bool) -> None:
    """Also of events that no agent would put down in this order."""
    run = Run()
    for one in story:
        run.enter(one) if one in PHASES else run.see(one, **FACTS[one])
    run.end(succeeded)
    open_spans: dict[str, Begin] = {}
    for step in run.steps:
        match step:
            case Begin():
                assert step.key not in open_spans
                assert step.parent == "" or step.parent in open_spans
                open_spans[step.key] = step
            case End(key, at_ms, _, _):
                begun = open_spans.pop(key)
                assert begun.at_ms <= at_ms
                assert key != "run" or open_spans == {}
            case Happen(key, _, _, _):
                assert key in open_spans
            case Measure(name, _, _):
                assert name in COUNTERS or name in GAUGES
    assert open_spans == {}


def test_what_comes_before_a_run_is_nothing() -> None:
    assert hear(Course(), "rallypoint.phase", 1.0, {}) == (Course(), ())
