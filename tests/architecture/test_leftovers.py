"""The check that nothing is left behind sees what it should: it runs here on tests that do leave something."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from tests.conftest import WaitUntil, children, children_among_all

CONFTEST = Path(__file__).parents[1] / "conftest.py"
UNTIDY = """
import os, subprocess, sys, tempfile, threading, time

def test_leaves_everything():
    daemon = "import os, time\\nif os.fork() == 0:\\n    os.setsid()\\n    time.sleep(60)"
    subprocess.run([sys.executable, "-c", daemon])
    os.pipe()
    tempfile.mkdtemp(prefix="rallypoint_")
    threading.Thread(target=time.sleep, args=(60,), daemon=True, name="rallypoint-test").start()

def test_is_tidy(capfd):
    subprocess.Popen(["true"])
"""


def test_leftovers_fail_a_test(tmp_path: Path) -> None:
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "tests").mkdir()
    shutil.copy(CONFTEST.with_name("torch_process.py"), tmp_path / "tests")
    (tmp_path / "test_untidy.py").write_text(UNTIDY)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert "2 passed, 1 error" in answer.stdout
    for what in ("process ", "thread rallypoint-test", "file descriptor ", "temporary file "):
        assert what in answer.stdout


def test_every_kind_of_child_is_seen_in_the_kernels_own_lists(wait_until: WaitUntil) -> None:
    """An orphan that was adopted, a zombie, and what another thread started, whether that thread goes on or has ended."""
    waits, go_on = [sys.executable, "-c", "input()"], threading.Event()
    started: list[subprocess.Popen[bytes]] = []

    def start(stay: threading.Event | None) -> None:
        started.append(subprocess.Popen(waits, stdin=subprocess.PIPE))
        if stay is not None:
            stay.wait()

    stays, ends = (threading.Thread(target=start, args=(stay,)) for stay in (go_on, None))
    for thread in (stays, ends):
        thread.start()
    ends.join()
    zombie = subprocess.Popen(["true"])
    leaves_one = [sys.executable, "-c", "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True)", *waits]
    with subprocess.Popen(leaves_one, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())
        os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        wait_until(lambda: len(started) == 2)
        assert {orphan, zombie.pid, *(one.pid for one in started)} <= children() == children_among_all()
    go_on.set()
    stays.join()
    for one in started:
        one.communicate(b"\n")
    zombie.wait()
    os.waitpid(orphan, 0)
    assert children().isdisjoint({orphan, zombie.pid, *(one.pid for one in started)})
