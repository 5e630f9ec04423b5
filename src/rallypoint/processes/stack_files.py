"""The files in which the stacks of workers are left: one for each worker, and one that tells those that are the same once."""

from __future__ import annotations

import os

from rallypoint.core.stack_groups import ProcessStacks, WorkerStacks, grouped_lines
from rallypoint.processes.log_specs import LogFolder, open_log

__all__ = ["SUMMARY_NAME", "write_stacks"]

SUMMARY_NAME = "stacks.txt"
MAX_BYTES = 1024 * 1024  # of one file


def write_stacks(
    folder: str, heading: list[str], workers: dict[int, WorkerStacks], first: list[int], run_folder: LogFolder | None = None
) -> str:
    """Write the files of these workers, by local rank, into the folder of their group; the path of the summary."""
    for local_rank, worker in workers.items():
        if run_folder is None:
            os.makedirs(os.path.join(folder, str(local_rank)), exist_ok=True)
        _write(run_folder, os.path.join(folder, str(local_rank), SUMMARY_NAME), _worker_lines(worker))
    path = os.path.join(folder, SUMMARY_NAME)
    _write(run_folder, path, [*heading, *grouped_lines(list(workers.values()), first)])
    return path


def _worker_lines(worker: WorkerStacks) -> list[str]:
    lines = [f"rank {worker.rank}"]
    for place, process in enumerate(worker.processes):
        lines += ["", f"{'the worker' if place == 0 else 'its descendant'}: process {process.pid} ({process.command})"]
        lines += _process_lines(process)
    return lines


def _process_lines(process: ProcessStacks) -> list[str]:
    python = process.text.splitlines() if process.threads else [f"no Python stack: {process.why_none or 'it told of no thread'}"]
    return [*python, "", f"process {process.pid} as the kernel sees it:", *(process.kernel or ("nothing can be seen",))]


def _write(run_folder: LogFolder | None, path: str, lines: list[str]) -> None:
    text = "\n".join([*lines, ""]).encode(errors="replace")
    with open(open_log(run_folder, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(text if len(text) <= MAX_BYTES else text[: MAX_BYTES - 16] + b"\n(cut short)\n")
