"""Launching: configs, results, errors, what is recorded, and what becomes of the rendezvous."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any
from unittest import mock

from tests.compat.conformance.harness import case, environment, folder, outcome, plain, tree


def config(**more: Any) -> Any:
    from torch.distributed.launcher.api import LaunchConfig

    given = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": 2,
        "run_id": "run",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "max_restarts": 0,
        "monitor_interval": 0.05,
        "start_method": "fork",
    }
    return LaunchConfig(**{**given, **more})


@case
def a_config() -> dict[str, Any]:
    from torch.distributed.launcher import LaunchConfig

    bare = LaunchConfig(1, 2, 3)
    names = (
        "min_nodes",
        "max_nodes",
        "nproc_per_node",
        "run_id",
        "role",
        "rdzv_endpoint",
        "rdzv_backend",
        "rdzv_configs",
        "rdzv_timeout",
        "max_restarts",
        "monitor_interval",
        "start_method",
        "log_line_prefix_template",
        "metrics_cfg",
        "local_addr",
        "event_log_handler",
        "numa_options",
        "signals_to_handle",
        "duplicate_stdout_filters",
        "duplicate_stderr_filters",
        "virtual_local_rank",
        "shutdown_timeout",
    )
    return {
        "fields": {name: plain(getattr(bare, name)) for name in names},
        "logs": type(bare.logs_specs).__name__,
        "timeout": config(rdzv_timeout=50).rdzv_configs,
        "timeout of configs": config(rdzv_configs={"timeout": 7, "other": 1}).rdzv_configs,
        "both": config(rdzv_timeout=50, rdzv_configs={"timeout": 7}).rdzv_configs,
        "own dict": LaunchConfig(1, 1, 1).rdzv_configs is not LaunchConfig(1, 1, 1).rdzv_configs,
        "lacks": outcome(LaunchConfig, 1, 1),
        "unknown": outcome(LaunchConfig, 1, 1, 1, nothing=1),
        "equal": outcome(lambda: LaunchConfig(1, 1, 1, logs_specs=5) == LaunchConfig(1, 1, 1, logs_specs=5)),
    }


def scaled(base: int) -> int:
    return base + int(os.environ["RANK"])


def failing() -> None:
    raise RuntimeError("told by the worker")


@case
def functions_are_launched() -> dict[str, Any]:
    from torch.distributed.launcher.api import elastic_launch, launch_agent

    return {
        "function": outcome(lambda: elastic_launch(config(), scaled)(10)),
        "agent": outcome(launch_agent, config(nproc_per_node=1), scaled, [5]),
        "nothing": outcome(launch_agent, config(), None, []),
    }


@case
def programs_are_launched() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import elastic_launch

    with folder() as path:
        specs = DefaultLogsSpecs(str(path), redirects=Std.ALL)
        answer = outcome(lambda: elastic_launch(config(logs_specs=specs), "sh")("-c", 'echo "$RANK $WORLD_SIZE"; echo e >&2'))
        return {
            "answer": answer,
            "files": [name for name in tree(path) if name.endswith(".log")],
            "texts": sorted(one.read_text() for one in path.rglob("*.log")),
        }


@case
def workers_that_fail() -> dict[str, Any]:
    from torch.distributed.launcher.api import elastic_launch

    facts = {}
    try:
        elastic_launch(config(nproc_per_node=1), failing)()
    except Exception as error:
        facts["function"] = [
            type(error).__name__,
            error.name,
            sorted(error.failures),
            error.get_first_failure()[1].error_file_data["message"]["message"],
        ]
    try:
        elastic_launch(config(nproc_per_node=1), "sh")("-c", "exit 9")
    except Exception as error:
        facts["program"] = [type(error).__name__, error.name, sorted(error.failures), error.failures[0].exitcode]
    return facts


@case
def workers_that_are_restarted() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import elastic_launch

    with folder() as path:
        second = f'echo "$TORCHELASTIC_RESTART_COUNT" > {path}/count; exit 0'
        program = f"if [ -e {path}/done ]; then {second}; fi; touch {path}/done; exit 1"
        answer = outcome(
            lambda: elastic_launch(
                config(nproc_per_node=1, max_restarts=2, logs_specs=DefaultLogsSpecs(str(path / "logs"))), "sh"
            )("-c", program)
        )
        return {"answer": answer, "count": (path / "count").read_text()}


@case
def what_workers_find_in_their_environment() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import elastic_launch

    with folder() as path, environment(CONFORMANCE_OWN="kept"):
        program = "import json, os; print(json.dumps(dict(os.environ)))"
        given = config(
            logs_specs=DefaultLogsSpecs(str(path), redirects=Std.OUT),
            role="actor",
            max_restarts=4,
            run_id="my-run",
            signals_to_handle="SIGTERM,SIGUSR1",
        )
        elastic_launch(given, sys.executable)("-S", "-c", program)
        found = [json.loads(one.read_text()) for one in sorted(path.rglob("stdout.log"))]
    fixed = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "CONFORMANCE_OWN",
    )
    facts: dict[str, Any] = {name: [one.get(name) for one in found] for name in fixed}
    facts["master"] = [one["MASTER_PORT"].isdigit() and bool(one["MASTER_ADDR"]) for one in found]
    facts["error file"] = [one["TORCHELASTIC_ERROR_FILE"].endswith(f"{rank}/error.json") for rank, one in enumerate(found)]
    return facts


def failure() -> Any:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    return ProcessFailure(0, 1, 1, "/no/such/file")


@case
def one_event_for_each_launch() -> dict[str, Any]:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.launcher.api import launch_agent

    facts = {}
    for name, result in (
        ("succeeded", RunResult(WorkerState.SUCCEEDED, {0: 5})),
        ("failed", RunResult(WorkerState.FAILED, failures={0: failure()})),
    ):
        with (
            mock.patch("torch.distributed.launcher.api.LocalElasticAgent.run", return_value=result),
            mock.patch("torch.distributed.launcher.api.events.record") as record,
        ):
            answer = outcome(launch_agent, config(), scaled, [1])
        facts[name] = [answer, [[call.args[0].name, *map(plain, call.args[1:])] for call in record.call_args_list]]
    return facts


class BrokenError(Exception):
    pass


@case
def what_becomes_of_the_rendezvous() -> dict[str, Any]:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
    from torch.distributed.launcher.api import launch_agent

    endings = {
        "success": {"return_value": RunResult(WorkerState.SUCCEEDED)},
        "failure": {"return_value": RunResult(WorkerState.FAILED, failures={0: failure()})},
        "signal": {"side_effect": SignalException("s", signal.SIGTERM)},
        "error": {"side_effect": BrokenError("b")},
    }
    facts: dict[str, Any] = {"name": get_rendezvous_handler.__name__}
    for name, ending in endings.items():
        handler = mock.MagicMock()
        handler.get_run_id.return_value, handler.get_backend.return_value = "r", "b"
        with (
            mock.patch("torch.distributed.elastic.rendezvous.registry.get_rendezvous_handler", return_value=handler),
            mock.patch("torch.distributed.launcher.api.LocalElasticAgent.run", **ending),
            mock.patch("torch.distributed.launcher.api.events.record") as record,
        ):
            answer = outcome(launch_agent, config(), scaled, [])
        facts[name] = [answer, handler.shutdown.call_count, [call.args[0].name for call in record.call_args_list]]
    return facts


@case
def the_agent_that_is_made() -> dict[str, Any]:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.launcher.api import launch_agent

    with mock.patch("torch.distributed.launcher.api.LocalElasticAgent") as made:
        made.return_value.run.return_value = RunResult(WorkerState.SUCCEEDED, {0: "v"})
        with mock.patch("torch.distributed.launcher.api.events.record"):
            server = mock.MagicMock()
            answer = outcome(launch_agent, config(shutdown_timeout=9, log_line_prefix_template="t"), scaled, ["x"], server)
        keywords = made.call_args.kwargs
    spec = keywords["spec"]
    ours = ("start_method", "log_line_prefix_template", "shutdown_timeout")
    return {
        "answer": answer,
        "keywords": {name: plain(keywords.get(name)) for name in ours},
        "server": keywords.get("health_check_server") is server,
        "spec": plain(
            [
                spec.role,
                spec.local_world_size,
                spec.entrypoint is scaled,
                spec.args,
                spec.max_restarts,
                spec.monitor_interval,
                spec.master_addr,
                spec.master_port,
                spec.local_addr,
            ]
        ),
    }


@case
def names_of_entry_points() -> dict[str, Any]:
    from tests.compat.conformance.cases_rendezvous import parameters
    from torch.distributed.launcher.api import _get_addr_and_port, _get_entrypoint_name

    def static(endpoint: str) -> Any:
        return outcome(_get_addr_and_port, parameters(backend="static", endpoint=endpoint))

    return {
        "function": _get_entrypoint_name(scaled, []),
        "program": _get_entrypoint_name("/bin/program", ["x"]),
        "interpreter": _get_entrypoint_name(sys.executable, ["-u", "script.py", "-x"]),
        "flags only": _get_entrypoint_name(sys.executable, ["-u"]),
        "module": _get_entrypoint_name(sys.executable, ["-u", "-m", "mod"]),
        "none": _get_entrypoint_name(None, []),
        "address": outcome(_get_addr_and_port, parameters(endpoint="h:5")),
        "static": static("h:5"),
        "static without port": static("h"),
        "static without endpoint": static(""),
        "static with spaces": static(" h:5 "),
    }


@case
def launching_by_static_ranks() -> dict[str, Any]:
    from torch.distributed.elastic.utils.distributed import get_free_port
    from torch.distributed.launcher.api import elastic_launch

    endpoint = f"127.0.0.1:{get_free_port()}"
    launch = elastic_launch(config(rdzv_backend="static", rdzv_endpoint=endpoint, rdzv_configs={"rank": 0}), masters)
    return {"answer": outcome(launch)}


def masters() -> list[str]:
    return [os.environ["MASTER_ADDR"], os.environ["TORCHELASTIC_USE_AGENT_STORE"]]


@case
def a_run_id_is_drawn() -> dict[str, Any]:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.launcher.api import launch_agent

    given = config(run_id="")
    with (
        mock.patch("torch.distributed.launcher.api.LocalElasticAgent.run", return_value=RunResult(WorkerState.SUCCEEDED)),
        mock.patch("torch.distributed.launcher.api.events.record") as record,
    ):
        answer = outcome(launch_agent, given, scaled, [1])
    drawn = record.call_args.args[0].metadata["run_id"]
    return {"answer": answer, "drawn": [type(drawn).__name__, len(drawn) > 5], "kept": given.run_id == drawn}


@case
def a_rendezvous_of_ones_own() -> dict[str, Any]:
    from tests.compat.conformance.cases_agents import handler_of
    from tests.compat.conformance.cases_rendezvous import parameters
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
    from torch.distributed.launcher.api import elastic_launch

    made: list[Any] = []

    def create(params: Any) -> Any:
        made.append([params.backend, params.endpoint, params.run_id, params.get("mine")])
        handler = handler_of()
        handler.get_backend = lambda: "conformance"
        return handler

    rendezvous_handler_registry.register("conformance", create)
    got = get_rendezvous_handler(parameters(backend="conformance", endpoint="e", mine=5))
    answer = outcome(elastic_launch(config(rdzv_backend="conformance", rdzv_configs={"mine": 7}), scaled), 3)
    return {"made": made, "kind": got.get_backend(), "agent store": got.use_agent_store, "answer": answer}


@case
def signals_in_the_launchers_own_environment() -> dict[str, Any]:
    from torch.distributed.launcher.api import elastic_launch

    name = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    with environment(**{name: None}):
        elastic_launch(config(nproc_per_node=1, signals_to_handle="SIGTERM,SIGUSR2"), "true")()
        return {"after a launch": os.environ.get(name)}
