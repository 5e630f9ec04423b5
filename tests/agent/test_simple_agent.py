"""SimpleElasticAgent as others subclass it: which hooks are called, in which order, with which arguments, and to what end.

The subclass below is written as one for torch 2.13 is: its signatures are exactly that version's.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.conftest import AT_ONCE_S

from rallypoint.agent.agent import ElasticAgent, SimpleElasticAgent
from rallypoint.agent.workers import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from rallypoint.base import defaults
from rallypoint.errors import RendezvousGracefulExitError, RendezvousTimeoutError, SignalException, UnkillableWorkersError
from rallypoint.failures.process_failure import ProcessFailure
from rallypoint.rendezvous.handler import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from rallypoint.store.hash_store import HashStore

HEALTHY = RunResult(WorkerState.HEALTHY)


class Handler(RendezvousHandler):
    """A rendezvous written by somebody else; each `waiting` is the answer to one look."""

    def __init__(self, world_size: int = 1, rank: int = 0, waiting: list[int] | None = None) -> None:
        self.store = HashStore()
        self.world_size = world_size
        self.rank = rank
        self.waiting = waiting or []
        self.rounds = 0
        self.before_round: Callable[[], Any] = lambda: None

    def get_backend(self) -> str:
        return "theirs"

    def next_rendezvous(self) -> RendezvousInfo:
        self.before_round()
        self.rounds += 1
        return RendezvousInfo(self.store, self.rank, self.world_size, RendezvousStoreInfo("10.0.0.9", 4000 + self.rounds))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return self.waiting.pop(0) if self.waiting else 0

    def get_run_id(self) -> str:
        return "job-7"

    def shutdown(self) -> bool:
        return True


Look = RunResult | Callable[[], RunResult]


class Agent(SimpleElasticAgent):
    """Fake workers: each look at them gives the next of `looks`."""

    def __init__(self, spec: WorkerSpec, looks: list[Look], **kwargs: Any) -> None:
        super().__init__(spec, **kwargs)
        self.looks = looks
        self.calls: list[Any] = []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        assert worker_group is self._worker_group
        self.calls.append("start")
        return {worker.local_rank: f"id-{worker.local_rank}" for worker in worker_group.workers}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # type: ignore[override]  # torch 2.13's signature
        assert worker_group is self._worker_group
        self.calls.append("stop")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert worker_group is self._worker_group
        self.calls.append("look")
        look = self.looks.pop(0)
        return look if isinstance(look, RunResult) else look()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:  # type: ignore[override]
        self.calls.append(("shutdown", death_sig, timeout))


def make_spec(handler: RendezvousHandler | None = None, **kwargs: Any) -> WorkerSpec:
    settings: dict[str, Any] = {"role": "trainer", "local_world_size": 2, "entrypoint": "train", "monitor_interval": 0.01}
    return WorkerSpec(rdzv_handler=handler or Handler(), **{**settings, **kwargs})


def succeeded(*ranks: int) -> RunResult:
    return RunResult(WorkerState.SUCCEEDED, return_values={rank: f"value {rank}" for rank in ranks or (0, 1)})


def failed(rank: int = 0) -> RunResult:
    failure = ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=1, error_file="")
    return RunResult(WorkerState.FAILED, failures={rank: failure})


@contextmanager
def signal_when(condition: Callable[[], bool], number: signal.Signals) -> Iterator[None]:
    """Send a signal to this process from a thread, as soon as the condition holds."""
    over = threading.Event()

    def send() -> None:
        deadline = time.monotonic() + 10
        while not condition() and not over.is_set() and time.monotonic() < deadline:
            time.sleep(0.005)
        if not over.is_set():
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# --- a run from start to end -----------------------------------------------------------------------------------------------


def test_a_successful_run_calls_the_hooks_in_order() -> None:
    agent = Agent(make_spec(), [HEALTHY, HEALTHY, succeeded()], shutdown_timeout=7)
    result = agent.run()
    assert result.state == WorkerState.SUCCEEDED
    assert not result.is_failed()
    assert result.return_values == {0: "value 0", 1: "value 1"}
    assert agent.calls == ["start", "look", "look", "look", ("shutdown", signal.SIGTERM, 7)]
    assert agent.get_worker_group().state == WorkerState.SUCCEEDED


def test_what_the_group_knows_after_the_rendezvous() -> None:
    handler = Handler()
    agent = Agent(make_spec(handler), [succeeded()])
    agent.run()
    group = agent.get_worker_group()
    assert group is agent.get_worker_group("any role")
    assert (group.group_rank, group.group_world_size, group.store) == (0, 1, handler.store)
    assert (group.master_addr, group.master_port) == ("10.0.0.9", 4001)
    assert [worker.id for worker in group.workers] == ["id-0", "id-1"]
    assert [(worker.local_rank, worker.global_rank, worker.role_rank) for worker in group.workers] == [(0, 0, 0), (1, 1, 1)]
    assert {(worker.world_size, worker.role_world_size) for worker in group.workers} == {(2, 2)}
    assert agent._store is handler.store


def test_a_master_that_the_spec_names_wins_over_the_rendezvous() -> None:
    agent = Agent(make_spec(master_addr="10.1.1.1", master_port=99), [succeeded()])
    agent.run()
    assert (agent._worker_group.master_addr, agent._worker_group.master_port) == ("10.1.1.1", 99)


def test_before_the_run_everything_is_as_subclasses_expect_it() -> None:
    agent = Agent(make_spec(max_restarts=4), [], exit_barrier_timeout=12.5)
    assert isinstance(agent, ElasticAgent)
    assert agent._worker_group.state == WorkerState.INIT
    assert agent._remaining_restarts == 4
    assert agent._store is None
    assert agent._exit_barrier_timeout == 12.5
    assert agent._total_execution_time == 0


def test_the_defaults_of_the_timeouts() -> None:
    agent = Agent(make_spec(), [])
    assert agent._exit_barrier_timeout == 300
    assert agent._shutdown_timeout == 30 == defaults.SHUTDOWN_TIMEOUT_S


def test_a_worker_group_that_is_healthy_is_looked_at_every_monitor_interval() -> None:
    agent = Agent(make_spec(monitor_interval=0.1), [HEALTHY] * 3 + [succeeded()])
    started_at = time.monotonic()
    agent.run()
    assert 0.3 <= time.monotonic() - started_at < AT_ONCE_S


# --- failures and restarts -------------------------------------------------------------------------------------------------


def test_restarts_are_spent_one_by_one_and_then_the_run_has_failed() -> None:
    handler = Handler()
    agent = Agent(make_spec(handler, max_restarts=2), [failed(), HEALTHY, failed(1), failed(1)])
    result = agent.run()
    assert result.is_failed()
    assert list(result.failures) == [1]
    assert agent.calls == [
        "start", "look", "stop",
        "start", "look", "look", "stop",
        "start", "look", "stop", ("shutdown", signal.SIGTERM, 30),
    ]  # fmt: skip
    assert agent._remaining_restarts == 0
    assert handler.rounds == 3
    assert agent._worker_group.state == WorkerState.FAILED


def test_without_restarts_the_first_failure_ends_the_run() -> None:
    agent = Agent(make_spec(max_restarts=0), [failed()])
    assert agent.run().is_failed()
    assert agent.calls == ["start", "look", "stop", ("shutdown", signal.SIGTERM, 30)]


def test_a_run_that_recovers_has_succeeded() -> None:
    agent = Agent(make_spec(max_restarts=3), [failed(), succeeded()])
    assert not agent.run().is_failed()
    assert agent._remaining_restarts == 2


def test_unhealthy_workers_are_restarted_like_failed_ones() -> None:
    agent = Agent(make_spec(max_restarts=1), [RunResult(WorkerState.UNHEALTHY), succeeded()])
    agent.run()
    assert agent.calls == ["start", "look", "stop", "start", "look", ("shutdown", signal.SIGTERM, 30)]
    assert agent._remaining_restarts == 0


def test_every_attempt_gets_the_master_of_its_own_rendezvous() -> None:
    agent = Agent(make_spec(max_restarts=1), [failed(), succeeded()])
    agent.run()
    assert agent._worker_group.master_port == 4002


def test_the_states_that_others_see_during_a_restart() -> None:
    seen: list[WorkerState] = []

    class Watching(Agent):
        def _rendezvous(self, worker_group: WorkerGroup) -> None:
            seen.append(worker_group.state)
            super()._rendezvous(worker_group)

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            seen.append(worker_group.state)
            return super()._monitor_workers(worker_group)

    Watching(make_spec(max_restarts=1), [failed(), succeeded()]).run()
    assert seen == [WorkerState.INIT, WorkerState.HEALTHY, WorkerState.STOPPED, WorkerState.HEALTHY]


@pytest.mark.parametrize("state", [WorkerState.UNKNOWN, WorkerState.INIT, WorkerState.STOPPED])
def test_a_state_that_nobody_can_explain_raises(state: WorkerState) -> None:
    agent = Agent(make_spec(), [RunResult(state)])
    with pytest.raises(Exception, match=f"trainer.*{state.name}"):
        agent.run()
    assert agent.calls == ["start", "look", ("shutdown", signal.SIGTERM, 30)]


def test_a_membership_change_restarts_without_spending_a_restart() -> None:
    handler = Handler(waiting=[0, 2, 0, 1])
    agent = Agent(make_spec(handler, max_restarts=0), [HEALTHY] * 4 + [succeeded()])
    assert not agent.run().is_failed()
    assert agent.calls == [
        "start", "look", "look", "stop",
        "start", "look", "look", "stop",
        "start", "look", ("shutdown", signal.SIGTERM, 30),
    ]  # fmt: skip
    assert agent._remaining_restarts == 0
    assert handler.rounds == 3


def test_peers_are_not_asked_for_when_the_workers_have_ended() -> None:
    handler = Handler(waiting=[1])
    Agent(make_spec(handler), [succeeded()]).run()
    assert handler.waiting == [1]


def test_workers_that_cannot_be_stopped_end_the_run_without_another_start() -> None:
    """P10: no restart on that host; the error that names the pid goes up as it is."""

    class Stuck(Agent):
        def _stop_workers(self, worker_group: WorkerGroup) -> None:  # type: ignore[override]
            super()._stop_workers(worker_group)
            raise UnkillableWorkersError([4711], 10)

    agent = Stuck(make_spec(max_restarts=3), [failed()])
    with pytest.raises(UnkillableWorkersError, match="4711"):
        agent.run()
    assert agent.calls == ["start", "look", "stop", ("shutdown", signal.SIGTERM, 30)]


def test_an_exception_of_a_hook_goes_up_after_the_shutdown() -> None:
    agent = Agent(make_spec(), [lambda: 1 // 0])
    with pytest.raises(ZeroDivisionError):
        agent.run()
    assert agent.calls == ["start", "look", ("shutdown", signal.SIGTERM, 30)]


def test_an_error_of_the_rendezvous_goes_up_after_the_shutdown() -> None:
    handler = Handler()

    def time_out() -> None:
        raise RendezvousTimeoutError("only 1 of 2 nodes came")

    handler.before_round = time_out
    agent = Agent(make_spec(handler), [])
    with pytest.raises(RendezvousTimeoutError, match="only 1 of 2"):
        agent.run()
    assert agent.calls == [("shutdown", signal.SIGTERM, 30)]


def test_a_node_that_is_not_needed_ends_as_an_empty_success() -> None:
    handler = Handler()

    def leave() -> None:
        raise RendezvousGracefulExitError("the job runs without this node")

    handler.before_round = leave
    agent = Agent(make_spec(handler), [])
    assert agent.run() == RunResult(WorkerState.SUCCEEDED)
    assert agent.calls == [("shutdown", signal.SIGTERM, 30)]


def test_a_node_that_is_not_needed_after_a_restart_ends_as_an_empty_success() -> None:
    handler = Handler(waiting=[1])
    agent = Agent(make_spec(handler), [HEALTHY])

    def leave_at_the_second() -> None:
        if handler.rounds:
            raise RendezvousGracefulExitError("the larger world has no place for this node")

    handler.before_round = leave_at_the_second
    assert agent.run() == RunResult(WorkerState.SUCCEEDED)
    assert agent.calls == ["start", "look", "stop", ("shutdown", signal.SIGTERM, 30)]


# --- signals ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_is_passed_on_to_the_shutdown_and_raised(number: signal.Signals) -> None:
    def receive() -> RunResult:
        os.kill(os.getpid(), number)
        return HEALTHY

    agent = Agent(make_spec(max_restarts=3), [receive, HEALTHY], shutdown_timeout=3)
    before = signal.getsignal(number)
    with pytest.raises(SignalException) as caught:
        agent.run()
    assert caught.value.sigval is number
    assert agent.calls == ["start", "look", ("shutdown", number, 3)]
    assert signal.getsignal(number) == before


def test_a_signal_ends_the_wait_between_two_looks() -> None:
    agent = Agent(make_spec(monitor_interval=60), [HEALTHY])
    started_at = time.monotonic()
    with signal_when(lambda: "look" in agent.calls, signal.SIGTERM), pytest.raises(SignalException):
        agent.run()
    assert time.monotonic() - started_at < AT_ONCE_S


def test_a_signal_ends_a_rendezvous_that_blocks() -> None:
    """P20: also one of somebody else's making, which knows nothing of our signals."""
    handler = Handler()
    inside = threading.Event()

    def block() -> None:
        inside.set()
        threading.Event().wait(60)

    handler.before_round = block
    agent = Agent(make_spec(handler), [])
    started_at = time.monotonic()
    with signal_when(inside.is_set, signal.SIGINT), pytest.raises(SignalException) as caught:
        agent.run()
    assert caught.value.sigval is signal.SIGINT
    assert time.monotonic() - started_at < AT_ONCE_S
    assert agent.calls == [("shutdown", signal.SIGINT, 30)]


