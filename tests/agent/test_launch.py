"""Launching: from a config and an entry point to results, on one node, with both of its rendezvous back ends."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.ports import free_port

from rallypoint.agent.launch import (
    LaunchConfig,
    Results,
    _get_addr_and_port,
    _get_entrypoint_name,
    elastic_launch,
    launch,
    launch_agent,
)
from rallypoint.agent.leaving import DrainFlags
from rallypoint.agent.local_agent import LocalElasticAgent
from rallypoint.agent.workers import RunResult, WorkerState
from rallypoint.errors import RendezvousGracefulExitError, SignalException, UnkillableWorkersError, UsageError
from rallypoint.events import EventSource
from rallypoint.failures.process_failure import ChildFailedError
from rallypoint.output.log_specs import DefaultLogsSpecs
from rallypoint.protocol.restarts import RestartPolicy
from rallypoint.rendezvous.handler import RendezvousParameters, registry_of_the_process
from rallypoint.rendezvous.one_node import LocalRendezvous

SH = "/bin/sh"
BACKENDS = ("static", "c10d")
every_backend = pytest.mark.parametrize("backend", BACKENDS)

AGENT = "rallypoint.agent.launch.LocalElasticAgent"
RECORD = "rallypoint.agent.launch.events.record"
GET_HANDLER = "rallypoint.rendezvous.registry.get_rendezvous_handler"

TOUCH = "import os, pathlib, sys; pathlib.Path(sys.argv[1], os.environ['RANK']).touch()"

ADD_UP = """
import socket

def add_up():
    # The workers find each other at the master's address, as any SPMD program does, and rank 0 adds up all ranks.
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank > 0:
        with connect(where) as line:
            line.sendall(bytes([rank]))
            return line.recv(1)[0]
    with socket.create_server(where, backlog=world) as server:
        lines = [server.accept()[0] for _ in range(world - 1)]
    total = sum(line.recv(1)[0] for line in lines)
    for line in lines:
        line.sendall(bytes([total]))
    return total

def connect(where):
    while True:
        try:
            return socket.create_connection(where)
        except ConnectionRefusedError:
            continue
"""


def test_what_a_notebook_shows_of_many_and_of_long_results() -> None:
    """A list is compared, copied and sent as one; the table has no markup of theirs, and an end."""
    results = Results(["<script>" * 100] * 70)
    assert results == ["<script>" * 100] * 70
    assert repr(results) == repr(list(results))
    assert pickle.loads(pickle.dumps(results)) == results
    table = results._repr_html_()
    assert table.count("<tr>") == 1 + 64
    assert table.endswith("</table><p>and 6 more</p>")
    assert "<script" not in table
    assert len(table) < 64 * 2000


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., LaunchConfig]:
    """``make_config(backend, workers, **fields)`` for one node."""

    def make(backend: str = "c10d", workers: int = 1, **fields: Any) -> LaunchConfig:
        given: dict[str, Any] = {
            "rdzv_backend": backend,
            "rdzv_endpoint": f"127.0.0.1:{free_port()}",
            "rdzv_configs": {"rank": 0} if backend == "static" else {},
            "run_id": "job-7",
            "max_restarts": 0,
            "monitor_interval": 0.1,
            "logs_specs": DefaultLogsSpecs(str(tmp_path / "logs")),
        }
        return LaunchConfig(1, 1, workers, **{**given, **fields})

    return make


MakeConfig = Callable[..., LaunchConfig]


def names_in(folder: Path) -> set[str]:
    return set(os.listdir(folder))


# --- programs --------------------------------------------------------------------------------------------------------------


@every_backend
def test_a_python_script(backend: str, make_config: MakeConfig, script: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    launch = elastic_launch(make_config(backend, 4), sys.executable)
    assert launch("-u", str(script(TOUCH)), str(out)) == dict.fromkeys(range(4))
    assert names_in(out) == {"0", "1", "2", "3"}


@every_backend
def test_a_shell_script(backend: str, make_config: MakeConfig, script: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    program = script('#!/bin/sh\ntouch "$1/$RANK"\n', "worker.sh")
    program.chmod(0o755)
    elastic_launch(make_config(backend, 3), str(program))(str(out))
    assert names_in(out) == {"0", "1", "2"}


@every_backend
def test_the_local_rank_in_arguments(backend: str, make_config: MakeConfig, tmp_path: Path) -> None:
    elastic_launch(make_config(backend, 3), SH)("-c", f"touch {tmp_path}/seen-$1", "sh", "${local_rank}")
    assert {path.name for path in tmp_path.glob("seen-*")} == {"seen-0", "seen-1", "seen-2"}


def test_the_callers_environment_is_inherited(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SENTINEL", "from the parent")
    elastic_launch(make_config(), SH)("-c", f'test "$SENTINEL" = "from the parent" && touch {tmp_path}/yes')
    assert (tmp_path / "yes").exists()


# --- functions -------------------------------------------------------------------------------------------------------------


def run_functions(tmp_path: Path, config: str, body: str, call: str) -> str:
    """In a program of its own, whose functions workers can import."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import os\nfrom rallypoint import LaunchConfig, elastic_launch\n"
        f"from rallypoint.output.log_specs import DefaultLogsSpecs\n{body}\n"
        f"if __name__ == '__main__':\n"
        f"    config = LaunchConfig({config}, max_restarts=0, logs_specs=DefaultLogsSpecs('logs'))\n"
        f"    print({call})\n"
    )
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def fields_of(backend: str, **more: Any) -> str:
    settings = {**({"rank": 0} if backend == "static" else {}), **more}
    return f"rdzv_backend={backend!r}, rdzv_endpoint='127.0.0.1:{free_port()}', rdzv_configs={settings}"


