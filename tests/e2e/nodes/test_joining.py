"""Nodes that come: while the job gathers, while it runs, and when there is no room for them."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest


def latest(*groups: list[Any]) -> float:
    return float(max(start.at for group in groups for start in group))


def generations(node: Any) -> int:
    """How many this node has had a seat in."""
    return int(node.stderr.count("rallyrun: generation "))


# --- into a running job ----------------------------------------------------------------------------------------------------


def test_a_joiner_makes_a_larger_world(job: Any, within: Any):
    """P45: within a second of its start; nobody's restart is spent."""
    host = job.start_host()
    host.wait_for_world(2)
    other = job.start()
    groups = host.wait_for_world(4), other.wait_for_world(4)
    within("from a second agent's start to the larger world", latest(*groups) - other.began_at, 1.0)
    assert [start.rank for group in groups for start in group] == [0, 1, 2, 3]
    assert {start.restarts for group in groups for start in group} == {0}
    job.finish()
    assert (host.wait(), other.wait()) == (0, 0)


def test_two_joiners_are_gathered_into_one_generation(job: Any):
    """P25: whoever comes within the scale-up window of another comes with it."""
    conf = "last_call_timeout=0.2,scale_up_window=2"
    options = {"nnodes": "1:4", "workers": 1, "conf": conf}
    host = job.start_host(**options)
    host.wait_for_world(1)
    joiners = [job.start(**options) for _ in range(2)]
    for node in (host, *joiners):
        node.wait_for_world(3)
    assert [generations(node) for node in (host, *joiners)] == [2, 1, 1]
    job.finish()
    assert [node.wait() for node in (host, *joiners)] == [0, 0, 0]


def test_the_world_is_a_multiple_of_the_node_unit(job: Any, wait_until: Any):
    """P25: with --node-unit 2 a third node waits until there is a fourth."""
    options = {"nnodes": "2:4", "workers": 1}
    host = job.start_host("--node-unit", "2", **options)
    second = job.start("--node-unit", "2", **options)
    for node in (host, second):
        node.wait_for_world(2)
    third = job.start("--node-unit", "2", **options)
    wait_until(lambda: established_connections(job.port) >= 3)
    fourth = job.start("--node-unit", "2", **options)
    nodes = [host, second, third, fourth]
    for node in nodes:
        node.wait_for_world(4)
    assert {start.world for node in nodes for start in node.starts()} == {2, 4}
    assert [generations(node) for node in nodes] == [2, 2, 1, 1]
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0, 0, 0]


def established_connections(port: int) -> int:
    """How many connections the store at this port has accepted."""
    found = 0
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(name) as table:
            rows = [line.split() for line in table.readlines()[1:]]
        found += sum(int(row[1].rpartition(":")[2], 16) == port and row[3] == "01" for row in rows)
    return found


# --- spares ----------------------------------------------------------------------------------------------------------------


def test_a_spare_takes_over_and_ends_well(job: Any, within: Any, wait_until: Any):
    """P26: a node too many waits; its death disturbs nobody; it takes a lost one's place; unneeded, it exits with 0."""
    options = {"nnodes": "2:2", "workers": 1}
    host = job.start_host(**options)
    member = job.start(**options)
    ranks = [node.wait_for_world(2)[0].rank for node in (host, member)]
    short_lived = job.start(**options)
    wait_until(lambda: established_connections(job.port) == 3)
    short_lived.kill()
    spare, unneeded = job.start(**options), job.start(**options)
    wait_until(lambda: established_connections(job.port) == 4)
    assert [generations(node) for node in (host, member, spare, unneeded)] == [1, 1, 0, 0]

    killed_at = member.kill()
    wait_until(lambda: spare.starts() or unneeded.starts())
    spare, unneeded = (spare, unneeded) if spare.starts() else (unneeded, spare)
    groups = host.wait_for_world(2, since=killed_at), spare.wait_for_world(2)
    within("from the loss of a node to the world with the spare", latest(*groups) - killed_at, 1.0)
    assert [group[0].rank for group in groups] == ranks
    assert unneeded.starts() == []
    job.finish()
    assert [node.wait() for node in (host, spare, unneeded)] == [0, 0, 0]
    assert "this node is not needed and ends: the job has finished without it" in unneeded.stderr


# --- ranks -----------------------------------------------------------------------------------------------------------------


def test_uneven_nodes_of_two_roles(job: Any):
    """P41: 2 + 3 + 3 workers are a world of 8; ranks follow the nodes, and each role counts its own."""
    nodes = [
        job.start_host("--node-rank", "0", "--role", "trainer", nnodes="3", workers=2),
        job.start("--node-rank", "1", "--role", "reader", nnodes="3", workers=3),
        job.start("--node-rank", "2", "--role", "trainer", nnodes="3", workers=3),
    ]
    starts = [start for node in nodes for start in node.wait_for_world(8)]
    names = ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")
    assert [tuple(int(start.env[name]) for name in names) for start in starts] == [
        (0, 0, 0, 2, 0, 5), (1, 0, 1, 2, 1, 5),
        (2, 1, 0, 3, 0, 3), (3, 1, 1, 3, 1, 3), (4, 1, 2, 3, 2, 3),
        (5, 2, 0, 3, 2, 5), (6, 2, 1, 3, 3, 5), (7, 2, 2, 3, 4, 5),
    ]  # fmt: skip
    assert [start.env["ROLE_NAME"] for start in starts] == ["trainer"] * 2 + ["reader"] * 3 + ["trainer"] * 3
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0, 0]