class ImpatientStore(HashStore):
    """Should a signal not end a wait, the test is to end nevertheless."""

    def set_timeout(self, timeout: Any) -> None:
        super().set_timeout(min(timeout, 2 * AT_ONCE_S))


def test_a_signal_ends_the_exchange_of_ranks() -> None:
    """P20: a peer that joined and then hangs must not keep us from going."""
    handler = Handler(world_size=2)
    handler.store = ImpatientStore()
    agent = Agent(make_spec(handler), [])
    started_at = time.monotonic()
    with signal_when(lambda: handler.store.num_keys() > 0, signal.SIGINT), pytest.raises(SignalException):
        agent.run()
    assert time.monotonic() - started_at < AT_ONCE_S
    assert agent.calls == [("shutdown", signal.SIGINT, 30)]


def test_a_signal_ends_the_exit_barrier() -> None:
    """P20: our workers are done and the peer's are not; whoever sends a signal now is not kept for the barrier's time."""

    class Alone(Agent):
        def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> list[Worker]:
            return super()._assign_worker_ranks(store, 0, 1, spec)

    handler = Handler(world_size=2)
    agent = Alone(make_spec(handler), [succeeded()], exit_barrier_timeout=2 * AT_ONCE_S)
    started_at = time.monotonic()
    with signal_when(lambda: handler.store.num_keys() > 0, signal.SIGTERM), pytest.raises(SignalException):
        agent.run()
    assert time.monotonic() - started_at < AT_ONCE_S
    assert agent.calls == ["start", "look", ("shutdown", signal.SIGTERM, 30)]


