"""An agent among others: what it tells the job and when, and what becomes of its workers for reasons that lie elsewhere.

The rest of the job is a script, in this process; the workers are real.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.ports import free_port

from rallypoint.agent.launch import LaunchConfig, launch_agent
from rallypoint.agent.local_agent import LocalElasticAgent
from rallypoint.agent.workers import RunResult, WorkerSpec, WorkerState
from rallypoint.base import report
from rallypoint.errors import (
    JobFailedError,
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
    SignalException,
    UsageError,
    WorkerStartError,
)
from rallypoint.failures.process_failure import ChildFailedError
from rallypoint.net.wake_fd import WakeFd
from rallypoint.output.log_specs import DefaultLogsSpecs
from rallypoint.processes.context import wait_readable
from rallypoint.protocol import agent_machine
from rallypoint.protocol.restarts import RestartPolicy
from rallypoint.protocol.verdict import NodeReport
from rallypoint.protocol.worker_plan import WorkerRanks
from rallypoint.rendezvous import embedded
from rallypoint.rendezvous.coordinated import CoordinatedHandler, Introduction
from rallypoint.rendezvous.handler import RendezvousHandler, RendezvousInfo, RendezvousParameters, RendezvousStoreInfo
from rallypoint.rendezvous.one_node import LocalRendezvous
from rallypoint.store.hash_store import HashStore

SH = "/bin/sh"
FIRST_RANK, WORLD_SIZE = 4, 8
LONG_S = 30.0  # of grace, of barriers: no test may wait for it
SOON_S = 2.0

Word = agent_machine.Regroup | agent_machine.Fenced | agent_machine.JobEnded
ALL_DONE = agent_machine.JobEnded("succeeded", "all nodes are done")
JOB_FAILED = agent_machine.JobEnded("failed", "rank 0 failed; all 3 restarts are used up")
VERDICT = JobFailedError("rank 0 failed; all 3 restarts are used up", ["the cause: rank 0 on node a"], 7)


class Peers(CoordinatedHandler):
    """The other nodes. Each of `rounds` is what one rendezvous comes to: a seat (None), an error, or no end ("none")."""

    def __init__(self, *rounds: Exception | str | None) -> None:
        self.rounds = deque(rounds)
        self.told: list[Any] = []  # in order, all that the agent has said
        self.on: dict[str, Callable[[], object]] = {}  # what to do when it does
        self.words: deque[Word] = deque()
        self.workers, self.restarts = 1, 0
        self.error: Exception | None = None
        self.bell, self.fence = WakeFd(), WakeFd()

    def say(self, word: Word) -> None:
        self.words.append(word)
        self.bell.set()

    def names(self) -> list[str]:
        return [one[0] for one in self.told]

    def _note(self, name: str, *details: Any) -> None:
        self.told.append((name, *details))
        self.on.get(name, lambda: None)()

    def get_backend(self) -> str:
        return "c10d"

    def get_run_id(self) -> str:
        return "job-7"

    def next_rendezvous(self) -> RendezvousInfo:
        raise AssertionError("an agent that knows us does not block")

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        raise AssertionError("an agent never closes a job by itself")

    def num_nodes_waiting(self) -> int:
        raise AssertionError("an agent that knows us does not ask")

    def shutdown(self) -> bool:
        self._note("shutdown")
        return True

    def wakeup_fd(self) -> int:
        return self.bell.fileno()

    def introduce(self, introduction: Introduction) -> None:
        self.workers = introduction.workers
        self._note("introduce", introduction)

    def poll_rendezvous(self) -> RendezvousInfo | None:
        self._note("poll")
        outcome = self.rounds.popleft() if self.rounds else None
        if outcome == "none":
            self.rounds.append("none")
            return None
        if isinstance(outcome, Exception):
            raise outcome
        self.fence.clear()
        return RendezvousInfo(HashStore(), 1, 2, RendezvousStoreInfo("10.0.0.9", 4000))

    def worker_ranks(self) -> tuple[WorkerRanks, ...]:
        return tuple(WorkerRanks(local, FIRST_RANK + local, local, WORLD_SIZE, self.workers) for local in range(self.workers))

    def restart_count(self) -> int:
        return self.restarts

    def observe(self) -> Word | None:
        self.bell.clear()
        if len(self.words) > 1:
            self.bell.set()
        return self.words.popleft() if self.words else None

    def fence_fd(self) -> int | None:
        return self.fence.fileno()

    def report_failure(self, report: NodeReport) -> None:
        self._note("failure", report)

    def report_done(self) -> None:
        self._note("done")

    def depart(self, why: str, signal: int = 0) -> None:
        self._note("depart", why)

    def leave(self, failure: str = "", ends_job: bool = False) -> None:
        self._note("leave", failure)

    def end_error(self) -> Exception | None:
        return self.error


MakePeers = Callable[..., Peers]
MakeAgent = Callable[..., LocalElasticAgent]
Launch = Callable[..., dict[int, Any]]
Alive = Callable[[int], bool]


@pytest.fixture
def make_peers() -> Iterator[MakePeers]:
    made: list[Peers] = []

    def make(*rounds: Exception | str | None) -> Peers:
        made.append(Peers(*rounds))
        return made[-1]

    yield make
    for peers in made:
        peers.bell.close()
        peers.fence.close()


@pytest.fixture
def make_agent(tmp_path: Path) -> MakeAgent:
    """``make_agent(peers, script, workers=1, **settings)``; all times of the agent are long."""

    def make(handler: Any, script: str, workers: int = 1, max_restarts: int = 3, **settings: Any) -> LocalElasticAgent:
        spec = WorkerSpec("trainer", workers, handler, entrypoint=SH, args=("-c", script), max_restarts=max_restarts)
        given = {"shutdown_timeout": LONG_S, "exit_barrier_timeout": LONG_S, **settings}
        return LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path / "logs")), **given)

    return make


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    def run(peers: RendezvousHandler, script: str, entrypoint: str = SH) -> dict[int, Any]:
        config = LaunchConfig(
            min_nodes=2, max_nodes=2, nproc_per_node=1, run_id="job-7", rdzv_backend="c10d", max_restarts=3,
            logs_specs=DefaultLogsSpecs(str(tmp_path / "logs")), shutdown_timeout=30, exit_barrier_timeout=LONG_S,
        )  # fmt: skip
        with mock.patch("rallypoint.rendezvous.registry.get_rendezvous_handler", return_value=peers):
            return launch_agent(config, entrypoint, ["-c", script])

    return run


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    report.set_sink(lambda level, text: lines.append(text) if level > report.DEBUG else None)
    yield lines
    report.set_sink(None)


@contextmanager
def when(condition: Callable[[], object], act: Callable[[], object]) -> Iterator[None]:
    """Do something from another thread, as soon as the condition holds."""
    over = threading.Event()

    def wait_and_act() -> None:
        deadline = time.monotonic() + 10
        while not condition() and not over.is_set() and time.monotonic() < deadline:
            time.sleep(0.005)
        if not over.is_set():
            act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def waits(folder: Path) -> str:
    """A worker that says that it is there and waits, in its first attempt; in the second it succeeds."""
    return f"echo $$ > {folder}/pid.new; test -e {folder}/pid && exit 0; mv {folder}/pid.new {folder}/pid; exec sleep 60"


def ignores_sigterm(folder: Path) -> str:
    """As `waits`, but it only notes that it was asked to stop."""
    busy = f"trap 'echo > {folder}/asked' TERM; mv {folder}/pid.new {folder}/pid; while :; do sleep 0.01; done"
    return f"echo $$ > {folder}/pid.new; test -e {folder}/pid && exit 0; {busy}"


def pid_in(folder: Path) -> int:
    return int((folder / "pid").read_text())


# --- a generation that runs well -------------------------------------------------------------------------------------------


def test_a_run_from_the_introduction_to_the_end(make_peers: MakePeers, make_agent: MakeAgent, tmp_path: Path) -> None:
    peers = make_peers()
    peers.restarts = 2
    peers.on["done"] = lambda: peers.say(ALL_DONE)
    script = f"echo $RANK $WORLD_SIZE $GROUP_RANK $MASTER_ADDR $TORCHELASTIC_RESTART_COUNT > {tmp_path}/$LOCAL_RANK"
    result = make_agent(peers, script, workers=2).run()
    assert result.state == WorkerState.SUCCEEDED
    assert sorted(result.return_values) == [4, 5]
    assert [(tmp_path / name).read_text() for name in "01"] == ["4 8 1 10.0.0.9 2\n", "5 8 1 10.0.0.9 2\n"]
    alike = (("checkpoint_memory", "not given"), ("checkpoint_copies", 0))
    assert peers.told == [("introduce", Introduction("trainer", 2, 3, "sh", LONG_S, alike=alike)), ("poll",), ("done",)]


def test_a_rendezvous_that_takes_its_time_is_waited_for(make_peers: MakePeers, make_agent: MakeAgent) -> None:
    peers = make_peers("none")
    peers.on["done"] = lambda: peers.say(ALL_DONE)

    def form() -> None:
        peers.rounds.clear()
        peers.bell.set()

    with when(lambda: "poll" in peers.names(), form):
        assert not make_agent(peers, "exit 0").run().is_failed()


def test_a_closed_job_lets_its_workers_end(make_peers: MakePeers, make_agent: MakeAgent, tmp_path: Path) -> None:
    """Closing forbids new generations; it stops nobody."""
    peers = make_peers()
    peers.on["done"] = lambda: peers.say(ALL_DONE)
    closed = agent_machine.JobEnded("closed", "node b closed it")
    with when((tmp_path / "here").exists, lambda: (peers.say(closed), (tmp_path / "go").touch())):
        agent = make_agent(peers, f"echo > {tmp_path}/here; while ! test -e {tmp_path}/go; do sleep 0.01; done")
        assert not agent.run().is_failed()
    assert peers.names() == ["introduce", "poll", "done"]


# --- failures of our own ---------------------------------------------------------------------------------------------------


def test_a_failure_is_told_before_workers_are_stopped_and_they_are_gone_before_we_ask_again(
    make_peers: MakePeers, make_agent: MakeAgent, tmp_path: Path, alive: Alive
) -> None:
    peers = make_peers(None, VERDICT)
    others: list[tuple[str, bool]] = []
    peers.on["failure"] = lambda: others.append(("failure", alive(pid_in(tmp_path))))
    fails = f"while ! test -e {tmp_path}/pid; do sleep 0.01; done; echo no >&2; exit 3"
    script = f'if test "$LOCAL_RANK" = 1; then {fails}; fi; {waits(tmp_path)}'
    agent = make_agent(peers, script, workers=2)
    peers.on["poll"] = lambda: others.append(("poll", (tmp_path / "pid").exists() and alive(pid_in(tmp_path))))
    result = agent.run()
    assert others == [("poll", False), ("failure", True), ("poll", False)]
    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {5: 3}
    (told,) = [one[1] for one in peers.told if one[0] == "failure"]
    (failure,) = told.failures
    assert (failure.rank, failure.local_rank, failure.role, failure.exitcode) == (5, 1, "trainer", 3)
    assert failure.pid == result.failures[5].pid
    assert 0 <= failure.age_s < 10
    assert told.stopped == 1


def test_the_job_rules_on_restarts_and_the_agent_counts_with_it(
    make_peers: MakePeers, make_agent: MakeAgent, tmp_path: Path, said: list[str]
) -> None:
    """Not the agent's own budget, which here would allow none, decides."""
    peers = make_peers()
    peers.on["done"] = lambda: peers.say(ALL_DONE)
    peers.on["failure"] = lambda: setattr(peers, "restarts", 5)
    count = f"echo $TORCHELASTIC_RESTART_COUNT >> {tmp_path}/counts"
    script = f"{count}; test -e {tmp_path}/failed || {{ touch {tmp_path}/failed; exit 1; }}"
    agent = make_agent(peers, script, max_restarts=0)
    assert not agent.run().is_failed()
    assert (tmp_path / "counts").read_text() == "0\n5\n"
    assert peers.names() == ["introduce", "poll", "failure", "introduce", "poll", "done"]
    assert any("the workers of all nodes are stopped" in line for line in said)


