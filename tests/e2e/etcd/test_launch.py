"""The launch API with its default back end, etcd, against the EtcdServer that it comes with. P32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.etcd_cluster import any_binary

from rallypoint.agent.launch import LaunchConfig, elastic_launch
from rallypoint.coordination.etcd.server import ENV_ETCD_BINARY, EtcdServer
from rallypoint.errors import SignalException
from rallypoint.events import EventSource
from rallypoint.failures.process_failure import ChildFailedError
from rallypoint.output.log_specs import DefaultLogsSpecs

SH = "/bin/sh"
AGENT_RUN = "rallypoint.agent.launch.LocalElasticAgent.run"
RECORD = "rallypoint.agent.launch.events.record"
TOUCH = "import os, pathlib, sys; pathlib.Path(sys.argv[1], os.environ['RANK']).touch()"
TIMEOUT_S = 30.0

MakeConfig = Callable[..., LaunchConfig]
Script = Callable[..., Path]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = EtcdServer()
    with mock.patch.dict(os.environ, {ENV_ETCD_BINARY: any_binary()}):
        server.start()
    yield server.get_endpoint()
    server.stop()


@pytest.fixture
def make_config(endpoint: str, tmp_path: Path) -> MakeConfig:
    """``make_config(workers, **fields)``: for one node, or as many as `min_nodes` and `max_nodes` say; no back end is named."""

    def make(workers: int, min_nodes: int = 1, max_nodes: int = 1, **fields: Any) -> LaunchConfig:
        given: dict[str, Any] = {
            "rdzv_endpoint": endpoint,
            "run_id": f"job-{uuid.uuid4().hex}",
            "rdzv_configs": {"last_call_timeout": 0.2},
            "max_restarts": 0,
            "monitor_interval": 0.1,
            "logs_specs": DefaultLogsSpecs(str(tmp_path / "logs")),
        }
        config = LaunchConfig(min_nodes, max_nodes, workers, **{**given, **fields})
        assert config.rdzv_backend == "etcd"
        return config

    return make


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def names_in(folder: Path) -> set[str]:
    return set(os.listdir(folder))


# --- programs --------------------------------------------------------------------------------------------------------------


def test_a_python_script(make_config: MakeConfig, script: Script, out: Path):
    assert elastic_launch(make_config(3), sys.executable)("-u", str(script(TOUCH)), str(out)) == dict.fromkeys(range(3))
    assert names_in(out) == {"0", "1", "2"}


def test_the_local_rank_in_arguments(make_config: MakeConfig, out: Path):
    elastic_launch(make_config(3), SH)("-c", f"touch {out}/$1", "sh", "${local_rank}")
    assert names_in(out) == {"0", "1", "2"}


def test_a_shell_script(make_config: MakeConfig, script: Script, out: Path):
    program = script('#!/bin/sh\ntouch "$1/$RANK.$WORLD_SIZE"\n', "worker.sh")
    program.chmod(0o755)
    elastic_launch(make_config(2), str(program))(str(out))
    assert names_in(out) == {"0.2", "1.2"}


def test_an_elastic_job_of_one_node(make_config: MakeConfig, script: Script, out: Path):
    """One of two nodes comes, which is enough."""
    elastic_launch(make_config(2, min_nodes=1, max_nodes=2), sys.executable)(str(script(TOUCH)), str(out))
    assert names_in(out) == {"0", "1"}


# --- functions -------------------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys
from rallypoint import LaunchConfig, elastic_launch
from rallypoint.output.log_specs import DefaultLogsSpecs

def tell(factor):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return [rank * factor, world, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]]

if __name__ == "__main__":
    endpoint, run_id, nodes, workers = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    config = LaunchConfig(nodes, nodes, workers, rdzv_endpoint=endpoint, run_id=run_id, logs_specs=DefaultLogsSpecs("logs"))
    print(json.dumps(elastic_launch(config, tell)(10)))
"""


def start_program(script: Script, folder: Path, *args: object) -> subprocess.Popen[str]:
    """In a process of its own, as the agent of a node is, and whose functions workers can import."""
    folder.mkdir()
    command = [sys.executable, str(script(PROGRAM, "program.py")), *map(str, args)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def told_by(process: subprocess.Popen[str]) -> dict[int, list[Any]]:
    """What its workers returned, by rank."""
    try:
        printed, complaint = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 0, complaint
    return {int(rank): value for rank, value in json.loads(printed).items()}


def test_a_function_gives_its_values_by_rank(endpoint: str, script: Script, tmp_path: Path):
    told = told_by(start_program(script, tmp_path / "node", endpoint, "a-function", 1, 3))
    assert {rank: value[:2] for rank, value in told.items()} == {0: [0, 3], 1: [10, 3], 2: [20, 3]}


def test_several_agents(endpoint: str, script: Script, tmp_path: Path):
    """Three nodes of two workers: each gets the values of its own workers, and all were told of one master."""
    agents = [start_program(script, tmp_path / f"node{number}", endpoint, "several-agents", 3, 2) for number in range(3)]
    told = [told_by(agent) for agent in agents]
    assert sorted(rank for values in told for rank in values) == [0, 1, 2, 3, 4, 5]
    assert all(len(values) == 2 and max(values) == min(values) + 1 for values in told)
    found = {(rank, *value) for values in told for rank, value in values.items()}
    assert {(rank, scaled) for rank, scaled, *_ in found} == {(rank, 10 * rank) for rank in range(6)}
    assert len({tuple(where) for _, _, *where in found}) == 1


# --- failures --------------------------------------------------------------------------------------------------------------


def test_a_worker_that_raises(make_config: MakeConfig, script: Script, endpoint: str):
    """The error names the worker; the agent itself has done its work, and says so."""
    program = script("raise RuntimeError('no such luck')", "worker.py")
    with mock.patch(RECORD) as record, pytest.raises(ChildFailedError) as raised:
        elastic_launch(make_config(1, min_nodes=1, max_nodes=2), sys.executable)(str(program))
    assert set(raised.value.failures) == {0}
    (event,) = [call.args[0] for call in record.call_args_list if call.args[0].source == EventSource.AGENT]
    assert event.metadata["state"] == "SUCCEEDED"


class OddError(Exception):
    pass


@pytest.mark.parametrize("error", [OddError("odd"), SignalException("asked to stop", 15)])
def test_an_agent_that_raises(make_config: MakeConfig, error: Exception, out: Path):
    """What ends the agent comes out, and is put on record; the job can be begun again under its name."""
    config = make_config(1, min_nodes=1, max_nodes=2)
    launch = elastic_launch(config, SH)
    with mock.patch(AGENT_RUN, side_effect=error), mock.patch(RECORD) as record, pytest.raises(type(error)) as raised:
        launch("-c", f"touch {out}/never")
    assert raised.value is error
    (event,) = [call.args[0] for call in record.call_args_list]
    assert event.metadata["state"] == "FAILED"
    launch("-c", f"touch {out}/again")
    assert names_in(out) == {"again"}
