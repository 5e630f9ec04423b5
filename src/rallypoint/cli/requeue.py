"""``--requeue``: once all workers have saved and the job is over, Slurm is told to queue it again.

One launcher of the step does that, the first, as its very last act: by then the others have left the store, which it has kept for
them, and what they had to write is written. Slurm ends whatever is left of the job.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from rallypoint.base import report
from rallypoint.errors import ExitCode, JobPreemptedError, UsageError
from rallypoint.schedulers import slurm

__all__ = ["check", "requeue"]

_PROGRAM = "scontrol"
_WAIT_S = 60.0
_INSTEAD = f'if [ $? -eq {ExitCode.PREEMPTED} ]; then {_PROGRAM} requeue "$SLURM_JOB_ID"; fi'


def check(named: str, environ: Mapping[str, str]) -> None:
    """UsageError where it could not be done in the end."""
    if not slurm.job_of(environ):
        raise UsageError(f"{named} is for jobs of Slurm, but {slurm.JOB} is not set")
    if shutil.which(_PROGRAM) is None:
        raise UsageError(f"{named}: {_PROGRAM} is not here, as in many containers; put this after srun in the script: {_INSTEAD}")


def requeue(error: BaseException, environ: Mapping[str, str]) -> None:
    """Where this error says that all have saved and the job is over, and where it is ours to do."""
    is_over = isinstance(error, JobPreemptedError) or slurm.nodes_of_step(environ) == 1
    job = slurm.job_of(environ)
    if not is_over or not slurm.is_first_task(environ):
        return
    try:
        done = subprocess.run([_PROGRAM, "requeue", job], capture_output=True, text=True, timeout=_WAIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        report.warn(f"job {job} is not queued again: {problem}")
        return
    if done.returncode:
        why = " ".join(done.stderr.split()) or f"{_PROGRAM} ended with {done.returncode}"
        report.warn(f"job {job} is not queued again: {why}")
    else:
        report.info(f"job {job} is queued again")
