"""The host of the coordination store: who it is, how it is reached, and what its end means."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

SECRET = "correct horse battery staple"


def gone_after(node: Any, since: float, timeout_s: float = 20.0) -> float:
    """How long after `since` the agent ended."""
    node.wait(timeout_s)
    return time.monotonic() - since


def errors(node: Any) -> list[str]:
    """What the launcher has to say about its own end."""
    return [line for line in node.stderr.splitlines() if line.startswith("rallyrun: error")]


def local_addresses() -> Iterator[str]:
    """One address for each interface of this machine that has one; link-local ones need a zone and are left out."""
    listing = Path("/proc/net/fib_trie").read_text().splitlines()
    yield from sorted({line.split()[-1] for line, below in pairwise(listing) if "/32 host LOCAL" in below})
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, _, _, scope, _, _ = line.split()
        if scope != "20":
            yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


# --- its end ---------------------------------------------------------------------------------------------------------------


GO_ON_S = 3.0 * 1.01 + 0.3  # from the start of a new store until no worker of the last one can be left
JOB_OF_TWO = {"nnodes": "2", "workers": 1}


def killed_at_work(job: Any) -> tuple[Any, list[Any]]:
    """A job of two nodes that has spent a restart, and whose host was killed; the other node, and its last workers."""
    host = job.start_host("--max-restarts", "1", **JOB_OF_TWO)
    other = job.start("--max-restarts", "1", **JOB_OF_TWO)
    host.wait_for_world(2)
    (worker,) = other.wait_for_world(2)
    job.order(worker.rank, "sys.exit(1)")
    again = other.wait_for_world(2, since=worker.at + 1e-6)
    host.wait_for_world(2, since=worker.at + 1e-6)
    host.kill()
    return other, again


def test_a_host_that_is_started_again_gets_its_job_back(job: Any, within: Any, wait_until: Any, alive: Any):
    """P04: by the same command; numbers, ranks and what was spent of the budget are as if it had never been away."""
    other, (worker,) = killed_at_work(job)
    wait_until(lambda: not alive(worker.pid))
    other.wait_for_line("its host has ended or is out of reach; waiting up to 60 s for it")
    back = job.start_host("--max-restarts", "1", **JOB_OF_TWO)
    opened_at = time.monotonic()
    starts = back.wait_for_world(2) + other.wait_for_world(2, since=worker.at + 1e-6)
    within("from the new store to the workers in it", max(one.at for one in starts) - opened_at, GO_ON_S + 1.0)
    assert min(one.at for one in starts) >= back.began_at + GO_ON_S  # the store is not open before its agent has begun
    assert {(one.generation, one.restarts) for one in starts} == {(worker.generation + 1, 1)}
    assert {one.rank: one.node for one in starts}[worker.rank] == worker.node
    assert len({one.rank for one in starts}) == 2
    assert "was started anew; this node tells it what it knows of the job" in other.stderr
    for one in (back, other):
        assert "lost node (the host of the coordination store); membership change 1" in one.stderr
    job.order(worker.rank, "sys.exit(1)")  # the one restart was spent before
    assert (back.wait(), other.wait()) == (1, 1)
    assert "the one restart is used up" in other.stderr


def test_a_host_that_is_back_at_once_meets_no_workers_of_before(job: Any, wait_until: Any, alive: Any):
    """P02, P04: before anybody's fence is over. Who finds another store than its own stops its workers before all else."""
    other, (worker,) = killed_at_work(job)
    back = job.start_host("--max-restarts", "1", **JOB_OF_TWO)
    (first,) = back.wait_for_world(2)
    assert first.generation == worker.generation + 1
    assert not alive(worker.pid)
    job.finish()
    assert (back.wait(), other.wait()) == (0, 0)


def test_who_is_done_waits_for_the_host_too(job: Any, wait_until: Any, alive: Any):
    """P04: the host's own workers were not, so the job is not finished; it would lack a node that had ended well meanwhile."""
    host = job.start_host(**JOB_OF_TWO)
    other = job.start(**JOB_OF_TWO)
    host.wait_for_world(2)
    (worker,) = other.wait_for_world(2)
    job.finish(worker.rank)
    wait_until(lambda: not alive(worker.pid))
    host.kill()
    other.wait_for_line("waiting up to 60 s for it")
    back = job.start_host(**JOB_OF_TWO)
    starts = back.wait_for_world(2) + other.wait_for_world(2, since=worker.at + 1e-6)
    assert {one.generation for one in starts} == {worker.generation + 1}
    job.finish()
    assert (back.wait(), other.wait()) == (0, 0)


