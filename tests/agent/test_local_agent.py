"""LocalElasticAgent with real workers: what they find, how they are watched, restarted and stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.pace import is_under

from rallypoint.agent import local_agent
from rallypoint.agent.local_agent import LocalElasticAgent
from rallypoint.agent.worker_monitor import WorkerMonitor
from rallypoint.agent.workers import RunResult, WorkerGroup, WorkerSpec, WorkerState
from rallypoint.errors import SignalException, WorkerStartError
from rallypoint.output.log_specs import DefaultLogsSpecs, Std
from rallypoint.processes.subprocesses import start_processes
from rallypoint.rendezvous.handler import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from rallypoint.rendezvous.one_node import LocalRendezvous
from rallypoint.store.hash_store import HashStore

SH = "/bin/sh"

TELL = """
import json, os, sys
name = f"{os.environ['ROLE_NAME']}.{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
with open(os.path.join(sys.argv[1], name), "w") as file:
    json.dump({"env": dict(os.environ), "args": sys.argv[2:]}, file)
"""


class SharedRendezvous(RendezvousHandler):
    """Several agents of one process meet, by a handler of somebody else's making."""

    def __init__(self, store: HashStore, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.waiting: list[int] = []

    def get_backend(self) -> str:
        return "shared"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self.store, self.rank, self.world_size, RendezvousStoreInfo("10.0.0.9", 4000))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return self.waiting.pop(0) if self.waiting else 0

    def get_run_id(self) -> str:
        return "shared-job"

    def shutdown(self) -> bool:
        return True


MakeAgent = Callable[..., LocalElasticAgent]


@pytest.fixture
def make_agent(tmp_path: Path) -> MakeAgent:
    """``make_agent(entrypoint, *args, workers=1, cls=…, agent={…}, **spec)``."""

    def make(
        entrypoint: Any,
        *args: Any,
        workers: int = 1,
        cls: type[LocalElasticAgent] = LocalElasticAgent,
        agent: dict[str, Any] | None = None,
        **spec: Any,
    ) -> LocalElasticAgent:
        given = {"role": "trainer", "rdzv_handler": LocalRendezvous("job-7"), "max_restarts": 0, **spec}
        settings = {"logs_specs": DefaultLogsSpecs(str(tmp_path / "logs")), **(agent or {})}
        return cls(WorkerSpec(local_world_size=workers, entrypoint=entrypoint, args=args, **given), **settings)

    return make


@pytest.fixture
def told(tmp_path: Path) -> Path:
    folder = tmp_path / "told"
    folder.mkdir()
    return folder


def tellings(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in folder.iterdir()}


# --- what workers find -----------------------------------------------------------------------------------------------------


def test_workers_find_what_the_contract_lists(make_agent: MakeAgent, told: Path) -> None:
    assert not make_agent(sys.executable, "-c", TELL, str(told), workers=2, max_restarts=4).run().is_failed()
    seen = tellings(told)
    assert set(seen) == {"trainer.0.0", "trainer.1.0"}
    for rank in (0, 1):
        env = seen[f"trainer.{rank}.0"]["env"]
        port = int(env.pop("MASTER_PORT"))
        assert 1024 < port < 65536
        error_file = env.pop("TORCHELASTIC_ERROR_FILE")
        assert error_file.endswith(f"/attempt_0/{rank}/error.json")
        assert env.pop("RALLYPOINT_PULSE").startswith(f"{4096 * rank}:/proc/{os.getpid()}/fd/")
        added = {name: value for name, value in env.items() if os.environ.get(name) != value and name != "LC_CTYPE"}
        assert added == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "2",
            "ROLE_NAME": "trainer",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "RALLYPOINT_GENERATION": "1",
            "TORCHELASTIC_MAX_RESTARTS": "4",
            "TORCHELASTIC_RUN_ID": "job-7",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "PYTHONFAULTHANDLER": "1",
        }


def test_the_agents_own_environment_is_not_touched(make_agent: MakeAgent, told: Path) -> None:
    before = dict(os.environ)
    make_agent(sys.executable, "-c", TELL, str(told)).run()
    assert dict(os.environ) == before


