"""The floor: the least that a parent in Python can do. It starts N workers and waits for them, and nothing else."""

import subprocess
import sys

count, *worker = sys.argv[1:]
processes = [subprocess.Popen([sys.executable, *worker]) for _ in range(int(count))]
for process in processes:
    process.wait()
