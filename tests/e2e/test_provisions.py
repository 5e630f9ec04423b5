"""A package that is upgraded, moved or removed while its job runs: nothing that the end of the job needs is still to be read."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import ports

import rallypoint
from rallypoint.agent import local_agent
from rallypoint.base import report

LOADED = "all that the end of this job may need is loaded"
WORKER = """
import os, sys, time
folder, rank, attempt = sys.argv[1], os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
os.write(1, f"rank {rank} attempt {attempt}\\n".encode())
while not os.path.exists(f"{folder}/finish"):
    if os.path.exists(f"{folder}/fail.{rank}.{attempt}"):
        raise ValueError("as ordered")
    time.sleep(0.01)
"""
# In every interpreter that is ours, what is imported is written down.
JOURNAL = """
import os, sys
if " rallypoint" in " ".join(sys.orig_argv):
    journal = os.open(os.environ["JOURNAL"] + f".{os.getpid()}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    sys.addaudithook(lambda event, args: event == "import" and os.write(journal, f"{args[0]}\\n".encode()))
"""


class Job:
    """One agent, which finds the package where the test wants it, and its orders."""

    def __init__(self, start: Callable[..., Any], folder: Path, worker: Path, path: Path) -> None:
        self._start, self._worker, self.folder, self._path = start, worker, folder, path
        self.journal = folder / "journal"
        self.agent: Any = None

    def start(self, *flags: str) -> Job:
        env = {"PYTHONPATH": str(self._path), "JOURNAL": str(self.journal), "LOGLEVEL": "DEBUG"}
        self.agent = self._start(["--nproc-per-node", "2", *flags, self._worker, self.folder], env)
        return self

    def wait_until_loaded(self) -> None:
        self.agent.wait_for_line("rank 1 attempt 0")
        self.agent.wait_for_line(LOADED)

    def order(self, name: str) -> None:
        (self.folder / name).touch()

    def ours(self) -> list[str]:
        """What the agent has imported of us, so far."""
        imported = Path(f"{self.journal}.{self.agent.pid}").read_text().splitlines()
        return [line for line in imported if line.startswith("rallypoint")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "job"
    made.mkdir()
    return made


@pytest.fixture
def watched(start_rallyrun: Any, script: Any, tmp_path: Path, folder: Path) -> Callable[[], Job]:
    """``watched()`` is a job whose imports are written down."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(JOURNAL)
    return lambda: Job(start_rallyrun, folder, script(WORKER), site)


def fail_and_be_stopped(job: Job) -> None:
    job.order("fail.1.0")
    job.agent.wait_for_line("rank 1 attempt 1")
    job.agent.send_signal(signal.SIGTERM)
    assert job.agent.wait() == 128 + signal.SIGTERM


def fail_for_good(job: Job) -> None:
    for attempt in range(2):
        job.order(f"fail.0.{attempt}")
    assert job.agent.wait() == 1
    assert "ValueError: as ordered" in job.agent.stderr


def succeed(job: Job) -> None:
    job.order("finish")
    assert job.agent.wait() == 0


ENDS = [fail_and_be_stopped, fail_for_good, succeed]
MANY_NODES = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-conf", "last_call_timeout=0"]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["one node", "many nodes", "logs and hangs"])
def test_m10_nothing_is_imported_later(watched: Callable[[], Job], kind: str, end: Callable[[Job], None]) -> None:
    """M10: the list of what is loaded is complete: no way to the end of a job reads anything else of us."""
    flags = {
        "one node": [],
        "many nodes": [*MANY_NODES, "--rdzv-endpoint", f"127.0.0.1:{ports.free_port()}"],
        "logs and hangs": ["--tee", "3", "--hang-timeout", "60"],
    }[kind]
    job = watched().start("--max-restarts", "1", *flags)
    job.wait_until_loaded()
    before = job.ours()
    end(job)
    assert job.ours() == before


@pytest.fixture
def movable(start_rallyrun: Any, script: Any, tmp_path: Path, folder: Path) -> tuple[Job, Path]:
    """A job whose package is a copy, and where that is."""
    place = tmp_path / "package"
    shutil.copytree(os.path.dirname(rallypoint.__file__), place / "rallypoint", ignore=shutil.ignore_patterns("__pycache__"))
    return Job(start_rallyrun, folder, script(WORKER), place), place / "rallypoint"


WARM = pytest.mark.parametrize("preload", [(), ("--preload", "decimal")], ids=["fresh", "warm"])


@pytest.mark.parametrize("end", ENDS)
@WARM
def test_m10_a_package_that_is_moved(movable: tuple[Job, Path], preload: tuple[str, ...], end: Callable[[Job], None]) -> None:
    """M10: workers are stopped with their grace, started anew, and what became of them is told."""
    job, package = movable
    job.start("--max-restarts", "1", *preload).wait_until_loaded()
    package.rename(package.with_name("elsewhere"))
    end(job)
    assert "ModuleNotFoundError" not in job.agent.stderr
    assert str(package) not in job.agent.stderr, "a traceback of ours"


@WARM
def test_m10_a_package_that_becomes_another_version(movable: tuple[Job, Path], preload: tuple[str, ...]) -> None:
    """M10: files of the new version are not mixed with what runs."""
    job, package = movable
    job.start("--max-restarts", "1", *preload).wait_until_loaded()
    for path in package.rglob("*.py"):
        path.write_text("raise RuntimeError('of another version')\n")
    fail_and_be_stopped(job)
    assert "of another version" not in job.agent.stderr


def test_m10_a_keeper_that_could_not_be_stopped_before_the_program_is_not_started(
    movable: tuple[Job, Path], wait_until: Any
) -> None:
    """M10: without the file that stops it, it would be one worker too many, with no place in the job."""
    job, package = movable
    job.start("--max-restarts", "1", "--preload", "decimal").wait_until_loaded()
    (package / "worker_site" / "sitecustomize.py").unlink()
    (keeper,) = (pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_keeper_below(pid, job.agent.pid))
    os.kill(keeper, signal.SIGKILL)
    job.agent.wait_for_line("workers import decimal themselves: rallypoint was upgraded, moved or removed since this job began")
    job.order("fail.1.0")
    job.agent.wait_for_line("rank 1 attempt 1")
    job.order("finish")
    assert job.agent.wait() == 0, job.agent.stderr
    assert "KeyError" not in job.agent.stderr, "it has run the program"


def is_keeper_below(pid: int, agent: int) -> bool:
    """A child of the agent's warden that goes by that name."""
    try:
        if Path(f"/proc/{pid}/comm").read_text() != "rally-keeper\n":
            return False
        warden = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        return Path(f"/proc/{warden}/stat").read_text().rpartition(")")[2].split()[1] == str(agent)
    except OSError:
        return False


def test_m10_what_cannot_be_loaded_any_more_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """M10: in the first moment nothing can be done about it, but it is said what it means."""
    said: list[str] = []
    monkeypatch.setattr(report, "warn", said.append)
    monkeypatch.setattr(local_agent, "PROVISIONS", ("rallypoint.processes.gone",))
    local_agent._load_provisions()
    (line,) = said
    assert "rallypoint was upgraded, moved or removed while it runs" in line
    assert "rallypoint.processes.gone" in line
