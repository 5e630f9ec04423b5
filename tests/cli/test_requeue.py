"""`--requeue`: who asks Slurm to queue a job again, when, and what is said where that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.cli import requeue
from rallypoint.errors import JobPreemptedError, PreemptedError, UsageError

STEP = {"SLURM_JOB_ID": "42", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "0"}
ALONE = {"SLURM_JOB_ID": "42"}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `scontrol` was asked for is here, once it was; without a file `refuses` beside it, it does that."""
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\necho "$@" > asked\n[ ! -e refuses ] || { echo "requeue is disabled" >&2; exit 1; }\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "asked"


@pytest.mark.parametrize(
    ("error", "environ", "job"),
    [
        (JobPreemptedError("all have notice"), STEP, "42"),
        (JobPreemptedError("all have notice"), {**STEP, "SLURM_PROCID": "1"}, ""),  # one of them is enough
        (JobPreemptedError("all have notice"), {**STEP, "SLURM_JOB_ID_HET_GROUP_0": "41"}, "41"),
        (PreemptedError("this node has notice"), STEP, ""),  # the other goes on
        (PreemptedError("this node has notice"), ALONE, "42"),
    ],
)
def test_the_first_launcher_asks_once_the_job_is_over(asked: Path, error: Exception, environ: dict[str, str], job: str):
    requeue.check("--requeue", environ)
    requeue.requeue(error, environ)
    assert (asked.read_text() if asked.exists() else "") == (f"requeue {job}\n" if job else "")


def test_a_refusal_of_slurms_is_told(asked: Path, tmp_path: Path, warnings: list[str]):
    (tmp_path / "refuses").touch()
    requeue.requeue(JobPreemptedError("all have notice"), STEP)
    assert warnings == ["job 42 is not queued again: requeue is disabled"]


def test_what_could_not_be_done_in_the_end_is_refused_at_the_start(asked: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="--requeue is for jobs of Slurm, but SLURM_JOB_ID is not set"):
        requeue.check("--requeue", {})
    (tmp_path / "scontrol").unlink()
    with pytest.raises(UsageError, match=r"PET_REQUEUE: scontrol is not here, .* after srun"):
        requeue.check("PET_REQUEUE", STEP)