def test_after_a_failure_nobody_waits_at_the_exit_barrier(make_peers: MakePeers, make_agent: MakeAgent) -> None:
    """P11: neither where the failure is, nor where workers are done already."""
    began = time.monotonic()
    peers = make_peers(None, VERDICT)
    assert make_agent(peers, "exit 1").run().is_failed()
    assert "done" not in peers.names()

    elsewhere = make_peers()
    elsewhere.on["done"] = lambda: elsewhere.say(JOB_FAILED)
    result = make_agent(elsewhere, "exit 0").run()
    assert result.is_failed()
    assert result.failures == {}
    assert time.monotonic() - began < LONG_S / 3


def test_the_exit_barrier_has_an_end(make_peers: MakePeers, make_agent: MakeAgent, said: list[str]) -> None:
    assert not make_agent(make_peers(), "exit 0", exit_barrier_timeout=0.1).run().is_failed()
    assert "after 0.1 s the other nodes were not seen to finish" in said


# --- what happens elsewhere ------------------------------------------------------------------------------------------------


def test_a_regroup_stops_our_workers_and_joins_again(
    make_peers: MakePeers, make_agent: MakeAgent, tmp_path: Path, alive: Alive, said: list[str]
) -> None:
    peers = make_peers()
    peers.on["done"] = lambda: peers.say(ALL_DONE)
    seen: list[bool] = []
    peers.on["poll"] = lambda: seen.append((tmp_path / "pid").exists() and alive(pid_in(tmp_path)))
    with when((tmp_path / "pid").exists, lambda: peers.say(agent_machine.Regroup("node b was lost"))):
        agent = make_agent(peers, waits(tmp_path))
        assert not agent.run().is_failed()
    assert seen == [False, False]
    assert peers.names() == ["introduce", "poll", "introduce", "poll", "done"]
    assert agent._remaining_restarts == 3
    assert "node b was lost" in said