def test_what_is_laid_over_the_environment_of_workers(make_agent: MakeAgent, told: Path) -> None:
    settings = {"worker_env": {"OMP_NUM_THREADS": "3"}, "signals_to_handle": "SIGTERM"}
    make_agent(sys.executable, "-c", TELL, str(told), agent=settings).run()
    env = tellings(told)["trainer.0.0"]["env"]
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM"


def test_the_local_rank_macro_in_arguments(make_agent: MakeAgent, told: Path) -> None:
    make_agent(sys.executable, "-c", TELL, str(told), "--device=${local_rank}", "${rank}", workers=2).run()
    assert {name: one["args"] for name, one in tellings(told).items()} == {
        "trainer.0.0": ["--device=0", "${rank}"],
        "trainer.1.0": ["--device=1", "${rank}"],
    }


def test_virtual_local_ranks_see_one_device_each(make_agent: MakeAgent, told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    make_agent(sys.executable, "-c", TELL, str(told), workers=2, virtual_local_rank=True).run()
    seen = {name: (one["env"]["LOCAL_RANK"], one["env"]["CUDA_VISIBLE_DEVICES"]) for name, one in tellings(told).items()}
    assert seen == {"trainer.0.0": ("0", "4"), "trainer.1.0": ("0", "7")}


def test_the_prefix_of_lines_can_name_the_host(make_agent: MakeAgent, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """P33: host, role and ranks."""
    settings = {
        "logs_specs": DefaultLogsSpecs(str(tmp_path / "logs"), tee=Std.ALL),
        "log_line_prefix_template": "[${hostname}|${role_name}|${rank}|${local_rank}] ",
    }
    make_agent(SH, "-c", "echo out; echo err >&2", workers=2, agent=settings).run()
    host = os.uname().nodename
    captured = capfd.readouterr()
    assert sorted(captured.out.splitlines()) == [f"[{host}|trainer|{rank}|{rank}] out" for rank in (0, 1)]
    assert sorted(captured.err.splitlines()) == [f"[{host}|trainer|{rank}|{rank}] err" for rank in (0, 1)]


def test_without_a_template_the_prefix_is_role_and_local_rank(
    make_agent: MakeAgent, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"logs_specs": DefaultLogsSpecs(str(tmp_path / "logs"), tee=Std.OUT)}
    make_agent(SH, "-c", "echo out", workers=2, agent=settings).run()
    assert sorted(capfd.readouterr().out.splitlines()) == ["[trainer0]:out", "[trainer1]:out"]


def test_each_attempt_finds_its_number_and_a_folder_of_its_own(make_agent: MakeAgent, told: Path, tmp_path: Path) -> None:
    """P35: what explains a failure is not overwritten by the restart."""
    script = TELL + "count = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint('attempt', count)\nsys.exit(count != '2')"
    settings = {"logs_specs": DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.OUT)}
    result = make_agent(sys.executable, "-c", script, str(told), max_restarts=2, agent=settings).run()
    assert not result.is_failed()
    seen = tellings(told)
    assert set(seen) == {"trainer.0.0", "trainer.0.1", "trainer.0.2"}
    (run_folder,) = (tmp_path / "logs").glob("*_*")
    assert {folder.name: (folder / "0" / "stdout.log").read_text() for folder in run_folder.glob("attempt_*")} == {
        f"attempt_{number}": f"attempt {number}\n" for number in range(3)
    }


# --- ranks over several agents ---------------------------------------------------------------------------------------------


def run_together(agents: list[LocalElasticAgent]) -> list[RunResult]:
    results: dict[int, RunResult] = {}
    threads = [
        threading.Thread(target=lambda place=place, agent=agent: results.update({place: agent.run()}))
        for place, agent in enumerate(agents)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [results[place] for place in range(len(agents))]


def test_ranks_over_agents_with_different_roles_and_sizes(make_agent: MakeAgent, told: Path) -> None:
    """P41: global ranks accumulate by group rank alone; only the role ranks count within a role."""
    members = [("reader", 2), ("trainer", 3), ("reader", 1), ("trainer", 1)]
    store = HashStore()
    agents = [
        make_agent(
            sys.executable, "-c", TELL, str(told), workers=count, role=role,
            rdzv_handler=SharedRendezvous(store, group_rank, len(members)),
        )
        for group_rank, (role, count) in enumerate(members)
    ]  # fmt: skip
    results = run_together(agents)
    assert [sorted(result.return_values) for result in results] == [[0, 1], [2, 3, 4], [5], [6]]
    seen = [one["env"] for one in tellings(told).values()]
    facts = ("RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert sorted(tuple(env[name] for name in facts) for env in seen) == [
        ("0", "reader", "0", "3", "0", "0", "2"),
        ("1", "reader", "1", "3", "0", "1", "2"),
        ("2", "trainer", "0", "4", "1", "0", "3"),
        ("3", "trainer", "1", "4", "1", "1", "3"),
        ("4", "trainer", "2", "4", "1", "2", "3"),
        ("5", "reader", "2", "3", "2", "0", "1"),
        ("6", "trainer", "3", "4", "3", "0", "1"),
    ]
    assert {(env["WORLD_SIZE"], env["GROUP_WORLD_SIZE"]) for env in seen} == {("7", "4")}
    assert {(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in seen} == {("10.0.0.9", "4000")}


def test_whoever_is_done_first_waits_for_the_others(make_agent: MakeAgent, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    store = HashStore()
    scripts = ["exit 0", f"read line < {go}"]
    agents = [make_agent(SH, "-c", text, rdzv_handler=SharedRendezvous(store, rank, 2)) for rank, text in enumerate(scripts)]
    results: list[RunResult] = []
    first, second = [threading.Thread(target=lambda agent=agent: results.append(agent.run())) for agent in agents]
    first.start()
    second.start()
    first.join(0.5)
    assert first.is_alive()
    go.write_text("now\n")
    first.join(10)
    second.join(10)
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2


# --- watching --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreign", [False, True], ids=["our rendezvous", "a foreign rendezvous"])
@pytest.mark.parametrize("code", [0, 9])
def test_a_workers_end_is_seen_far_sooner_than_the_monitor_interval(make_agent: MakeAgent, code: int, foreign: bool) -> None:
    handler = SharedRendezvous(HashStore(), 0, 1) if foreign else LocalRendezvous("job")
    agent = make_agent(SH, "-c", f"sleep 0.2; exit {code}", monitor_interval=60, rdzv_handler=handler)
    started_at = time.monotonic()
    result = agent.run()
    assert is_under(time.monotonic() - started_at, 10)
    assert result.is_failed() == bool(code)


def test_a_restart_is_as_quick(make_agent: MakeAgent, tmp_path: Path) -> None:
    script = f"echo >> {tmp_path}/starts; test $(wc -l < {tmp_path}/starts) -ge 4"
    agent = make_agent(SH, "-c", script, monitor_interval=60, max_restarts=3)
    started_at = time.monotonic()
    assert not agent.run().is_failed()
    assert is_under(time.monotonic() - started_at, 10)
    assert agent._remaining_restarts == 0


def test_peers_that_wait_are_seen_at_the_monitor_interval_where_nothing_can_wake_us(
    make_agent: MakeAgent, tmp_path: Path
) -> None:
    handler = SharedRendezvous(HashStore(), 0, 1)
    handler.waiting = [0, 0, 1]
    script = f"echo >> {tmp_path}/starts; test $(wc -l < {tmp_path}/starts) -ge 2 || exec sleep 60"
    agent = make_agent(SH, "-c", script, monitor_interval=0.05, rdzv_handler=handler)
    assert not agent.run().is_failed()
    assert (tmp_path / "starts").read_text() == "\n\n"
    assert agent._remaining_restarts == 0


class Custom(LocalElasticAgent):
    """A subclass with its own idea of health, as others write them: it looks at a file, not at the processes."""

    looks = 0
    healthy_until = 0.0

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.looks += 1
        if time.monotonic() < self.healthy_until:
            return RunResult(WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)


@pytest.mark.parametrize("script", ["exec sleep 1.5", "exit 0"], ids=["while workers run", "when a worker has ended"])
def test_an_overridden_monitor_is_asked_every_monitor_interval_no_more_and_no_less(make_agent: MakeAgent, script: str) -> None:
    agent = make_agent(SH, "-c", script, monitor_interval=0.1, cls=Custom)
    assert isinstance(agent, Custom)
    agent.healthy_until = time.monotonic() + 1.2
    assert not agent.run().is_failed()
    assert 4 <= agent.looks <= 25


def test_workers_with_other_ids_than_were_started_are_unknown(make_agent: MakeAgent) -> None:
    class Confused(LocalElasticAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            return {local_rank: pid + 1 for local_rank, pid in super()._start_workers(worker_group).items()}

    agent = make_agent(SH, "-c", "exec sleep 60", cls=Confused)
    with pytest.raises(RuntimeError, match="UNKNOWN"):
        agent.run()


def test_before_the_start_the_state_is_unknown(make_agent: MakeAgent) -> None:
    agent = make_agent(SH)
    assert agent._pcontext is None
    assert agent._monitor_workers(agent.get_worker_group()).state == WorkerState.UNKNOWN
    agent._shutdown()
    agent._stop_workers(agent.get_worker_group(), is_restart=True)


# --- results and failures --------------------------------------------------------------------------------------------------


def test_a_failure_is_told_by_global_rank(make_agent: MakeAgent) -> None:
    """Rank 1 of two agents' workers; the other agent's are not in our result."""
    store = HashStore()
    agents = [
        make_agent(SH, "-c", script, rdzv_handler=SharedRendezvous(store, rank, 2), agent={"exit_barrier_timeout": 0.1})
        for rank, script in enumerate(["exit 0", "echo no >&2; exit 5"])
    ]
    first, second = run_together(agents)
    assert first.return_values == {0: None}
    assert second.is_failed()
    assert {rank: (failure.local_rank, failure.exitcode) for rank, failure in second.failures.items()} == {1: (0, 5)}


def test_when_one_fails_the_others_are_stopped(make_agent: MakeAgent, tmp_path: Path, alive: Callable[[int], bool]) -> None:
    fail_when_both_run = f'test "$RANK" = 1 && while ! test -s {tmp_path}/0; do sleep 0.01; done && exit 3'
    script = f"echo $$ > {tmp_path}/$RANK; {fail_when_both_run}; exec sleep 60"
    agent = make_agent(SH, "-c", script, workers=2)
    result = agent.run()
    assert list(result.failures) == [1]
    assert not alive(int((tmp_path / "0").read_text()))


def test_a_program_that_cannot_be_started_is_not_retried(make_agent: MakeAgent, tmp_path: Path) -> None:
    with pytest.raises(WorkerStartError, match="nowhere"):
        make_agent(str(tmp_path / "nowhere"), max_restarts=3).run()


def test_the_shutdown_time_is_kept_on_a_failure(make_agent: MakeAgent, tmp_path: Path) -> None:
    """P08: --shutdown-timeout holds also when a worker has failed."""
    stubborn = f"trap '' TERM; echo > {tmp_path}/ready; while :; do sleep 0.01; done"
    script = f'test "$RANK" = 1 && while ! test -e {tmp_path}/ready; do sleep 0.01; done && exit 3; {stubborn}'
    agent = make_agent(SH, "-c", script, workers=2, agent={"shutdown_timeout": 0.5})
    started_at = time.monotonic()
    assert agent.run().is_failed()
    assert time.monotonic() - started_at >= 0.5
    assert is_under(time.monotonic() - started_at, 8)


# --- signals ---------------------------------------------------------------------------------------------------------------


def test_the_signal_received_is_the_one_that_workers_get(make_agent: MakeAgent, tmp_path: Path, private_tmpdir: Path) -> None:
    """And a run that was ended so leaves no temporary folder where nothing was logged."""
    got = tmp_path / "got"
    script = f"trap 'echo HUP > {got}; exit 0' HUP; kill -HUP {os.getpid()}; while :; do sleep 0.01; done"
    agent = make_agent(SH, "-c", script, agent={"logs_specs": DefaultLogsSpecs()})
    with pytest.raises(SignalException) as caught:
        agent.run()
    assert caught.value.sigval is signal.SIGHUP
    assert got.read_text() == "HUP\n"
    assert list(private_tmpdir.glob("rallypoint_*")) == []


def test_a_second_signal_kills_at_once(make_agent: MakeAgent) -> None:
    script = f"trap '' TERM; kill -TERM {os.getpid()}; sleep 0.3; kill -TERM {os.getpid()}; while :; do sleep 0.01; done"
    agent = make_agent(SH, "-c", script)
    started_at = time.monotonic()
    with pytest.raises(SignalException):
        agent.run()
    assert is_under(time.monotonic() - started_at, 8)


# --- subclasses and callers ------------------------------------------------------------------------------------------------


def test_a_shutdown_with_the_signature_of_torch_2_13_is_called_with_its_arguments(make_agent: MakeAgent) -> None:
    calls: list[tuple[signal.Signals, float]] = []

    class Theirs(LocalElasticAgent):
        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:  # type: ignore[override]
            calls.append((death_sig, timeout))
            super()._shutdown(death_sig, timeout)

    assert make_agent(SH, "-c", "exit 1", cls=Theirs, agent={"shutdown_timeout": 7}).run().is_failed()
    assert set(calls) == {(signal.SIGTERM, 7)}


def test_starting_processes_is_looked_up_in_the_module(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers replace it there; and what they return need not be of our making."""
    calls: list[dict[str, Any]] = []

    class Context:
        def pids(self) -> dict[int, int]:
            return {0: 123}

        def wait(self, timeout: float = -1, period: float = 1) -> Any:
            from rallypoint.processes.context import RunProcsResult

            return RunProcsResult({0: "theirs"})

        def close(self, death_sig: Any = None, timeout: float = 30) -> None:
            pass

    def start(**kwargs: Any) -> Context:
        calls.append(kwargs)
        return Context()

    monkeypatch.setattr("rallypoint.agent.local_agent.start_processes", start)
    result = make_agent(SH, "a ${local_rank}", agent={"start_method": "fork"}).run()
    assert result.return_values == {0: "theirs"}
    (call,) = calls
    assert (call["name"], call["entrypoint"], call["args"], call["start_method"]) == ("trainer", SH, {0: ("a 0",)}, "fork")


def test_an_agent_is_positional_as_in_torch(tmp_path: Path) -> None:
    spec = WorkerSpec("trainer", 1, LocalRendezvous("job"), entrypoint=SH)
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path)), "fork", 5.0, "[x]", 6, None, 7.0)
    assert (agent._start_method, agent._exit_barrier_timeout, agent._log_line_prefix_template) == ("fork", 5.0, "[x]")
    assert agent._shutdown_timeout == 6


def test_p13_the_master_port_is_held_while_workers_run(make_agent: MakeAgent, told: Path) -> None:
    script = (
        TELL
        + """
import errno, socket
try:
    socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
except OSError as error:
    assert error.errno == errno.EADDRINUSE
else:
    raise SystemExit("the port was free")
"""
    )
    assert not make_agent(sys.executable, "-c", script, str(told), "${local_rank}", workers=2).run().is_failed()
    (port,) = {one["env"]["MASTER_PORT"] for one in tellings(told).values()}
    with socket.create_server(("127.0.0.1", int(port))):
        pass


# --- timers that workers set -----------------------------------------------------------------------------------------------

LATE = """
import json, os, time
request = {"version": 1, "pid": os.getpid(), "scope_id": "first step", "expiration_time": time.time() - 1, "signal": 9}
with open(os.environ["TORCHELASTIC_TIMER_FILE"], "w") as pipe:
    pipe.write(json.dumps(request) + "\\n")
time.sleep(60)
"""


def test_m12_a_worker_that_is_late_before_all_have_been_started_is_ended(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """m12: on a loaded machine a worker may be quicker than the agent, which has yet to put down whom it has started."""
    judged = threading.Event()

    class Monitor(WorkerMonitor):
        def is_ours(self, pid: int) -> bool:
            is_ours = super().is_ours(pid)
            judged.set()
            return is_ours

    def start_slowly(*args: Any, **kwargs: Any) -> Any:
        context = start_processes(*args, **kwargs)
        judged.wait(0.5)  # whoever judges before we are done does not know this worker
        return context

    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.setattr(local_agent, "start_processes", start_slowly)
    monkeypatch.setattr(local_agent, "WorkerMonitor", Monitor)
    result = make_agent(sys.executable, "-c", LATE).run()
    assert judged.is_set()
    assert result.is_failed()
    assert result.failures[0].exitcode == -signal.SIGKILL
    assert result.failures[0].message.startswith("timer first step expired")
