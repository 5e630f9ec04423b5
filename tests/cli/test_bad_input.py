"""Bad input through a real process: one line that names the culprit, exit code 2, nothing started, nothing slow imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Ends with a code of its own if the launcher was as much as imported.
PROGRAM = """
import sys
from rallypoint.cli import main as cli
code = cli.main(sys.argv[1:])
sys.exit(99 if "rallypoint.agent.launch" in sys.modules else code)
"""
# What a cold start has no time for.
HEAVY = {
    "argparse", "json", "logging", "subprocess", "asyncio", "tempfile", "shutil", "random", "uuid", "traceback", "datetime",
    "multiprocessing", "pickle", "importlib.metadata", "difflib", "textwrap", "torch", "rallypoint.cli.usage",
}  # fmt: skip


def run(folder: Path, *argv: str, program: str = PROGRAM, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text("raise SystemExit('a worker was started')")
    command = [sys.executable, "-c", program, *argv]
    return subprocess.run(command, cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("argv", "culprit"),
    [
        ([], "no script"),
        (["--standalone", "--nproc-per-node", "4"], "no script"),
        (["no_such.py"], "no_such.py"),
        (["-m", "no_such_module"], "no_such_module"),
        (["--no-python", "no-such-program"], "no-such-program"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node: 0"),
        (["--nproc-per-node", "many", "train.py"], "--nproc-per-node: 'many'"),
        (["--nproc-per-node", "gpu", "train.py"], "--nproc-per-node: no gpu"),
        (["--nnodes", "2:1", "train.py"], "--nnodes: '2:1'"),
        (["--tee", "9", "train.py"], "--tee"),
        (["--rdzv-backend", "pigeon", "train.py"], "'pigeon'"),
        (["--log-dir", "/proc/self/logs", "train.py"], "--log-dir"),
        (["--log-dir", "train.py", "train.py"], "--log-dir"),
        (["--role", "a\nb", "train.py"], "--role must be"),
        (["--monitor-interval", "0", "train.py"], "--monitor-interval must be"),
        (["--rdzv-backend", "etcd", "train.py"], "--rdzv-endpoint is empty"),
        (["--exit-barrier-timeout", "-1", "train.py"], "--exit-barrier-timeout must be"),
        (["--nproc", "4", "train.py"], "--nproc"),
        (["--start-method", "vfork", "train.py"], "--start-method"),
        (["--rdzv-conf", "join_timeout", "train.py"], "--rdzv-conf"),
        (["--signals-to-handle", "SIGFOO", "train.py"], "--signals-to-handle: "),
        (["--numa-binding", "near", "train.py"], "--numa-binding"),
        (["--hang-timeout", "60,checkpoint", "train.py"], "--hang-timeout"),
    ],
)
def test_bad_input_costs_one_line_and_starts_nothing(tmp_path: Path, argv: list[str], culprit: str):
    ended = run(tmp_path, *argv, CUDA_VISIBLE_DEVICES="")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("rallyrun: error: ")
    assert ended.stderr.count("\n") == 1
    assert culprit in ended.stderr


def test_a_folder_that_may_not_be_written():
    """Root may write everywhere, so a root process becomes nobody first, who may not even import any more."""
    become_nobody = """
import os
from rallypoint.cli import main as cli
from rallypoint.failures import process_failure as failures
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
"""
    command = [sys.executable, "-c", become_nobody + PROGRAM, "--log-dir", "/logs/of/the/job", "/dev/null"]
    ended = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("rallyrun: error: --log-dir: no logs can be written under '/logs/of/the/job'")
    assert ended.stderr.count("\n") == 1


def test_a_bad_variable(tmp_path: Path):
    ended = run(tmp_path, "train.py", PET_MAX_RESTARTS="many")
    assert (ended.returncode, ended.stderr) == (2, "rallyrun: error: PET_MAX_RESTARTS must be a whole number, not 'many'\n")
    ended = run(tmp_path, "train.py", PET_MONITOR_INTERVAL="0")
    assert (ended.returncode, ended.stderr) == (2, "rallyrun: error: PET_MONITOR_INTERVAL must be more than 0 seconds\n")


def test_the_way_to_the_launcher_imports_nothing_heavy(tmp_path: Path):
    """P38: what is imported before the first worker is what a cold start costs."""
    program = """
import sys
from rallypoint.cli import main as cli; from rallypoint.base import report
report.set_sink(lambda level, text: None)
cli.config_from_args(cli.parse_args(["--standalone", "--nproc-per-node", "4", "--tee", "3", "train.py"]))
print(*sys.modules)
"""
    loaded = set(run(tmp_path, program=program).stdout.split())
    assert "rallypoint.agent.config" in loaded
    assert not loaded & HEAVY


def test_help_survives_a_reader_that_has_seen_enough(tmp_path: Path):
    command = f'"{sys.executable}" -c "from rallypoint.cli import main as cli; raise SystemExit(cli.main())" --help | head -n 1'
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("usage: rallyrun")
