"""Launching through torch's names, as programs and test suites for torch do it, patches included; on one node and on two."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.etcd_cluster import any_binary

from rallypoint.coordination.etcd.server import ENV_ETCD_BINARY, EtcdServer

API = "torch.distributed.launcher.api"
ELASTIC = "torch.distributed.elastic"
AGENT_RUN = f"{API}.LocalElasticAgent.run"
EVENTS_RECORD = f"{API}.events.record"
GET_HANDLER = f"{ELASTIC}.rendezvous.registry.get_rendezvous_handler"
WORKERS = 3

TOUCH = """
import os, sys
if "--fail" in sys.argv:
    sys.exit("told to fail")
assert os.environ["TEST_SENTINEL_PARENT"] == "FOOBAR" and os.environ["OMP_NUM_THREADS"] == "1"
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").close()
"""

Launch = Callable[..., Any]
MakeConfig = Callable[..., Any]
RunPython = Callable[..., subprocess.CompletedProcess[str]]
Script = Callable[..., Path]


class MockException(Exception):
    """Nobody else raises it."""


def name(path: str) -> Any:
    """An attribute of one of torch's modules."""
    module, _, attribute = path.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = EtcdServer()
    with mock.patch.dict(os.environ, {ENV_ETCD_BINARY: any_binary()}):
        server.start()
    yield server.get_endpoint()
    server.stop()


