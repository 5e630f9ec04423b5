"""The plug-in for torchrun, with a rendezvous that does as the test says, and without torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint.compat import torchrun_plugin as torch_plugin
from rallypoint.compat.torchrun_plugin import TorchrunHandler
from rallypoint.errors import (
    JobFailedError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
    UsageError,
)
from rallypoint.protocol import agent_machine
from rallypoint.rendezvous import handler as own_names
from rallypoint.rendezvous.coordinated import CoordinatedHandler
from rallypoint.rendezvous.handler import RendezvousInfo, RendezvousStoreInfo
from rallypoint.rendezvous.settings import agreed, mismatch, read_settings


class Torch(SimpleNamespace):
    """Classes with torch's names, which are not ours."""

    class RendezvousHandler(own_names.RendezvousHandler):
        pass

    class RendezvousStoreInfo(RendezvousStoreInfo):
        pass

    class RendezvousInfo(RendezvousInfo):
        pass

    class RendezvousError(Exception):
        pass

    class RendezvousClosedError(RendezvousError):
        pass

    class RendezvousTimeoutError(RendezvousError):
        pass

    class RendezvousConnectionError(RendezvousError):
        pass

    class RendezvousGracefulExitError(RendezvousError):
        pass


class Scripted(CoordinatedHandler):
    """Notes what it is told; `heard` is what becomes of its generation, `answers` what comes of a rendezvous."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.heard: list[Any] = []
        self.answers: list[Exception] = []

    def next_rendezvous(self) -> RendezvousInfo:
        self.calls.append("next")
        if self.answers:
            raise self.answers.pop(0)
        return RendezvousInfo("a store", 1, 2, RendezvousStoreInfo("127.0.0.1", 1234))

    def observe(self) -> Any:
        return self.heard.pop(0) if self.heard else None

    def report_failure(self, report: Any) -> None:
        self.calls.append("failed")

    def report_done(self) -> None:
        self.calls.append("done")

    def leave(self, failure: str = "", ends_job: bool = False) -> None:
        self.calls.append(f"leave {failure}".strip())

    def shutdown(self) -> bool:
        self.calls.append("shutdown")
        return True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_backend(self) -> str:
        return "rallypoint"

    def get_run_id(self) -> str:
        return "a-job"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...
    def wakeup_fd(self) -> int | None: ...
    def introduce(self, introduction: Any) -> None: ...
    def poll_rendezvous(self) -> None: ...
    def worker_ranks(self) -> Any: ...
    def restart_count(self) -> Any: ...
    def fence_fd(self) -> int | None: ...
    def depart(self, why: str, signal: int = 0) -> None: ...
    def end_error(self) -> Exception | None: ...


@pytest.fixture
def inner() -> Scripted:
    return Scripted()


@pytest.fixture
def handler(inner: Scripted) -> TorchrunHandler:
    return TorchrunHandler(inner, Torch)


def test_results_are_of_the_callers_classes(handler: TorchrunHandler) -> None:
    info = handler.next_rendezvous()
    assert type(info) is Torch.RendezvousInfo
    assert (info.store, info.rank, info.world_size) == ("a store", 1, 2)
    assert type(info.bootstrap_store_info) is Torch.RendezvousStoreInfo
    assert (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) == ("127.0.0.1", 1234)
    assert isinstance(handler, Torch.RendezvousHandler)


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (RendezvousTimeoutError("why"), Torch.RendezvousTimeoutError),
        (RendezvousClosedError("why"), Torch.RendezvousClosedError),
        (RendezvousConnectionError("why"), Torch.RendezvousConnectionError),
        (RendezvousGracefulExitError("why"), Torch.RendezvousClosedError),
        (UsageError("why"), Torch.RendezvousError),
        (JobFailedError("why", [], None), Torch.RendezvousClosedError),
    ],
)
def test_errors_are_of_the_callers_classes(
    handler: TorchrunHandler, inner: Scripted, error: Exception, becomes: type[Exception]
) -> None:
    inner.answers.append(error)
    with pytest.raises(Torch.RendezvousError, match="why") as raised:
        handler.next_rendezvous()
    assert raised.type is becomes


@pytest.mark.parametrize("over", [agent_machine.Regroup("a node joins"), agent_machine.Fenced("the store is silent")])
def test_a_generation_that_is_over_is_one_waiting_node(handler: TorchrunHandler, inner: Scripted, over: Any) -> None:
    handler.next_rendezvous()
    assert handler.num_nodes_waiting() == 0
    inner.heard.append(over)
    assert [handler.num_nodes_waiting(), handler.num_nodes_waiting()] == [1, 1]
    handler.next_rendezvous()
    assert inner.calls == ["next", "next"]
    assert handler.num_nodes_waiting() == 0


def test_an_agent_that_comes_back_by_itself_has_lost_workers(handler: TorchrunHandler, inner: Scripted) -> None:
    handler.next_rendezvous()
    handler.next_rendezvous()
    assert inner.calls == ["next", "failed", "next"]


@pytest.mark.parametrize(("how", "waiting"), [("failed", 1), ("closed", 0), ("succeeded", 0)])
def test_the_end_of_a_job_calls_the_agent_only_if_it_failed(
    handler: TorchrunHandler, inner: Scripted, how: Any, waiting: int
) -> None:
    handler.next_rendezvous()
    inner.heard.append(agent_machine.JobEnded(how, "somebody said so"))
    assert handler.num_nodes_waiting() == waiting
    with pytest.raises(Torch.RendezvousClosedError, match="somebody said so"):
        handler.next_rendezvous()


def test_a_launcher_without_an_error_is_done(handler: TorchrunHandler, inner: Scripted) -> None:
    handler.next_rendezvous()
    assert handler.shutdown()
    assert inner.calls == ["next", "done", "leave"]


def test_a_launcher_with_an_error_on_its_way_has_failed(handler: TorchrunHandler, inner: Scripted) -> None:
    def launch() -> None:
        try:
            handler.next_rendezvous()
            raise ValueError("\n=====\ntrain.py FAILED\n-----")
        finally:
            handler.shutdown()

    with pytest.raises(ValueError, match="FAILED"):
        launch()
    assert inner.calls == ["next", "leave ValueError: train.py FAILED"]


def test_an_error_of_before_is_none_of_this_launch(inner: Scripted) -> None:
    try:
        raise KeyError("an earlier attempt")
    except KeyError:
        handler = TorchrunHandler(inner, Torch)
        handler.next_rendezvous()
        handler.shutdown()
    assert inner.calls == ["next", "done", "leave"]


def test_a_handler_without_a_seat_only_leaves(handler: TorchrunHandler, inner: Scripted) -> None:
    assert handler.shutdown()
    assert inner.calls == ["shutdown"]


@pytest.mark.parametrize("backend", ["rallypoint", "rallypoint-etcd"])
def test_the_creator_takes_torchs_parameters(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a timeout that no setting of ours is, and settings as text."""
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon")
    config = {"timeout": 900, "join_timeout": "20"}
    params = SimpleNamespace(
        backend=backend, endpoint="127.0.0.1:2", run_id="a-job", min_nodes=1, max_nodes=2, local_addr=None, config=config
    )
    handler = torch_plugin.get_creator()(params)
    assert (handler.get_backend(), handler.get_run_id(), handler.is_closed()) == (backend, "a-job", False)
    assert handler.use_agent_store
    assert handler.shutdown()


def test_nodes_of_rallyrun_and_of_torchrun_are_not_of_one_job() -> None:
    """Torch's agents get their ranks by telling each other through the store, which ours do not."""
    settings = read_settings({}, {})
    torchs = agreed(settings, 1, 2, torch_plugin.UNCOUNTED, torch_plugin.ROLE, torch_plugin.ROLE, 3.0)
    ours = agreed(settings, 1, 2, 3, "default", "train.py", 3.0)
    assert "max_restarts is 3 here and 1000000 for the job" in str(mismatch(ours, torchs))


def test_one_node_has_nobody_to_meet() -> None:
    params = SimpleNamespace(
        backend="rallypoint", endpoint="127.0.0.1:2", run_id="a-job", min_nodes=1, max_nodes=1, local_addr=None, config={}
    )
    handler = torch_plugin.get_creator()(params)
    assert [handler.next_rendezvous().world_size for _ in range(2)] == [1, 1]
    assert handler.num_nodes_waiting() == 0
    handler.set_closed()
    assert handler.is_closed()
    assert handler.shutdown()
