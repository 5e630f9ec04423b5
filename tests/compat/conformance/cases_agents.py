"""Agents: what a subclass sees of a run, and what is recorded of it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from tests.compat.conformance.harness import case, environment, folder, outcome, plain, store, tree


def handler_of(rank: int = 0, world_size: int = 1, shared: Any = None) -> Any:
    """A rendezvous that is at once complete."""
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

    class Handler(RendezvousHandler):  # type: ignore[misc]
        def __init__(self) -> None:
            self.store = shared if shared is not None else store()
            self.calls: list[str] = []
            self.waiting = [0]

        def get_backend(self) -> str:
            return "test"

        def next_rendezvous(self) -> Any:
            self.calls.append("next_rendezvous")
            return RendezvousInfo(self.store, rank, world_size, RendezvousStoreInfo("127.0.0.1", 29999))

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            self.calls.append("set_closed")

        def num_nodes_waiting(self) -> int:
            return self.waiting.pop(0) if len(self.waiting) > 1 else self.waiting[0]

        def get_run_id(self) -> str:
            return "run-7"

        def shutdown(self) -> bool:
            self.calls.append("shutdown")
            return True

    return Handler()


def spec_of(**more: Any) -> Any:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    given = {
        "role": "trainer",
        "local_world_size": 2,
        "entrypoint": "sh",
        "args": ("-c", "exit 0"),
        "rdzv_handler": handler_of(),
        "max_restarts": 2,
        "monitor_interval": 0.01,
    }
    return WorkerSpec(**{**given, **more})


def agent_class() -> Any:
    """An agent whose workers are imaginary: their states come from a list."""
    from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerState

    class Agent(SimpleElasticAgent):  # type: ignore[misc]
        def __init__(self, spec: Any, states: list[str], **more: Any) -> None:
            super().__init__(spec, **more)
            self.calls: list[Any] = []
            self.states = list(states)

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            self.calls.append("_start_workers")
            return {worker.local_rank: f"id{worker.global_rank}" for worker in worker_group.workers}

        def _stop_workers(self, worker_group: Any) -> None:
            self.calls.append(["_stop_workers", type(worker_group).__name__])

        def _monitor_workers(self, worker_group: Any) -> Any:
            state = WorkerState(self.states.pop(0))
            self.calls.append(["_monitor_workers", state.name])
            if state == WorkerState.SUCCEEDED:
                return RunResult(
                    state, return_values={worker.global_rank: worker.global_rank * 10 for worker in worker_group.workers}
                )
            return RunResult(state)

        def _shutdown(self, death_sig: Any = signal.SIGTERM, timeout: int = 30) -> None:
            self.calls.append(["_shutdown", plain(death_sig), timeout])

    return Agent


@case
def the_states_of_workers() -> dict[str, Any]:
    from torch.distributed.elastic.agent.server.api import WorkerState

    return {
        "running": {state.name: WorkerState.is_running(state) for state in WorkerState},
        "text": [WorkerState.FAILED == "FAILED", str(WorkerState.FAILED), WorkerState("INIT").name],
        "unknown": outcome(WorkerState, "DONE"),
    }


@case
def a_worker_and_its_group() -> dict[str, Any]:
    from torch.distributed.elastic.agent.server import Worker, WorkerGroup

    worker = Worker(1, 2, 3, 4, 5)
    group = WorkerGroup(spec_of(local_world_size=3))
    return {
        "worker": plain(
            [worker.id, worker.local_rank, worker.global_rank, worker.role_rank, worker.world_size, worker.role_world_size]
        ),
        "text": [str(worker), repr(Worker(0))],
        "defaults": [getattr(Worker(0), name) for name in ("global_rank", "role_rank", "world_size", "role_world_size")],
        "slots": outcome(setattr, worker, "other", 1),
        "group": plain(
            [
                group.state,
                group.store,
                group.group_rank,
                group.group_world_size,
                group.master_addr,
                group.master_port,
                len(group.workers),
            ]
        ),
        "ranks": [one.local_rank for one in group.workers],
        "group slots": outcome(setattr, group, "other", 1),
        "slot names": [sorted(Worker.__slots__), sorted(WorkerGroup.__slots__)],
    }


@case
def the_spec_of_workers() -> dict[str, Any]:
    def named() -> None: ...

    return {
        "name of function": spec_of(entrypoint=named).get_entrypoint_name().rpartition(".")[2],
        "name of program": spec_of(entrypoint="/usr/bin/program").get_entrypoint_name(),
        "no workers": outcome(spec_of, local_world_size=0),
        "no interval": outcome(spec_of, monitor_interval=0),
        "no entry": outcome(spec_of, entrypoint=None),
        "old name": outcome(lambda: spec_of(entrypoint=None, fn=named).entrypoint is named),
        "defaults": plain(
            [
                getattr(spec_of(), name)
                for name in (
                    "master_addr",
                    "master_port",
                    "local_addr",
                    "event_log_handler",
                    "numa_options",
                    "virtual_local_rank",
                    "fn",
                )
            ]
        ),
        "equal": spec_of(rdzv_handler=1) == spec_of(rdzv_handler=1),
    }


@case
def the_result_of_a_run() -> dict[str, Any]:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

    return {
        "failed": {state.name: RunResult(state).is_failed() for state in WorkerState},
        "defaults": plain([RunResult(WorkerState.INIT).return_values, RunResult(WorkerState.INIT).failures]),
        "own dicts": RunResult(WorkerState.INIT).failures is not RunResult(WorkerState.INIT).failures,
        "equal": RunResult(WorkerState.INIT) == RunResult(WorkerState.INIT),
    }


@case
def abstract_agents() -> dict[str, Any]:
    from torch.distributed.elastic.agent.server import ElasticAgent, SimpleElasticAgent

    return {"agent": outcome(ElasticAgent), "simple": outcome(lambda: SimpleElasticAgent(spec_of()))}


def state_and_values(result: Any) -> list[Any]:
    return [result.state, result.return_values]


def run_of(states: list[str], waiting: list[int] | None = None, **more: Any) -> dict[str, Any]:
    spec = spec_of(**more)
    spec.rdzv_handler.waiting = waiting or [0]
    agent = agent_class()(spec, states, exit_barrier_timeout=5)
    with mock.patch.object(type(agent), "_exit_barrier", lambda self: self.calls.append("_exit_barrier")):
        answer = outcome(lambda: state_and_values(agent.run()))
    group = agent.get_worker_group()
    return {
        "answer": answer,
        "calls": agent.calls,
        "rendezvous": spec.rdzv_handler.calls,
        "left": agent._remaining_restarts,
        "group": plain([group.state, group.group_rank, group.group_world_size, group.master_addr, group.master_port]),
        "ids": plain([[one.id, one.global_rank, one.world_size, one.role_rank, one.role_world_size] for one in group.workers]),
        "time": type(agent._total_execution_time).__name__,
    }


@case
def a_run_that_succeeds() -> dict[str, Any]:
    return run_of(["HEALTHY", "HEALTHY", "SUCCEEDED"])


@case
def a_run_that_restarts() -> dict[str, Any]:
    return run_of(["HEALTHY", "FAILED", "HEALTHY", "SUCCEEDED"])


@case
def a_run_that_fails() -> dict[str, Any]:
    return run_of(["FAILED"], max_restarts=0)


@case
def a_run_that_spends_its_restarts() -> dict[str, Any]:
    return run_of(["FAILED", "FAILED"], max_restarts=1)


@case
def a_run_of_unhealthy_workers() -> dict[str, Any]:
    return run_of(["UNHEALTHY", "SUCCEEDED"])


@case
def a_run_of_which_nothing_is_known() -> dict[str, Any]:
    return run_of(["UNKNOWN"])


@case
def a_run_with_new_members() -> dict[str, Any]:
    return run_of(["HEALTHY", "HEALTHY", "SUCCEEDED"], waiting=[0, 1, 0])


@case
def a_run_with_a_master_of_its_own() -> dict[str, Any]:
    return {"group": run_of(["SUCCEEDED"], master_addr="10.1.1.1", master_port=77)["group"]}


@case
def a_run_ended_by_a_signal() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    agent = agent_class()(spec_of(), [])

    def interrupted(role: str = "default") -> None:
        raise SignalException("told to stop", signal.SIGINT)

    agent._invoke_run = interrupted
    return {"answer": outcome(agent.run), "calls": agent.calls}


@case
def a_run_ended_by_an_error() -> dict[str, Any]:
    agent = agent_class()(spec_of(), [], shutdown_timeout=7)

    def broken(role: str = "default") -> None:
        raise KeyError("x")

    agent._invoke_run = broken
    return {"answer": outcome(agent.run), "calls": agent.calls}


@case
def hooks_are_called_with_these() -> dict[str, Any]:
    calls: list[Any] = []
    base = agent_class()

    class Agent(base):  # type: ignore[misc,valid-type]
        def _invoke_run(self, role: str = "default") -> Any:
            calls.append(["_invoke_run", role])
            return super()._invoke_run(role)

        def _initialize_workers(self, worker_group: Any) -> None:
            calls.append(["_initialize_workers", worker_group is self._worker_group])
            super()._initialize_workers(worker_group)

        def _restart_workers(self, worker_group: Any) -> None:
            calls.append(["_restart_workers", worker_group is self._worker_group])
            super()._restart_workers(worker_group)

        def _rendezvous(self, worker_group: Any) -> None:
            calls.append(["_rendezvous", worker_group is self._worker_group])
            super()._rendezvous(worker_group)

        def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: Any) -> Any:
            calls.append(["_assign_worker_ranks", group_rank, group_world_size, spec is self._worker_group.spec])
            workers = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
            calls.append([[one.local_rank, one.global_rank, one.world_size] for one in workers])
            return workers

        def _exit_barrier(self) -> None:
            calls.append("_exit_barrier")

    result = outcome(lambda: Agent(spec_of(), ["HEALTHY", "FAILED", "SUCCEEDED"]).run("other").state)
    return {"answer": result, "calls": calls}


@case
def ranks_over_several_agents() -> dict[str, Any]:
    """Two agents of one role and one of another, with different numbers of workers."""
    from tests.compat.conformance.harness import together

    shared = store()
    base = agent_class()

    def one(rank: int, role: str, count: int) -> Any:
        handler = handler_of(rank, 3, shared)
        agent = base(spec_of(role=role, local_world_size=count, rdzv_handler=handler), [])
        agent._rendezvous(agent.get_worker_group())
        group = agent.get_worker_group()
        return [[w.local_rank, w.global_rank, w.world_size, w.role_rank, w.role_world_size] for w in group.workers]

    return {"ranks": together(lambda: one(0, "a", 2), lambda: one(1, "b", 1), lambda: one(2, "a", 3))}


@case
def role_infos() -> dict[str, Any]:
    from torch.distributed.elastic.agent.server.api import _RoleInstanceInfo

    info = _RoleInstanceInfo("role", 1, 4)
    back = _RoleInstanceInfo.deserialize(info.serialize())
    infos = [_RoleInstanceInfo(role, rank, 2) for role, rank in (("b", 1), ("a", 3), ("b", 0), ("a", 2))]
    facts = {
        "back": [back.role, back.rank, back.local_world_size],
        "text": json.loads(info.serialize()),
        "kind": type(info.serialize()).__name__,
    }
    if hasattr(_RoleInstanceInfo, "compare"):
        facts["compare"] = [_RoleInstanceInfo.compare(infos[0], one) for one in infos]
        infos.sort(key=lambda one: (one.role, one.rank))
        facts["boundaries"] = [outcome(_RoleInstanceInfo.find_role_boundaries, infos, role) for role in ("a", "b", "c")]
    return facts


@case
def events_of_an_agent() -> dict[str, Any]:
    agent = agent_class()(spec_of(), ["SUCCEEDED"])
    with mock.patch.object(type(agent), "_exit_barrier"):
        agent.run()
    succeeded = agent.get_event_succeeded()
    try:
        raise RuntimeError("told")
    except RuntimeError:
        failed = agent.get_event_failed()

    def shown(event: Any) -> Any:
        details = json.loads(event.metadata["metadata"])
        return [
            event.name,
            plain(event.source),
            sorted(event.metadata),
            sorted(details),
            {
                key: event.metadata[key]
                for key in ("run_id", "global_rank", "group_rank", "worker_id", "role", "state", "rdzv_backend", "agent_restarts")
            },
        ]

    worker = agent._construct_event("FAILED", succeeded.source, agent.get_worker_group().workers[0], raw_error="raw")
    return {
        "succeeded": shown(succeeded),
        "failed": shown(failed),
        "error": "told" in failed.metadata["raw_error"],
        "worker": shown(worker),
        "details": json.loads(worker.metadata["metadata"]),
        "raw": worker.metadata["raw_error"],
    }


@case
def events_that_an_agent_records() -> dict[str, Any]:
    agent = agent_class()(spec_of(event_log_handler="console"), ["HEALTHY", "SUCCEEDED"])
    with (
        mock.patch("torch.distributed.elastic.agent.server.api.record") as recorded,
        mock.patch.object(type(agent), "_exit_barrier"),
    ):
        agent.run()
    found = [(call.args[0].name.rpartition(".")[2], plain(call.args[0].source)) for call in recorded.call_args_list]
    return {
        "names": sorted({name for name, _ in found}),
        "durations": [name for name, _ in found if name in ("RENDEZVOUS", "ASSIGN_WORKER_RANKS")],
        "workers": sorted(name for name, source in found if source.endswith("WORKER")),
    }


@case
def durations_that_an_agent_records() -> dict[str, Any]:
    agent = agent_class()(spec_of(event_log_handler="console"), [])
    with mock.patch("torch.distributed.elastic.agent.server.api.record") as recorded, agent.record_duration("LOADING"):
        pass
    events = [call.args[0] for call in recorded.call_args_list]
    return {
        "names": [event.name for event in events],
        "sources": [plain(event.source) for event in events],
        "type": [type(event.metadata["duration_ms"]).__name__ for event in events],
    }


def metrics_of(states: list[str], **more: Any) -> Any:
    agent = agent_class()(spec_of(**more), states)
    with (
        mock.patch("torch.distributed.elastic.agent.server.api.put_metric") as put,
        mock.patch.object(type(agent), "_exit_barrier"),
    ):
        outcome(agent.run)
    return [[call.args[0], call.args[1]] for call in put.call_args_list]


@case
def metrics_that_an_agent_puts() -> dict[str, Any]:
    return {
        "success": metrics_of(["HEALTHY", "SUCCEEDED"]),
        "with a restart": sorted(metrics_of(["FAILED", "SUCCEEDED"])),
        "failure": sorted(metrics_of(["FAILED"], max_restarts=0)),
    }


@case
def how_flaky_a_run_was() -> dict[str, Any]:
    facts = {}
    for restarts, left, failed in ((3, 3, False), (3, 2, False), (3, 0, False), (3, 1, True), (0, 0, False)):
        agent = agent_class()(spec_of(max_restarts=restarts), [])
        agent._remaining_restarts = left
        with mock.patch("torch.distributed.elastic.agent.server.api.put_metric") as put:
            agent._record_flakiness_metric(failed)
        facts[f"{restarts} {left} {failed}"] = plain([call.args for call in put.call_args_list])
    return facts


@case
def the_exit_barrier() -> dict[str, Any]:
    import torch.distributed.elastic.utils.store as store_util

    agent = agent_class()(spec_of(), ["SUCCEEDED"], exit_barrier_timeout=3)
    with mock.patch.object(store_util, "barrier") as barrier:
        result = outcome(lambda: agent.run().state)
    arguments = {**barrier.call_args.kwargs} if barrier.call_args else {}
    arguments.pop("store", None)
    failing = agent_class()(spec_of(), ["SUCCEEDED"])
    with mock.patch.object(store_util, "barrier", side_effect=RuntimeError("lost")):
        lost = outcome(lambda: failing.run().state)
    return {
        "answer": result,
        "calls": barrier.call_count,
        "arguments": {key: arguments.get(key) for key in ("world_size", "key_prefix", "barrier_timeout")},
        "lost": lost,
    }


@case
def the_local_agent() -> dict[str, Any]:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    with folder() as path:
        program = 'echo "out $RANK"; echo "err $RANK" >&2'
        spec = spec_of(args=("-c", program))
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(str(path), redirects=Std.ALL))
        before = plain([agent.get_worker_group().state, agent._pcontext])
        result = agent.run()
        found = sorted(str(one.relative_to(path)).split("/", 1)[1] for one in path.rglob("*.log"))
        texts = sorted(one.read_text() for one in path.rglob("*.log"))
    return {
        "before": before,
        "state": plain(result.state),
        "values": plain(result.return_values),
        "failures": plain(result.failures),
        "files": found,
        "texts": texts,
        "group": plain(agent.get_worker_group().state),
    }


@case
def the_local_agent_with_a_function() -> dict[str, Any]:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    with folder() as path:
        spec = spec_of(entrypoint=ranks_and, args=("more",))
        result = LocalElasticAgent(spec, DefaultLogsSpecs(str(path)), start_method="fork").run()
    return {"state": plain(result.state), "values": plain(result.return_values)}


def ranks_and(text: str) -> list[str]:
    return [os.environ["RANK"], os.environ["LOCAL_RANK"], text]


@case
def the_local_agent_whose_workers_fail() -> dict[str, Any]:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    with folder() as path:
        spec = spec_of(args=("-c", '[ "$RANK" = 1 ] && exit 3; sleep 20'), max_restarts=1)
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(str(path)))
        result = agent.run()
        failures = {rank: [one.exitcode, one.local_rank] for rank, one in result.failures.items()}
        attempts = sorted({one.parent.name for one in path.rglob("0") if one.is_dir()})
    return {
        "state": plain(result.state),
        "failures": plain(failures),
        "left": agent._remaining_restarts,
        "attempts": attempts,
        "failed": result.is_failed(),
    }


@case
def the_environment_of_workers() -> dict[str, Any]:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    ours = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCH", "OMP_NUM")
    with folder() as path:
        program = f"import json, os; print(json.dumps({{k: v for k, v in os.environ.items() if k.startswith({ours!r})}}))"
        spec = spec_of(entrypoint=sys.executable, args=("-S", "-c", program), max_restarts=5)
        LocalElasticAgent(spec, DefaultLogsSpecs(str(path), redirects=Std.OUT)).run()
        texts = [json.loads(one.read_text()) for one in sorted(path.rglob("stdout.log"))]
        for text in texts:
            text["TORCHELASTIC_ERROR_FILE"] = Path(text["TORCHELASTIC_ERROR_FILE"]).name
            for name in [name for name in text if name.startswith("TORCH_CPP")]:
                del text[name]
    return {f"worker {index}": text for index, text in enumerate(texts)}


@case
def arguments_of_workers() -> dict[str, Any]:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    with folder() as path:
        spec = spec_of(args=("-c", 'echo "$@"', "name", "--rank=${local_rank}", "$other", "a b"))
        LocalElasticAgent(spec, DefaultLogsSpecs(str(path), redirects=Std.OUT), "spawn", 300, None).run()
        texts = [one.read_text() for one in sorted(path.rglob("stdout.log"))]
    return {"texts": texts}


@case
def the_local_agent_waits_for_these() -> dict[str, Any]:
    """A group of workers is what `start_processes` gives, which callers replace."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import RunProcsResult

    context = mock.MagicMock()
    context.pids.return_value = {0: 11, 1: 12}
    context.wait.return_value = RunProcsResult(return_values={0: "a", 1: "b"})
    with (
        folder() as path,
        mock.patch("torch.distributed.elastic.agent.server.local_elastic_agent.start_processes", return_value=context) as start,
    ):
        result = LocalElasticAgent(spec_of(), DefaultLogsSpecs(str(path))).run()
        keywords = start.call_args.kwargs
    return {
        "state": plain(result.state),
        "values": plain(result.return_values),
        "closed": context.close.call_count > 0,
        "named": sorted(keywords),
        "some": plain(
            [keywords["name"], keywords["entrypoint"], keywords["args"], keywords["start_method"], keywords["log_line_prefixes"]]
        ),
    }