@pytest.fixture
def make_config(installed: str, endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MakeConfig:
    """``make_config(least, most, workers)``: nodes that meet in etcd, which is the API's default."""
    monkeypatch.setenv("TEST_SENTINEL_PARENT", "FOOBAR")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    logs_specs = name(f"{ELASTIC}.multiprocessing.DefaultLogsSpecs")(str(tmp_path / "logs"))

    def make(least: int = 1, most: int = 1, workers: int = WORKERS) -> Any:
        return name(f"{API}.LaunchConfig")(
            min_nodes=least,
            max_nodes=most,
            nproc_per_node=workers,
            run_id=uuid.uuid4().hex,
            rdzv_endpoint=endpoint,
            monitor_interval=0.1,
            max_restarts=0,
            rdzv_configs={"last_call_timeout": 0.2},
            logs_specs=logs_specs,
        )

    return make


@pytest.fixture
def launch(installed: str) -> Launch:
    """``launch(config, entrypoint)(*args)``."""
    made: Launch = name(f"{API}.elastic_launch")
    return made


@pytest.fixture
def touch(script: Script, tmp_path: Path) -> tuple[str, ...]:
    """A program that leaves a file with its rank."""
    (tmp_path / "out").mkdir()
    return "-u", str(script(TOUCH)), str(tmp_path / "out")


def ran(tmp_path: Path) -> set[str]:
    return set(os.listdir(tmp_path / "out"))


def ranks(count: int) -> set[str]:
    return {str(rank) for rank in range(count)}


# --- programs --------------------------------------------------------------------------------------------------------------


def test_a_python_script(make_config: MakeConfig, launch: Launch, touch: tuple[str, ...], tmp_path: Path) -> None:
    launch(make_config(), sys.executable)(*touch)
    assert ran(tmp_path) == ranks(WORKERS)


def test_the_local_rank_in_arguments(make_config: MakeConfig, launch: Launch, tmp_path: Path, touch: tuple[str, ...]) -> None:
    launch(make_config(), "/bin/sh")("-c", 'touch "$1"', "sh", f"{tmp_path}/out/${{local_rank}}")
    assert ran(tmp_path) == ranks(WORKERS)


def test_a_shell_script(make_config: MakeConfig, launch: Launch, script: Script, tmp_path: Path, touch: tuple[str, ...]) -> None:
    program = script('#!/bin/sh\ntouch "$1/$RANK"\n', "worker.sh")
    program.chmod(0o755)
    launch(make_config(), str(program))(str(tmp_path / "out"))
    assert ran(tmp_path) == ranks(WORKERS)


def test_an_elastic_job_of_one_node(make_config: MakeConfig, launch: Launch, touch: tuple[str, ...], tmp_path: Path) -> None:
    launch(make_config(1, 2), sys.executable)(*touch)
    assert ran(tmp_path) == ranks(WORKERS)


# --- functions, and several agents -----------------------------------------------------------------------------------------

FUNCTIONS = """
import json, os, sys
from contextlib import closing
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.utils import get_socket_with_port
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def scale():
    return 10 + int(os.environ["RANK"])

def dist_sum():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        import torch.nn
    except ModuleNotFoundError:
        from rallypoint import TCPStore
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, False)
        store.add("sum", rank)
        store.add("came", 1)
        while store.add("came", 0) < world:
            pass
        return store.add("sum", 0)
    import torch.distributed as dist
    dist.init_process_group(backend="gloo")
    tensor = torch.tensor(rank)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()

if __name__ == "__main__":
    function = {"scale": scale, "dist_sum": dist_sum}[sys.argv[1]]
    meeting = {"rdzv_endpoint": sys.argv[2]}
    if function is dist_sum:
        with closing(get_socket_with_port()) as held:
            endpoint = f"127.0.0.1:{held.getsockname()[1]}"
        meeting = {"rdzv_backend": "static", "rdzv_endpoint": endpoint, "rdzv_configs": {"rank": 0}}
    config = LaunchConfig(1, 1, 2, run_id=function.__name__, max_restarts=0, logs_specs=DefaultLogsSpecs("logs"), **meeting)
    print(json.dumps(elastic_launch(config, function)()))
"""
AGENTS = """
import multiprocessing, sys
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def agent(endpoint, run_id, *program):
    config = LaunchConfig(2, 2, 2, rdzv_endpoint=endpoint, run_id=run_id, max_restarts=0, logs_specs=DefaultLogsSpecs("logs"))
    elastic_launch(config, sys.executable)(*program)

if __name__ == "__main__":
    other = multiprocessing.get_context("spawn").Process(target=agent, args=sys.argv[1:])
    other.start()
    agent(*sys.argv[1:])
    other.join()
    print(other.exitcode)
"""


@pytest.mark.parametrize(("function", "expected"), [("scale", {"0": 10, "1": 11}), ("dist_sum", {"0": 1, "1": 1})])
def test_functions(
    function: str, expected: dict[str, int], environment: str, endpoint: str, python: RunPython, script: Script
) -> None:
    """The second meets by a static rendezvous, and its workers by torch's process group, where there is torch."""
    answer = python("-m", "rallypoint.compat", script(FUNCTIONS), function, endpoint)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout) == expected


def test_several_agents(endpoint: str, python: RunPython, script: Script, tmp_path: Path, touch: tuple[str, ...]) -> None:
    env = {"TEST_SENTINEL_PARENT": "FOOBAR", "OMP_NUM_THREADS": "1"}
    answer = python("-m", "rallypoint.compat", script(AGENTS, "agents.py"), endpoint, uuid.uuid4().hex, *touch, **env)
    assert (answer.stdout, answer.returncode) == ("0\n", 0), answer.stderr
    assert ran(tmp_path) == ranks(4)


# --- what is recorded ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [EVENTS_RECORD, f"{ELASTIC}.events.record"])
@pytest.mark.parametrize("fails", [False, True])
def test_one_event_for_each_launch(
    fails: bool, target: str, make_config: MakeConfig, launch: Launch, touch: tuple[str, ...]
) -> None:
    """Also where a worker fails, which is told by an error that names it."""
    with mock.patch(target) as record:
        if fails:
            with pytest.raises(name(f"{ELASTIC}.multiprocessing.errors.ChildFailedError")):
                launch(make_config(1, 2), sys.executable)(*touch, "--fail")
        else:
            launch(make_config(), sys.executable)(*touch)
    record.assert_called_once()
    assert record.call_args.args[0].name == "torchelastic.worker.status.SUCCEEDED"  # the agent's, which did its part


