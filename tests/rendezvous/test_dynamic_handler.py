"""Torch's dynamic rendezvous over any back end: its settings, and what a caller that is not our agent finds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from tests.cells import MemoryCell
from tests.pace import is_under

from rallypoint import events
from rallypoint.errors import RendezvousClosedError, RendezvousConnectionError, RendezvousStateError, RendezvousTimeoutError
from rallypoint.events import NodeState
from rallypoint.protocol import agent_machine
from rallypoint.rendezvous.dynamic_handler import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    RendezvousTimeout,
    create_handler,
)
from rallypoint.rendezvous.handler import RendezvousInfo, RendezvousParameters
from rallypoint.store.hash_store import HashStore

QUICK = {"timeout": RendezvousTimeout(join=timedelta(seconds=20), last_call=timedelta(seconds=0.2)), "keep_alive_interval": 0.35}


class Job:
    """Handlers of one job in this process."""

    def __init__(self) -> None:
        self.cell, self.store = MemoryCell(), HashStore()
        self.handlers: list[DynamicRendezvousHandler] = []

    def node(self, min_nodes: int = 1, max_nodes: int = 1, **more: Any) -> DynamicRendezvousHandler:
        settings = {**QUICK, **more}
        handler = DynamicRendezvousHandler.from_backend(
            "job", self.store, self.cell, min_nodes, max_nodes, "127.0.0.1", **settings
        )
        self.handlers.append(handler)
        return handler

    def meet(self, *handlers: DynamicRendezvousHandler) -> list[RendezvousInfo]:
        with ThreadPoolExecutor(len(handlers)) as pool:
            return list(pool.map(DynamicRendezvousHandler.next_rendezvous, handlers))


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.cell.before = lambda what: None
    for handler in job.handlers:
        handler._stop_heartbeats()


# --- settings --------------------------------------------------------------------------------------------------------------


def test_timeouts_have_defaults_and_must_be_positive() -> None:
    timeout = RendezvousTimeout()
    found = [one.total_seconds() for one in (timeout.join, timeout.last_call, timeout.close, timeout.heartbeat)]
    assert found == [600, 30, 30, 5]
    for name in ("join", "last_call", "close", "heartbeat"):
        assert getattr(RendezvousTimeout(**{name: timedelta(seconds=7)}), name) == timedelta(seconds=7)
        for seconds in (0, -1):
            with pytest.raises(ValueError, match=rf"The {name} timeout \(.*\) must be positive"):
                RendezvousTimeout(**{name: timedelta(seconds=seconds)})


def test_a_back_end_is_an_interface() -> None:
    assert RendezvousBackend.__abstractmethods__ == {"name", "get_state", "set_state"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run_id": ""}, "run id must be a non-empty string"),
        ({"min_nodes": 0}, r"minimum number of nodes \(0\) must be greater than zero"),
        ({"min_nodes": 3}, r"maximum number of nodes \(2\) must be greater than or equal to the minimum number of nodes \(3\)"),
    ],
)
def test_what_could_never_run_is_refused(change: dict[str, Any], message: str) -> None:
    arguments = {"run_id": "job", "store": HashStore(), "backend": MemoryCell(), "min_nodes": 1, "max_nodes": 2, **change}
    with pytest.raises(ValueError, match=message):
        DynamicRendezvousHandler.from_backend(**arguments)


def parameters(**config: Any) -> RendezvousParameters:
    return RendezvousParameters("ignored", "ignored", "job", 1, 2, "10.0.0.1", **config)


def test_a_handler_from_parameters() -> None:
    config = {"join_timeout": "10", "last_call_timeout": 20, "close_timeout": "30", "heartbeat_timeout": "7"}
    params = parameters(**config, keep_alive_interval="9", keep_alive_max_attempt="8")
    handler = create_handler(HashStore(), MemoryCell(), params)
    assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store) == ("memory", "job", True)
    match handler.settings:
        case RendezvousSettings("job", 1, 2, timeout, interval, 8):
            assert interval == timedelta(seconds=9)
            found = [one.total_seconds() for one in (timeout.join, timeout.last_call, timeout.close, timeout.heartbeat)]
            assert found == [10, 20, 30, 7]
        case other:
            pytest.fail(f"{other}")
    paused = create_handler(HashStore(), MemoryCell(), parameters(cas_backoff_max_seconds="0.25")).settings
    plain = create_handler(HashStore(), MemoryCell(), parameters()).settings
    assert (paused.cas_backoff_max_seconds, plain.cas_backoff_max_seconds) == (0.25, 0.0)
    assert (plain.timeout.join, plain.keep_alive_interval, plain.keep_alive_max_attempt) == (
        timedelta(seconds=600), timedelta(seconds=5), 3,
    )  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        {"join_timeout": "x"},
        {"join_timeout": "-1"},
        {"keep_alive_interval": "1.5"},
        *({"cas_backoff_max_seconds": text} for text in ("nan", "inf", "-1", "x", "")),
    ],
    ids=repr,
)
def test_parameters_that_mean_nothing_are_refused_and_recorded(config: dict[str, str]) -> None:
    told = r"[Tt]imeout|interval|cas_backoff_max_seconds"
    with mock.patch.object(events, "construct_and_record_rdzv_event") as record, pytest.raises(ValueError, match=told):
        create_handler(HashStore(), MemoryCell(), parameters(**config))
    assert record.call_args.kwargs["node_state"] is NodeState.FAILED


@pytest.mark.parametrize("interval", [0, -3])
def test_a_lease_that_nobody_could_keep_is_made_longer(interval: int) -> None:
    handler = DynamicRendezvousHandler.from_backend("job", None, MemoryCell(), 1, 1, keep_alive_interval=interval)
    assert handler.settings.keep_alive_interval == timedelta(seconds=interval)
    assert handler._terms.lease_s == 1.0


# --- one node --------------------------------------------------------------------------------------------------------------


def test_one_node_meets_itself_again_and_again_until_it_is_closed(job: Job) -> None:
    handler, began = job.node(), time.monotonic()
    for number in range(3):
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size, info.bootstrap_store_info.master_addr) == (0, 1, "127.0.0.1")
        info.store.set("key", str(number))
        assert (handler.is_closed(), handler.num_nodes_waiting()) == (False, 0)
    assert job.store.num_keys() == 3, "P16: each generation has keys of its own"
    assert is_under(time.monotonic() - began, 5)
    assert handler.shutdown()
    assert handler.is_closed()
    assert handler.shutdown()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()
    with pytest.raises(RendezvousClosedError):
        job.node().next_rendezvous()


def test_a_job_is_closed_for_all_and_by_anybody(job: Job) -> None:
    one, other = job.node(), job.node()
    assert not other.is_closed()
    one.set_closed()
    assert (one.is_closed(), other.is_closed()) == (True, True)


@pytest.mark.parametrize("has_heard", [False, True])
def test_a_job_that_was_closed_while_it_ran_has_no_next_rendezvous(job: Job, wait_until: Any, has_heard: bool) -> None:
    handler = job.node()
    handler.next_rendezvous()
    job.node().set_closed()
    assert handler._driver is not None
    wait_until(lambda: not has_heard or handler._driver.peek())
    for _ in range(2):
        with pytest.raises(RendezvousClosedError):
            handler.next_rendezvous()


def test_who_runs_on_after_the_end_is_told_so_when_it_is_done_or_asks_for_a_seat(job: Job, wait_until: Any) -> None:
    """The end is said once, while the workers run; it waited for a second time, for as long as anybody may wait."""
    handler = job.node()
    handler.next_rendezvous()
    job.node().set_closed()
    seen: list[Any] = []
    wait_until(lambda: seen.append(handler.observe()) or seen[-1] is not None)
    assert isinstance(seen[-1], agent_machine.JobEnded)
    assert seen[-1].how == "closed"
    assert handler.observe() is None
    handler.report_done()
    assert handler.observe() == seen[-1]
    with pytest.raises(RendezvousClosedError, match="closed it"):
        handler.poll_rendezvous()


def test_who_shuts_down_without_having_met_closes_the_job(job: Job) -> None:
    assert job.node().shutdown()
    assert job.node().is_closed()


def test_too_few_nodes_are_told_and_may_try_again(job: Job) -> None:
    handler = job.node(2, 2, timeout=RendezvousTimeout(join=timedelta(seconds=0.3)))
    for _ in range(2):
        with pytest.raises(RendezvousTimeoutError):
            handler.next_rendezvous()


@pytest.mark.parametrize("error", [RendezvousConnectionError("mine"), RendezvousStateError("mine"), KeyError("mine")], ids=repr)
def test_what_a_back_end_raises_reaches_the_caller(job: Job, error: Exception) -> None:
    def fail(what: str) -> None:
        raise error

    handler = job.node()
    job.cell.before = fail
    for call in (handler.is_closed, handler.set_closed, handler.num_nodes_waiting, handler.next_rendezvous):
        with pytest.raises(type(error), match="mine"):
            call()
    if not isinstance(error, KeyError):
        assert not handler.shutdown()
    job.cell.before = lambda what: None
    assert handler.next_rendezvous().rank == 0, "it may be called again"


def test_a_state_of_somebody_else_is_told(job: Job) -> None:
    job.cell.state = b"\x80\x04 a state of torch's"
    handler = job.node()
    for call in (handler.is_closed, handler.next_rendezvous):
        with pytest.raises(RendezvousStateError, match="not rallypoint's"):
            call()


# --- several nodes ---------------------------------------------------------------------------------------------------------


def test_two_nodes_meet_and_share_a_store(job: Job) -> None:
    handlers = [job.node(2, 2), job.node(2, 2)]
    for _ in range(2):
        infos = job.meet(*handlers)
        assert sorted((info.rank, info.world_size) for info in infos) == [(0, 2), (1, 2)]
        assert len({(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in infos}) == 1
        infos[0].store.set("key", "value")
        assert infos[1].store.get("key") == b"value"
    assert handlers[0].shutdown()
    assert handlers[1].is_closed()


def test_a_joiner_waits_until_the_others_come_back(job: Job, wait_until: Callable[..., Any]) -> None:
    one, two = job.node(1, 2), job.node(1, 2)
    one.next_rendezvous()
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(two.next_rendezvous)
        wait_until(one.num_nodes_waiting)
        assert not joining.done()
        assert one.next_rendezvous().world_size == 2
        assert joining.result(10).world_size == 2
    assert (one.num_nodes_waiting(), two.num_nodes_waiting()) == (0, 0)


def test_a_node_beyond_the_most_is_not_waiting_and_takes_over(job: Job, wait_until: Callable[..., Any]) -> None:
    """P26: a spare disturbs nobody, and has the place of a node that is lost."""
    one, spare = job.node(), job.node()
    one.next_rendezvous()
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(spare.next_rendezvous)
        wait_until(lambda: b'"up/nodes/' in (job.cell.state or b"") and (job.cell.state or b"").count(b'["up/nodes/') >= 2)
        assert (one.num_nodes_waiting(), joining.done()) == (0, False)
        one._stop_heartbeats()
        assert joining.result(10).world_size == 1


def test_a_node_that_falls_silent_is_missed(job: Job, wait_until: Callable[..., Any]) -> None:
    one, two = job.node(1, 2), job.node(1, 2)
    assert [info.world_size for info in job.meet(one, two)] == [2, 2]
    two._stop_heartbeats()
    two._stop_heartbeats()
    wait_until(one.num_nodes_waiting)
    assert one.next_rendezvous().world_size == 1


def test_what_happens_is_recorded(job: Job) -> None:
    handler = job.node()
    with mock.patch.object(events, "construct_and_record_rdzv_event") as record:
        handler.next_rendezvous()
        handler.shutdown()
    assert [call.args[2] for call in record.call_args_list] == [NodeState.RUNNING, NodeState.RUNNING, NodeState.SUCCEEDED]
    assert {call.args[0] for call in record.call_args_list} == {"job"}


def test_nothing_runs_before_and_after(job: Job) -> None:
    handler, before = job.node(), threading.active_count()
    handler.is_closed()
    assert threading.active_count() == before
    handler.next_rendezvous()
    handler.shutdown()
    assert threading.active_count() == before


@pytest.mark.torch
def test_a_store_of_torch_stays_one_of_torch() -> None:
    torch = pytest.importorskip("torch.distributed")
    store = torch.HashStore()
    handler = DynamicRendezvousHandler.from_backend("job", store, MemoryCell(), 1, 1)
    info = handler.next_rendezvous()
    assert isinstance(info.store, torch.PrefixStore)
    info.store.set("key", "value")
    assert (store.num_keys(), handler.shutdown()) == (1, True)