def test_a_node_that_is_done_joins_again_when_another_fails(make_peers: MakePeers, make_agent: MakeAgent, tmp_path: Path) -> None:
    peers = make_peers()
    answers = [agent_machine.Regroup("rank 0 failed"), ALL_DONE]
    peers.on["done"] = lambda: peers.say(answers.pop(0))
    assert not make_agent(peers, f"echo >> {tmp_path}/starts").run().is_failed()
    assert (tmp_path / "starts").read_text() == "\n\n"
    assert peers.names().count("done") == 2


def test_the_fence_kills_without_grace(make_peers: MakePeers, make_agent: MakeAgent, tmp_path: Path, alive: Alive) -> None:
    """By the word alone: that the fence can be read matters only while workers are being stopped."""
    peers = make_peers()
    peers.on["done"] = lambda: peers.say(ALL_DONE)
    times: list[float] = []

    def fall() -> None:
        times.append(time.monotonic())
        peers.say(agent_machine.Fenced("the store has been silent for 3 s"))

    def again() -> None:
        if times:
            assert not alive(pid_in(tmp_path))
            times.append(time.monotonic())

    peers.on["poll"] = again
    with when((tmp_path / "pid").exists, fall):
        assert not make_agent(peers, ignores_sigterm(tmp_path)).run().is_failed()
    assert times[1] - times[0] < SOON_S
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("cause", ["regroup", "signal"])
def test_the_fence_ends_the_grace_of_a_stop_that_is_under_way(
    make_peers: MakePeers, make_agent: MakeAgent, tmp_path: Path, alive: Alive, cause: str
) -> None:
    peers = make_peers(None, RendezvousClosedError("the job has ended"))
    times: list[float] = []

    def fall() -> None:
        times.append(time.monotonic())
        peers.fence.set()
        peers.say(agent_machine.Fenced("the store has been silent for 3 s"))

    def stop() -> None:
        if cause == "regroup":
            peers.say(agent_machine.Regroup("node b was lost"))
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    agent = make_agent(peers, ignores_sigterm(tmp_path))
    with when((tmp_path / "pid").exists, stop), when((tmp_path / "asked").exists, fall):
        with pytest.raises(RendezvousClosedError if cause == "regroup" else SignalException):
            agent.run()
        assert time.monotonic() - times[0] < SOON_S
    assert not alive(pid_in(tmp_path))