def test_a_signal_that_was_ignored_when_we_started_stays_ignored() -> None:
    """P18: nohup."""

    def receive() -> RunResult:
        os.kill(os.getpid(), signal.SIGHUP)
        return HEALTHY

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = Agent(make_spec(), [receive, HEALTHY, succeeded()]).run()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert result.state == WorkerState.SUCCEEDED


# --- the exit barrier ------------------------------------------------------------------------------------------------------


class BrokenStore(HashStore):
    def add(self, key: str, amount: int) -> int:
        raise ConnectionResetError("the store's host is gone")


def test_an_error_at_the_exit_barrier_does_not_fail_the_run() -> None:
    handler = Handler()
    handler.store = BrokenStore()
    assert Agent(make_spec(handler), [succeeded()]).run().state == WorkerState.SUCCEEDED


def test_peers_that_do_not_finish_are_waited_for_as_long_as_asked() -> None:
    class Alone(Agent):
        def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> list[Worker]:
            return super()._assign_worker_ranks(store, 0, 1, spec)

    agent = Alone(make_spec(Handler(world_size=2)), [succeeded()], exit_barrier_timeout=0.3)
    started_at = time.monotonic()
    assert agent.run().state == WorkerState.SUCCEEDED
    assert 0.3 <= time.monotonic() - started_at < AT_ONCE_S