def test_a_host_that_does_not_come_back_is_waited_for_as_long_as_was_said(job: Any, within: Any):
    """P04: then the node ends with one line that says what it has waited for."""
    conf = "host_timeout=4"
    host = job.start_host(conf=conf, **JOB_OF_TWO)
    other = job.start(conf=conf, **JOB_OF_TWO)
    host.wait_for_world(2)
    other.wait_for_world(2)
    within("from kill -9 of the store's host to the end of the other node", gone_after(other, host.kill()), 4.0 + 2.0)
    assert other.wait() == 3
    assert "waiting up to 4 s for it" in other.stderr
    assert len(errors(other)) == 1
    assert "is gone: its host has refused connections for 4 s" in errors(other)[0]


def test_who_waits_for_the_host_can_be_stopped(job: Any, within: Any):
    """F23: by a signal, as at any other time."""
    other, _ = killed_at_work(job)
    other.wait_for_line("waiting up to 60 s for it")
    asked_at = time.monotonic()
    assert other.end() == 128 + signal.SIGTERM
    within("from the signal to the end of the node", time.monotonic() - asked_at, 1.5)


def test_a_killed_host_ends_the_job_within_seconds(job: Any, within: Any, wait_until: Any, alive: Any):
    """P04: where nobody is to wait for it: one clear line, workers gone, exit code 3."""
    conf = "last_call_timeout=0.2,host_timeout=0"
    host = job.start_host(conf=conf)
    other = job.start(conf=conf)
    workers = host.wait_for_world(4) + other.wait_for_world(4)
    took_s = gone_after(other, host.kill())
    within("from kill -9 of the store's host to the end of the other node", took_s, 7.0)
    assert other.wait() == 3
    line = ["rallyrun: error: the coordination store at", f"localhost:{job.port} is gone"]
    assert [all(part in said for part in line) for said in errors(other)] == [True]
    wait_until(lambda: not any(alive(worker.pid) for worker in workers), 5.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_host_that_is_stopped_ends_the_job_for_all(job: Any, within: Any, number: signal.Signals):
    """P04: the others are told why, and end at once. F23: as stopped on purpose, which another try would not help."""
    host = job.start_host()
    other = job.start()
    host.wait_for_world(4)
    other.wait_for_world(4)
    asked_at = time.monotonic()
    assert host.end(number) == 128 + number
    within("from the signal to the end of the other node", gone_after(other, asked_at), 1.0)
    assert other.wait() == 128 + number
    assert len(errors(other)) == 1
    here = re.escape(os.uname().nodename)
    said = rf"the job was stopped on purpose: {number.name} was received by node \d \({here}, ranks \d-\d\)"
    assert re.search(said, errors(other)[0])
    assert "hosts the coordination store, so the job ends for all" in errors(other)[0]


def test_a_silent_store_ends_the_job_after_the_stated_time(job: Any, within: Any, wait_until: Any, alive: Any):
    """P07: the host is paused for good; workers are killed after the lease, the agent ends store_timeout later, in one line."""
    conf = "last_call_timeout=0.2,keep_alive_interval=0.4,store_timeout=2,host_timeout=0"
    host = job.start_host(conf=conf)
    other = job.start(conf=conf)
    host.wait_for_world(4)
    workers = other.wait_for_world(4)
    host.send_signal(signal.SIGSTOP)
    paused_at = time.monotonic()
    wait_until(lambda: not any(alive(worker.pid) for worker in workers), 10.0)
    within("from the store's silence to the end of the workers", time.monotonic() - paused_at, 1.2)
    within("from the store's silence to the end of the node", gone_after(other, paused_at), 1.2 + 2.0)
    assert other.wait() == 3
    assert len(errors(other)) == 1
    assert f"the coordination store at localhost:{job.port} was not reached within 2 s" in errors(other)[0]
    host.kill()


# --- who it is -------------------------------------------------------------------------------------------------------------


def reach(job: Any, host: str) -> list[Any]:
    """Let two nodes meet at this host, started at the same time; the workers of both."""
    nodes = [job.start(nnodes="2", workers=1, host=host) for _ in range(2)]
    starts = [start for node in nodes for start in node.wait_for_world(2)]
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0], [node.stderr for node in nodes]
    assert sum("this node hosts the coordination store" in node.stderr for node in nodes) == 1
    return starts


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.7", "[::1]", socket.gethostname()])
def test_the_host_recognises_itself(job: Any, host: str):
    """P05, P43: by any of its names; both agents find the address on their machine, and who comes second is a client."""
    starts = reach(job, host)
    assert sorted(start.rank for start in starts) == [0, 1]
    if host == "[::1]":
        assert {start.master[0] for start in starts} == {"::1"}