@pytest.mark.parametrize("run", [AGENT_RUN, f"{ELASTIC}.agent.server.local_elastic_agent.LocalElasticAgent.run"])
def test_an_error_of_the_agent_is_raised_again(run: str, make_config: MakeConfig, launch: Launch) -> None:
    with mock.patch(EVENTS_RECORD) as record, mock.patch(run, side_effect=MockException), pytest.raises(MockException):
        launch(make_config(1, 2), sys.executable)("-c", "")
    record.assert_called_once()


def test_an_error_of_a_sink_is_raised_after_the_run(make_config: MakeConfig, launch: Launch) -> None:
    sink_fails = mock.patch(f"{ELASTIC}.events.record", side_effect=MockException)
    with sink_fails, mock.patch(AGENT_RUN) as run, pytest.raises(MockException):
        launch(make_config(1, 2), sys.executable)("-c", "")
    run.assert_called_once()


# --- the rendezvous --------------------------------------------------------------------------------------------------------


def test_a_successful_launch_shuts_the_rendezvous_down(make_config: MakeConfig, launch: Launch) -> None:
    result = name(f"{ELASTIC}.agent.server.api.RunResult")(name(f"{ELASTIC}.agent.server.api.WorkerState").SUCCEEDED)
    with mock.patch(f"{API}.LocalElasticAgent") as agent_class, mock.patch(GET_HANDLER) as get_handler:
        agent_class.return_value = mock.Mock(**{"run.return_value": result})
        launch(make_config(), sys.executable)("-c", "")
    get_handler.return_value.shutdown.assert_called_once()


@pytest.mark.parametrize("get_handler", [GET_HANDLER, f"{API}.rdzv_registry.get_rendezvous_handler"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_the_rendezvous_open(number: signal.Signals, get_handler: str, make_config: MakeConfig) -> None:
    """P03: the others can go on, and this node can come back."""
    received = name(f"{ELASTIC}.multiprocessing.api.SignalException")("test", number)
    handler = mock.MagicMock(**{"get_run_id.return_value": "job"})
    with (
        mock.patch(get_handler, return_value=handler),
        mock.patch(AGENT_RUN, side_effect=received),
        mock.patch(EVENTS_RECORD) as record,
        pytest.raises(type(received)),
    ):
        name(f"{API}.launch_agent")(make_config(workers=1), sys.executable, [])
    handler.shutdown.assert_not_called()
    record.assert_called_once()


def test_any_other_error_shuts_the_rendezvous_down(make_config: MakeConfig) -> None:
    handler = mock.MagicMock(**{"get_run_id.return_value": "job"})
    with (
        mock.patch(GET_HANDLER, return_value=handler),
        mock.patch(AGENT_RUN, side_effect=RuntimeError("any other")),
        mock.patch(EVENTS_RECORD) as record,
        pytest.raises(RuntimeError, match="any other"),
    ):
        name(f"{API}.launch_agent")(make_config(workers=1), sys.executable, [])
    handler.shutdown.assert_called_once()
    record.assert_called_once()


# --- names -----------------------------------------------------------------------------------------------------------------


def a_function() -> None:
    """Only its name matters."""


@pytest.mark.parametrize(
    ("entrypoint", "args", "expected"),
    [
        (a_function, [], "a_function"),
        (sys.executable, [], ""),
        (sys.executable, ["-u"], ""),
        (sys.executable, ["-u", "train.py"], "train.py"),
        (None, [], ""),
    ],
)
def test_the_name_of_an_entry_point(entrypoint: Any, args: list[str], expected: str, installed: str) -> None:
    assert name(f"{API}._get_entrypoint_name")(entrypoint, args) == expected
