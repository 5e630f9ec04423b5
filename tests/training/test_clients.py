"""Other people's programs and launchers, unmodified: Hugging Face Accelerate, JAX, and a subclass of torch's agent."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_port

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

COMPAT = ("-m", "rallypoint.compat")


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


# --- Hugging Face Accelerate -----------------------------------------------------------------------------------------------


def check_training(launched: Any) -> None:
    """Two processes of ours trained together, and found the slope of the line."""
    assert launched.wait() == 0
    told = sorted(launched.told(), key=lambda one: one["rank"])
    found = [(one["rank"], one["processes"], one["slope"], one["launcher"]) for one in told]
    assert found == [(0, 2, 3.0, "rallypoint"), (1, 2, 3.0, "rallypoint")]


@pytest.mark.soak  # what it shows, the next test shows too, but for the way there
@needs("accelerate")
def test_a_program_with_accelerate_runs_under_rallyrun(launch: Any, programs: Path):
    check_training(launch.rallyrun("--standalone", "--nproc-per-node", "2", programs / "accelerated.py"))


@needs("accelerate")
def test_accelerates_command_launches_with_rallypoint(launch: Any, programs: Path):
    """``accelerate launch`` for several devices calls torch's launcher, which is ours behind compat."""
    flags = ["--multi_gpu", "--num_processes", "2", "--main_process_port", str(free_port())]
    command = ["-m", "accelerate.commands.launch", *flags, programs / "accelerated.py"]
    check_training(launch.python(*COMPAT, *command))


@needs("accelerate")
def test_accelerates_notebook_launcher_launches_with_rallypoint(launch: Any, programs: Path):
    notebook = launch.python(*COMPAT, programs / "notebook.py")
    check_training(notebook)
    assert "NOTEBOOK goes on" in notebook.printed


# --- JAX -------------------------------------------------------------------------------------------------------------------


@needs("jax")
def test_jax_meets_from_our_environment_and_meets_again_after_a_failure(launch: Any, programs: Path):
    """JAX's coordinator wants the master port for itself, which is what ``--worker-store rank0`` is for."""
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--worker-store", "rank0"]
    job = launch.rallyrun(*flags, programs / "jax_sum.py")
    assert job.wait() == 0
    last = [told for told in job.told() if told["restarts"] == 1]
    assert sorted(told["rank"] for told in last) == [0, 1]
    assert [(told["sum"], told["processes"]) for told in job.told()] == [(1, 2)] * len(job.told())


# --- a launcher of somebody's own ------------------------------------------------------------------------------------------


CALLS_OF_TORCHS_AGENT = [
    "invoke_run", "initialize", "rendezvous 0 of 1", "start [0, 1], 1 restarts left", "monitor: FAILED, failed: [1]", "restart",
    "shutdown", "initialize", "rendezvous 0 of 1", "start [0, 1], 0 restarts left", "monitor: SUCCEEDED, failed: []", "shutdown",
]  # fmt: skip


@pytest.mark.parametrize("code", ["rallypoint", pytest.param("torch", marks=pytest.mark.soak)])
def test_a_subclass_of_torchs_agent_runs_on_rallypoint_as_on_torch(launch: Any, programs: Path, code: str):
    """The same hooks are called in the same order, with the same ranks, results and restarts left."""
    compat = COMPAT if code == "rallypoint" else ()
    launcher = launch.python(*compat, programs / "own_agent.py", f"127.0.0.1:{free_port()}", launch.folder / "logs")
    assert launcher.wait() == 0
    (told,) = launcher.told()
    assert told == {"calls": CALLS_OF_TORCHS_AGENT, "state": "SUCCEEDED", "returned": {"0": 21.0, "1": 21.0}, "code": code}
