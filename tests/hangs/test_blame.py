"""Of several workers that are silent at once, the one that hangs is named, and equal stacks are told once (P30, P31)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from tests.hangs.watching import Watching

from rallypoint.protocol.verdict import MAY_WAIT_ELSEWHERE

Watch = Callable[..., Watching]
WITHIN_S = 5.0
WAIT_OR_HANG = """
    {preparation}
    def wait_for_others(): time.sleep(60)
    def hang(): time.sleep(60)
    print(flush=True)
    if rank == 2:
        hang()
    wait_for_others()
"""


def test_the_one_that_stands_elsewhere_is_blamed(watching: Watch) -> None:
    """P30: without any change to the program"""
    job = watching("0.6", size=4).start(WAIT_OR_HANG.format(preparation=""))
    job.until_ready()
    found = job.hang(WITHIN_S)
    assert found is not None
    assert [one.global_rank for one in found.hung] == [12]
    assert [one.global_rank for one in found.waiting] == [10, 11, 13]
    assert "rank 12 (local rank 2" in found.lines[0]
    assert any("ranks 10-11,13" in line and "wait" in line for line in found.lines)
    summary = job.stacks()
    assert summary.index("rank 12, main thread:\n  hang (") < summary.index("ranks 10-11,13, main thread:\n  wait_for_others (")


def test_where_nothing_tells_them_apart_it_is_said_that_all_may_wait_for_another_node(watching: Watch) -> None:
    job = watching("0.6", size=2).start("print(flush=True); time.sleep(60)")
    job.watch._has_other_nodes = True
    job.until_ready()
    found = job.hang(WITHIN_S)
    assert found is not None
    (hung,) = found.hung
    assert hung.why.endswith(f", as all workers here, which {MAY_WAIT_ELSEWHERE}")


def test_the_one_with_the_fewest_steps_is_blamed(watching: Watch) -> None:
    beats = "from rallypoint import worker; worker.progress(6 if rank == 1 else 7)"
    job = watching("0.6", size=4).start(WAIT_OR_HANG.format(preparation=beats))
    job.until_ready()
    found = job.hang(WITHIN_S)
    assert found is not None
    assert [(one.local_rank, one.step) for one in found.hung] == [(1, 6)]
    assert len(found.waiting) == 3


def test_the_stopped_one_is_blamed(watching: Watch) -> None:
    beats = "from rallypoint import worker; worker.progress(7 if rank == 3 else 6)"
    job = watching("0.6", size=4).start(WAIT_OR_HANG.format(preparation=beats))
    job.until_ready()
    os.kill(job.workers[3].pid, signal.SIGSTOP)
    found = job.hang(WITHIN_S)
    assert found is not None
    assert [one.local_rank for one in found.hung] == [3]
    assert "hang" in job.stacks(2)  # all were asked, not only the one to blame


def test_one_that_waited_first_is_not_blamed(watching: Watch) -> None:
    """The others give their last sign before the one that hangs, and are overdue first."""
    program = """
        from rallypoint import worker
        worker.heartbeat()
        def wait_for_others(): time.sleep(60)
        def hang(): time.sleep(60)
        if rank == 2: time.sleep(0.45); worker.heartbeat()
        print(flush=True)
        hang() if rank == 2 else wait_for_others()
    """
    job = watching("1", size=4).start(program)
    job.until_ready()
    found = job.hang(WITHIN_S)
    assert found is not None
    assert [one.local_rank for one in found.hung] == [2]


def test_one_that_hangs_alone_is_blamed_and_the_others_do_not_wait(watching: Watch) -> None:
    program = """
        from rallypoint import worker
        worker.heartbeat()
        print(flush=True)
        while True:
            time.sleep(0.05 if rank else 60)
            worker.heartbeat()
    """
    job = watching("1", size=3).start(program)
    job.until_ready()
    found = job.hang(WITHIN_S)
    assert found is not None
    assert [one.local_rank for one in found.hung] == [0]
    assert found.waiting == ()
    assert "in phase 'running', and within their time: ranks 11-12" in found.lines
    assert (job.folder / "1" / "stacks.txt").exists()


def test_a_hang_is_told_once_and_the_next_group_is_watched_anew(watching: Watch) -> None:
    job = watching("0.6").start("from rallypoint import worker\nworker.heartbeat(); print(flush=True); time.sleep(60)")
    job.until_ready()
    assert job.hang(WITHIN_S) is not None
    assert job.watch.next_look_at() is None
    job.watch.end()
    job.close_workers()
    job.start("from rallypoint import worker\nprint(flush=True); time.sleep(60)").until_ready()
    assert job.hang(0.8) is None  # the page of the one before is not taken for its own


def test_without_a_folder_the_stacks_are_summed_up_all_the_same(watching: Watch) -> None:
    job = watching("0.6").start("def nap(): time.sleep(60)\nprint(flush=True); nap()", folder="")
    job.until_ready()
    found = job.hang(WITHIN_S)
    assert found is not None
    assert found.summary_file == ""
    assert any("nap" in line for line in found.lines)


def test_a_folder_that_cannot_be_written_is_told(watching: Watch) -> None:
    job = watching("0.6").start("print(flush=True); time.sleep(60)", folder="/proc/none")
    job.until_ready()
    found = job.hang(WITHIN_S)
    assert found is not None
    assert any("could not be written" in line for line in found.lines)