@case
def prefixes_of_lines() -> dict[str, Any]:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    with folder() as path, mock.patch("torch.distributed.elastic.agent.server.local_elastic_agent.start_processes") as start:
        agent = LocalElasticAgent(
            spec_of(), DefaultLogsSpecs(str(path)), log_line_prefix_template="[${role_name}-${local_rank}-${rank}]:"
        )
        start.return_value.pids.return_value = {0: 1, 1: 2}
        agent._initialize_workers(agent.get_worker_group())
        return {"prefixes": plain(start.call_args.kwargs["log_line_prefixes"]), "files": tree(path)}


@case
def a_run_that_is_not_needed() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

    agent = agent_class()(spec_of(), [])

    def left_out(role: str = "default") -> None:
        raise RendezvousGracefulExitError("not needed")

    agent._invoke_run = left_out
    return {"answer": outcome(agent.run), "calls": agent.calls}


@case
def a_run_that_cannot_meet() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

    spec = spec_of()
    spec.rdzv_handler.next_rendezvous = mock.MagicMock(side_effect=RendezvousTimeoutError("late"))
    agent = agent_class()(spec, [])
    return {"answer": outcome(agent.run, words=("late",)), "calls": agent.calls, "group": plain(agent.get_worker_group().state)}


@case
def steps_taken_one_by_one() -> dict[str, Any]:
    """What tests of subclasses do: call the hooks themselves, and look at the group."""
    agent = agent_class()(spec_of(), [])
    group = agent.get_worker_group()
    agent._initialize_workers(group)
    first = plain([group.state, [one.id for one in group.workers], group.store is not None])
    agent._restart_workers(group)
    second = plain([group.state, [one.id for one in group.workers]])
    workers = agent._assign_worker_ranks(store(), 0, 1, group.spec)
    return {
        "initialized": first,
        "restarted": second,
        "calls": agent.calls,
        "ranks": [[one.local_rank, one.global_rank] for one in workers],
    }