def test_the_host_recognises_every_address_of_its_interfaces(job: Any, free_port: Callable[[], int]):
    """P05, P06: all addresses of this machine; the workers are told the one that was used."""
    for address in local_addresses():
        job.port = free_port()
        starts = reach(job, bracketed(address))
        assert {start.master[0] for start in starts} == {address}
        (job.folder / "finish").unlink()


def test_who_is_the_host_can_be_said(job: Any):
    """P05: is_host wins over what the machine finds out about itself."""
    client = job.start(nnodes="2", workers=1, conf="is_host=false")
    host = job.start(nnodes="2", workers=1, conf="is_host=true")
    for node in (client, host):
        node.wait_for_world(2)
    job.finish()
    assert (client.wait(), host.wait()) == (0, 0)
    assert "this node hosts" in host.stderr
    assert "this node hosts" not in client.stderr


def test_a_host_that_cannot_listen_says_so(job: Any):
    """P05: is_host=true at an address of another machine, and at a port that is taken."""
    elsewhere = job.start(nnodes="2", workers=1, conf="is_host=true", host="192.0.2.77")
    job.start_host(nnodes="2", workers=1)
    second = job.start(nnodes="2", workers=1, conf="is_host=true")
    assert (elsewhere.wait(), second.wait()) == (3, 3)
    assert "192.0.2.77 is no address of this machine" in errors(elsewhere)[0]
    assert f":{job.port}" in errors(second)[0]
    assert "Address already in use" in errors(second)[0]


def test_no_name_service_is_needed(job: Any):
    """P06: a numeric endpoint, workers that are told numeric addresses; a name that does not resolve is tried for a while."""
    starts = reach(job, "127.0.0.1")
    assert {start.master[0] for start in starts} == {"127.0.0.1"}
    lost = job.start(nnodes="2", conf="join_timeout=1", host="no-such-host.invalid")
    assert lost.wait() == 3
    assert "no-such-host.invalid" in errors(lost)[0]
    assert "within 1 s" in errors(lost)[0]


# --- who may come ----------------------------------------------------------------------------------------------------------


def test_an_agent_of_another_job_is_refused_by_name(job: Any, within: Any):
    """P13: at once, with both names; the job that is there does not notice."""
    host = job.start_host(run_id="the-first", workers=1)
    host.wait_for_world(1)
    stranger = job.start(run_id="the-second")
    within("from its start to its refusal", gone_after(stranger, stranger.began_at), 1.0)
    assert stranger.wait() == 3
    assert "'the-first'" in errors(stranger)[0]
    assert "'the-second'" in errors(stranger)[0]
    job.finish()
    assert host.wait() == 0
    assert len(host.starts()) == 1


def test_only_who_knows_the_secret_may_join(job: Any, tmp_path: Path):
    """P36: by file or by variable; without it, or with another, a node is refused. Workers do not see it."""
    secret_file = tmp_path / "secret"
    secret_file.write_text(SECRET + "\n")
    secret_file.chmod(0o600)
    host = job.start_host("--secret-file", str(secret_file), nnodes="2:3")
    without = job.start(nnodes="2:3")
    wrong = job.start(nnodes="2:3", env={"RALLYPOINT_SECRET": "another secret of some length"})
    assert (without.wait(), wrong.wait()) == (3, 3)
    assert "asks for a secret" in errors(without)[0]
    assert "the secret, or the name of the job, is not the same" in errors(wrong)[0]
    other = job.start(nnodes="2:3", env={"RALLYPOINT_SECRET": SECRET})
    starts = host.wait_for_world(4) + other.wait_for_world(4)
    assert not [name for start in starts for name in start.env if "SECRET" in name]
    job.finish()
    assert (host.wait(), other.wait()) == (0, 0)
    assert not any(SECRET in node.stderr for node in (host, other, without, wrong))


def test_workers_inherit_none_of_the_sockets(job: Any):
    """P36: neither of the store nor of anything else that the agent has open."""
    host = job.start_host()
    other = job.start()
    starts = host.wait_for_world(4) + other.wait_for_world(4)
    assert len(starts) == 4
    for start in starts:
        assert not [what for what in start.fds.values() if what.startswith(("socket:", "anon_inode:"))], start.fds
    job.finish()
    assert (host.wait(), other.wait()) == (0, 0)