def test_a_failed_run_skips_the_exit_barrier() -> None:
    """P11."""
    handler = Handler()
    Agent(make_spec(handler, max_restarts=0), [failed()]).run()
    assert handler.store.num_keys() == 0


def test_the_exit_barrier_uses_the_timeout_and_the_key_that_peers_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers replace the barrier in its module, so it is looked up there."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr("rallypoint.store.barriers.barrier", lambda **kwargs: calls.append(kwargs))
    handler = Handler()
    Agent(make_spec(handler), [succeeded()], exit_barrier_timeout=12).run()
    (call,) = calls
    assert call["store"] is handler.store
    assert call["world_size"] == 1
    assert call["key_prefix"] == "torchelastic/agent/terminal_state"
    assert call["barrier_timeout"] == 12


# --- overriding more than the abstract methods -----------------------------------------------------------------------------


def test_restarting_can_be_overridden_as_a_whole() -> None:
    class InPlace(Agent):
        def _restart_workers(self, worker_group: WorkerGroup) -> None:
            self.calls.append("restart in place")

    handler = Handler(waiting=[1])
    agent = InPlace(make_spec(handler, max_restarts=1), [HEALTHY, failed(), HEALTHY, succeeded()])
    assert not agent.run().is_failed()
    assert agent.calls == [
        "start", "look", "restart in place", "look", "restart in place", "look", "look", ("shutdown", signal.SIGTERM, 30),
    ]  # fmt: skip
    assert handler.rounds == 1
    assert agent._remaining_restarts == 0


