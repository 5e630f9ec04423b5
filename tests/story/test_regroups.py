"""What a regroup is made of."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.story.event_records import ENDED, FAILED, PHASE, RESTART, Told
from rallypoint.story.regroups import Regroup, regroups


def told(name: str, t: float | None, **metadata: Any) -> Told:
    return Told(name, 0.0, t, metadata)


def phase(t: float, previous: str, now: str, lasted_s: float, why: str = "") -> Told:
    return told(PHASE, t, phase=now, previous=previous, lasted_s=lasted_s, why=why)


BEGIN = [phase(0.1, "starting", "waiting", 0.1), phase(0.2, "waiting", "starting", 0.1), phase(0.5, "starting", "running", 0.3)]
AFTER_FAILURE = [
    told(FAILED, 10.0, ago_s=0.25),
    told(FAILED, 10.1, ago_s=0.0),
    phase(10.25, "running", "stopping", 9.75, "rank 1 failed"),
    told(RESTART, 10.25),
    phase(12.25, "stopping", "waiting", 2.0),
    phase(12.5, "waiting", "starting", 0.25),
    phase(12.625, "starting", "running", 0.125),
]
JOINER = [phase(20.0, "running", "stopping", 7.375, "a node joined"), phase(20.5, "stopping", "waiting", 0.5),
          phase(21.0, "waiting", "starting", 0.5), phase(21.25, "starting", "running", 0.25)]  # fmt: skip
FIRST = Regroup(9.75, "rank 1 failed", {"noticing": 0.5, "stopping": 2.0, "waiting": 0.25, "starting": 0.125})
SECOND = Regroup(20.0, "a node joined", {"noticing": 0.0, "stopping": 0.5, "waiting": 0.5, "starting": 0.25})


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([], []),
        (BEGIN, []),
        ([*BEGIN, *AFTER_FAILURE], [FIRST]),
        ([*BEGIN, *AFTER_FAILURE, *JOINER], [FIRST, SECOND]),
        (AFTER_FAILURE, [FIRST]),
        ([*BEGIN, *AFTER_FAILURE[:-1]], []),
        ([*BEGIN, *AFTER_FAILURE[:4], told(ENDED, 13.0), *BEGIN], []),
        ([one for one in [*BEGIN, *AFTER_FAILURE] if one.metadata.get("previous") != "stopping"],
         [FIRST.replace(seconds={**FIRST.seconds, "stopping": 0.0})]),
        ([told(PHASE, None, phase="running", previous="starting"), told(FAILED, None)], []),
    ],
)  # fmt: skip
def test_hops_of_each_regroup(events: list[Told], found: list[Regroup]) -> None:
    assert list(regroups(events)) == found


def test_hops_add_up() -> None:
    assert FIRST.total_s == 2.875
