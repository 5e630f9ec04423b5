"""Runs seeds: ``python -m tests.simulation --seeds 0:100000 --jobs 2 --histogram``."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context

from tests.simulation.cluster import Failure, simulate
from tests.simulation.planted import BUGS

from rallypoint.base import report
from rallypoint.output.progress import metered

__all__ = ["main", "run_seeds"]

BATCH = 50


def run_batch(work: tuple[int, int, str, bool]) -> tuple[Counter[str], list[Failure]]:
    """Some seeds, one after the other. Garbage is collected between batches, not within."""
    begin, end, bug, is_traced = work
    tally: Counter[str] = Counter()
    failures: list[Failure] = []
    gc.disable()
    for seed in range(begin, end):
        try:
            tally.update(simulate(seed, bug, is_traced))
        except Failure as failure:
            failures.append(failure)
    gc.enable()
    return tally, failures


def run_seeds(
    begin: int, end: int, jobs: int = 1, bug: str = "", is_traced: bool = False
) -> Iterator[tuple[Counter[str], list[Failure]]]:
    """What came of each batch of seeds, as soon as it is known."""
    batches = [(first, min(first + BATCH, end), bug, is_traced) for first in range(begin, end, BATCH)]
    if jobs == 1:
        yield from map(run_batch, batches)
        return
    with get_context("fork").Pool(jobs) as pool:  # which finds this module wherever it was found here
        yield from pool.imap_unordered(run_batch, batches)


def _span(text: str) -> tuple[int, int]:
    begin, colon, end = text.partition(":")
    return (int(begin), int(end)) if colon else (0, int(begin))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Simulate a cluster for each of many seeds.")
    parser.add_argument("--seeds", type=_span, default=(0, 1000), metavar="FROM:TO", help="which seeds; N stands for 0:N")
    parser.add_argument("--jobs", type=int, default=1, help="processes to run them in")
    parser.add_argument("--histogram", action="store_true", help="print what happened in them")
    parser.add_argument("--trace", action="store_true", help="print everything that led to a failure, not only the last events")
    parser.add_argument("--bug", default="", choices=["", *BUGS], help="plant this bug")
    parser.add_argument("--most-failures", type=int, default=3, help="stop after so many")
    options = parser.parse_args(arguments)
    begun, tally, failures = time.monotonic(), Counter[str](), 0
    with metered("simulating", options.seeds[1] - options.seeds[0], "seeds") as meter:
        for happened, failed in run_seeds(*options.seeds, options.jobs, options.bug, options.trace):
            tally.update(happened)
            failures += len(failed)
            meter.advance(happened["seeds"] + len(failed))
            with report.stepping_aside(1):
                for failure in failed:
                    print(failure, end="\n\n", flush=True)
            if failures >= options.most_failures:
                break
    if options.histogram:
        for what, count in sorted(tally.items()):
            print(f"{count:>12,}  {what}")
    took_s = time.monotonic() - begun
    print(f"{tally['seeds']:,} seeds without a violation, {failures} with one, in {took_s:.0f} s on {options.jobs} processes")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
