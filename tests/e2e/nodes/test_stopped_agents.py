"""An agent that stands still, wholly or in part, or whose warden does: its workers are gone before the others start theirs."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.nodes.conftest import MEMBER, Job
from tests.pace import is_kept

STOPPED_S = 8.0
ANSWER_S = 5.0  # which a warden has when its workers are to be stopped gracefully
LEASE_S = 3.0
CONF = "last_call_timeout=60,close_timeout=1"  # the first generation has all three
PATIENCE_S = 6.0  # the shutdown time of 1 s, and 5 s more
MARGIN_S = 0.3
REPOSITORY = Path(__file__).parents[3]

# As the members of other tests; and every 5 ms each writes down when it was still there.
BEATS = """
import os, threading, time

def beat(path):
    while True:
        with open(path + ".new", "w") as file:
            file.write(str(time.monotonic()))
        os.rename(path + ".new", path)
        time.sleep(0.005)

import sys
threading.Thread(target=beat, args=(f"{sys.argv[1]}/beat.{os.getpid()}",), daemon=True).start()
"""

# The agent's main thread never comes back from stopping its workers.
STUCK = """
import os, sys, threading
from rallypoint.cli import main as cli; from rallypoint.agent import launch
from rallypoint.agent.local_agent import LocalElasticAgent

class Stuck(LocalElasticAgent):
    def _stop_workers(self, group, is_restart=False):
        os.write(2, b"STUCK\\n")
        threading.Event().wait()

launch.LocalElasticAgent = Stuck
sys.exit(cli.main(sys.argv[1:]))
"""

RELAY = """
import sys, threading
from tests.relay import relay
with relay(int(sys.argv[1])) as port:
    print("PORT", port, flush=True)
    threading.Event().wait()