@every_backend
def test_a_function_gives_its_values_by_global_rank(backend: str, tmp_path: Path) -> None:
    body = "def scale(by):\n    return 10 + by * int(os.environ['RANK'])"
    printed = run_functions(tmp_path, f"1, 1, 4, {fields_of(backend)}", body, "elastic_launch(config, scale)(2)")
    assert printed == "{0: 10, 1: 12, 2: 14, 3: 16}"


@every_backend
def test_workers_meet_at_the_master_address(backend: str, tmp_path: Path) -> None:
    """A program that opens the master's port itself says so."""
    fields = fields_of(backend, worker_store="rank0")
    printed = run_functions(tmp_path, f"1, 1, 4, {fields}", ADD_UP, "elastic_launch(config, add_up)()")
    assert printed == "{0: 6, 1: 6, 2: 6, 3: 6}"


# --- a short way in --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"rdzv_backend": "static"}, {"rdzv_backend": "c10d"}, {"rdzv_endpoint": " "}])
def test_f08_one_node_that_names_no_endpoint_meets_nobody(fields: dict[str, Any], tmp_path: Path) -> None:
    """Whatever back end it would need for others, even the default one, which is etcd."""
    config = LaunchConfig(1, 1, 2, DefaultLogsSpecs(str(tmp_path / "logs")), max_restarts=0, **fields)
    elastic_launch(config, SH)("-c", f"touch {tmp_path}/$RANK-of-$WORLD_SIZE")
    assert {path.name for path in tmp_path.glob("*-of-*")} == {"0-of-2", "1-of-2"}


