"""From arguments to a LaunchConfig: torchrun's rules for where nodes meet, logs, threads, and what is started."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.agent.config import LaunchConfig
from rallypoint.base import report
from rallypoint.cli import arguments, entry_point
from rallypoint.cli import main as cli
from rallypoint.cli.command_line import OPTIONS
from rallypoint.errors import UsageError
from rallypoint.output.log_specs import DefaultLogsSpecs, Std
from rallypoint.rendezvous.settings import SETTINGS


@pytest.fixture
def train(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script in the current folder."""
    monkeypatch.chdir(tmp_path)
    script("print('hello')", name="train.py")
    return "train.py"


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    report.set_sink(lambda _level, text: lines.append(text))
    yield lines
    report.set_sink(None)


def configure(*argv: str) -> LaunchConfig:
    return cli.config_from_args(cli.parse_args(argv))[0]


def started(*argv: str) -> tuple[object, list[str]]:
    _, entry, entry_args = cli.config_from_args(cli.parse_args(argv))
    return entry, entry_args


def refusal(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        configure(*argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- where the nodes meet --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [
    ["--standalone"],
    ["--standalone", "--rdzv-backend=no-such", "--rdzv-endpoint=elsewhere:1", "--rdzv-id=mine", "--master-port=1"],
    ["--standalone", "--nnodes=1:4"],
    [],
    ["--nnodes=1"],
    ["--nnodes=1:1", "--master-addr=elsewhere", "--node-rank=0"],
])  # fmt: skip
def test_one_node_that_needs_nobody(train: str, flags: list[str]):
    first, second = configure(*flags, train), configure(*flags, train)
    assert (first.rdzv_backend, first.rdzv_endpoint, first.min_nodes, first.max_nodes) == ("c10d", "localhost:0", 1, 1)
    assert first.run_id not in ("", "none", "mine", second.run_id)
    assert "rank" not in first.rdzv_configs


@pytest.mark.parametrize(
    ("flags", "endpoint", "rank"),
    [
        (["--nnodes=2"], "127.0.0.1:29500", 0),
        (["--nnodes=2", "--node-rank=1", "--master-addr=head", "--master-port=7"], "head:7", 1),
        (["--master-port=0"], "127.0.0.1:0", 0),
        (["--rdzv-endpoint=head:5"], "head:5", 0),
        (["--nnodes=2", "--master-addr=::1"], "[::1]:29500", 0),
        (["--nnodes=2", "--master-addr=[fe80::1]", "--master-port=7"], "[fe80::1]:7", 0),
    ],
)
def test_static_rendezvous(train: str, flags: list[str], endpoint: str, rank: int):
    config = configure(*flags, train)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("static", endpoint, "none")
    assert config.rdzv_configs["rank"] == rank


def test_a_named_backend_keeps_what_was_given(train: str):
    config = configure("--nnodes=1:4", "--rdzv-backend=c10d", "--rdzv-endpoint=head", "--rdzv-id=7", "--node-rank=9", train)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("c10d", "head", "7")
    assert (config.min_nodes, config.max_nodes, "rank" in config.rdzv_configs) == (1, 4, False)


def test_settings_of_the_rendezvous(train: str):
    config = configure("--rdzv-conf", " join_timeout=5 , is_host = true,timeout=3,", train)
    assert config.rdzv_configs == {"join_timeout": "5", "is_host": "true", "timeout": "3"}
    for quoted in ("'join_timeout=5,timeout=3'", '"join_timeout=5,timeout=3"'):
        assert configure("--rdzv-conf", quoted, train).rdzv_configs == {"join_timeout": "5", "timeout": "3"}
    assert "did you mean join_timeout?" in refusal("--rdzv-conf", "join_timout=5", train)
    for bad in ("join_timeout", "=5", "a=1,b="):
        assert "--rdzv-conf" in refusal("--rdzv-conf", bad, train)


@pytest.mark.parametrize(("nnodes", "expected"), [("1", (1, 1)), ("3", (3, 3)), ("1:4", (1, 4)), ("2:2", (2, 2))])
def test_numbers_of_nodes(nnodes: str, expected: tuple[int, int]):
    assert cli.parse_min_max_nnodes(nnodes) == expected


@pytest.mark.parametrize("nnodes", ["0", "2:1", "0:1", "-1", "1:2:3", "a", "1:", ":", "1.5"])
def test_impossible_numbers_of_nodes(train: str, nnodes: str):
    assert f"--nnodes: {nnodes!r}" in refusal(f"--nnodes={nnodes}", train)


@pytest.mark.parametrize(
    ("flags", "culprit"),
    [
        (["--standalone", "--nnodes=2"], "--standalone"),
        (["--nnodes=2", "--node-rank=2"], "--node-rank"),
        (["--nnodes=2", "--node-rank=-1"], "--node-rank"),
        (["--master-port=70000"], "--master-port"),
        (["--rdzv-backend=pigeon"], "--rdzv-backend: there is no rendezvous backend 'pigeon'; available: c10d, etcd, etcd-v2"),
    ],
)
def test_impossible_meetings(train: str, flags: list[str], culprit: str):
    assert culprit in refusal(*flags, train)


def test_a_value_from_the_environment_is_blamed_on_its_variable(train: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PET_NNODES", "2:1")
    assert "PET_NNODES: '2:1'" in refusal(train)


ELASTIC = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:1", "--nnodes", "1:4"]


@pytest.mark.parametrize(("flag", "text", "conf", "other"), [
    ("--node-unit", "2", "2", "4"), ("--restart-backoff", "2.5", "2.50", "3"), ("--restart-window", "6.5", "65e-1", "0"),
    ("--no-retry-exit-codes", "2,64", "64+2", "2"), ("--secret-file", "/a", "/a", "/b"),
])  # fmt: skip
def test_a_flag_and_its_setting_are_one(flag: str, text: str, conf: str, other: str, train: str) -> None:
    """P24: the settings that are wanted most have flags; two that contradict each other are refused."""
    key = flag[2:].replace("-", "_")
    alone = configure(*ELASTIC, flag, text, train).rdzv_configs[key]
    assert configure(*ELASTIC, flag, text, "--rdzv-conf", f"{key}={conf}", train).rdzv_configs[key] == alone
    told = refusal(*ELASTIC, flag, text, "--rdzv-conf", f"{key}={other}", train)
    assert f"{key} is {other} in --rdzv-conf and {text} in {flag}" in told


def test_the_flags_that_stand_for_settings_are_those_that_the_settings_name() -> None:
    flags = {option.name for option in OPTIONS if option.setting}
    assert flags | {"--node-rank"} == {setting.flag for setting in SETTINGS if setting.flag}


def test_restarts_of_one_node_are_set_by_flag_setting_environment_and_file(
    train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P24"""
    (tmp_path / "settings").write_text("restart_window = 9\nrestart_backoff = 9\nno_retry_exit_codes = 9\n")
    monkeypatch.setenv("RALLYPOINT_CONF", str(tmp_path / "settings"))
    monkeypatch.setenv("RALLYPOINT_RESTART_BACKOFF", "7")
    config = configure("--standalone", "--no-retry-exit-codes", "2,64", train)
    assert (config.no_retry_exit_codes, config.restart_backoff, config.restart_window) == ((2, 64), 7.0, 9.0)
    assert configure("--standalone", "--rdzv-conf", "restart_backoff=3", train).restart_backoff == 3.0
    assert configure("--rdzv-backend=static", "--master-port=1", "--restart-backoff=4", train).restart_backoff == 4.0


def test_a_rank_that_was_given_is_a_setting_of_an_elastic_job(train: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P27: torchrun ignores it there."""
    assert "node_rank" not in configure(*ELASTIC, train).rdzv_configs
    assert configure(*ELASTIC, "--node-rank", "0", train).rdzv_configs["node_rank"] == 0
    assert "node_rank is 1 in --rdzv-conf" in refusal(*ELASTIC, "--node-rank=2", "--rdzv-conf", "node_rank=1", train)
    monkeypatch.setenv("PET_NODE_RANK", "3")
    assert configure(*ELASTIC, train).rdzv_configs["node_rank"] == 3
    assert "node_rank" not in configure("--standalone", train).rdzv_configs


def test_a_unit_of_nodes_that_no_size_of_the_job_is_a_multiple_of(train: str) -> None:
    """P25"""
    assert "no multiple of 5 lies between 1 and 4" in refusal(*ELASTIC, "--node-unit", "5", train)
    assert "--node-unit" in refusal(*ELASTIC, "--node-unit", "0", train)


def test_a_job_of_one_node_without_settings_does_not_load_them(train: str) -> None:
    """P38: they are for jobs of many nodes."""
    program = (
        "import sys; from rallypoint.cli import main as cli; cli.config_from_args(cli.parse_args(['train.py']));"
        "print([name for name in sys.modules if 'setting' in name or 'agreement' in name])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert answer.stdout.strip() == "[]"


# --- logs ------------------------------------------------------------------------------------------------------------------


def test_logs_go_where_they_were_asked_to(train: str, tmp_path: Path):
    """P47: a rank of any number can be named."""
    flags = ["--log-dir", str(tmp_path / "new"), "-r", "10:3,0:1", "-t", "3", "--local-ranks-filter=0, 11"]
    specs = configure(*flags, train).logs_specs
    assert isinstance(specs, DefaultLogsSpecs)
    assert specs.root_log_dir == str(tmp_path / "new")
    assert (specs._redirects, specs._tee, specs._local_ranks_filter) == ({0: Std.OUT, 10: Std.ALL}, Std.ALL, {0, 11})
    assert not (tmp_path / "new").exists(), "nothing is made before anything starts"


@pytest.mark.parametrize(
    ("flags", "culprit"),
    [
        (["--tee=9"], "--tee"), (["-r", "0:9"], "--redirects"), (["-r", "x:1"], "--redirects"),
        (["--local-ranks-filter=0,x"], "--local-ranks-filter"), (["--log-dir=/dev/null/logs"], "log_dir"),
        (["--log-max-size=0"], "log_max_bytes"), (["--logs-specs=no-such"], "--logs-specs: no entry point 'no-such'"),
    ],
)  # fmt: skip
def test_impossible_logs(train: str, flags: list[str], culprit: str):
    assert culprit in refusal(*flags, train)


def test_the_rest_of_the_log_flags(train: str, monkeypatch: pytest.MonkeyPatch):
    config = configure("--log-max-size=1M", "--duplicate-stdout-filters=a,b", "--log-line-prefix-template=${rank}>", train)
    assert (config.log_max_bytes, config.duplicate_stdout_filters, config.duplicate_stderr_filters) == (1 << 20, ["a", "b"], [])
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${hostname}]")
    assert configure(train).log_line_prefix_template == "[${hostname}]"
    assert configure("--log-line-prefix-template=${rank}>", train).log_line_prefix_template == "${rank}>"


class Quiet(DefaultLogsSpecs):
    """What a plug-in would be."""


def install(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    found = importlib.metadata.EntryPoints([importlib.metadata.EntryPoint("quiet", value, "torchrun.logs_specs")])
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found.select(group=group))


def test_a_plug_in_for_logs(train: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "quiet_logs", sys.modules[__name__])
    install(monkeypatch, "quiet_logs:Quiet")
    specs = configure("--logs-specs=quiet", "--tee=3", train).logs_specs
    assert isinstance(specs, Quiet)
    assert specs._tee == Std.ALL
    assert "installed: quiet" in refusal("--logs-specs=loud", train)
    install(monkeypatch, "no_such_module:Quiet")
    assert "cannot be loaded" in refusal("--logs-specs=quiet", train)


# --- workers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "workers", "already_set", "cpus", "threads"),
    [
        (None, 1, False, 8, None),
        (None, 4, False, 8, 1),
        (None, 4, True, 8, None),
        ("auto", 4, False, 8, 2),
        ("auto", 4, True, 8, 2),
        ("auto", 1, False, 8, 8),
        ("auto", 3, False, 8, 2),
        ("auto", 8, False, 2, 1),
        ("6", 4, True, 8, 6),
        ("6", 1, False, 1, 6),
    ],
)
def test_threads_of_each_worker(asked: str | None, workers: int, already_set: bool, cpus: int, threads: int | None):
    """P39: one thread by default as with torchrun, `auto` divides the CPUs, and what the user has set is left alone."""
    assert arguments.threads_per_worker(asked, workers, already_set, cpus) == threads


def test_the_default_number_of_threads_is_told_once_and_only_given_to_workers(
    train: str, said: list[str], monkeypatch: pytest.MonkeyPatch
):
    """P39: said once, with what `auto` would do."""
    monkeypatch.setattr(arguments, "allowed_cpus", lambda: 8)
    assert configure("--nproc-per-node=4", train).worker_env == {"OMP_NUM_THREADS": "1"}
    assert len(said) == 1
    assert said[0].startswith("OMP_NUM_THREADS was not set; using 1 per worker")
    assert "--omp-num-threads auto would use 2: 8 CPUs / 4 workers" in said[0]
    assert "OMP_NUM_THREADS" not in os.environ


def test_auto_threads_are_told_and_counted_ones_are_not(train: str, said: list[str], monkeypatch: pytest.MonkeyPatch):
    """P39: what the user counted needs no words."""
    monkeypatch.setattr(arguments, "allowed_cpus", lambda: 8)
    assert configure("--nproc-per-node=4", "--omp-num-threads=auto", train).worker_env == {"OMP_NUM_THREADS": "2"}
    assert said == ["OMP_NUM_THREADS=2 per worker: 8 CPUs / 4 workers"]
    assert configure("--nproc-per-node=4", "--omp-num-threads=3", train).worker_env == {"OMP_NUM_THREADS": "3"}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert configure("--nproc-per-node=4", train).worker_env == {}
    assert configure(train).worker_env == {}
    assert len(said) == 1


@pytest.mark.parametrize("bad", ["0", "-1", "all", "1.5"])
def test_impossible_threads(train: str, bad: str):
    assert f"--omp-num-threads: {bad!r}" in refusal(f"--omp-num-threads={bad}", train)


def test_the_rest_of_the_flags_reach_the_configuration(train: str):
    config = configure(
        "--nproc-per-node=1", "--max-restarts=2", "--monitor-interval=0.5", "--start-method=fork", "--role=trainer",
        "--local-addr=10.0.0.1", "--event-log-handler=console", "--signals-to-handle=SIGTERM,SIGUSR1", "--shutdown-timeout=5",
        "--exit-barrier-timeout=9", "--virtual-local-rank", train,
    )  # fmt: skip
    assert (config.max_restarts, config.monitor_interval, config.start_method, config.role) == (2, 0.5, "fork", "trainer")
    assert (config.local_addr, config.event_log_handler, config.signals_to_handle) == ("10.0.0.1", "console", "SIGTERM,SIGUSR1")
    assert (config.shutdown_timeout, config.exit_barrier_timeout, config.virtual_local_rank) == (5, 9.0, True)


@pytest.mark.parametrize(
    ("flags", "culprit"),
    [
        (["--hang-timeout=soon"], "--hang-timeout: "), (["--nproc-per-node=0"], "--nproc-per-node: 0"),
        (["--nproc-per-node=many"], "--nproc-per-node: 'many'"), (["--max-restarts=-1"], "max_restarts"),
        (["--monitor-interval=0"], "monitor_interval"), (["--role=a\nb"], "role"),
        (["--shutdown-timeout=-1"], "shutdown_timeout"),
        (["--signals-to-handle=SIGFOO"], "signals_to_handle"), (["--rdzv-id=a\nb", "--master-port=1"], "run_id"),
    ],
)  # fmt: skip
def test_impossible_workers(train: str, said: list[str], flags: list[str], culprit: str):
    assert culprit in refusal("--nproc-per-node=2", *flags, train)
    assert said == [], "a refusal is one line"


def test_the_shutdown_time_of_the_environment(train: str, monkeypatch: pytest.MonkeyPatch):
    assert configure(train).shutdown_timeout == 30
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3")
    assert configure(train).shutdown_timeout == 3
    assert configure("--shutdown-timeout=4", train).shutdown_timeout == 4
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon")
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in refusal(train)


# --- what is started -------------------------------------------------------------------------------------------------------


def test_a_script_runs_under_this_python(train: str):
    assert started(train, "--lr", "${local_rank}") == (sys.executable, ["-u", "train.py", "--lr", "${local_rank}"])


def test_python_exec_chooses_another_python(train: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHON_EXEC", "/bin/sh")
    assert started(train) == ("/bin/sh", ["-u", "train.py"])
    assert started("-m", "module_of_another_python") == ("/bin/sh", ["-u", "-m", "module_of_another_python"])
    monkeypatch.setenv("PYTHON_EXEC", "/no/such/python")
    assert "PYTHON_EXEC: program '/no/such/python'" in refusal(train)


def test_a_module(train: str, tmp_path: Path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise RuntimeError('imported')")
    for module in ("train", "package.anything", "json.tool"):
        assert started("-m", module, "-x") == (sys.executable, ["-u", "-m", module, "-x"])
    assert "module 'no_such.thing' is not there: no 'no_such'" in refusal("-m", "no_such.thing")
    assert "without .py or slashes" in refusal("-m", "./train.py")
    assert "package" not in sys.modules


def test_a_program(train: str, tmp_path: Path):
    assert started("--no-python", "sh", "-c", "true") == ("sh", ["-c", "true"])
    assert "program 'no-such-program' is not on the PATH" in refusal("--no-python", "no-such-program")
    assert "program './no-such' is not there" in refusal("--no-python", "./no-such")
    assert "is not executable" in refusal("--no-python", "./train.py")
    (tmp_path / "train.py").chmod(0o755)
    assert started("--no-python", "./train.py") == ("./train.py", [])


def test_a_script_inside_the_worker(train: str):
    assert started("--run-path", train, "a") == (cli.run_script_path, ["train.py", "a"])


def test_running_a_script_inside_the_worker(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["before"])
    path = str(script("import sys; print(__name__, sys.argv)"))
    entry_point.run_script_path(path, "a", "b")
    assert capsys.readouterr().out == f"__main__ {[path, 'a', 'b']}\n"


def test_a_folder_with_a_main_module_is_a_script(train: str, tmp_path: Path):
    (tmp_path / "app").mkdir()
    assert "holds no __main__.py" in refusal("app")
    (tmp_path / "app" / "__main__.py").touch()
    assert started("app")[1] == ["-u", "app"]


@pytest.mark.parametrize(("argv", "words"), [
    (["no_such.py"], "script 'no_such.py' is not there"),
    (["--", ""], "give the name of a script"),
    (["-m", "--no-python", "x"], "-m/--module and --no-python exclude each other"),
    (["--run-path", "--no-python", "x"], "--no-python and --run-path exclude each other"),
    (["-m", "--run-path", "x"], "-m/--module and --run-path exclude each other"),
])  # fmt: skip
def test_what_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], words: str):
    monkeypatch.chdir(tmp_path)
    assert words in refusal(*argv)


def test_an_unreadable_script(train: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda _path, mode: mode != os.R_OK)
    assert "cannot be read" in refusal(train)


def test_the_local_rank_as_an_argument_where_torch_distributed_launch_asks_for_it(train: str):
    args = cli.parse_args([train, "x"])
    args.use_env = False
    assert cli.config_from_args(args)[2] == ["-u", "train.py", "--local-rank=${local_rank}", "x"]
    assert cli.get_use_env(cli.parse_args([train])) is True


def test_a_rank_that_is_given_is_one_in_etcd_too(train: str) -> None:
    flags = ["--rdzv-backend", "etcd", "--rdzv-endpoint", "a:1,b", "--rdzv-id", "job", "--nnodes", "2:4"]
    assert configure(*flags, "--node-rank", "3", train).rdzv_configs["node_rank"] == 3
    assert "node_rank" not in configure(*flags, train).rdzv_configs
