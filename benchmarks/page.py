"""BENCHMARKS.md and its pictures, made of what was measured; ``python -m benchmarks.page`` makes them of the kept figures again.

Everything on the page comes from one document of JSON, which stands in the repository beside it. Nothing is published that was
measured on a machine that had something else to do, or of code that has no commit.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contestants import FLOOR, PREDECESSOR, RALLYRUN, TORCHRUN
from benchmarks.goodput import FAULTS, OWN_STORE, SEEDS, STEPS_PER_FILE, WINDOW_S, schedule
from benchmarks.plots import bars, number

__all__ = ["main", "publish", "read", "texts", "why_not_published"]

ROOT = Path(__file__).parents[1]
PAGE, DATA, PICTURES = "BENCHMARKS.md", "benchmarks/figures.json", "docs/images/benchmarks"
CONTESTANTS = (RALLYRUN, PREDECESSOR, TORCHRUN)
LOOK_S, MOST_BUSY = 3.0, 0.1  # of the processors' time
PARTS = {
    "start": "From the launcher's exec to the first line of the *last* worker; the floor is a bare Python parent.",
    "restart": "From the SIGKILL of one of four workers to all four running again, in the first restart of a job.",
    "warm": "Workers that need torch: with us by `--preload torch`.",
    "standby": "The same with `--standby`, which only we have.",
    "rendezvous": "Many nodes, each with its own connection, driven from four processes on this machine.",
    "regroup": "What two nodes take when one is lost, frozen or joins.",
    "store": "The workers' store, which torch's own client talks to: ours against torch's.",
    "tee": "Four workers that print as fast as they can, to the console and to files. The floor is `cat`.",
    "memory": "What the launcher and its helpers hold while four workers sleep.",
    "idle": "What they use of a processor meanwhile.",
    "seen": "What it takes to look at a job of a thousand workers, and at what workers have written.",
    "goodput": "A job of two workers that is hit by the same faults under each launcher, and what is left of its time.",
}  # in the page's order, by the first word of a figure's name


def main() -> None:
    _write(json.loads((ROOT / DATA).read_text()))


def publish(document: dict[str, Any]) -> None:
    (ROOT / DATA).write_text(json.dumps(document, indent=1) + "\n")
    _write(document)


def why_not_published() -> str:
    """What speaks against it now, before anything is measured; empty if nothing does."""
    if not (ROOT / ".git").exists():
        return "this is no clone of the repository, so there is no commit to name"
    if changed := _git("status", "--porcelain", "--untracked-files=no"):
        return f"the code has changes that no commit has: {', '.join(line[3:] for line in changed.splitlines()[:3])}"
    before = _processor_time()
    time.sleep(LOOK_S)
    busy, whole = (after - then for after, then in zip(_processor_time(), before, strict=True))
    share = busy / max(whole, 1)
    return f"this machine has something else to do: {share:.0%} of its processors' time" if share > MOST_BUSY else ""


def read() -> dict[str, str]:
    """The machine and what runs on it, as the page tells them."""
    cpu = next(line.partition(":")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    memory_kb = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "processor": cpu.strip(),
        "memory": f"{memory_kb / 2**20:.0f} GiB",
    }


def texts(document: dict[str, Any]) -> dict[str, str]:
    """All files, by their paths in the repository."""
    groups = {part: [figure for figure in document["figures"] if figure["name"].split()[0].strip(":") == part] for part in PARTS}
    measured = {part: figures for part, figures in groups.items() if figures}
    pictures = {
        f"{PICTURES}/{part}.svg": bars([(figure["name"], figure["unit"], figure["samples"]) for figure in figures], RALLYRUN)
        for part, figures in measured.items()
    }
    return {PAGE: "\n".join(_page(document, measured)), **pictures}


def _write(document: dict[str, Any]) -> None:
    for picture in (ROOT / PICTURES).glob("*.svg"):  # of a part that is not among them any more
        picture.unlink()
    for path, text in texts(document).items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
    print(f"{PAGE} and the pictures in {PICTURES}/ are those of {document['machine']['date']}")


def _page(document: dict[str, Any], measured: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    machine = document["machine"]
    yield "# Benchmarks\n"
    yield "Made by `make bench`; do not edit. Medians, with the least and the most of all samples below them. What is compared"
    yield "was measured in turns on the same machine, which had nothing else to do.\n"
    yield "| | |\n|---|---|"
    system = {"measured": f"{machine['date']}, commit {machine['commit']}"}
    system |= {name: machine[name] for name in ("processor", "cpus", "memory", "system", "python", "torch")}
    yield from (f"| {name} | {value} |" for name, value in system.items())
    yield f"\nEvery sample is in [{DATA}]({DATA}); `python -m benchmarks.page` makes this page of it again.\n"
    for part, figures in measured.items():
        yield f"## {part.capitalize()}\n\n{PARTS[part]}\n"
        if part == "goodput":
            yield from _faults()
        yield f"![{part}]({PICTURES}/{part}.svg)\n"
        yield from _table(figures)
        yield f"\nAgain: `python -m benchmarks --only {'warm' if part == 'standby' else part}`\n"


def _table(figures: list[dict[str, Any]]) -> Iterator[str]:
    named = [name for name in (*CONTESTANTS, FLOOR, "cat") if any(name in figure["samples"] for figure in figures)]
    yield f"| | unit | {' | '.join(named)} |\n|---|---|{'---|' * len(named)}"
    for figure in figures:
        cells = [_cell(figure["samples"].get(name)) for name in named]
        yield f"| {figure['name'].partition(' ')[2]} | {figure['unit']} | {' | '.join(cells)} |"


def _cell(values: list[float] | None) -> str:
    return f"{number(median(values))}<br>{number(min(values))} to {number(max(values))}" if values else ""


def _faults() -> Iterator[str]:
    yield f"{WINDOW_S:g} s from the first step, {FAULTS} faults in each run, a checkpoint in a file every {STEPS_PER_FILE} steps."
    yield "Faults come less often on a real cluster; what one of them costs is the same. Torchrun has a variable more"
    yield f"(`{OWN_STORE}`), without which its workers find the addresses of dead ones after a restart and wait for them."
    yield "Restarts are not put off, as rallyrun does by itself from the second on. The same seed gives the same faults:\n"
    for seed in SEEDS:
        yield f"- seed {seed}: {'; '.join(f'{one.kind} of rank {one.rank} at {one.at_s:.1f} s' for one in schedule(seed))}"
    yield ""


def _processor_time() -> tuple[float, float]:
    """Busy, and in all, since the machine was started."""
    times = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = times[3] + times[4]
    return sum(times) - idle, sum(times)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.rstrip()


if __name__ == "__main__":
    main()
