"""Help, documentation and completions know every flag, because they are made from one table; the shells themselves complete."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rallypoint.cli import usage
from rallypoint.cli.command_line import BY_NAME, GROUPS, OPTIONS, Option


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_help_and_page_list_every_flag(option: Option):
    text = usage.help_text()
    spelled = f"{option.short}, {option.name}" if option.short else option.name
    assert f"\n  {spelled}" in text
    assert all(choice in text for choice in option.choices)
    [row] = [line for line in usage.markdown().splitlines() if line.startswith(f"| `{spelled}") and f"{spelled}-" not in line]
    assert option.variable in row


def test_lines_fit_a_terminal():
    assert max(map(len, usage.help_text().splitlines())) <= 100


def test_defaults_are_shown():
    rows = {line.split("`")[1].split()[0]: line for line in usage.markdown().splitlines() if line.startswith("| `--")}
    assert "| `1:1` | `PET_NNODES` |" in rows["--nnodes"]
    assert "| `0` | `PET_NODE_RANK` |" in rows["--node-rank"]
    assert "| `300` | `PET_EXIT_BARRIER_TIMEOUT` |" in rows["--exit-barrier-timeout"]
    assert "| - | - |" in rows["--logs-specs"]


def test_the_page_is_a_table_for_each_group():
    lines = usage.markdown().splitlines()
    assert [line[3:] for line in lines if line.startswith("## ")] == list(GROUPS)
    rows = [line.replace("\\|", "") for line in lines if line.startswith("| `")]
    assert len(rows) == len(OPTIONS)
    assert all(row.count("|") == 5 for row in rows)


def test_the_table_is_sound():
    names = [name for option in OPTIONS for name in (option.name, option.short) if name]
    assert len(names) == len(set(names)) == len(BY_NAME)
    for option in OPTIONS:
        assert option.group in GROUPS
        assert option.name == "--" + option.dest.replace("_", "-")
        assert option.help.endswith(".")
        assert (option.kind == "choice") == bool(option.choices)
        assert (option.kind == "flag") == (not option.metavar)


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
    path.write_text(usage.completion_script("bash"))
    command = ["bash", "--norc", "-c", program, "bash", str(path), "rallyrun", *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    return ended.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_every_flag_is_in_every_script(shell: str):
    text = usage.completion_script(shell)
    assert all((option.name if shell != "tcsh" else option.name[2:]) in text for option in OPTIONS)


@pytest.mark.parametrize(("shell", "check"), [("bash", ["bash", "-n"]), ("zsh", ["zsh", "-n"]), ("tcsh", ["tcsh", "-f"])])
def test_each_shell_reads_its_script(shell: str, check: list[str], tmp_path: Path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = tmp_path / "script"
    path.write_text(usage.completion_script(shell))
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
    command = ["bash", "--norc", "-c", program, "bash", usage.completion_script("bash")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "complete -F _rallyrun rallyrun\n"
