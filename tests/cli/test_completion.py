"""Completion scripts know every flag, value and command; the shells themselves complete, where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rallypoint.cli import completion, usage
from rallypoint.cli.command_line import BY_NAME, OPTIONS

SHELLS = ("bash", "zsh", "fish", "tcsh")


def complete(folder: Path, *words: str, command: str = "rallyrun") -> list[str]:
    """What bash offers for the last of `words`."""
    program = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
compopt() { [[ $2 == default ]] && COMPREPLY+=(FILES); }
"_$1"
printf '%s\\n' "${COMPREPLY[@]}"
"""
    path = folder / "completion.bash"
    path.write_text(completion.script("bash"))
    shell = ["bash", "--norc", "-c", program, "bash", str(path), command, *words]
    ended = subprocess.run(shell, cwd=folder, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    return ended.stdout.split()


@pytest.mark.parametrize("shell", SHELLS)
def test_f17_every_flag_back_end_and_command_is_in_every_script(shell: str):
    text = completion.script(shell)
    assert all((option.name if shell in ("bash", "zsh") else option.name[2:]) in text for option in OPTIONS)
    assert "c10d etcd etcd-v2 static" in text
    assert all(command in text for command in usage.COMMANDS)


def test_f17_there_is_a_script_for_each_shell_that_the_flag_names():
    assert BY_NAME["--print-completion"].choices == SHELLS


@pytest.mark.parametrize(
    ("shell", "check"),
    [("bash", ["bash", "-n"]), ("zsh", ["zsh", "-n"]), ("fish", ["fish", "-N", "--no-execute"]), ("tcsh", ["tcsh", "-f"])],
)
def test_each_shell_reads_its_script(shell: str, check: list[str], tmp_path: Path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = tmp_path / "script"
    path.write_text(completion.script(shell))
    ended = subprocess.run([*check, str(path)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["--standal"], ["--standalone"]),
        (["--nproc_per"], ["--nproc-per-node"]),
        (["--start-method", ""], ["spawn", "fork", "forkserver"]),
        (["--start-method", "=", "for"], ["fork", "forkserver"]),
        (["--start-method", "="], ["spawn", "fork", "forkserver"]),
        (["--start_method", "sp"], ["spawn"]),
        (["--standalone", "--nproc-per-node", "g"], ["gpu"]),
        (["-t", ""], ["0", "1", "2", "3"]),
        (["--tee", "3", "--rdzv-b"], ["--rdzv-backend"]),
        (["--tee", "=", "3", "--rdzv-b"], ["--rdzv-backend"]),
        (["--role", ""], ["FILES"]),
        (["--tee", "3", ""], ["FILES"]),
        (["train.py", "--standal"], ["FILES"]),
        (["--tee", "3", "--", "--standal"], ["FILES"]),
        (["--log-dir", "fol"], ["folder"]),
        (["--rdzv-backend", ""], ["c10d", "etcd", "etcd-v2", "static"]),
        (["--print-completion", ""], [*SHELLS]),
    ],
)
def test_bash_completes(tmp_path: Path, words: list[str], offered: list[str]):
    """P42: nothing is offered for the script's own arguments but files."""
    (tmp_path / "folder").mkdir()
    assert complete(tmp_path, *words) == offered


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ([""], [*usage.COMMANDS, "--help", "--version"]),
        (["sta"], ["status", "stacks"]),
        (["status", "--j"], ["--json"]),
        (["ex"], ["explain"]),
        (["run", "--standal"], ["--standalone"]),
        (["run", "--tee", "3", "--rdzv-backend", "et"], ["etcd", "etcd-v2"]),
        (["run", "train.py", "--standal"], ["FILES"]),
        (["explain", "--j"], ["--json"]),
        (["explain", ""], ["FILES"]),
        (["stacks", "--h"], ["--help"]),
        (["top", "--h"], ["--help"]),
        (["logs", "--s"], ["--since", "--stderr", "--stdout"]),
        (["logs", ""], ["FILES"]),
    ],
)
def test_f17_bash_completes_the_commands_of_rallypoint(tmp_path: Path, words: list[str], offered: list[str]):
    assert complete(tmp_path, *words, command="rallypoint") == offered


def test_bash_knows_the_commands():
    program = 'eval "$1"; complete -p rallyrun rallypoint'
    command = ["bash", "--norc", "-c", program, "bash", completion.script("bash")]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert answer == "complete -F _rallyrun rallyrun\ncomplete -F _rallypoint rallypoint\n"


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("rallyrun --rdzv-backend ", ["c10d", "etcd", "etcd-v2", "static"]),
        ("rallyrun --tee 3 --standal", ["--standalone"]),
        ("rallyrun --tee=3 --standal", ["--standalone"]),
        ("rallyrun train.py --standal", []),
        ("rallyrun -- train.py --standal", []),
        ("rallypoint ", sorted(usage.COMMANDS)),
        ("rallypoint run --standal", ["--standalone"]),
        ("rallypoint run train.py --standal", []),
        ("rallypoint explain --j", ["--json"]),
        ("rallypoint logs --col", ["--collapse"]),
    ],
)
def test_f17_fish_completes(tmp_path: Path, line: str, offered: list[str]):
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    path = tmp_path / "completion.fish"
    path.write_text(completion.script("fish"))
    command = ["fish", "--no-config", "-c", f"source {path}; complete -C{line!r}"]
    ended = subprocess.run(command, cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True)
    assert ([one.split("\t")[0] for one in ended.stdout.splitlines()], ended.stderr) == (offered, "")
