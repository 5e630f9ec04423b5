"""``torch.distributed.run`` and ``torch.distributed.launch`` as modules that programs call."""

from __future__ import annotations

import warnings
from argparse import Namespace
from pathlib import Path
from unittest import mock

import pytest

from rallypoint import torch_run
from rallypoint.compat import launch_module
from rallypoint.errors import UsageError
from rallypoint.failures.process_failure import ChildFailedError


@pytest.fixture
def train(tmp_path: Path) -> str:
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.stdout.write(f'trained {sys.argv[1:]}\\n')  # one write: others write beside us")
    return str(script)


@pytest.fixture
def launched() -> mock.Mock:
    """Stands in for elastic_launch where the module looks it up."""
    with mock.patch("rallypoint.torch_run.elastic_launch") as stand_in:
        yield stand_in


def config_of(*argv: str) -> object:
    return torch_run.config_from_args(torch_run.parse_args(argv))[0]


def test_arguments_are_taken_as_they_are() -> None:
    """Nothing is looked up, and one node is not made standalone: that is for `run`."""
    config, entry, arguments = torch_run.config_from_args(torch_run.parse_args(["--run-path", "nosuch.py", "a"]))
    assert (config.rdzv_backend, config.run_id, config.rdzv_configs) == ("static", "none", {"rank": 0, "timeout": 900})
    assert (entry, arguments) == (torch_run.run_script_path, ["nosuch.py", "a"])


def test_a_static_rendezvous_has_the_masters_place() -> None:
    config = config_of("--nnodes", "2", "--node-rank", "1", "--master-addr", "h", "--master-port", "5", "t.py")
    assert (config.rdzv_endpoint, config.rdzv_configs["rank"]) == ("h:5", 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("argv", [
    ["--redirects", "9", "t.py"], ["--rdzv-conf", "bad", "t.py"], ["--local-ranks-filter", "0,x", "t.py"],
    ["--logs-specs", "nope", "t.py"], ["--no-python", "-m", "x"], ["--nproc-per-node", "many", "t.py"],
])  # fmt: skip
def test_bad_values_are_value_errors(argv: list[str]) -> None:
    with pytest.raises(ValueError, match="--"):
        config_of(*argv)


def test_nodes_that_are_no_range_are_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="1:2:3"):
        torch_run.parse_min_max_nnodes("1:2:3")
    assert [torch_run.parse_min_max_nnodes(text) for text in ("1", "2:20", "5:2")] == [(1, 1), (2, 20), (5, 2)]
    assert torch_run.determine_local_world_size("0") == 0
    for flags in (["--nnodes", "5:2"], ["--nproc-per-node", "0"]):
        with pytest.raises(UsageError, match=flags[0]):
            config_of(*flags, "t.py")


@pytest.mark.parametrize("flags", [[], ["--standalone"], ["--standalone", "--rdzv-backend", "etcd", "--rdzv-id", "mine"]])
def test_one_node_that_needs_nobody_is_settled_by_run(flags: list[str], train: str, launched: mock.Mock) -> None:
    args = torch_run.parse_args([*flags, train, "x"])
    torch_run.run(args)
    config = launched.call_args.kwargs["config"]
    assert (config.rdzv_backend, config.rdzv_endpoint, config.max_nodes) == ("c10d", "localhost:0", 1)
    assert (args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id) == ("c10d", "localhost:0", config.run_id)
    assert config.run_id not in ("none", "mine")
    assert launched.return_value.call_args.args == ("-u", train, "x")


def test_nodes_that_meet_are_left_as_they_are(train: str, launched: mock.Mock) -> None:
    torch_run.run(torch_run.parse_args(["--nnodes", "2", "--rdzv-id", "j", train]))
    config = launched.call_args.kwargs["config"]
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("static", "127.0.0.1:29500", "j")


def test_run_says_what_is_not_there(launched: mock.Mock) -> None:
    with pytest.raises(UsageError, match=r"nosuch\.py"):
        torch_run.run(torch_run.parse_args(["nosuch.py"]))
    with pytest.raises(UsageError, match="--nnodes asks for 2"):
        torch_run.run(torch_run.parse_args(["--standalone", "--nnodes", "2", "--no-python", "true"]))
    launched.assert_not_called()


def test_run_looks_its_parts_up_when_it_is_called(launched: mock.Mock, train: str) -> None:
    with mock.patch("rallypoint.torch_run.config_from_args", return_value=("config", "entry", ["a"])):
        torch_run.run(torch_run.parse_args([train]))
    assert launched.mock_calls == [mock.call(config="config", entrypoint="entry"), mock.call()("a")]


def test_main_runs_a_command_line(capfd: pytest.CaptureFixture[str], train: str) -> None:
    torch_run.main(["--nproc-per-node", "2", train, "rank", "${local_rank}"])
    assert sorted(capfd.readouterr().out.splitlines()) == ["trained ['rank', '0']", "trained ['rank', '1']"]


def test_main_raises_what_a_worker_did() -> None:
    with pytest.raises(ChildFailedError) as failed:
        torch_run.main(["--no-python", "sh", "-c", "exit 7"])
    assert failed.value.failures[0].exitcode == 7


def test_main_takes_its_arguments_from_the_process(train: str, launched: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["torchrun", "--role", "r", train])
    torch_run.main()
    assert launched.call_args.kwargs["config"].role == "r"


def test_use_env_is_the_rule_but_for_the_old_launcher() -> None:
    assert torch_run.get_use_env(Namespace())
    assert not torch_run.get_use_env(Namespace(use_env=False))


@pytest.mark.parametrize(("flags", "arguments"), [([], ["--local-rank=${local_rank}", "a"]), (["--use_env"], ["a"])])
def test_the_old_launcher_passes_the_local_rank_on(flags: list[str], arguments: list[str]) -> None:
    args = launch_module.parse_args([*flags, "t.py", "a"])
    assert torch_run.config_from_args(args)[2] == ["-u", "t.py", *arguments]


def test_the_old_launcher_says_that_it_is_old(train: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(FutureWarning, match="deprecated"):
        launch_module.main([train, "a"])
    assert capfd.readouterr().out == "trained ['--local-rank=0', 'a']\n"


def test_the_old_launcher_gives_a_program_no_local_rank() -> None:
    with mock.patch("rallypoint.compat.launch_module.run") as run, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="--use-env"):
            launch_module.main(["--no-python", "true"])
        run.assert_not_called()
        launch_module.launch(launch_module.parse_args(["--no-python", "--use-env", "true"]))
        assert run.call_args.args[0].training_script == "true"


def test_a_script_can_be_run_in_this_interpreter(
    train: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["before"])
    torch_run.run_script_path(train, "a", "b")
    assert capsys.readouterr().out == "trained ['a', 'b']\n"
