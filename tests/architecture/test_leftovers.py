"""The check that nothing is left behind sees what it should: it runs here on tests that do leave something."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

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
