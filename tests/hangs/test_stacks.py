"""Workers are asked for their stacks: they answer from wherever they are, and whoever cannot is not hurt (P31)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import pytest

from rallypoint.hangs.stack_groups import ProcessStacks, WorkerStacks
from rallypoint.hangs.stacks import ALL_ANSWERS_S, STACK_SIGNAL, StackDesk
from rallypoint.processes.activity import look_at
from rallypoint.worker_site import SITE_FOLDER
from rallypoint.worker_site.sitecustomize import ENV_STACKS

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def desk() -> Iterator[StackDesk]:
    desk = StackDesk(2)
    yield desk
    desk.close()


@pytest.fixture
def start(desk: StackDesk, wait_until: Callable[..., object]) -> Iterator[Start]:
    """A worker that has printed a line, and sleeps since."""
    started: list[subprocess.Popen[str]] = []

    def run(program: str, *flags: str, rank: int = 0) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": SITE_FOLDER, ENV_STACKS: desk.place(rank)}
        command = [sys.executable, *flags, "-c", "import os, sys, threading, time\n" + textwrap.dedent(program)]
        process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()
        wait_until(lambda: getattr(look_at(process.pid), "state", "") == "S")
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def ask(desk: StackDesk, *processes: subprocess.Popen[str]) -> list[WorkerStacks]:
    answers = desk.ask({rank: process.pid for rank, process in enumerate(processes)}, {})
    return [answers[rank] for rank in range(len(processes))]


def speaker(worker: WorkerStacks) -> ProcessStacks:
    assert worker.speaker is not None
    return worker.speaker


def test_all_threads_are_in_the_answer_and_the_worker_goes_on(desk: StackDesk, start: Start) -> None:
    program = """
        def first(): time.sleep(60)
        def second(): time.sleep(60)
        threading.Thread(target=first, daemon=True).start()
        threading.Thread(target=second, daemon=True).start()
        print(flush=True)
        sys.stdin.readline()
        print("went on", flush=True)
    """
    worker = start(program)
    for _ in range(3):  # as often as one likes
        (answer,) = ask(desk, worker)
        threads = speaker(answer).threads
        assert len(threads) == 3
        assert {frame.partition(" ")[0] for thread in threads for frame in thread.frames} >= {"first", "second", "<module>"}
        assert threads[-1].frames == ("<module> (<string>:8)",)
        assert speaker(answer).kernel[0].startswith(f"thread {worker.pid} ")
    assert worker.communicate("\n")[0] == "went on\n"


def test_a_long_answer_is_waited_for_to_its_end(desk: StackDesk, start: Start) -> None:
    program = """
        def deep(n):
            if n: deep(n - 1)
            else: time.sleep(60)
        for _ in range(50): threading.Thread(target=deep, args=(80,), daemon=True).start()
        print(flush=True)
        time.sleep(60)
    """
    worker = start(program)
    for _ in range(5):
        (answer,) = ask(desk, worker)
        assert len(speaker(answer).threads) == 51
        assert speaker(answer).threads[-1].frames[0].startswith("<module>")


def test_children_are_asked_too(desk: StackDesk, start: Start) -> None:
    program = """
        def in_child(): time.sleep(60)
        if os.fork() == 0: print(flush=True); in_child()
        os.wait()
    """
    (answer,) = ask(desk, start(program))
    own, child = answer.processes
    assert own.threads[-1].frames[0].startswith("<module>")
    assert child.threads[-1].frames[0].startswith("in_child")
    os.kill(child.pid, 9)


@pytest.mark.parametrize("flag", ["-S", "-I", "-E"])
def test_an_interpreter_without_site_is_left_alone(desk: StackDesk, start: Start, flag: str) -> None:
    worker = start("print(flush=True); time.sleep(60)", flag)
    (answer,) = ask(desk, worker)
    assert "without site" in speaker(answer).why_none
    assert worker.poll() is None
    assert "asleep" in speaker(answer).waits_in


def test_a_process_can_register_itself(desk: StackDesk, start: Start) -> None:
    """As a function's worker does, whose interpreter was not started for it."""
    program = "from rallypoint.worker_site.sitecustomize import register; register(os.environ); print(flush=True); time.sleep(60)"
    (answer,) = ask(desk, start(program, "-E"))
    assert speaker(answer).threads[-1].frames[0].startswith("<module>")


def test_a_worker_that_closed_its_files_is_left_alone(desk: StackDesk, start: Start) -> None:
    """What it opened since may have the number of the file for its answer."""
    (answer,) = ask(desk, start("os.closerange(3, 256); print(flush=True); time.sleep(60)"))
    assert "does not hold open" in speaker(answer).why_none


def test_one_that_does_not_answer_holds_nobody_up_for_long(desk: StackDesk, start: Start) -> None:
    deaf = start(
        f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {{{int(STACK_SIGNAL)}}}); print(flush=True); time.sleep(60)"
    )
    other = start("def nap(): time.sleep(60)\nprint(flush=True); nap()", rank=1)
    began_at = time.monotonic()
    first, second = ask(desk, deaf, other)
    assert time.monotonic() - began_at < ALL_ANSWERS_S
    assert "did not answer" in speaker(first).why_none
    assert speaker(second).threads[-1].frames[0].startswith("nap")


def test_ended_processes_are_told_as_such(desk: StackDesk) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    (answer,) = ask(desk, process)  # type: ignore[arg-type]
    assert speaker(answer).why_none == "it has ended"