def test_a_rank_found_in_the_environment_is_followed(job: Any):
    """P27: Slurm's number of a node; the first to come is not rank 0 for that."""
    slurm = {"SLURM_JOB_NUM_NODES": "2"}
    host = job.start_host(nnodes="2", workers=1, env={**slurm, "SLURM_NODEID": "1"})
    other = job.start(nnodes="2", workers=1, env={**slurm, "SLURM_NODEID": "0"})
    assert [node.wait_for_world(2)[0].rank for node in (host, other)] == [1, 0]
    job.finish()
    assert (host.wait(), other.wait()) == (0, 0)


def test_a_second_holder_of_a_rank_is_refused_by_name(job: Any):
    """P27: the first may be dying, so this takes a lease; then the second is told who holds its rank."""
    options = {"nnodes": "1:3", "workers": 1}
    host = job.start_host("--node-rank", "0", **options)
    host.wait_for_world(1)
    second = job.start("--node-rank", "0", **options)
    assert second.wait() == 2
    assert "rank 0 is held by rank0 at 127.0.0.1, which lives" in second.stderr
    assert generations(host) == 1
    job.finish()
    assert host.wait() == 0


# --- while the job gathers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "options", "told"),
    [
        (["--max-restarts", "3"], {}, "max_restarts is 3 here and 0 for the job"),
        ([], {"nnodes": "2:4"}, "nnodes is 2:4 here and 2:3 for the job"),
        (["--node-unit", "2"], {}, "node_unit is 2 here and 1 for the job"),
        ([], {"conf": "last_call_timeout=0.2,keep_alive_interval=2"}, "lease is 6 here and 3 for the job"),
        (["--checkpoint-memory", "1M"], {}, "checkpoint_memory is given here and not given for the job"),
        (
            ["--checkpoint-memory", "1M", "--checkpoint-copies", "1"],
            {},
            "checkpoint_memory is given here and not given for the job, checkpoint_copies is 1 here and 0 for the job",
        ),
    ],
    ids=["restarts", "nnodes", "node_unit", "lease", "snapshots", "copies"],
)
def test_mismatched_settings_are_refused(job: Any, flags: list[str], options: dict[str, Any], told: str):
    """P19: by the name of the setting and both values, before anything is started, with exit code 2."""
    job.start_host(nnodes="2:3")
    other = job.start(*flags, **{"nnodes": "2:3", **options})
    assert other.wait() == 2
    assert other.starts() == []
    assert "this node may not join the job" in other.stderr
    assert told in other.stderr


def test_who_waits_says_for_whom_and_can_be_interrupted(job: Any, within: Any):
    """P19, P20: a line each 10 s with who is here and who is missing; Ctrl-C ends the wait at once, without a traceback."""
    host = job.start_host("--node-rank", "0", nnodes="3")
    other = job.start("--node-rank", "2", nnodes="3")
    for node in (host, other):
        line = node.wait_for_line("waiting: ", 15.0)
        assert "2 of 3 nodes; here:" in line
        assert "here: rank0, rank2; missing: rank 1" in line
    for node, code in ((other, 130), (host, 130)):
        asked_at = time.monotonic()
        assert node.end(signal.SIGINT) == code
        within("from Ctrl-C to the end", time.monotonic() - asked_at, 1.0)
        assert "Traceback" not in node.stderr


def test_ctrl_c_before_the_store_is_there(job: Any, within: Any):
    """P20: also a node that cannot reach its store yet ends at once, while it tries to."""
    waiting = job.start(nnodes="2", conf="is_host=false")
    waiting.wait_for_line(": 2 nodes")
    asked_at = time.monotonic()
    assert waiting.end(signal.SIGINT) == 130
    within("from Ctrl-C to the end", time.monotonic() - asked_at, 1.0)
    assert "Traceback" not in waiting.stderr


def test_a_wait_has_an_end(job: Any, within: Any):
    """P19, P24: after join_timeout, which is told at the start and may come from the environment or a file, with exit code 3."""
    settings = job.folder / "settings"
    settings.write_text("join_timeout = 30  # the environment is stronger\nlast_call_timeout = 7\n")
    env = {"RALLYPOINT_JOIN_TIMEOUT": "1", "RALLYPOINT_CONF": str(settings)}
    lonely = job.start(nnodes="2", conf="close_timeout=5", env=env)
    assert lonely.wait() == 3
    told = lonely.wait_for_line(": 2 nodes")
    assert "join_timeout 1 s (RALLYPOINT_JOIN_TIMEOUT)" in told
    assert f"last_call_timeout 7 s ({settings}:2)" in told
    assert "close_timeout 5 s (--rdzv-conf)" in told
    assert "keep_alive_interval" not in told, "what was not changed is told only for debugging"
    assert "run 'a-job': waited 1 s for enough nodes in vain" in lonely.stderr


def test_the_start_takes_four_lines_at_most(job: Any):
    """The host's too: threads, where the nodes meet, who hosts the store, and the generation."""
    nodes = [job.start_host(nnodes="2", workers=1), job.start(nnodes="2", workers=1)]
    for node in nodes:
        node.wait_for_world(2)
        said = [line for line in node.stderr.splitlines() if line.startswith("rallyrun:")]
        assert 2 <= len(said) <= 4, said
        assert "generation 1 started: 2 nodes, 2 workers; this is node" in said[-1]
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]


def test_f22_a_signal_before_any_worker_runs(job: Any):
    """F22: nothing is said of workers where none was started."""
    host = job.start_host(nnodes="2")
    assert host.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert "rallyrun: SIGTERM was received: no worker was started yet\n" in host.stderr
    assert "passing it on" not in host.stderr