def test_a_stop_after_the_fence_has_its_grace_again(make_peers: MakePeers, make_agent: MakeAgent, tmp_path: Path) -> None:
    peers = make_peers()
    first, second = tmp_path / "first", tmp_path / "second"
    asks = f"trap 'echo > {tmp_path}/asked; exit 0' TERM; echo > {second}; while :; do sleep 0.01; done"
    script = f"test -e {first} && {{ {asks}; }}; echo > {first}; exec sleep 60"
    fenced = agent_machine.Fenced("the store has been silent for 3 s")
    with when(first.exists, lambda: peers.say(fenced)), when(second.exists, lambda: peers.say(JOB_FAILED)):
        assert make_agent(peers, script).run().is_failed()
    assert (tmp_path / "asked").exists()


def test_a_failure_of_an_earlier_attempt_is_not_the_cause_of_a_later_end(
    make_peers: MakePeers, make_agent: MakeAgent, tmp_path: Path
) -> None:
    """The job fails elsewhere before the workers of the second attempt were looked at."""
    peers = make_peers()
    polls: list[int] = []

    def fail_elsewhere() -> None:
        polls.append(1)
        if len(polls) == 2:
            peers.say(JOB_FAILED)

    peers.on["poll"] = fail_elsewhere
    agent = make_agent(peers, f"test -e {tmp_path}/failed && exec sleep 60; touch {tmp_path}/failed; exit 1")
    result = agent.run()
    assert result.is_failed()
    assert result.failures == {}
    assert agent.get_worker_group().state is WorkerState.FAILED