@pytest.mark.parametrize("fields", [{"max_nodes": 2}, {"rdzv_endpoint": "host"}])
def test_f08_what_is_missing_is_called_by_its_field(fields: dict[str, Any]) -> None:
    config = LaunchConfig(**{"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 1, "rdzv_backend": "static", **fields})
    with pytest.raises(UsageError, match=r"^rdzv_endpoint ") as caught:
        elastic_launch(config, SH)()
    assert (caught.value.field, "--" in str(caught.value)) == ("rdzv_endpoint", False)


def test_f08_a_back_end_of_the_programs_own_needs_no_endpoint(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = registry_of_the_process()
    monkeypatch.setattr("rallypoint.rendezvous.registry.rendezvous_handler_registry", fresh)
    fresh.register("etcd", lambda params: LocalRendezvous(params.run_id, backend="etcd"))
    with mock.patch(RECORD) as recorded:
        elastic_launch(make_config("etcd", rdzv_endpoint=""), SH)("-c", "exit 0")
    assert the_event(recorded).metadata["rdzv_backend"] == "etcd"


def test_f08_a_config_for_this_machine_alone() -> None:
    config = LaunchConfig.standalone(4, role="trainer")
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (1, 1, 4, 0)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.role) == ("c10d", "localhost:0", "trainer")
    assert LaunchConfig.standalone("cpu", max_restarts=2).nproc_per_node == len(os.sched_getaffinity(0))
    with pytest.raises(UsageError, match=r"^nproc_per_node: 'many' is neither a number nor one of auto, cpu, gpu, xpu"):
        LaunchConfig.standalone("many")


def test_f08_launch_gives_a_list_by_rank(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, rallypoint\n"
        "def scale(by): return by * int(os.environ['RANK'])\n"
        "if __name__ == '__main__': print(rallypoint.launch(scale, nproc=3, args=(2,)))\n"
    )
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[0, 2, 4]\n", "")


@pytest.mark.parametrize("nproc", [0, "no"])
def test_f08_launch_names_its_own_parameter(nproc: object) -> None:
    with pytest.raises(UsageError, match=r"^nproc[: ]"):
        launch(SH, nproc)  # type: ignore[arg-type]


# --- failures, events and the rendezvous -----------------------------------------------------------------------------------


@pytest.fixture
def handler() -> Any:
    one = mock.MagicMock()
    one.get_run_id.return_value = "job-7"
    with mock.patch(GET_HANDLER, return_value=one):
        yield one


@pytest.fixture
def record() -> Any:
    with mock.patch(RECORD) as recorded:
        yield recorded


def the_event(record: mock.Mock) -> Any:
    record.assert_called_once()
    return record.call_args.args[0]


@every_backend
def test_a_launch_that_succeeds_records_one_event(backend: str, make_config: MakeConfig, record: mock.Mock) -> None:
    elastic_launch(make_config(backend, 2), SH)("-c", "exit 0")
    event = the_event(record)
    assert (event.name, event.source) == ("torchelastic.worker.status.SUCCEEDED", EventSource.AGENT)
    assert event.metadata["rdzv_backend"] == backend
    assert record.call_args.args[1] == "null"


@every_backend
def test_a_launch_whose_worker_fails_raises_and_records_one_event(
    backend: str, make_config: MakeConfig, record: mock.Mock, script: Callable[..., Path]
) -> None:
    program = script("import os, sys, time\nif os.environ['RANK'] == '2': sys.exit('no')\ntime.sleep(60)")
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(make_config(backend, 3), sys.executable)("-u", str(program))
    assert caught.value.name == str(program)
    rank, failure = caught.value.get_first_failure()
    assert (rank, failure.exitcode) == (2, 1)
    assert list(caught.value.failures) == [2]
    the_event(record)


def test_a_failed_launch_shuts_the_rendezvous_down(make_config: MakeConfig, record: mock.Mock) -> None:
    with mock.patch.object(LocalRendezvous, "shutdown", autospec=True) as shutdown, pytest.raises(ChildFailedError):
        elastic_launch(make_config(), SH)("-c", "exit 1")
    shutdown.assert_called_once()


def test_a_successful_launch_shuts_the_rendezvous_down(make_config: MakeConfig, handler: mock.Mock) -> None:
    with mock.patch(AGENT) as agent_class:
        agent_class.return_value.run.return_value = RunResult(WorkerState.SUCCEEDED, {0: "value"})
        assert elastic_launch(make_config(), SH)("-c", "exit 0") == {0: "value"}
    handler.shutdown.assert_called_once_with()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_the_rendezvous_open(
    number: signal.Signals, make_config: MakeConfig, handler: mock.Mock, record: mock.Mock
) -> None:
    """P03: the others can go on, and this node can come back."""
    received = SignalException("test", number)
    with mock.patch.object(LocalElasticAgent, "run", side_effect=received), pytest.raises(SignalException) as caught:
        launch_agent(make_config(), SH, [])
    assert caught.value.sigval is number
    handler.shutdown.assert_not_called()
    event = the_event(record)
    assert event.name == "torchelastic.worker.status.FAILED"
    assert "SignalException" in event.metadata["raw_error"]


@pytest.mark.parametrize(
    "error", [RuntimeError("any other"), UnkillableWorkersError([7], 10), ConnectionError("no store")], ids=type
)
def test_any_other_error_shuts_the_rendezvous_down(
    error: Exception, make_config: MakeConfig, handler: mock.Mock, record: mock.Mock
) -> None:
    with mock.patch.object(LocalElasticAgent, "run", side_effect=error), pytest.raises(type(error)) as caught:
        launch_agent(make_config(), SH, [])
    assert caught.value is error
    handler.shutdown.assert_called_once_with()
    event = the_event(record)
    assert (event.name, event.source) == ("torchelastic.worker.status.FAILED", EventSource.AGENT)
    assert str(error) in event.metadata["raw_error"]


def test_a_node_that_is_not_needed_ends_with_nothing_and_no_error(
    make_config: MakeConfig, handler: mock.Mock, record: mock.Mock
) -> None:
    handler.next_rendezvous.side_effect = RendezvousGracefulExitError("the job is complete without this node")
    assert launch_agent(make_config(), SH, ["-c", "exit 0"]) == {}
    assert the_event(record).name == "torchelastic.worker.status.SUCCEEDED"
    handler.shutdown.assert_called_once_with()


def test_a_real_signal_during_a_launch(make_config: MakeConfig, record: mock.Mock, alive: Callable[[int], bool]) -> None:
    with mock.patch.object(LocalRendezvous, "shutdown", autospec=True) as shutdown, pytest.raises(SignalException):
        elastic_launch(make_config(workers=2), SH)("-c", f"kill -TERM {os.getpid()}; exec sleep 60")
    shutdown.assert_not_called()
    the_event(record)


# --- from the config to the agent ------------------------------------------------------------------------------------------


def test_what_the_config_says_reaches_the_agent_and_its_workers(make_config: MakeConfig, handler: mock.Mock) -> None:
    config = make_config(
        workers=3,
        role="reader",
        max_restarts=5,
        monitor_interval=0.7,
        start_method="fork",
        log_line_prefix_template="[${rank}]",
        local_addr="10.0.0.5",
        event_log_handler="console",
        signals_to_handle="SIGTERM",
        duplicate_stdout_filters=["loss"],
        duplicate_stderr_filters=["warn"],
        virtual_local_rank=True,
        shutdown_timeout=9,
        exit_barrier_timeout=11,
        worker_env={"A": "b"},
        no_retry_exit_codes=(2, 64),
        restart_backoff=0.5,
        restart_window=60.0,
        hang_timeout="30,starting=60",
        preflight=("disk",),
        preload="torch,numpy",
        standby=True,
        proctitle=False,
        checkpoint_memory=4096,
        checkpoint_dir="kept",
        checkpoint_copies=1,
        checkpoint_bandwidth=1 << 20,
        signals_to_forward="USR2",
        drain_grace=90.0,
        drain_signals="USR1",
        drain_file="notice",
        drain_forward="HUP",
        web=True,
    )
    with mock.patch(AGENT) as agent_class, mock.patch(RECORD) as record:
        agent_class.return_value.run.return_value = RunResult(WorkerState.SUCCEEDED)
        launch_agent(config, SH, ["-c", "exit 0"], health_check_server="server")
    given = agent_class.call_args.kwargs
    spec = given.pop("spec")
    assert (spec.role, spec.local_world_size, spec.entrypoint, spec.args) == ("reader", 3, SH, ("-c", "exit 0"))
    assert (spec.max_restarts, spec.monitor_interval, spec.rdzv_handler) == (5, 0.7, handler)
    assert (spec.master_addr, spec.master_port, spec.local_addr) == (None, None, "10.0.0.5")
    assert (spec.event_log_handler, spec.virtual_local_rank) == ("console", True)
    assert (spec.duplicate_stdout_filters, spec.duplicate_stderr_filters) == (["loss"], ["warn"])
    assert given == {
        "logs_specs": config.logs_specs,
        "start_method": "fork",
        "exit_barrier_timeout": 11,
        "log_line_prefix_template": "[${rank}]",
        "shutdown_timeout": 9,
        "health_check_server": "server",
        "signals_to_handle": "SIGTERM",
        "worker_env": {"A": "b"},
        "hang_timeout": "30,starting=60",
        "preload": ("torch", "numpy"),
        "standby": True,
        "proctitle": False,
        "checkpoint_memory": 4096,
        "checkpoint_dir": "kept",
        "checkpoint_copies": 1,
        "checkpoint_bandwidth": 1 << 20,
        "drain": DrainFlags("USR2", 90.0, "USR1", "notice", "HUP"),
        "preflight": ("disk",),
        "health_listeners": [],
        "health_addr": "127.0.0.1",
        "web": True,
        "restart_policy": RestartPolicy(5, no_retry_exit_codes=(2, 64), backoff_s=0.5, window_s=60.0),
    }
    assert record.call_args.args[1] == "console"


def test_what_the_config_says_reaches_the_rendezvous(make_config: MakeConfig, handler: mock.Mock) -> None:
    config = make_config(rdzv_configs={"read_timeout": 60}, rdzv_timeout=12, local_addr="10.0.0.5")
    with mock.patch(GET_HANDLER, return_value=handler) as get_handler, mock.patch(AGENT) as agent_class:
        agent_class.return_value.run.return_value = RunResult(WorkerState.SUCCEEDED)
        launch_agent(config, SH, [])
    (parameters,) = get_handler.call_args.args
    assert (parameters.backend, parameters.endpoint, parameters.run_id) == ("c10d", config.rdzv_endpoint, "job-7")
    assert (parameters.min_nodes, parameters.max_nodes, parameters.local_addr) == (1, 1, "10.0.0.5")
    assert parameters.config == {"read_timeout": 60, "timeout": 12}


def test_with_the_static_back_end_the_endpoint_is_the_master(make_config: MakeConfig) -> None:
    config = make_config("static", rdzv_endpoint="127.0.0.1:1234")
    with mock.patch(AGENT) as agent_class:
        agent_class.return_value.run.return_value = RunResult(WorkerState.SUCCEEDED)
        launch_agent(config, SH, [])
    spec = agent_class.call_args.kwargs["spec"]
    assert (spec.master_addr, spec.master_port) == ("127.0.0.1", 1234)


@pytest.mark.parametrize(("given", "env", "expected"), [(4, "9", 4), (None, "9", 9), (None, None, 30), (0, "9", 0)])
def test_the_shutdown_time_is_the_configs_else_the_environments_else_30_s(
    given: int | None, env: str | None, expected: int, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if env is not None:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", env)
    with mock.patch(AGENT) as agent_class:
        agent_class.return_value.run.return_value = RunResult(WorkerState.SUCCEEDED)
        launch_agent(make_config(shutdown_timeout=given), SH, [])
    assert agent_class.call_args.kwargs["shutdown_timeout"] == expected


def test_a_job_without_a_name_gets_one(make_config: MakeConfig, tmp_path: Path) -> None:
    names = set()
    for _ in range(2):
        config = make_config(run_id="")
        elastic_launch(config, SH)("-c", f"echo $TORCHELASTIC_RUN_ID > {tmp_path}/name")
        assert (tmp_path / "name").read_text() == f"{config.run_id}\n"
        names.add(config.run_id)
    assert len(names) == 2
    assert all(names)


def test_a_config_can_be_launched_again(make_config: MakeConfig) -> None:
    config = make_config()
    assert [elastic_launch(config, SH)("-c", "exit 0") for _ in range(2)] == [{0: None}, {0: None}]


# --- bad input -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"rdzv_backend": "zeus"}, "zeus"),
        ({"rdzv_backend": "etcd", "rdzv_endpoint": ",", "run_id": "job"}, "^rdzv_endpoint .*etcd"),
        ({"event_log_handler": "nowhere"}, "event_log_handler.*nowhere"),
        ({"metrics_cfg": {"sink": "nowhere"}}, "metrics_cfg.*nowhere"),
        ({"rdzv_backend": "static", "rdzv_endpoint": "host"}, "no port"),
    ],
)
def test_bad_input_starts_nothing(fields: dict[str, Any], complaint: str, make_config: MakeConfig, tmp_path: Path) -> None:
    with mock.patch(RECORD) as record, pytest.raises(UsageError, match=complaint):
        elastic_launch(make_config(**fields), SH)("-c", f"touch {tmp_path}/started")
    assert not (tmp_path / "started").exists()
    record.assert_not_called()


def test_nothing_to_run_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(UsageError, match="entrypoint"):
        elastic_launch(make_config(), None)()


# --- names -----------------------------------------------------------------------------------------------------------------


def a_function() -> None:
    """Only its name matters."""


class Callable_:
    def __call__(self) -> None: ...

    def __repr__(self) -> str:
        return "callable object"


@pytest.mark.parametrize(
    ("entrypoint", "args", "name"),
    [
        (a_function, [], "a_function"),
        (sys.executable, [], ""),
        (sys.executable, ["-u"], ""),
        (sys.executable, ["-u", "train.py"], "train.py"),
        (sys.executable, ["-u", Path("train.py"), "--lr", "1"], "train.py"),
        (sys.executable, [""], ""),
        ("./train.sh", ["x"], "./train.sh"),
        (Callable_(), [], "callable object"),
        (None, [], ""),
    ],
)
def test_the_name_of_an_entry_point(entrypoint: Any, args: list[Any], name: str) -> None:
    assert _get_entrypoint_name(entrypoint, args) == name


@pytest.mark.parametrize(
    ("backend", "endpoint", "expected"),
    [
        ("c10d", "host:1", (None, None)),
        ("static", "host:1", ("host", 1)),
        ("static", " 127.0.0.1:29500 ", ("127.0.0.1", 29500)),
        ("static", "[::1]:29500", ("::1", 29500)),
    ],
)
def test_the_master_of_a_rendezvous(backend: str, endpoint: str, expected: tuple[str | None, int | None]) -> None:
    assert _get_addr_and_port(RendezvousParameters(backend, endpoint, "job", 1, 1)) == expected


@pytest.mark.parametrize("endpoint", ["", "   ", "host"])
def test_a_static_rendezvous_needs_a_master_with_a_port(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"^rdzv_endpoint .*host:port"):
        _get_addr_and_port(RendezvousParameters("static", endpoint, "job", 1, 1))
