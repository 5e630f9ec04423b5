"""What subclasses of the agents override and what code imports although it begins with an underscore, as torch 2.13 has it."""

from __future__ import annotations

import inspect
import logging
import signal
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from rallypoint import events
from rallypoint.agent import agent, launch
from rallypoint.agent import records as agent_records
from rallypoint.agent.local_agent import LocalElasticAgent
from rallypoint.agent.workers import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState, _RoleInstanceInfo
from rallypoint.errors import UsageError
from rallypoint.events import Event, EventSource, NodeState, RdzvEvent, check_sink, get_logging_handler
from rallypoint.output.log_specs import DefaultLogsSpecs
from rallypoint.rendezvous.handler import (
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from rallypoint.store.hash_store import HashStore

HOOKS = {
    "_setup_local_watchdog": "self, envs",
    "_setup_healthcheck": "self",
    "_log_watchdog_event": "self, name, request",
    "_exit_barrier": "self",
    "_construct_event": "self, state, source, worker=None, raw_error=None, duration_ms=None, exit_code=None, worker_pid=None",
    "_record_metrics": "self, group_results",
    "_record_worker_events": "self, result",
    "_record_flakiness_metric": "self, is_failed=False",
    "_record_metric_with_condition": "self, metric_name, condition",
    "_get_fq_hostname": "self",
    "_get_worker_state": "self, worker, result",
    "_invoke_run": "self, role='default'",
    "_rendezvous": "self, worker_group",
    "_assign_worker_ranks": "self, store, group_rank, group_world_size, spec",
    "_initialize_workers": "self, worker_group",
    "_restart_workers": "self, worker_group",
    "_start_workers": "self, worker_group",
    "_stop_workers": "self, worker_group, is_restart=False",
    "_monitor_workers": "self, worker_group",
    "_shutdown": f"self, death_sig={signal.SIGTERM!r}, timeout=30, is_restart=False",
}


def parameters(function: Callable[..., Any]) -> str:
    """Names and defaults, without annotations."""
    kept = [one.replace(annotation=inspect.Parameter.empty) for one in inspect.signature(function).parameters.values()]
    return str(inspect.Signature(kept)).removeprefix("(").removesuffix(")")


def test_hooks_have_their_arguments() -> None:
    assert {name: parameters(getattr(LocalElasticAgent, name)) for name in HOOKS} == HOOKS


def test_names_that_code_imports() -> None:
    assert agent.DEFAULT_ROLE == "default"
    assert parameters(launch._get_entrypoint_name) == "entrypoint, args"
    assert parameters(launch._get_addr_and_port) == "rdzv_parameters"
    assert agent_records._get_fq_hostname()
    assert sorted(_RoleInstanceInfo.__slots__) == ["local_world_size", "rank", "role"]
    assert RendezvousHandlerCreator is not None
    assert (RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY) == ("MASTER_ADDR", "MASTER_PORT")
    assert sorted(Worker.__slots__) == ["global_rank", "id", "local_rank", "role_rank", "role_world_size", "world_size"]
    assert sorted(WorkerGroup.__slots__) == [
        "group_rank", "group_world_size", "master_addr", "master_port", "spec", "state", "store", "workers",
    ]  # fmt: skip


def test_a_masters_place_can_be_told_in_both_forms() -> None:
    for argument in ({}, {"local_addr": "10.0.0.1"}):
        info = RendezvousStoreInfo.build(0, HashStore(), **argument)  # type: ignore[arg-type]
        assert info.master_port > 0
    assert (info.master_addr, RendezvousStoreInfo.build(0, HashStore(), None, server_port=7).master_port) == ("10.0.0.1", 7)


def test_entry_points_have_names() -> None:
    name = launch._get_entrypoint_name
    assert (name(None, []), name("prog", ["a"]), name(print, [])) == ("", "prog", "print")
    assert (name(sys.executable, ["-u", "-m", "pkg"]), name(sys.executable, [])) == ("pkg", "")


def test_the_master_of_a_static_rendezvous_is_its_endpoint() -> None:
    def place(backend: str, endpoint: str) -> tuple[str | None, int | None]:
        return launch._get_addr_and_port(RendezvousParameters(backend, endpoint, "run", 1, 1))

    assert (place("c10d", "h:1"), place("static", "h:1")) == ((None, None), ("h", 1))
    for endpoint in ("", "h"):
        with pytest.raises(ValueError, match="endpoint"):
            place("static", endpoint)


class OneNode(RendezvousHandler):
    """A rendezvous of this node alone."""

    def get_backend(self) -> str:
        return "one"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("localhost", 1234))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "run"

    def shutdown(self) -> bool:
        return True