def test_the_group_of_a_job_that_gives_up_has_failed(make_peers: MakePeers, make_agent: Any) -> None:
    """Its workers were stopped, to be started again by the next generation, which does not come."""
    agent = make_agent(make_peers(None, VERDICT), "exit 5")
    assert agent.run().is_failed()
    assert agent.get_worker_group().state is WorkerState.FAILED


# --- how a launch ends -----------------------------------------------------------------------------------------------------


def test_a_failed_job_is_told_by_our_own_failures_after_the_verdict(
    make_peers: MakePeers, launch: Launch, said: list[str]
) -> None:
    peers = make_peers(None, VERDICT)
    peers.error = VERDICT
    with pytest.raises(ChildFailedError) as caught:
        launch(peers, "exit 5")
    assert {rank: failure.exitcode for rank, failure in caught.value.failures.items()} == {4: 5}
    assert caught.value.cause_exitcode == 7
    assert "the cause: rank 0 on node a" in said
    assert peers.names()[-1] == "shutdown"


def test_a_job_that_failed_elsewhere_is_told_by_the_verdict_alone(
    make_peers: MakePeers, launch: Launch, tmp_path: Path, alive: Alive, said: list[str]
) -> None:
    peers = make_peers()
    peers.error = VERDICT
    with when((tmp_path / "pid").exists, lambda: peers.say(JOB_FAILED)), pytest.raises(JobFailedError) as caught:
        launch(peers, waits(tmp_path))
    assert caught.value is VERDICT
    assert not alive(pid_in(tmp_path))
    assert said.count("the cause: rank 0 on node a") == 1
    assert peers.names()[-1] == "shutdown"


