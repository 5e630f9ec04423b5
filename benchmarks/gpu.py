"""``python -m benchmarks.gpu``: what recovery takes on a machine with a GPU, in some minutes. Ours alone.

Nothing has to be installed: with ``PYTHONPATH=src`` the interpreter that has torch will do.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks import warm
from benchmarks.contestants import PROGRAMS, RALLYRUN, Contestant, clean_environment
from benchmarks.figures import table

__all__ = ["main"]

ROUNDS = 3


def main() -> None:
    subprocess.run([sys.executable, str(PROGRAMS / "gpu_pages.py"), str(warm.GIBIBYTES)], check=False, env=clean_environment())
    launcher = [sys.executable, "-m", "rallypoint", "run", "--standalone", "--nproc-per-node"]
    ours = Contestant(RALLYRUN, Path(sys.executable), lambda count, options, program: [*launcher, str(count), *options, *program])
    for figure in warm.on_gpu([ours], ROUNDS):
        samples = ", ".join(f"{sample:.0f}" for sample in figure.samples[RALLYRUN])
        print(f"{table([figure])}\nsamples: {samples}", flush=True)


if __name__ == "__main__":
    main()