@case
def states_of_workers_in_events() -> dict[str, Any]:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    agent = agent_class()(spec_of(event_log_handler="console"), [])
    agent._rendezvous(agent.get_worker_group())
    facts = {}
    for name, result in (
        ("failed", RunResult(WorkerState.FAILED, failures={0: ProcessFailure(0, 5, 3, "none")})),
        ("succeeded", RunResult(WorkerState.SUCCEEDED, {0: "a", 1: "b"})),
    ):
        with mock.patch("torch.distributed.elastic.agent.server.api.record") as recorded:
            agent._record_worker_events(result)
        events = [call.args[0] for call in recorded.call_args_list]
        facts[name] = [
            [one.name, plain(one.source), one.metadata["global_rank"], one.metadata["raw_error"] is not None] for one in events
        ]
        facts[f"{name}: sink"] = [
            (call.args[1:] and plain(call.args[1])) or plain(call.kwargs) for call in recorded.call_args_list
        ]
    return facts


@case
def the_watchdog_of_a_local_agent() -> dict[str, Any]:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    facts = {}
    with folder() as path:
        for name, variables in (
            ("off", {}),
            ("on", {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}),
            ("named", {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": str(path / "timer")}),
        ):
            with environment(**variables):
                spec = spec_of(
                    local_world_size=1,
                    args=("-c", 'echo "$TORCHELASTIC_TIMER_FILE"; [ -p "$TORCHELASTIC_TIMER_FILE" ] && echo pipe'),
                    max_restarts=0,
                )
                LocalElasticAgent(spec, DefaultLogsSpecs(str(path / name), redirects=Std.OUT)).run()
            lines = next(iter((path / name).rglob("stdout.log"))).read_text().splitlines()
            facts[name] = [bool(lines[0]), lines[0] == str(path / "timer"), lines[1:]]
    return facts