def test_an_end_without_a_verdict_has_its_reason(make_peers: MakePeers, launch: Launch, tmp_path: Path, said: list[str]) -> None:
    refused = agent_machine.JobEnded("failed", "another node has this rank")
    peers = make_peers()
    with when((tmp_path / "pid").exists, lambda: peers.say(refused)), pytest.raises(JobFailedError):
        launch(peers, waits(tmp_path))
    assert "another node has this rank" in said


def test_a_node_that_is_not_needed_succeeds(make_peers: MakePeers, launch: Launch, said: list[str]) -> None:
    peers = make_peers(RendezvousGracefulExitError("the job has finished without it"))
    assert launch(peers, "exit 1") == {}
    assert peers.names() == ["introduce", "poll", "shutdown"]
    assert "this node is not needed and ends: the job has finished without it" in said


def test_a_signal_is_a_departure_then_the_workers_are_stopped_then_we_leave(
    make_peers: MakePeers, launch: Launch, tmp_path: Path, alive: Alive
) -> None:
    peers = make_peers()
    alive_at: dict[str, bool] = {}
    for name in ("depart", "leave"):
        peers.on[name] = lambda name=name: alive_at.update({name: alive(pid_in(tmp_path))})  # type: ignore[misc]
    with when((tmp_path / "pid").exists, lambda: os.kill(os.getpid(), signal.SIGTERM)), pytest.raises(SignalException):
        launch(peers, waits(tmp_path))
    assert alive_at == {"depart": True, "leave": False}
    assert peers.names() == ["introduce", "poll", "depart", "leave"], "a job that goes on elsewhere is not shut down"
    assert "SIGTERM was received" in peers.told[2][1]
    assert peers.told[3] == ("leave", "")


def test_a_signal_ends_the_wait_for_the_others(make_peers: MakePeers, launch: Launch) -> None:
    peers = make_peers("none")
    with when(lambda: "poll" in peers.names(), lambda: os.kill(os.getpid(), signal.SIGTERM)), pytest.raises(SignalException):
        launch(peers, "exit 0")
    assert peers.names()[-2:] == ["depart", "leave"]


def test_a_signal_ends_the_exit_barrier(make_peers: MakePeers, launch: Launch) -> None:
    peers = make_peers()
    peers.on["done"] = lambda: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SignalException):
        launch(peers, "exit 0")
    assert peers.names()[-3:] == ["done", "depart", "leave"]


def test_an_error_that_only_we_know_of_ends_the_job_with_its_reason(
    make_peers: MakePeers, launch: Launch, tmp_path: Path
) -> None:
    """Else the others would wait for a node that can never start its workers."""
    peers = make_peers()
    with pytest.raises(WorkerStartError):
        launch(peers, "", entrypoint=str(tmp_path / "nowhere"))
    (why,) = [one[1] for one in peers.told if one[0] == "leave"]
    assert "could not be started" in why


def test_a_rendezvous_that_fails_ends_only_us(make_peers: MakePeers, launch: Launch) -> None:
    peers = make_peers(RendezvousTimeoutError("too few came"))
    with pytest.raises(RendezvousTimeoutError):
        launch(peers, "exit 0")
    assert ("leave", "") in peers.told


