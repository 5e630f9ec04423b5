"""Workers are asked for their stacks: they answer from wherever they are, and whoever cannot is not hurt (P31).

What faulthandler writes is understood, and equal stacks are told once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import AT_ONCE_S

from rallypoint.hangs import stacks
from rallypoint.hangs.stacks import (
    BRIEF_GROUPS,
    STACK_SIGNAL,
    ProcessStacks,
    StackDesk,
    WorkerStacks,
    brief_lines,
    grouped_lines,
    parse_faulthandler,
    rank_ranges,
    spy_on,
    standing,
)
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
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may come as late as it does on a busy machine."""
    for limit in ("ALL_ANSWERS_S", "ONE_ANSWER_S"):
        monkeypatch.setattr(stacks, limit, AT_ONCE_S)


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


@pytest.mark.usefixtures("patient")
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
        assert {frame.partition(" ")[0] for thread in threads for frame in thread} >= {"first", "second", "<module>"}
        assert threads[-1] == ("<module> (<string>:8)",)
        assert speaker(answer).kernel[0].startswith(f"thread {worker.pid} ")
    assert worker.communicate("\n")[0] == "went on\n"


@pytest.mark.usefixtures("patient")
def test_two_who_ask_at_once_get_whole_answers(desk: StackDesk, start: Start) -> None:
    """The answers of a worker have one file, and whoever looks at the job's page may ask while a hang is looked into."""
    worker = start("def stand_here(): print(flush=True); time.sleep(60)\nstand_here()")
    found: list[WorkerStacks] = []
    askers = [threading.Thread(target=lambda: found.extend(ask(desk, worker))) for _ in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert [[frame.partition(" ")[0] for frame in speaker(one).threads[-1]] for one in found] == [["stand_here", "<module>"]] * 4


def test_a_desk_that_is_closed_meanwhile_leaves_the_files_of_others_alone(desk: StackDesk, start: Start) -> None:
    """It would empty whatever has the number of its file by then."""
    worker = start("print(flush=True); time.sleep(60)")
    [fd] = desk._own_files([0]).values()
    asked = desk._ask_one(0, fd, worker.pid, time.monotonic() + AT_ONCE_S)
    next(asked)
    desk.close()
    found: list[str] = []

    def hear() -> Generator[None, None, None]:
        text, _ = yield from asked
        found.append(text)

    assert not any(hear())
    os.close(fd)
    assert "<module>" in found[0]
    with pytest.raises(OSError, match="not watched any more"):
        ask(desk, worker)


@pytest.mark.usefixtures("patient")
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
        assert speaker(answer).threads[-1][0].startswith("<module>")


@pytest.mark.usefixtures("patient")
def test_children_are_asked_too(desk: StackDesk, start: Start) -> None:
    program = """
        def in_child(): print(flush=True); time.sleep(60)
        if os.fork() == 0: in_child()
        os.wait()
    """
    (answer,) = ask(desk, start(program))
    own, child = answer.processes
    assert own.threads[-1][0].startswith("<module>")
    assert child.threads[-1][0].startswith("in_child")
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
    assert speaker(answer).threads[-1][0].startswith("<module>")


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
    assert time.monotonic() - began_at < AT_ONCE_S
    assert "did not answer" in speaker(first).why_none
    assert speaker(second).threads[-1][0].startswith("nap")


def test_ended_processes_are_told_as_such(desk: StackDesk) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    (answer,) = ask(desk, process)  # type: ignore[arg-type]
    assert speaker(answer).why_none == "it has ended"


TEXT = """Thread 0x00007f72c9fdb6c0 [pin_memory] (most recent call first):
  File "/lib/threading.py", line 982 in run
  File "/a "quoted", line 5 in name", line 7 in deep
  ...

Thread 0x00007f72c9fdb6c1 (most recent call first):
  <no Python frame>

Current thread 0x00007f7325dcdb80 (most recent call first):
  Garbage-collecting
  File "train.py", line 19 in <module>

Extension modules: numpy (total: 1)
"""


def worker(rank: int, *frames: str, others: tuple[str, ...] = ()) -> WorkerStacks:
    threads = [*((other,) for other in others), frames]
    return WorkerStacks(rank, (ProcessStacks(rank + 100, threads=tuple(threads)),))


def mute(rank: int, waits_in: str = "asleep in futex") -> WorkerStacks:
    return WorkerStacks(rank, (ProcessStacks(rank + 100, why_none="it is stopped", waits_in=waits_in),))


def test_all_threads_are_read_and_the_main_one_is_the_last() -> None:
    first, second, main = parse_faulthandler(TEXT)
    assert first == ("run (/lib/threading.py:982)", 'deep (/a "quoted", line 5 in name:7)', "...")
    assert second == ("<no Python frame>",)
    assert main == ("Garbage-collecting", "<module> (train.py:19)")


def test_an_answer_of_one_thread_is_read() -> None:
    assert parse_faulthandler('Stack (most recent call first):\n  File "a.py", line 1 in f\n') == (("f (a.py:1)",),)


@given(st.text() | st.lists(st.sampled_from([*TEXT.splitlines(), "rubbish"])).map("\n".join))
def test_no_text_confuses_the_reader(text: str) -> None:
    threads = parse_faulthandler(text)
    grouped_lines([WorkerStacks(0, (ProcessStacks(1, threads=threads),))], [0])


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranges_name_each_rank_once(ranks: set[int]) -> None:
    shown = rank_ranges(ranks).split(" ")[1]
    named: list[int] = []
    for part in shown.split(","):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(ranks)


def test_equal_stacks_are_told_once_and_the_one_that_hangs_first() -> None:
    workers = [worker(rank, "loop (a.py:1)" if rank == 3 else "wait (a.py:2)", others=("pump (b.py:1)",)) for rank in range(5)]
    assert grouped_lines(workers, [3]) == [
        "", "rank 3, main thread:", "  loop (a.py:1)",
        "", "ranks 0-2,4, main thread:", "  wait (a.py:2)",
        "", "ranks 0-4, another thread:", "  pump (b.py:1)",
    ]  # fmt: skip


def test_without_a_python_stack_the_kernel_tells_where_it_is() -> None:
    lines = grouped_lines([mute(0), mute(1), worker(2, "f (a.py:1)")], [2])
    assert lines[1] == "rank 2, main thread:"
    assert lines[4:] == ["ranks 0-1, main thread:", "  no Python stack: it is stopped", "  in the kernel: asleep in futex"]


def test_a_shell_stands_behind_its_child() -> None:
    shell, python = ProcessStacks(1, why_none="no Python"), ProcessStacks(2, threads=(("f (a.py:1)",),))
    behind = WorkerStacks(0, (shell, python))
    assert behind.speaker is python
    assert standing(behind) == ("f (a.py:1)",)


def test_where_a_worker_stands() -> None:
    assert standing(worker(0, "f (a.py:1)", others=("pump (b.py:1)",))) == ("f (a.py:1)",)
    assert standing(mute(0)) == "asleep in futex"
    assert standing(mute(0, "")) is None
    assert standing(WorkerStacks(0, ())) is None


def test_the_brief_form_is_brief() -> None:
    deep = worker(0, *(f"f{n} (a.py:{n})" for n in range(9)))
    assert brief_lines([deep], []) == ["rank 0: f0 (a.py:0) < f1 (a.py:1) < f2 (a.py:2) < f3 (a.py:3) < ..."]
    many = [worker(rank, f"f{rank} (a.py:1)") for rank in range(20)]
    lines = brief_lines(many, [7])
    assert len(lines) == BRIEF_GROUPS + 1
    assert lines[0].startswith("rank 7: ")
    assert lines[-1] == "and 12 more"


# --- py-spy ----------------------------------------------------------------------------------------------------------------

SPY = """#!/bin/sh
case "$*" in
    *--native*) {native} ;;
    *) {plain} ;;
esac
"""
SAYS, REFUSES, HANGS = 'echo "saw $*"', "echo 'not here' >&2; exit 1", "exec sleep 60"


@pytest.mark.parametrize(
    ("native", "plain", "timeout_s", "told"),
    [
        (SAYS, REFUSES, 30.0, ("saw dump --native --pid 7", "")),
        (REFUSES, SAYS, 30.0, ("saw dump --pid 7", "")),  # it was built without
        (REFUSES, REFUSES, 30.0, ("", "py-spy says: not here")),
        (HANGS, SAYS, 0.2, ("", "py-spy failed: ")),
    ],
)
def test_py_spy_is_asked_for_native_frames_and_else_for_what_it_has(
    tmp_path: Path, native: str, plain: str, timeout_s: float, told: tuple[str, str]
) -> None:
    program = tmp_path / "py-spy"
    program.write_text(SPY.format(native=native, plain=plain))
    program.chmod(0o755)
    text, why = spy_on(str(program), 7, timeout_s)
    assert (text, why[: len(told[1])]) == told


def test_py_spy_that_cannot_be_started_is_no_trouble(tmp_path: Path) -> None:
    assert spy_on(str(tmp_path / "none"), 7, 30.0)[1].startswith("py-spy failed: ")