def test_initializing_can_be_overridden_as_a_whole() -> None:
    class Bare(Agent):
        def _initialize_workers(self, worker_group: WorkerGroup) -> None:
            self.calls.append("initialize")
            worker_group.group_world_size = 1
            self._store = HashStore()

    agent = Bare(make_spec(max_restarts=1), [failed(-1), RunResult(WorkerState.SUCCEEDED, {-1: None})])
    assert not agent.run().is_failed()
    assert agent.calls == ["initialize", "look", "stop", "initialize", "look", ("shutdown", signal.SIGTERM, 30)]


def test_the_whole_run_can_be_overridden() -> None:
    class Short(Agent):
        def _invoke_run(self, role: str = "default") -> RunResult:
            self.calls.append(("invoke", role))
            return RunResult(WorkerState.SUCCEEDED, {-1: "short"})

    agent = Short(make_spec(), [])
    assert agent.run("mine").return_values == {-1: "short"}
    assert agent.calls == [("invoke", "mine"), ("shutdown", signal.SIGTERM, 30)]


def test_the_rendezvous_and_the_ranks_can_be_overridden() -> None:
    class Remote(Agent):
        def _rendezvous(self, worker_group: WorkerGroup) -> None:
            self.calls.append("rendezvous")
            super()._rendezvous(worker_group)

        def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> list[Worker]:
            self.calls.append(("ranks", store, group_rank, group_world_size, spec))
            return [Worker(local_rank=0, global_rank=40, role_rank=4, world_size=50, role_world_size=5)]

    handler = Handler()
    spec = make_spec(handler, local_world_size=1)
    agent = Remote(spec, [succeeded(40)])
    agent.run()
    assert agent.calls[:3] == ["rendezvous", ("ranks", handler.store, 0, 1, spec), "start"]
    assert [worker.global_rank for worker in agent._worker_group.workers] == [40]


def test_an_agent_runs_again_with_what_is_left_of_its_budget() -> None:
    agent = Agent(make_spec(max_restarts=1), [failed(), succeeded(), succeeded()])
    assert not agent.run().is_failed()
    assert not agent.run().is_failed()
    assert agent._remaining_restarts == 0
