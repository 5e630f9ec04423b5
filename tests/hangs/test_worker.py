"""What a worker tells of itself through `rallypoint.worker`, seen from the other side of its page."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rallypoint.base.defaults import ENV_PULSE
from rallypoint.hangs.pulse import PulseBoard
from rallypoint.hangs.pulse_page import Pulse
from rallypoint.hangs.watchdog import HangWatch, parse_hang_timeout

SLOW_MACHINE_S = 5e-6  # a heartbeat takes a third of a microsecond


@pytest.fixture
def board() -> Iterator[PulseBoard]:
    board = PulseBoard(2)
    yield board
    board.close()


def run(board: PulseBoard | None, program: str, rank: int = 1) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **({ENV_PULSE: board.place(rank)} if board else {})}
    command = [sys.executable, "-c", "from rallypoint import worker\n" + textwrap.dedent(program)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)


def pulse_after(board: PulseBoard, program: str) -> Pulse:
    """What the page says when the program has run, and ended without a word of farewell."""
    answer = run(board, textwrap.dedent(program) + "\nimport os; os._exit(0)")
    assert (answer.returncode, answer.stderr) == (0, "")
    pulse = board.read(1, time.monotonic())
    assert pulse is not None
    return pulse


def test_a_worker_is_announced_by_the_import(board: PulseBoard) -> None:
    pulse = pulse_after(board, "")
    assert (pulse.phase, pulse.sign_at, pulse.step, pulse.checkpoint_at) == ("starting", None, None, None)
    assert board.read(0, time.monotonic()) is None


def test_a_sign_of_life_ends_the_start(board: PulseBoard) -> None:
    before = time.monotonic()
    pulse = pulse_after(board, "worker.heartbeat(); worker.progress(41)")
    assert (pulse.phase, pulse.step) == ("running", 41)
    assert pulse.sign_at is not None
    assert before <= pulse.sign_at <= time.monotonic()


def test_sections_nest_and_the_inner_one_counts(board: PulseBoard) -> None:
    inside = "a = worker.section('load', 5); a.__enter__(); b = worker.section('Prüfung'); b.__enter__()"
    assert pulse_after(board, inside).phase == "Prüfung"
    assert pulse_after(board, inside).limit_s is None
    outer = pulse_after(board, inside + "; b.__exit__(None, None, None)")
    assert (outer.phase, outer.limit_s) == ("load", 5.0)
    assert pulse_after(board, inside + "; a.__exit__(None, None, None)").phase == "Prüfung"  # as threads may do
    assert pulse_after(board, inside + "; b.__exit__(None, None, None); a.__exit__(None, None, None)").phase == "starting"


def test_a_section_can_decorate_a_function_that_calls_itself(board: PulseBoard) -> None:
    program = """
        @worker.section("deep", 7)
        def deep(n): return deep(n - 1) + 1 if n else os._exit(0)
        import os
        worker.heartbeat(); deep(3)
    """
    pulse = pulse_after(board, program)
    assert (pulse.phase, pulse.limit_s) == ("deep", 7.0)


def test_a_limit_must_be_above_zero() -> None:
    from rallypoint.worker import section

    with pytest.raises(ValueError, match="limit_s"):
        section("load", 0)


def test_only_a_complete_checkpoint_counts(board: PulseBoard) -> None:
    failed = "try:\n    with worker.section('checkpoint'): raise ValueError\nexcept ValueError: pass"
    assert pulse_after(board, failed).checkpoint_at is None
    board.clear(1)
    assert pulse_after(board, "with worker.section('checkpoint'): pass").checkpoint_at is not None


def test_an_exit_is_told_before_others_are_called_at_exit(board: PulseBoard) -> None:
    """P30: what libraries do at exit may take its time, whatever the order in which they asked for it."""
    program = """
        import atexit, os, time
        from rallypoint.hangs.pulse import layout
        worker.heartbeat()
        atexit.register(lambda: os._exit(worker._page._numbers[layout.BASE]))
    """
    assert run(board, program).returncode == 2
    pulse = board.read(1, time.monotonic())
    assert pulse is not None
    assert pulse.phase == "exiting"


def test_a_forked_child_does_not_speak_for_its_parent(board: PulseBoard) -> None:
    program = """
        import os
        worker.progress(1)
        if os.fork() == 0:
            worker.progress(99)
            with worker.section("child"): os._exit(0)
        os.wait()
    """
    pulse = pulse_after(board, program)
    assert (pulse.phase, pulse.step) == ("running", 1)


def test_a_program_that_the_worker_starts_does_not_speak_for_it(board: PulseBoard) -> None:
    child = "from rallypoint import worker; worker.progress(99)"
    pulse = pulse_after(board, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}]); worker.progress(1)")
    assert pulse.step == 1


def test_a_program_that_becomes_another_speaks_for_itself(board: PulseBoard) -> None:
    after = "from rallypoint import worker; import os; worker.progress(2); os._exit(0)"
    answer = run(board, f"import os, sys; worker.progress(1); os.execv(sys.executable, [sys.executable, '-c', {after!r}])")
    pulse = board.read(1, time.monotonic())
    assert answer.returncode == 0
    assert pulse is not None
    assert pulse.step == 2


def test_without_an_agent_nothing_is_loaded_or_said() -> None:
    program = "import sys; worker.heartbeat(); worker.progress(1)\nwith worker.section('x'): print('mmap' in sys.modules)"
    answer = run(None, program)
    assert (answer.stdout, answer.stderr) == ("False\n", "")


@pytest.mark.parametrize("place", ["0:/proc/1/fd/12345", "0:/nowhere", "rubbish", "", "4096:/dev/null"])
def test_a_page_that_cannot_be_had_is_told_once_and_the_program_goes_on(place: str, tmp_path: Path) -> None:
    program = "from rallypoint import worker; worker.heartbeat(); worker.progress(1); print('done')"
    env = {**os.environ, ENV_PULSE: place}
    answer = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=30)
    assert answer.stdout == "done\n"
    assert answer.stderr.count("rallypoint.worker: the agent cannot be told") == 1
    assert answer.stderr.count("\n") == 1


def test_a_heartbeat_costs_next_to_nothing(board: PulseBoard) -> None:
    timing = "import timeit; print(min(timeit.repeat(worker.heartbeat, number=20000, repeat=5)) / 20000)"
    assert float(run(board, timing).stdout) < SLOW_MACHINE_S


def test_signs_of_many_threads_are_never_torn(board: PulseBoard) -> None:
    program = """
        import threading, time
        end = time.monotonic() + 0.5
        def work(name):
            while time.monotonic() < end:
                worker.progress(7)
                with worker.section(name * 20, float(len(name))): pass
        threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "bb", "ccc")]
        [one.start() for one in threads]; [one.join() for one in threads]
    """
    env = {**os.environ, ENV_PULSE: board.place(1)}
    expected = {("starting", None), ("running", None), ("exiting", None), ("a" * 20, 1.0), ("b" * 40, 2.0), ("c" * 60, 3.0)}
    seen = set()
    with subprocess.Popen(
        [sys.executable, "-c", "from rallypoint import worker\n" + textwrap.dedent(program)], env=env
    ) as process:
        while process.poll() is None:
            pulse = board.read(1, time.monotonic())
            if pulse is not None:
                seen.add((pulse.phase, pulse.limit_s))
    assert seen <= expected
    assert len(seen) >= 3


def test_a_worker_cannot_harm_the_file(board: PulseBoard) -> None:
    """A file made shorter would end whoever looks at its pages."""
    path = board.place(0).partition(":")[2]
    with pytest.raises(PermissionError):
        os.truncate(path, 0)


@pytest.fixture
def watch() -> Iterator[Callable[[int], HangWatch]]:
    opened: list[HangWatch] = []

    def make(size: int) -> HangWatch:
        limits = parse_hang_timeout("60")
        assert limits is not None
        opened.append(HangWatch(limits, size))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def tell(watch: HangWatch, rank: int, program: str) -> None:
    command = [sys.executable, "-c", f"from rallypoint import worker\n{program}"]
    subprocess.run(command, env={**os.environ, **watch.worker_env(rank, os.environ)}, check=True, timeout=30)


def test_progress_outlives_the_group_that_made_it(watch: Callable[[int], HangWatch]) -> None:
    watched = watch(2)
    assert watched.progress_at() is None
    tell(watched, 0, "worker.heartbeat()")
    first = watched.progress_at()
    assert first is not None
    watched.end()
    watched.worker_env(0, {})
    assert watched.progress_at() == first
    tell(watched, 1, "worker.heartbeat()")
    second = watched.progress_at()
    assert second is not None
    assert second > first
    watched.close()
    assert watched.progress_at() is not None


def test_work_is_safe_up_to_the_oldest_of_the_workers_checkpoints(watch: Callable[[int], HangWatch]) -> None:
    watched = watch(3)
    tell(watched, 0, "worker.heartbeat()")
    assert watched.checkpoint_at() is None
    tell(watched, 1, "with worker.section('checkpoint'): pass")
    oldest = watched.checkpoint_at()
    tell(watched, 2, "with worker.section('checkpoint'): pass")
    assert oldest is not None
    assert watched.checkpoint_at() == oldest
    tell(watched, 1, "with worker.section('checkpoint'): pass")
    latest = watched.checkpoint_at()
    assert latest is not None
    assert latest > oldest
