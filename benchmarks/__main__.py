"""``python -m benchmarks``: all figures, or the one that is named with ``--only``."""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path

from benchmarks.contestants import PREDECESSOR, TORCHRUN, launchers
from benchmarks.figures import Figure, table, write_json
from benchmarks.predecessor import why_not

__all__ = ["main"]

PARTS = ("start", "memory", "restart", "warm", "idle", "tee", "rendezvous", "regroup", "store")
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    what = "Measure rallyrun side by side with 0.1.0 and torchrun."
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=what)
    parser.add_argument("--only", choices=PARTS, help="measure this part alone")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    options = parser.parse_args()
    if TORCHRUN not in [contestant.name for contestant in launchers()]:
        print("torch is not installed here: torchrun is not measured")
    if why_not():
        print(f"{PREDECESSOR} is not measured: {why_not()}")
    figures = [figure for part in PARTS if options.only in (None, part) for figure in _measure(part)]
    path = RESULTS / time.strftime("%Y-%m-%dT%H-%M-%S.json")
    write_json(figures, path)
    print(f"\n{table(figures)}\n\nmedians; every sample is in {path}")
    missed = [figure.name for figure in figures for target in figure.targets if figure.verdict(target) == "FAIL"]
    if missed and options.strict:
        raise SystemExit(f"missed: {', '.join(missed)}")


def _measure(part: str) -> list[Figure]:
    began = time.monotonic()
    print(f"{part} ...", end=" ", flush=True)
    figures: list[Figure] = importlib.import_module(f"benchmarks.{part}").measure()
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    return figures


if __name__ == "__main__":
    main()
