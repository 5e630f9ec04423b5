"""A figure: samples by contestant, their medians, and whether the target is met; the table and the file made of them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.contestants import PREDECESSOR, RALLYRUN, TORCHRUN

__all__ = ["Figure", "Target", "at_least", "at_most", "ratio_at_least", "ratio_at_most", "table", "told", "write_json"]

HEADINGS = ("figure", "unit", "rallyrun", PREDECESSOR, "ratio", "torchrun", "floor, cat", "better by", "target", "")
LAUNCHERS = (RALLYRUN, PREDECESSOR, TORCHRUN)


class Target(NamedTuple):
    text: str
    rival: str | None  # whose median is needed to judge it
    holds: Callable[[float, float], bool]  # of our median and the rival's


class Figure(NamedTuple):
    name: str
    unit: str
    samples: Mapping[str, Sequence[float]]
    targets: tuple[Target, ...] = ()
    more_is_better: bool = False

    def median_of(self, contestant: str) -> float | None:
        values = self.samples.get(contestant)
        return median(values) if values else None

    def verdict(self, target: Target) -> str:
        ours = self.median_of(RALLYRUN)
        rival = self.median_of(target.rival) if target.rival else 0.0
        if ours is None or rival is None:
            return "not measured"
        return "PASS" if target.holds(ours, rival) else "FAIL"


def at_most(limit: float, unit: str) -> Target:
    return Target(f"<= {limit:,g} {unit}", None, lambda ours, _: ours <= limit)


def at_least(limit: float, unit: str) -> Target:
    return Target(f">= {limit:,g} {unit}", None, lambda ours, _: ours >= limit)


def ratio_at_most(limit: float, rival: str) -> Target:
    return Target(f"<= {limit:g}x {rival}", rival, lambda ours, theirs: ours <= limit * theirs)


def ratio_at_least(limit: float, rival: str) -> Target:
    """At least `limit` times the rival's figure, where more is better."""
    return Target(f">= {limit:g}x {rival}", rival, lambda ours, theirs: ours >= limit * theirs)


def table(figures: Sequence[Figure]) -> str:
    rows = [HEADINGS] + [row for figure in figures for row in _rows(figure)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def write_json(figures: Sequence[Figure], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told(figures), indent=2) + "\n")


def told(figures: Sequence[Figure], machine: Mapping[str, str] | None = None) -> dict[str, Any]:
    """All that was measured, and on what, as a document."""
    system = {"cpus": len(os.sched_getaffinity(0)), "system": platform.platform(), "python": platform.python_version()}
    return {
        "machine": {**system, "torch": _version("torch"), **(machine or {})},
        "figures": [
            {
                "name": figure.name,
                "unit": figure.unit,
                "median": {name: figure.median_of(name) for name in figure.samples},
                "samples": {name: list(values) for name, values in figure.samples.items()},
                "targets": {target.text: figure.verdict(target) for target in figure.targets},
            }
            for figure in figures
        ],
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _rows(figure: Figure) -> list[tuple[str, ...]]:
    """One row per target: the values stand in the first."""
    ours, before, torchrun = map(figure.median_of, LAUNCHERS)
    baseline = next((figure.median_of(name) for name in figure.samples if name not in LAUNCHERS), None)
    medians = (_number(ours), _number(before), _ratio(figure), _number(torchrun), _number(baseline))
    values = (figure.name, figure.unit, *medians, _times_better(figure))
    judged = [(target.text, figure.verdict(target)) for target in figure.targets] or [("", "")]
    blank = ("",) * len(values)
    return [(*(values if index == 0 else blank), *row) for index, row in enumerate(judged)]


def _times_better(figure: Figure) -> str:
    ours, torchrun = figure.median_of(RALLYRUN), figure.median_of(TORCHRUN)
    if not ours or not torchrun:
        return ""
    return f"{ours / torchrun if figure.more_is_better else torchrun / ours:.1f}x"


def _ratio(figure: Figure) -> str:
    """Ours to the release before, the median of all rounds: what slows a round down slows both."""
    pairs = zip(figure.samples.get(RALLYRUN, ()), figure.samples.get(PREDECESSOR, ()), strict=False)
    ratios = [ours / before for ours, before in pairs if before]
    return f"{median(ratios):.2f}x" if ratios else "-"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