def test_a_node_that_is_refused_leaves_the_job_to_the_others(launch: Launch) -> None:
    """It learns which setting differs; the job that refused it goes on. With a real store, over loopback."""
    params = RendezvousParameters("c10d", f"127.0.0.1:{free_port()}", "job", 1, 2, last_call_timeout=0.1, close_timeout=1)
    member, stranger = embedded.create_handler(params), embedded.create_handler(params)
    assert isinstance(member, CoordinatedHandler)
    member.introduce(Introduction("default", 1, 99, "sh", 1.0))
    assert member.next_rendezvous().world_size == 1
    with pytest.raises(UsageError, match="max_restarts is 3 here and 99 for the job"):
        launch(stranger, "exit 0")
    member.report_done()
    while (word := member.observe()) is None:
        wait_readable([member.wakeup_fd()], LONG_S)
    assert member.shutdown()
    assert word == agent_machine.JobEnded("succeeded", word.why)


# --- restarts of a job of one node -----------------------------------------------------------------------------------------


def run_alone(make_agent: MakeAgent, script: str, policy: RestartPolicy) -> RunResult:
    return make_agent(LocalRendezvous("job"), script, max_restarts=policy.max_restarts, restart_policy=policy).run()


def test_the_pause_grows_from_the_second_restart_on(make_agent: MakeAgent, tmp_path: Path, said: list[str]) -> None:
    """P15: a crash loop slows down; most failures happen once, so the first restart comes at once."""
    script = f"date +%s.%N >> {tmp_path}/starts; exit 1"
    assert run_alone(make_agent, script, RestartPolicy(3, backoff_s=0.3)).is_failed()
    starts = [float(line) for line in (tmp_path / "starts").read_text().split()]
    pauses = [after - before for before, after in pairwise(starts)]
    assert pauses[1] >= 0.3
    assert pauses[2] >= 0.6
    assert pauses[0] < pauses[2]
    restarts = [line.partition("; restarting all workers ")[2] for line in said if "restarting all workers" in line]
    assert restarts == ["(restart 1 of 3)", "(restart 2 of 3, after 0.3 s)", "(restart 3 of 3, after 0.6 s)"]


def test_an_exit_code_that_no_restart_can_help_is_not_retried(make_agent: MakeAgent, tmp_path: Path, said: list[str]) -> None:
    """P15"""
    result = run_alone(make_agent, f"echo >> {tmp_path}/starts; exit 64", RestartPolicy(3, no_retry_exit_codes=(64,)))
    assert result.is_failed()
    assert (tmp_path / "starts").read_text() == "\n"
    assert any("exited with code 64, which no restart can help" in line for line in said)


def test_a_signal_that_no_restart_can_help_is_not_retried(make_agent: MakeAgent, tmp_path: Path) -> None:
    """P15"""
    script = f"echo >> {tmp_path}/starts; kill -SEGV $$"
    assert run_alone(make_agent, script, RestartPolicy(3, no_retry_exit_codes=(-signal.SIGSEGV,))).is_failed()
    assert (tmp_path / "starts").read_text() == "\n"


def test_restarts_outside_the_window_are_forgiven(make_agent: MakeAgent, tmp_path: Path) -> None:
    """P15: with room for one restart in 50 ms, workers that run for longer than that are restarted again and again."""
    script = f"echo >> {tmp_path}/starts; sleep 0.1; test $(wc -l < {tmp_path}/starts) -ge 4"
    assert not run_alone(make_agent, script, RestartPolicy(1, backoff_s=0, window_s=0.05)).is_failed()
    assert (tmp_path / "starts").read_text() == "\n" * 4


def test_a_signal_ends_the_pause(make_agent: MakeAgent, tmp_path: Path) -> None:
    script = f"echo >> {tmp_path}/starts; exit 1"
    began = time.monotonic()

    def is_pausing() -> bool:
        return (tmp_path / "starts").exists() and (tmp_path / "starts").read_text() == "\n\n"

    with when(is_pausing, lambda: os.kill(os.getpid(), signal.SIGTERM)), pytest.raises(SignalException):
        run_alone(make_agent, script, RestartPolicy(3, backoff_s=LONG_S))
    assert time.monotonic() - began < LONG_S / 3
