"""What faulthandler writes is understood, and equal stacks are told once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.hangs.stack_groups import (
    BRIEF_GROUPS,
    ProcessStacks,
    ThreadStack,
    WorkerStacks,
    brief_lines,
    grouped_lines,
    parse_faulthandler,
    rank_ranges,
    standing,
)

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
    threads = [ThreadStack("0x2", (other,)) for other in others] + [ThreadStack("0x1", frames)]
    return WorkerStacks(rank, (ProcessStacks(rank + 100, threads=tuple(threads)),))


def mute(rank: int, waits_in: str = "asleep in futex") -> WorkerStacks:
    return WorkerStacks(rank, (ProcessStacks(rank + 100, why_none="it is stopped", waits_in=waits_in),))


def test_all_threads_are_read_and_the_main_one_is_the_last() -> None:
    first, second, main = parse_faulthandler(TEXT)
    assert first == ThreadStack("pin_memory", ("run (/lib/threading.py:982)", 'deep (/a "quoted", line 5 in name:7)', "..."))
    assert second == ThreadStack("0x00007f72c9fdb6c1", ("<no Python frame>",))
    assert main.frames == ("Garbage-collecting", "<module> (train.py:19)")


def test_an_answer_of_one_thread_is_read() -> None:
    assert parse_faulthandler('Stack (most recent call first):\n  File "a.py", line 1 in f\n') == (
        ThreadStack("Stack", ("f (a.py:1)",)),
    )


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
    shell, python = ProcessStacks(1, why_none="no Python"), ProcessStacks(2, threads=(ThreadStack("0x1", ("f (a.py:1)",)),))
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
