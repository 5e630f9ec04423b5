"""The demo shows what it promises, on a machine with nothing but the package."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.demo import scenes


@pytest.mark.timeout(400)
def test_every_scene_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rallypoint", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    parts = re.split(r"^\d\. ", done.stdout, flags=re.MULTILINE)[1:]
    assert [part.partition("\n")[0] for part in parts] == list(scenes.TITLES)
    killed, hung, lost = parts
    assert "now: kill -9 of rank 2" in killed
    assert re.search(r"rank 2 \(pid \d+\) failed: .*SIGKILL", killed)
    assert re.search(r"rank 1 .*hangs", hung)
    assert "wait_for_a_lock_that_nobody_gives_back (train.py:" in hung
    assert re.search("was lost: (its agent was killed|not heard of in time)", lost)  # which one a busy machine finds first
    assert "generation 2 started: 1 node, 2 workers" in lost
    for part in parts:
        assert re.search(r"workers go on from step \d+, \d+\.\d\d s after", part)
        assert "done: all 12 steps, exit code 0" in part
    assert "next: rallyrun" in lost
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_scene_that_ends_otherwise_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "train.py"
    broken.write_text("import os, sys; os.write(1, b'pid 1 rank 0 of 4 from step 0\\n'); sys.exit(1)")
    monkeypatch.setattr(scenes, "PROGRAM", broken)
    monkeypatch.setattr(scenes, "PATIENCE_S", 10.0)  # the launcher ends by itself in that time
    with pytest.raises(scenes.DemoFailed):
        scenes.play(0, lambda _: None)