"""


@pytest.fixture
def beating_job(start_rallyrun: Any, script: Any, tmp_path: Path, free_port: Callable[[], int]) -> Job:
    folder = tmp_path / "orders"
    folder.mkdir()
    return Job(start_rallyrun, script(BEATS + MEMBER, "member.py"), folder, free_port())


def last_beat(job: Job, pid: int) -> float:
    return float((job.folder / f"beat.{pid}").read_text())


def first_start(*groups: list[Any]) -> float:
    return float(min(start.at for group in groups for start in group))


def start_three(job: Job) -> tuple[list[Any], list[Any]]:
    """Three nodes in one world, the host first, and the workers of the last."""
    flags = ("--max-restarts", "1")
    nodes = [job.start_host(*flags, nnodes="2:3"), job.start(*flags, nnodes="2:3"), job.start(*flags, nnodes="2:3")]
    starts = [node.wait_for_world(6) for node in nodes]
    return nodes, starts[2]


def test_v5_an_agent_that_is_stopped_has_no_workers_left_when_the_others_go_on(
    beating_job: Job, wait_until: Any, alive: Any
) -> None:
    """V5: SIGSTOP of one agent of three for 8 s. Its warden kills its workers; when it goes on it joins anew."""
    (host, second, third), workers = start_three(beating_job)
    third.send_signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    groups = [node.wait_for_world(4, since=stopped_at) for node in (host, second)]
    assert not any(alive(start.pid) for start in workers)
    assert max(last_beat(beating_job, start.pid) for start in workers) < first_start(*groups)
    wait_until(lambda: time.monotonic() >= stopped_at + STOPPED_S)
    third.send_signal(signal.SIGCONT)
    woken_at = time.monotonic()
    groups = [node.wait_for_world(6, since=woken_at) for node in (host, second, third)]
    assert all(start.restarts == 0 for group in groups for start in group)
    beating_job.finish()
    assert [node.wait() for node in (host, second, third)] == [0, 0, 0]


def test_v5_a_warden_that_is_stopped_holds_nobody_back_for_long(
    beating_job: Job, processes: Any, alive: Any, within: Any
) -> None:
    """V5: its agent kills it when it does not answer, and the kernel its workers with it; the others wait for that."""
    (host, second, third), workers = start_three(beating_job)
    warden = processes.warden(third.agent.pid)
    os.kill(warden, signal.SIGSTOP)
    stopped_at = time.monotonic()
    beating_job.order(0, "os._exit(3)")
    groups = [node.wait_for_world(6, since=stopped_at) for node in (host, second, third)]
    assert not any(alive(start.pid) for start in workers)
    assert max(last_beat(beating_job, start.pid) for start in workers) < first_start(*groups)
    within("from a failure elsewhere to the next world", first_start(*groups) - stopped_at, ANSWER_S + 1.0)
    beating_job.finish()
    assert [node.wait() for node in (host, second, third)] == [0, 0, 0]


def test_v5_a_node_that_is_cut_off_and_whose_warden_is_stopped(
    beating_job: Job, processes: Any, alive: Any, wait_until: Any
) -> None:
    """V5: its agent is the one who is left to kill its workers in time, and does so past the warden."""
    (host, second, third), workers = start_three(beating_job)
    os.kill(processes.warden(third.agent.pid), signal.SIGSTOP)
    host.send_signal(signal.SIGSTOP)  # nobody hears of the store any more
    silent_since = time.monotonic()
    wait_until(lambda: not any(alive(start.pid) for start in workers))
    assert is_kept(max(last_beat(beating_job, start.pid) for start in workers) - silent_since, LEASE_S)
    host.send_signal(signal.SIGCONT)
    for node in (third, second, host):
        node.end()


def start_with_a_stuck_one(job: Job, launcher: list[Any], **third: Any) -> tuple[list[Any], list[Any]]:
    """Three nodes in one world, the last of which will not stop its workers, and these."""
    flags, options = ("--max-restarts", "1", "--shutdown-timeout", "1"), {"nnodes": "2:3", "conf": CONF}
    nodes = [job.start_host(*flags, **options), job.start(*flags, **options)]
    nodes.append(job.start(*flags, launcher=launcher, **{**options, **third}))
    starts = [node.wait_for_world(6) for node in nodes]
    return nodes, starts[2]


def test_v1_a_node_that_never_stops_its_workers_is_replaced_once_its_fence_has_ended_them(
    beating_job: Job, script: Any, alive: Any, within: Any
) -> None:
    """V1: the main thread of one agent of three hangs for good. The others are patient, then expel it, and wait for its fence."""
    launcher = [sys.executable, script(STUCK, "stuck.py")]
    (host, second, third), workers = start_with_a_stuck_one(beating_job, launcher)
    ordered_at = time.monotonic()
    beating_job.order(0, "os._exit(9)")
    third.wait_for_line("STUCK")
    groups = [node.wait_for_world(4, since=ordered_at) for node in (host, second)]
    assert not any(alive(start.pid) for start in workers)
    assert max(last_beat(beating_job, start.pid) for start in workers) < first_start(*groups)
    waited_s = first_start(*groups) - ordered_at
    assert waited_s > PATIENCE_S + LEASE_S
    within("from the failure to the world without the stuck node", waited_s, PATIENCE_S + LEASE_S + MARGIN_S + 1.0)
    third.wait_for_line("the others go on without this node: its workers had not stopped 6 s after generation")
    assert third.agent.process.poll() is None
    assert "which did not stop in time" in second.stderr
    beating_job.finish()
    assert [node.wait() for node in (host, second)] == [0, 0]
    third.kill()


def test_v2_the_fence_of_a_node_that_is_cut_off_acts_although_its_main_thread_hangs(
    beating_job: Job, script: Any, start_command: Any, wait_until: Any, alive: Any, numbers: Any
) -> None:
    """V2: it is cut off while it should stop its workers."""
    way = [sys.executable, script(RELAY, "way.py"), str(beating_job.port)]
    relay = start_command(way, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    (port,) = wait_until(lambda: numbers("PORT", relay.stdout))
    launcher = [sys.executable, script(STUCK, "stuck.py")]
    through = {"host": "127.0.0.1", "port": port, "conf": f"{CONF},is_host=false"}
    (host, second, third), workers = start_with_a_stuck_one(beating_job, launcher, **through)
    beating_job.order(0, "os._exit(9)")
    third.wait_for_line("STUCK")
    os.kill(relay.pid, signal.SIGSTOP)  # nothing passes any more, and no connection is closed
    cut_at = time.monotonic()
    groups = [node.wait_for_world(4, since=cut_at) for node in (host, second)]
    ended_at = max(last_beat(beating_job, start.pid) for start in workers)
    assert not any(alive(start.pid) for start in workers)
    assert ended_at < first_start(*groups)
    assert is_kept(ended_at - cut_at, LEASE_S)  # by the fence, before anybody's patience was over
    beating_job.finish()
    assert [node.wait() for node in (host, second)] == [0, 0]
    third.kill()


def test_v4_a_killed_agent_is_replaced_at_once_and_not_before_its_workers_are_gone(
    beating_job: Job, within: Any, alive: Any
) -> None:
    """V4, P02: kill -9. Its warden testifies, so that nobody waits for the rest of its lease."""
    (host, second, third), workers = start_three(beating_job)
    killed_at = third.kill()
    groups = [node.wait_for_world(4, since=killed_at) for node in (host, second)]
    assert not any(alive(start.pid) for start in workers)
    assert max(last_beat(beating_job, start.pid) for start in workers) < first_start(*groups)
    within("from kill -9 to the smaller world", max(start.at for group in groups for start in group) - killed_at, 1.0)
    beating_job.finish()
    assert [node.wait() for node in (host, second)] == [0, 0]
