"""``--preload auto``: what one run imports, the next finds imported."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import RunRallyrun

Script = Callable[..., Path]

SLOW = "import os, time\ntime.sleep(0.4)\nprocess = os.getpid()\n"
# Whether the module was imported by this very process, or is there already.
PROGRAM = """
    import os, sys
    is_there = "slow_module" in sys.modules
    import slow_module
    is_own = slow_module.process == os.getpid()
    os.write(1, f"rank {os.environ['RANK']} {is_there} {is_own} {os.environ['PYTHONPATH']}\\n".encode())
"""
COMMON = ("--standalone", "--nproc-per-node", "2", "--omp-num-threads", "1")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """With a module that is installed, and takes its time."""
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "slow_module.py").write_text(SLOW)
    return {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if "--preload auto" in line or "themselves" in line]


@pytest.mark.parametrize("where", ["logs", "cache"])
def test_what_one_run_imports_the_next_finds_imported(
    where: str, env: dict[str, str], rallyrun: RunRallyrun, script: Script, tmp_path: Path
) -> None:
    """Kept beside the log folders, or among the caches of the user where none is named; asked for by flag or variable."""
    train = script(PROGRAM, "train.py")
    if where == "logs":
        command, file = [*COMMON, "--log-dir", tmp_path / "logs", "--preload", "auto"], tmp_path / "logs/.rallypoint-preload.json"
    else:
        command, file = [*COMMON], tmp_path / "cache/rallypoint/preload.json"
        env = {**env, "PET_PRELOAD": "auto"}
    first, second = rallyrun([*command, train], env), rallyrun([*command, train], env)
    path = env["PYTHONPATH"]
    assert sorted(first.stdout.splitlines()) == [f"rank {rank} False True {path}" for rank in range(2)], first.stderr
    assert sorted(second.stdout.splitlines()) == [f"rank {rank} True False {path}" for rank in range(2)], second.stderr
    assert lines_of(first.stderr) == [
        "rallyrun: --preload auto: nothing is known yet of what train.py imports; the first run measures it"
    ]
    [line] = lines_of(second.stderr)
    assert line.startswith("rallyrun: --preload auto: slow_module (")
    assert line.endswith(" s), as train.py imported them last")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [one.name for one in file.parent.iterdir() if "preload" in one.name] == [file.name], "nothing is left of writing it"
    assert (tmp_path / "cache").exists() == (where == "cache")
    plan = rallyrun([*command, "--dry-run", train], env).stdout
    assert "preload       auto: slow_module (" in plan
    assert "nothing is known yet of what other.py" in rallyrun([*command, "--dry-run", script("", "other.py")], env).stdout


RESTARTED = """
    import os, sys, time
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    is_there = "slow_module" in sys.modules
    import slow_module
    os.write(1, f"restart {restart} {is_there}\\n".encode())
    if restart != "2":
        os.kill(os.getpid(), 9)
"""


def test_what_the_first_workers_import_restarted_ones_find_imported(
    env: dict[str, str], rallyrun: RunRallyrun, script: Script
) -> None:
    """However those end: here they kill themselves."""
    flags = ["--standalone", "--max-restarts", "2", "--restart-backoff", "0", "--preload", "auto"]
    ended = rallyrun([*flags, script(RESTARTED)], env)
    assert ended.stdout.splitlines() == ["restart 0 False", "restart 1 True", "restart 2 True"], ended.stderr
    assert len(lines_of(ended.stderr)) == 2, "told once, until it changes"


LEFT_OUT = """
    import os, sys
    print([name in sys.modules for name in ("slow_module", "with_thread", "late")], flush=True)
    import slow_module, with_thread
    os.environ["FOR_LATE"] = "1"
    import late
"""


def test_what_was_refused_is_left_out_of_the_next_run(
    env: dict[str, str], rallyrun: RunRallyrun, script: Script, tmp_path: Path
) -> None:
    threaded = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (tmp_path / "site-packages/with_thread.py").write_text(SLOW + threaded)
    (tmp_path / "site-packages/late.py").write_text(SLOW)
    command = ["--standalone", "--preload", "auto", script(LEFT_OUT, "train.py")]
    first, refused, warm = (rallyrun([*command], env) for _ in range(3))
    assert (first.stdout, first.returncode) == ("[False, False, False]\n", 0), first.stderr
    assert (refused.stdout, refused.returncode) == ("[False, False, False]\n", 0), refused.stderr
    assert (warm.stdout, warm.returncode) == ("[True, False, False]\n", 0), warm.stderr
    why = "1 thread of what was imported would be missing in a fork"
    changed = "the program changes FOR_LATE in its environment before it imports that"
    assert lines_of(refused.stderr)[1] == f"rallyrun: workers import slow_module, with_thread themselves: {why}"
    [line] = lines_of(warm.stderr)
    assert line.endswith(f" s), as train.py imported them last; without with_thread: {why}; without late: {changed}")


def test_programs_that_cannot_be_warm_are_not_measured(env: dict[str, str], rallyrun: RunRallyrun, script: Script) -> None:
    ended = rallyrun(["--standalone", "--preload", "auto", "--no-python", "sh", "-c", "env | grep -c RALLYPOINT_IMPORTS"], env)
    assert ended.stdout == "0\n"
    [line] = lines_of(ended.stderr)
    assert line.startswith("rallyrun: --preload auto: what workers import is not measured: they run sh, not this Python")


FUNCTION = """
    import os, sys
    from rallypoint import LaunchConfig, elastic_launch

    def work():
        is_there = "slow_module" in sys.modules
        import slow_module
        return is_there

    if __name__ == "__main__":
        print(elastic_launch(LaunchConfig.standalone(2, preload="auto"), work)())
"""


def test_functions_too(env: dict[str, str], script: Script) -> None:
    command = [sys.executable, script(FUNCTION)]
    runs = [subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, check=True) for _ in range(2)]
    assert [run.stdout for run in runs] == ["{0: False, 1: False}\n", "{0: True, 1: True}\n"]
    assert [run.stderr for run in runs] == ["", ""]


@pytest.mark.torch
def test_torch_is_found_by_itself(tmp_path: Path, rallyrun: RunRallyrun, script: Script) -> None:
    program = script("import sys; print('torch' in sys.modules); import torch")
    command = ["--standalone", "--log-dir", tmp_path / "logs", "--preload", "auto", program]
    assert [rallyrun([*command]).stdout for _ in range(2)] == ["False\n", "True\n"]
