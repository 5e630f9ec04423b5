"""Which collaborators can do more than torch's interfaces say, and what stands for those that cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from tests.ports import free_port

from rallypoint.agent.capabilities import NoFolders, NoHold, folders_of, hold_on, news_fd_of, peers_of
from rallypoint.agent.peers import CoordinatedPeers, PlainPeers, WakingPeers
from rallypoint.agent.workers import RunResult, WorkerSpec, WorkerState
from rallypoint.output.log_specs import DefaultLogsSpecs, LogsDest, LogsSpecs
from rallypoint.processes.warden_context import EndReason
from rallypoint.rendezvous.handler import RendezvousHandler, RendezvousInfo, RendezvousParameters, RendezvousStoreInfo
from rallypoint.rendezvous.registry import get_rendezvous_handler
from rallypoint.store.hash_store import HashStore


class Plain(RendezvousHandler):
    """What somebody else writes for torch's interface."""

    def get_backend(self) -> str:
        return "plain"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("localhost", 1))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return

    def num_nodes_waiting(self) -> int:
        return 3

    def get_run_id(self) -> str:
        return "run"

    def shutdown(self) -> bool:
        return True


class Foreign(LogsSpecs):
    """Log specs of somebody else's."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return LogsDest()


def spec_for(handler: RendezvousHandler) -> WorkerSpec:
    return WorkerSpec("role", 1, handler, entrypoint="program")


def not_called(*_: Any) -> None:
    raise AssertionError("nothing is entrusted where there is no licence")


@pytest.mark.parametrize(("nodes", "kind"), [(1, WakingPeers), (2, CoordinatedPeers)], ids=["one node", "several"])
def test_peers_are_as_much_as_the_handler_tells_of_them(nodes: int, kind: type[PlainPeers]) -> None:
    handler = get_rendezvous_handler(RendezvousParameters("c10d", f"localhost:{free_port()}", "run", nodes, nodes))
    assert type(peers_of(spec_for(handler))) is kind
    handler.shutdown()


def test_with_a_plain_handler_there_is_nobody_to_hear_or_to_tell() -> None:
    peers = peers_of(spec_for(Plain()))
    assert type(peers) is PlainPeers
    assert peers.must_be_polled
    assert not peers.act_as_one
    assert peers.next_rendezvous(30, not_called).world_size == 1
    assert peers.nodes_waiting() == 3
    job = peers.job
    assert {job.observe(), job.worker_ranks(), job.restart_count(), peers.drain(1), job.end_error()} == {None}
    assert {peers.wakeup_fd(), job.fence_fd(), job.licence_fd()} == {None}
    assert (job.generation(), job.settings_in_force()) == (0, "")
    peers.report_failure(RunResult(WorkerState.FAILED))
    for tell in cast("list[Callable[[str], None]]", [job.was_fenced, job.depart, job.leave]):
        tell("why")
    job.on_fence(not_called)
    peers.close_worker_store()


def test_a_handler_that_is_replaced_in_the_spec_is_the_one_that_is_asked() -> None:
    class Busy(Plain):
        def num_nodes_waiting(self) -> int:
            return 7

    spec = spec_for(Plain())
    peers = peers_of(spec)
    spec.rdzv_handler = Busy()
    assert peers.nodes_waiting() == 7


def test_there_is_no_hold_on_workers_of_somebody_elses() -> None:
    hold = hold_on(None)
    assert type(hold) is NoHold
    assert not hold.licence_expired
    assert news_fd_of(None) is None
    hold.kill_at_once()
    hold.explain_end(1, EndReason("why"))
    hold.end_worker(0, EndReason("why"))
    hold.await_others(60.0, None)


def test_only_our_own_log_specs_have_folders_that_we_know_of(tmp_path: Path) -> None:
    ours = DefaultLogsSpecs(str(tmp_path))
    assert folders_of(ours) is ours
    theirs = folders_of(Foreign())
    assert type(theirs) is NoFolders
    assert (theirs.keeps_output, theirs.run_log_dir, theirs.run_folder, theirs.discard_if_empty()) == (True, "", None, False)
