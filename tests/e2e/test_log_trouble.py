"""Logs serve the job: a folder that is lost while it runs costs the logs, and nothing else. And nobody leads them astray."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 30.0
WORKER = """
import os, sys, time
folder, attempt, rank = sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
print("a line of stdout", flush=True)
open(f"{folder}/started.{attempt}.{rank}", "w").close()
while not os.path.exists(f"{folder}/go.{attempt}"):
    time.sleep(0.005)
if rank == "0":
    sys.exit(7)
time.sleep(60)
"""


def remove(run: Path) -> None:
    """Also if links are made in it at that moment."""
    while run.exists():
        shutil.rmtree(run, ignore_errors=True)


def remove_all(run: Path) -> None:
    remove(run.parent)


def rename(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))


def replace_by_a_file(run: Path) -> None:
    remove(run)
    run.touch()


def replace_by_a_link(run: Path) -> None:
    victim = run.parent.parent / "victim"
    victim.mkdir()
    remove(run)
    run.symlink_to(victim)


def run_with_trouble(
    start_rallyrun: Any, script: Any, orders: Path, wait_until: Any, logs: Path, flags: list[Any], trouble: Callable[[Path], None]
) -> None:
    """A job whose workers fail three times, with trouble from the first time on; it has ended."""
    args = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "--pass-exit-code", *flags, script(WORKER), orders]
    job = start_rallyrun(args)
    for attempt in range(3):
        wait_until(lambda at=attempt: all((orders / f"started.{at}.{rank}").exists() for rank in range(2)), WAIT_S)
        if attempt == 0:
            trouble(wait_until(lambda: next(iter(logs.rglob("events.jsonl")), None)).parent)
        (orders / f"go.{attempt}").touch()
    assert job.wait() == 7, job.stderr
    assert job.stderr.count("run without log files") == 1, job.stderr
    assert "Traceback" not in job.stderr, job.stderr


@pytest.mark.parametrize("flags", [["--tee", "3"], ["-r", "3"], []], ids=["tee", "redirect", "none"])
@pytest.mark.parametrize("trouble", [remove, remove_all, rename, replace_by_a_file, replace_by_a_link])
def test_M5_a_log_folder_that_is_lost(
    start_rallyrun: Any, script: Any, orders: Path, wait_until: Any, tmp_path: Path, flags: list[str], trouble: Any
):
    """M5: restarts are used, each group runs without logs, and the exit code is the workers'."""
    logs = tmp_path / "logs"
    run_with_trouble(start_rallyrun, script, orders, wait_until, logs, [*flags, "--log-dir", logs], trouble)
    if trouble is replace_by_a_link:
        assert list((tmp_path / "victim").iterdir()) == [], "something was written where it should not be"


def test_M5_a_temporary_folder_that_is_reaped(
    start_rallyrun: Any, script: Any, orders: Path, wait_until: Any, private_tmpdir: Path
):
    """M5: as a clean-up of /tmp does it."""
    run_with_trouble(start_rallyrun, script, orders, wait_until, private_tmpdir, [], remove_all)


@pytest.mark.root
@pytest.mark.parametrize("how", ["full", "read-only"])
def test_M5_a_disk_that_takes_nothing(
    start_rallyrun: Any, script: Any, orders: Path, wait_until: Any, small_disk: Path, how: str
):
    """M5: it is full, or has become read-only."""

    def trouble(run: Path) -> None:
        if how == "full":
            for number in range(100):
                try:
                    (small_disk / f"filler.{number}").write_bytes(b"x" * 4096)
                except OSError:
                    return
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, timeout=60)

    run_with_trouble(start_rallyrun, script, orders, wait_until, small_disk / "logs", ["--log-dir", small_disk / "logs"], trouble)


@pytest.mark.root
def test_f04_a_full_disk_is_named_as_the_cause(rallyrun: Any, script: Any, small_disk: Path):
    """F04: workers write to the log files themselves, and fail there; as no traceback finds room, the summary says why."""
    worker = script("""
        while True:
            print("a line that fills the disk, sooner or later")
        """)
    flags = ["--log-dir", small_disk / "logs", "--redirects", "3"]
    ended = rallyrun(["--standalone", "--nproc-per-node", "2", *flags, worker])
    assert ended.returncode == 1
    [run] = (small_disk / "logs").glob("*_*")
    summary = ended.stderr.rsplit("=" * 80, 2)[1]
    assert f"exited with code 1; the disk of the log folder {run} is full\n" in summary
    assert "what to do: the disk of the log folder is full" in summary
    assert "left no traceback" not in ended.stderr
    assert "goes on" not in ended.stderr
    assert "go on" not in ended.stderr


def test_M5_a_bad_folder_at_the_start_is_bad_input(rallyrun: Any, script: Any, tmp_path: Path):
    """M5: then nothing runs yet, and one line says so."""
    (tmp_path / "file").touch()
    ended = rallyrun(["--standalone", "--log-dir", tmp_path / "file" / "logs", script("print('started')")])
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1
    assert "--log-dir" in ended.stderr


# --- another user ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stranger() -> int:
    """A user of this machine who is not root."""
    for user in pwd.getpwall():
        if user.pw_uid not in (0, 65534):
            return user.pw_uid
    pytest.skip("there is no other user on this machine")


@pytest.mark.root
@pytest.mark.parametrize("part", ["", "new"])
def test_m5_a_folder_of_another_user_is_refused(rallyrun: Any, script: Any, tmp_path: Path, stranger: int, part: str):
    """m5: root would write where the other user leads it."""
    logs = tmp_path / "logs"
    logs.mkdir()
    os.chown(logs, stranger, -1)
    ended = rallyrun(["--standalone", "--log-dir", logs / part, script("print('started')")])
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1
    assert f"it belongs to {pwd.getpwuid(stranger).pw_name}" in ended.stderr
    assert list(logs.iterdir()) == []


@pytest.mark.root
def test_m5_a_folder_of_nobody_known_here_is_used(rallyrun: Any, script: Any, tmp_path: Path):
    """m5: as it is in a container into which a folder of the host was mounted."""
    logs = tmp_path / "logs"
    logs.mkdir()
    os.chown(logs, 123_456_789, -1)
    ended = rallyrun(["--standalone", "--log-dir", logs, script("print('started')")])
    assert (ended.returncode, ended.stdout) == (0, "started\n"), ended.stderr
    assert len(list(logs.glob("*_*"))) == 1