def recording(name: str) -> Callable[..., Any]:
    """A method that notes with which arguments the one of this name was called, and calls it."""
    original = getattr(LocalElasticAgent, name)

    def method(self: Recording, *args: Any, **kwargs: Any) -> Any:
        kinds = [type(arg).__name__ for arg in args]
        self.calls.append(f"{name}({', '.join([*kinds, *kwargs])})")
        return original(self, *args, **kwargs)

    return method


class Recording(LocalElasticAgent):
    """Overrides every hook."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[str] = []
        super().__init__(*args, **kwargs)

    for _name in HOOKS:
        locals()[_name] = recording(_name)


def test_overridden_hooks_are_called_with_the_arguments_of_2_13() -> None:
    """Those of an override that takes no more than torch's own would."""
    spec = WorkerSpec(
        "r", 1, OneNode(), entrypoint="/bin/sh", args=("-c", "test $TORCHELASTIC_RESTART_COUNT = 1"), max_restarts=1
    )
    recorder = Recording(spec, DefaultLogsSpecs())
    result = recorder.run()
    assert result.state == WorkerState.SUCCEEDED
    told = list(dict.fromkeys(call for call in recorder.calls if not call.startswith("_construct_event")))
    assert told == [
        "_setup_healthcheck()",
        "_invoke_run(str)",
        "_initialize_workers(WorkerGroup)",
        "_rendezvous(WorkerGroup)",
        "_assign_worker_ranks(HashStore, int, int, WorkerSpec)",
        "_start_workers(WorkerGroup)",
        "_setup_local_watchdog(envs)",
        "_monitor_workers(WorkerGroup)",
        "_restart_workers(WorkerGroup)",
        "_stop_workers(WorkerGroup)",
        "_shutdown(Signals, timeout)",
        "_exit_barrier()",
        "_record_metrics(RunResult)",
        "_record_flakiness_metric(bool)",
        "_record_metric_with_condition(str, bool)",
        "_record_worker_events(RunResult)",
        "_get_worker_state(Worker, RunResult)",
    ]
    assert isinstance(result, RunResult)
    assert recorder._total_execution_time >= 0


def test_an_unknown_sink_is_a_key_error_and_says_so_plainly() -> None:
    with pytest.raises(KeyError):
        get_logging_handler("nosuch")
    with pytest.raises(UsageError) as refused:
        check_sink("nosuch")
    assert str(refused.value).startswith("event_log_handler: there is no event sink 'nosuch'")


def test_a_handler_that_was_replaced_is_asked_once_for_each_destination() -> None:
    seen: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(Event.deserialize(record.getMessage()).name)

    for asked_of in ("first", "second"):
        with mock.patch("rallypoint.events.get_logging_handler", return_value=Recorder()) as replaced:
            for name in ("a", "b"):
                events.record(Event(f"{asked_of} {name}", EventSource.AGENT), "somewhere")
        assert replaced.call_args_list == [mock.call("somewhere")]
    assert seen == ["first a", "first b", "second a", "second b"]


def test_an_event_of_an_unknown_state_is_a_key_error() -> None:
    event = RdzvEvent("n", "r", "m", "h", 1, NodeState.INIT)
    assert RdzvEvent.deserialize(event.serialize()) == event
    with pytest.raises(KeyError):
        RdzvEvent.deserialize(event.serialize().replace("INIT", "LOST"))
