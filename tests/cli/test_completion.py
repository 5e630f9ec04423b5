"""Completion scripts, used by the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rallypoint.cli import completion
from rallypoint.cli.options import OPTIONS


def complete(folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of `words`."""
    program = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
compopt() { [[ $2 == default ]] && COMPREPLY+=(FILES); }
_rallyrun
printf '%s\\n' "${COMPREPLY[@]}"
"""
    path = folder / "completion.bash"
    path.write_text(completion.script("bash"))
    command = ["bash", "--norc", "-c", program, "bash", str(path), "rallyrun", *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    return ended.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_every_flag_is_in_every_script(shell: str):
    text = completion.script(shell)
    assert all((option.name if shell != "tcsh" else option.name[2:]) in text for option in OPTIONS)


@pytest.mark.parametrize(("shell", "check"), [("bash", ["bash", "-n"]), ("zsh", ["zsh", "-n"]), ("tcsh", ["tcsh", "-f"])])
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
    ],
)
def test_bash_completes(tmp_path: Path, words: list[str], offered: list[str]):
    """P42: nothing is offered for the script's own arguments but files."""
    (tmp_path / "folder").mkdir()
    assert complete(tmp_path, *words) == offered


def test_bash_knows_the_command():
    program = 'eval "$1"; complete -p rallyrun'
    command = ["bash", "--norc", "-c", program, "bash", completion.script("bash")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "complete -F _rallyrun rallyrun\n"
