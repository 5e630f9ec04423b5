"""Real workers that hang are found in the stated time plus one second, and those that do not are left alone (P30)."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.hangs.watching import Watching
from tests.pace import is_under

Watch = Callable[..., Watching]
ON_TOP_S = 1.0  # to find a hang may take that much longer than its limit
LEFT_ALONE_S = 1.4  # what is not found by then, with a limit of one second, is not found
SPINS_IN_C = "__import__('re').match(r'(a+)+$', 'a' * 64 + 'b')"  # one call that takes for ever and never lets Python code run


def test_a_worker_asleep_in_a_lock_is_found_without_a_change_to_it(watching: Watch) -> None:
    """P30, P31"""
    job = watching().start("def forget(): lock.acquire()\nlock = threading.Lock(); lock.acquire(); print(flush=True); forget()")
    job.until_ready()
    began_at = time.monotonic()
    found = job.hang(within_s=5)
    assert found is not None
    assert job.hung_at - began_at < 1 + ON_TOP_S
    (hung,) = found.hung
    assert (hung.local_rank, hung.global_rank, hung.pid, hung.phase) == (0, 10, job.workers[0].pid, "silent")
    assert "asleep" in hung.why
    assert "in forget" in job.stacks(0)
    assert "rank 10, main thread:\n  forget (<string>:" in job.stacks()
    assert any("forget" in line for line in found.lines)
    assert job.workers[0].poll() is None  # it is for the agent to end it


def test_a_worker_that_beats_and_then_spins_in_c_is_found(watching: Watch) -> None:
    """P30, P31"""
    job = watching().start(
        f"from rallypoint import worker\ndef spin(): {SPINS_IN_C}\nworker.progress(7); print(flush=True); spin()"
    )
    job.until_ready()
    began_at = time.monotonic()
    found = job.hang(within_s=5)
    assert found is not None
    assert job.hung_at - began_at < 1 + ON_TOP_S
    (hung,) = found.hung
    assert (hung.phase, hung.step) == ("running", 7)
    assert hung.still_s >= 1
    assert is_under(hung.still_s, 1 + ON_TOP_S)
    assert "no heartbeat" in hung.why
    assert "in spin" in job.stacks(0)


STOPPED = {
    "silent": "print(flush=True)\nwhile True: time.sleep(0.01)",
    "starting": "from rallypoint import worker\nprint(flush=True); time.sleep(60)",
    "running": "from rallypoint import worker\nworker.heartbeat(); print(flush=True)\nwhile True: worker.heartbeat()",
    "io": "from rallypoint import worker\nwith worker.section('io'): print(flush=True); time.sleep(60)",
}


def test_a_stopped_worker_is_found_in_any_phase(watching: Watch) -> None:
    """P30"""
    job = watching(size=len(STOPPED)).start(list(STOPPED.values())).until_ready()
    for worker in job.workers:
        os.kill(worker.pid, signal.SIGSTOP)
    began_at = time.monotonic()
    found = job.hang(within_s=5)
    assert found is not None
    assert job.hung_at - began_at < 1 + ON_TOP_S
    assert [one.phase for one in found.hung] == list(STOPPED)
    for one in found.hung:
        assert "stopped" in one.why
        assert "no Python stack: it is stopped" in job.stacks(one.local_rank)
        assert "as the kernel sees it" in job.stacks(one.local_rank)


LEFT_ALONE = {
    "starting": "print(flush=True); time.sleep(60)",
    "section": "worker.heartbeat()\nwith worker.section('checkpoint', limit_s=60): print(flush=True); time.sleep(60)",
    "section without limit": "worker.heartbeat()\nwith worker.section('download'): print(flush=True); time.sleep(60)",
    "section by name": "worker.heartbeat()\nwith worker.section('patient'): print(flush=True); time.sleep(60)",
    "exiting": "worker.heartbeat(); import atexit; atexit.register(time.sleep, 60); print(flush=True)",
    "waiting at exit": "worker.heartbeat(); threading.Thread(target=time.sleep, args=(60,)).start(); print(flush=True)",
    "beating": "print(flush=True)\nwhile True: worker.heartbeat(); time.sleep(0.1)",
}


def test_other_phases_are_left_alone(watching: Watch) -> None:
    """P30: start-up, checkpoint and exit raise no false alarm."""
    programs = ["from rallypoint import worker\n" + program for program in LEFT_ALONE.values()]
    job = watching("1,patient=60", len(programs)).start(programs).until_ready()
    found = job.hang(within_s=LEFT_ALONE_S)
    assert found is None, found.lines


@pytest.mark.parametrize("phase", ["starting", "checkpoint", "exiting"])
def test_other_phases_have_limits_where_they_are_given(watching: Watch, phase: str) -> None:
    programs = {
        "starting": "print(flush=True); time.sleep(60)",
        "checkpoint": "with worker.section('checkpoint'): print(flush=True); time.sleep(60)",
        "exiting": "worker.heartbeat(); import atexit; atexit.register(time.sleep, 60); print(flush=True)",
    }
    job = watching(f"30,{phase}=0.5").start("from rallypoint import worker\n" + programs[phase])
    job.until_ready()
    found = job.hang(within_s=0.5 + ON_TOP_S)
    assert found is not None
    assert found.hung[0].phase == phase


def test_a_short_section_within_a_long_limit_is_found_in_its_own_time(watching: Watch) -> None:
    program = "worker.heartbeat(); print(flush=True); time.sleep(0.4)\nwith worker.section('fetch', 0.3): time.sleep(60)"
    job = watching("30").start("from rallypoint import worker\n" + program)
    job.until_ready()
    assert job.hang(within_s=0.4 + 0.3 + ON_TOP_S) is not None


SILENT_AND_ALIVE = {
    "busy": "print(flush=True)\nwhile True: pass",
    "busy in a thread": "print(flush=True); threading.Thread(target=sum, args=(range(10**12),)).start(); time.sleep(60)",
    "output only": "print(flush=True)\nwhile True: time.sleep(0.4); os.write(2, b'.')",
    "input and output only": "print(flush=True)\nr, w = os.pipe()\nwhile True: time.sleep(0.4); os.write(w, b'x'); os.read(r, 1)",
    "busy child": "os.spawnlp(os.P_NOWAIT, 'sh', 'sh', '-c', 'while :; do :; done'); print(flush=True); time.sleep(60)",
}


def test_a_silent_worker_that_does_something_is_left_alone(watching: Watch) -> None:
    job = watching(size=len(SILENT_AND_ALIVE)).start(list(SILENT_AND_ALIVE.values())).until_ready()
    found = job.hang(within_s=LEFT_ALONE_S)
    assert found is None, found.lines


def test_background_threads_that_wake_now_and_then_hide_nothing(watching: Watch) -> None:
    program = """
        def wake():
            while True: time.sleep(0.2)
        for _ in range(10): threading.Thread(target=wake, daemon=True).start()
        print(flush=True); time.sleep(60)
    """
    job = watching("0.5").start(program)
    job.until_ready()
    assert job.hang(within_s=5) is not None


def test_a_worker_behind_a_shell_is_found_and_asked(watching: Watch) -> None:
    program = "import time\ndef nap(): time.sleep(60)\nprint(flush=True)\nnap()"
    job = watching("0.5").run([["sh", "-c", f"{sys.executable} -c '{program}'; true"]])
    job.until_ready()
    found = job.hang(within_s=5)
    assert found is not None
    assert "rank 10, main thread:\n  nap (<string>:2)" in job.stacks()
    assert "in nap" in job.stacks(0)
    assert "no Python stack" in job.stacks(0)  # of the shell


def test_a_heartbeat_behind_a_shell_counts_until_its_process_ends(watching: Watch) -> None:
    program = "from rallypoint import worker; worker.heartbeat()"
    job = watching("0.5").run([["sh", "-c", f"{sys.executable} -c '{program}'; echo; while :; do :; done"]])
    job.until_ready()
    assert job.hang(within_s=0.9) is None


def test_a_process_that_does_not_catch_the_signal_is_not_signalled(watching: Watch) -> None:
    """P31: what does not expect to be asked is not ended by the question."""
    job = watching("0.5").run([["sh", "-c", "echo; sleep 60; true"]])
    job.until_ready()
    found = job.hang(within_s=5)
    assert found is not None
    assert job.workers[0].poll() is None
    assert "no Python stack: it is no Python program" in job.stacks(0)
    assert "sleep" in job.stacks(0)


def test_a_handler_of_the_programs_own_is_not_called(watching: Watch) -> None:
    from rallypoint.hangs.stacks import STACK_SIGNAL

    program = f"import signal; signal.signal({int(STACK_SIGNAL)}, lambda *_: os._exit(3)); print(flush=True); time.sleep(60)"
    job = watching("0.5").start(program, PYTHONPATH="")
    job.until_ready()
    assert job.hang(within_s=5) is not None
    assert job.workers[0].poll() is None
    assert "does not hold open the file" in job.stacks(0)


def test_time_in_which_nobody_could_look_does_not_count(watching: Watch) -> None:
    """A job that was suspended as a whole goes on when it is resumed."""
    beats = (
        "from rallypoint import worker\nworker.heartbeat(); print(flush=True)\nwhile True: time.sleep(0.1); worker.heartbeat()"
    )
    job = watching("0.6").start(beats)
    job.until_ready()
    assert job.hang(within_s=0.2) is None
    os.kill(job.workers[0].pid, signal.SIGSTOP)
    time.sleep(1.2)  # not to wait for anything: the watch is suspended too
    found = job.watch.look(time.monotonic())
    os.kill(job.workers[0].pid, signal.SIGCONT)
    assert found is None
    assert job.hang(within_s=0.8) is None


def test_ended_workers_do_not_hang(watching: Watch) -> None:
    job = watching("0.3").start("from rallypoint import worker\nworker.heartbeat(); print(flush=True); os._exit(0)")
    job.until_ready()
    job.workers[0].wait(10)
    assert job.hang(within_s=0.6) is None


def test_where_py_spy_is_installed_the_one_that_hangs_is_shown_with_its_native_frames(
    watching: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P31: in its own file, before it is ended; it is named before that, and stays there meanwhile."""
    spy = tmp_path / "py-spy"
    spy.write_text('#!/bin/sh\necho "native of $4"\n')
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = watching().start("def forget(): lock.acquire()\nlock = threading.Lock(); lock.acquire(); print(flush=True); forget()")
    job.until_ready()
    first = job.hang(within_s=30)
    assert first is not None
    assert first.hung == ()
    assert any("forget" in line for line in first.lines)
    found = job.hang(within_s=30)
    assert found is not None
    assert [one.pid for one in found.hung] == [job.workers[0].pid]
    assert found.lines == ()
    assert f"with its native frames, by py-spy:\nnative of {job.workers[0].pid}\n" in job.stacks(0)
    assert "in forget" in job.stacks(0)
    assert job.stacks().startswith("rank 10 (local rank 0, process ")
