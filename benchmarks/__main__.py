"""``python -m benchmarks``: all figures, or those of some parts with ``--only``.

With ``--publish``, BENCHMARKS.md is made of them, if the machine has nothing else to do.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import page
from benchmarks.contestants import PREDECESSOR, TORCHRUN, launchers
from benchmarks.figures import Figure, table, told, write_json
from benchmarks.predecessor import why_not
from rallypoint.base import report
from rallypoint.output.progress import metered

__all__ = ["main"]

PARTS = ("start", "memory", "restart", "warm", "idle", "tee", "rendezvous", "regroup", "store", "seen", "goodput")
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    what = "Measure rallyrun side by side with 0.1.0 and torchrun."
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=what)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    parser.add_argument("--publish", action="store_true", help="make BENCHMARKS.md of them, on a machine that is at rest")
    options = parser.parse_args()
    not_published = page.why_not_published() if options.publish else ""
    if not_published:
        print(f"BENCHMARKS.md will not be made: {not_published}")
    if TORCHRUN not in [contestant.name for contestant in launchers()]:
        print("torch is not installed here: torchrun is not measured")
    if why_not():
        print(f"{PREDECESSOR} is not measured: {why_not()}")
    machine = page.read() if options.publish and not not_published else {}
    figures = _measure_all([part for part in PARTS if part in options.only])
    path = RESULTS / time.strftime("%Y-%m-%dT%H-%M-%S.json")
    write_json(figures, path)
    print(f"\n{table(figures)}\n\nmedians; every sample is in {path}")
    if options.publish and not not_published:
        page.publish(told(figures, machine))
    missed = [figure.name for figure in figures for target in figure.targets if figure.verdict(target) == "FAIL"]
    if missed and options.strict:
        raise SystemExit(f"missed: {', '.join(missed)}")


def _measure_all(parts: Sequence[str]) -> list[Figure]:
    found: list[Figure] = []
    with metered("measuring", len(parts), "parts") as meter:
        for part in parts:
            found += _measure(part)
            meter.advance(1)
    return found


def _measure(part: str) -> list[Figure]:
    began = time.monotonic()
    _say(f"{part} ... ")
    figures: list[Figure] = importlib.import_module(f"benchmarks.{part}").measure()
    _say(f"{time.monotonic() - began:.0f} s\n")
    return figures


def _say(text: str) -> None:
    with report.stepping_aside(1):
        print(text, end="", flush=True)


if __name__ == "__main__":
    main()
