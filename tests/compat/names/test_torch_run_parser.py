"""torchrun's parser and its two actions, as programs use them that build their own command line on it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from tests.torchrun_defaults import TORCHRUN_DEFAULTS

from rallypoint import torch_run
from rallypoint.cli.command_line import BY_NAME
from rallypoint.errors import UsageError
from rallypoint.parser_actions import check_env, env
from rallypoint.torch_run import TORCHRUN_FLAGS, get_args_parser

DEFAULTS = TORCHRUN_DEFAULTS


@pytest.fixture
def train(tmp_path: Path) -> str:
    script = tmp_path / "train.py"
    script.write_text("")
    return str(script)


def differing(*argv: str) -> dict[str, object]:
    """What a command line changes."""
    return {key: value for key, value in vars(torch_run.parse_args(argv)).items() if DEFAULTS.get(key, []) != value}


def test_the_defaults_are_torchruns() -> None:
    args = torch_run.parse_args(["train.py"])
    assert isinstance(args, argparse.Namespace)
    assert vars(args) == {**DEFAULTS, "training_script": "train.py", "training_script_args": []}


def test_each_flag_has_both_spellings() -> None:
    strings = get_args_parser()._option_string_actions
    assert [name for name in TORCHRUN_FLAGS if strings[name] is not strings[f"--{BY_NAME[name].dest}"]] == []


@pytest.mark.parametrize(("argv", "expected"), [
    (["--nnodes=2", "-m", "mod", "a"], {"nnodes": "2", "module": True, "training_script": "mod", "training_script_args": ["a"]}),
    (["s", "--nnodes", "3", "-x"], {"training_script": "s", "training_script_args": ["--nnodes", "3", "-x"]}),
    (["--nno", "2", "s"], {"nnodes": "2", "training_script": "s"}),
    (["-t3", "-r", "0:1", "s"], {"tee": "3", "redirects": "0:1", "training_script": "s"}),
    (["--node_rank", "-1", "--max-restarts", "5", "s"], {"node_rank": -1, "max_restarts": 5, "training_script": "s"}),
    (["--duplicate-stdout-filters", "a,b,,c", "s"], {"duplicate_stdout_filters": ["a", "b,c"], "training_script": "s"}),
    (["--", "s", "--help"], {"training_script": "s", "training_script_args": ["--help"]}),
])  # fmt: skip
def test_command_lines_are_read_as_torchrun_reads_them(argv: list[str], expected: dict[str, object]) -> None:
    assert differing(*argv) == expected


@pytest.mark.parametrize("argv", [
    [], ["--nnodes"], ["--unknown", "s"], ["--start-method", "x", "s"], ["--max-restarts", "x", "s"], ["--tee", "-a=b", "s"],
])  # fmt: skip
def test_what_is_wrong_ends_in_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        torch_run.parse_args(argv)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_help_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        torch_run.parse_args(["--help"])
    shown = capsys.readouterr().out
    assert [name for name in TORCHRUN_FLAGS if name not in shown] == []


def test_a_completion_script_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        torch_run.parse_args(["--print-completion", "bash"])
    assert (ended.value.code, "complete -" in capsys.readouterr().out) == (0, True)


def test_variables_give_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"NNODES": "4", "STANDALONE": "1", "MAX_RESTARTS": "5", "DUPLICATE_STDERR_FILTERS": "a,b", "NUMA_BINDING": "node"}
    for name, value in settings.items():
        monkeypatch.setenv(f"PET_{name}", value)
    assert differing("--nnodes", "2", "s") == {
        "nnodes": "2", "standalone": True, "max_restarts": 5, "duplicate_stderr_filters": ["a", "b"], "training_script": "s",
    }  # fmt: skip


def test_a_program_can_add_flags_of_its_own_even_under_names_that_rallyrun_has(train: str) -> None:
    parser = get_args_parser()
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--version", default="1")
    args = parser.parse_args(["--dry-run", "--nproc-per-node", "2", train])
    assert (args.dry_run, args.version, args.nproc_per_node) == (True, "1", "2")
    assert torch_run.config_from_args(args)[0].nproc_per_node == 2


def test_another_parser_can_take_it_over(train: str) -> None:
    parser = argparse.ArgumentParser(parents=[get_args_parser()], conflict_handler="resolve")
    parser.add_argument("--mine", type=int)
    args = parser.parse_args(["--mine", "3", "--role", "trainer", train, "--mine", "4"])
    assert (args.mine, args.role, args.training_script_args) == (3, "trainer", ["--mine", "4"])


def test_arguments_of_another_launcher_go_through_it(train: str) -> None:
    """Accelerate fills a parsed namespace with what it knows under the same names, and runs that."""
    filled, _ = get_args_parser().parse_known_args(["--training_script", train, "--training_script_args", "a"])
    for name, value in {"training_script": train, "training_script_args": ["--lr", "1"], "nproc_per_node": "3"}.items():
        setattr(filled, name, value)
    config, _, arguments = torch_run.config_from_args(filled)
    assert (config.nproc_per_node, arguments) == (3, ["-u", train, "--lr", "1"])


def test_flags_of_rallyrun_alone_are_read_from_their_variables(train: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_HANG_TIMEOUT", "60")
    assert torch_run.config_from_args(torch_run.parse_args([train]))[0].hang_timeout == "60"
    monkeypatch.setenv("PET_HEALTH_PORT", "many")
    with pytest.raises(UsageError, match="PET_HEALTH_PORT"):
        torch_run.config_from_args(torch_run.parse_args([train]))


def add(action: type[argparse.Action], name: str, **rules: object) -> argparse.Action:
    return argparse.ArgumentParser().add_argument(name, action=action, **rules)  # type: ignore[arg-type]


def test_env_takes_its_default_from_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert add(env, "--multi-word", default="x").default == "x"
    monkeypatch.setenv("PET_MULTI_WORD", "y")
    assert add(env, "--multi-word", default="x").default == "y"
    monkeypatch.setenv("PET_MULTI_WORD", "")
    assert add(env, "--multi-word", default="x").default == ""


def test_env_is_not_required_where_there_is_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert add(env, "--name", required=True).required
    assert not add(env, "--name", required=True, default=5).required
    monkeypatch.setenv("PET_NAME", "x")
    assert not add(env, "--name", required=True).required


@pytest.mark.parametrize(("text", "is_set"), [("1", True), ("0", False), ("2", True)])
def test_check_env_is_set_by_the_variable(text: str, is_set: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_VERBOSE", text)
    action = add(check_env, "--verbose")
    assert (action.default, action.const, action.nargs) == (is_set, True, 0)


def test_check_env_on_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--verbose", action=check_env)
    assert (parser.parse_args([]).verbose, parser.parse_args(["--verbose"]).verbose) == (False, True)
    monkeypatch.setenv("PET_VERBOSE", "yes")
    with pytest.raises(ValueError, match="yes"):
        add(check_env, "--verbose")
