"""One failure, many failures, and the text that a user reads."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.failures.error_files import ErrorHandler
from rallypoint.failures.process_failure import NOT_AVAILABLE, ChildFailedError, ProcessFailure

STDERR = """\
INFO: epoch 1
Traceback (most recent call last):
  File "/job/train.py", line 12, in <module>
    main()
  File "/job/train.py", line 8, in main
    raise ValueError("boom")
ValueError: boom
"""


def failure(rank: int = 0, exitcode: int = 1, stderr: str = "", at: float | None = 1_700_000_000.5, **more) -> ProcessFailure:
    return ProcessFailure(rank, 4711 + rank, exitcode, "", stderr_tail=stderr, ended_at=at, hostname="node1", **more)


def written(tmp_path: Path, content: object) -> str:
    path = tmp_path / "error.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def summary_of(*failures: ProcessFailure) -> str:
    return str(ChildFailedError("train.py", dict(enumerate(failures))))


# --- one failure -----------------------------------------------------------------------------------------------------------


def test_the_error_file_speaks_first(tmp_path: Path) -> None:
    data = {"message": {"message": "ValueError: recorded", "extraInfo": {"py_callstack": STDERR, "timestamp": "1700000000"}}}
    path = written(tmp_path, data)
    failed = ProcessFailure(3, 997, 1, path)
    assert (failed.message, failed.timestamp, failed.error_file) == ("ValueError: recorded", 1_700_000_000, path)
    assert failed.error_file_data == data
    assert failed.signal_name() == NOT_AVAILABLE == "<N/A>"
    traceback = failed.traceback()
    assert traceback is not None
    assert traceback.frames[-1].line == 8


@pytest.mark.parametrize("timestamp", [10, "10"])
def test_the_short_form_of_the_error_file(tmp_path: Path, timestamp: object) -> None:
    failed = ProcessFailure(0, 997, 1, written(tmp_path, {"message": "a text", "timestamp": timestamp}))
    assert (failed.message, failed.timestamp) == ("a text", 10)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        {"unknown": 1},
        {"message": 3},
        "\0" * 100,
    ],
)
def test_a_broken_error_file_is_as_good_as_none(tmp_path: Path, content: object) -> None:
    failed = ProcessFailure(0, 997, 3, written(tmp_path, content))
    assert failed.error_file == NOT_AVAILABLE
    assert failed.message == "exited with code 3 and left no traceback"
    assert failed.error_file_data == {"message": failed.message}
    assert abs(failed.timestamp - time.time()) < 5


@pytest.mark.parametrize(
    "data",
    [
        {"message": {"message": "why"}},
        {"message": {"message": "why", "extraInfo": None}},
        {"message": {"message": "why", "extraInfo": {"timestamp": "soon", "timestamp_ns": "nan", "py_callstack": 3}}},
        {"message": {"message": "why", "extraInfo": {"timestamp": -1, "timestamp_ns": "9" * 400}}},
        {"message": {"message": "why", "extraInfo": {"timestamp": 1e300}}},
    ],
)
def test_an_error_file_with_gaps_gives_what_it_has(tmp_path: Path, data: object) -> None:
    failed = ProcessFailure(0, 997, 1, written(tmp_path, data), ended_at=1_700_000_000.25)
    assert (failed.message, failed.timestamp, failed.failed_at) == ("why", 1_700_000_000, 1_700_000_000.25)
    assert "why" in summary_of(failed)


def test_a_stack_that_is_a_list_of_lines(tmp_path: Path) -> None:
    lines = STDERR.splitlines(keepends=True)
    failed = ProcessFailure(0, 1, 1, written(tmp_path, {"message": {"message": "x", "extraInfo": {"py_callstack": lines}}}))
    traceback = failed.traceback()
    assert traceback is not None
    assert traceback.message == "boom"


def test_a_signal_is_named() -> None:
    failed = ProcessFailure(0, 997, -signal.SIGSEGV, "there/is/none.json")
    assert failed.signal_name() == "SIGSEGV"
    assert failed.error_file == NOT_AVAILABLE
    assert all(fact in failed.message for fact in ("11", "SIGSEGV", "997"))
    assert ProcessFailure(0, 997, -49, "").signal_name() == NOT_AVAILABLE
    assert "was killed by signal 49" in summary_of(failure(exitcode=-49))


def test_stderr_speaks_where_nothing_was_recorded() -> None:
    """P01: a script without any decorator."""
    assert failure(stderr=STDERR).message == "ValueError: boom"
    assert failure(stderr="usage: train.py\n", exitcode=2).message == "exited with code 2 and left no traceback"


def test_the_four_argument_constructor_and_the_fields_are_those_that_programs_know() -> None:
    names = [field.name for field in dataclasses.fields(ProcessFailure)]
    assert names[:7] == ["local_rank", "pid", "exitcode", "error_file", "error_file_data", "message", "timestamp"]
    with pytest.raises(TypeError):
        ProcessFailure(0, 1, 1, "", "node1")  # type: ignore[misc]
    assert ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file="").hostname == os.uname().nodename


def test_the_time_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    assert failure(at=1_700_000_000.5).timestamp_isoformat() == "2023-11-14_22:13:20"
    assert "at 2023-11-14T22:13:20.500+0000" in summary_of(failure(at=1_700_000_000.5))
    monkeypatch.undo()
    time.tzset()


# --- which was the first ---------------------------------------------------------------------------------------------------


def test_the_first_failure_is_found_below_a_second() -> None:
    error = ChildFailedError(
        "t", {5: failure(5, at=10.2), 1: failure(1, at=10.1), 3: failure(3, at=10.1), 0: failure(0, at=11.0)}
    )
    assert error.get_first_failure() == (1, error.failures[1])


def test_an_exception_counts_from_when_it_was_raised_not_from_when_the_process_was_gone(tmp_path, monkeypatch) -> None:
    """A cause that takes long to shut down stays the cause."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    ErrorHandler().record_exception(ValueError("the cause"))
    now = time.time()
    slow = ProcessFailure(1, 1, 1, str(tmp_path / "error.json"), ended_at=now + 9)
    quick_victim = failure(0, at=now + 0.05)
    assert ChildFailedError("t", {0: quick_victim, 1: slow}).get_first_failure()[0] == 1


def test_error_files_of_whole_seconds_do_not_hide_who_was_first(tmp_path: Path) -> None:
    path = written(tmp_path, {"message": {"message": "x", "extraInfo": {"timestamp": "100"}}})

    def recorded(at: float | None) -> ProcessFailure:
        return ProcessFailure(0, 1, 1, path, ended_at=at)

    assert ChildFailedError("t", {0: recorded(100.4), 1: recorded(100.3)}).get_first_failure()[0] == 1
    assert ChildFailedError("t", {0: failure(at=102.0), 1: recorded(109.0)}).get_first_failure()[0] == 1
    assert recorded(None).failed_at == 100


def test_no_failure_at_all() -> None:
    error = ChildFailedError("train.py", {})
    assert "train.py FAILED" in str(error)
    with pytest.raises(ValueError, match=r"train\.py"):
        error.get_first_failure()


def test_the_error_survives_pickling() -> None:
    error = ChildFailedError("train.py", {2: failure(2, stderr=STDERR)})
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.name, copy.failures) == (error.name, error.failures)


# --- the summary -----------------------------------------------------------------------------------------------------------


def test_the_whole_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    """P01: type, message, last frames and stderr of the first rank that failed, with host, rank, pid and log path."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    first = failure(2, stderr=STDERR, log_file="/logs/attempt_0/2/stderr.log")
    others = {rank: failure(rank, stderr=STDERR, at=1_700_000_000.512) for rank in (0, 1, 3)}
    killed = failure(4, -signal.SIGABRT, at=1_700_000_001.0)
    text = str(ChildFailedError("train.py", {2: first, 4: killed, **others}))
    monkeypatch.undo()
    time.tzset()
    border, rule = "=" * 80, "-" * 80
    assert text.splitlines() == [
        border,
        "train.py FAILED: ranks 0-3 raised ValueError: boom",
        rule,
        "First cause, at 2023-11-14T22:13:20.500+0000:",
        "  host: node1   rank: 2 (local_rank: 2)   pid: 4713   exit code: 1",
        "  error: ValueError: boom",
        "  at:",
        "    /job/train.py:12 in <module>",
        "      main()",
        "    /job/train.py:8 in main",
        '      raise ValueError("boom")',
        "  stderr, last lines:",
        "    INFO: epoch 1",
        "  log: /logs/attempt_0/2/stderr.log",
        "  and ranks 0-1, 3: the same",
        rule,
        "Other failures:",
        "  rank 4 (local_rank 4, pid 4715, exit code -6 (SIGABRT), host node1) at +0.500 s: was killed by SIGABRT",
        border,
    ]


def test_how_to_keep_a_log_is_told_where_there_is_none() -> None:
    assert "  log: none was kept; --log-dir DIR" in summary_of(failure())


def test_other_rulers() -> None:
    text = ChildFailedError("train.py", {0: failure()}).format_msg(boarder_delim="*", section_delim="~+")
    assert text.splitlines()[0] == "*" * 80
    assert text.splitlines()[2] == "~+" * 40


def test_sigkill_for_memory_is_named() -> None:
    """P21: out of memory where the kernel says so."""
    text = summary_of(failure(exitcode=-9, killed_for_memory="the memory cgroup /job killed 1 process"))
    assert text.splitlines()[1] == "train.py FAILED: rank 0 was killed by SIGKILL: out of memory"
    assert "(SIGKILL) received by PID 4711: the memory cgroup /job killed 1 process\n" in text
    assert "what to do: give the job more memory" in text
    assert "sender unknown" not in text
    guess = summary_of(failure(exitcode=-9, killed_for_memory="probably out of memory: the host's counter rose"))
    assert "was killed by SIGKILL: probably out of memory\n" in guess


def test_sigkill_of_unknown_sender_says_how_to_find_out() -> None:
    """P21: else the sender is unknown, and where to look is told."""
    text = summary_of(failure(exitcode=-9))
    assert text.splitlines()[1] == "train.py FAILED: rank 0 was killed by SIGKILL"
    assert "exit code: -9 (SIGKILL)" in text
    assert "SIGKILL, sender unknown" in text
    assert "dmesg" in text


@pytest.mark.parametrize(
    ("exitcode", "stderr", "expected", "unexpected"),
    [
        (-signal.SIGSEGV, "", "PYTHONFAULTHANDLER=1", "core"),
        (-signal.SIGSEGV, "Fatal Python error: Segmentation fault\n", "native code", "PYTHONFAULTHANDLER"),
        (-signal.SIGBUS, "", "/dev/shm", "core"),
        (-signal.SIGTERM, "", "preemption", "PYTHONFAULTHANDLER"),
        (127, "sh: 1: nothing: not found\n", "exit code 127", "core"),
        (137, "", "SIGKILL ended the program", "core"),
        (3, "", "exited with code 3 and left no traceback", "what to do"),
    ],
)
def test_what_to_do(exitcode: int, stderr: str, expected: str, unexpected: str) -> None:
    text = summary_of(failure(exitcode=exitcode, stderr=stderr))
    assert expected in text
    assert unexpected not in text


def test_f04_a_full_disk_explains_what_is_missing() -> None:
    """F04: where a traceback was found after all, that comes first, and the disk is still told of."""
    text = summary_of(failure(full_log_folder="/logs/run"))
    assert text.splitlines()[1] == "train.py FAILED: rank 0 exited with code 1; the disk of the log folder /logs/run is full"
    assert "what to do: the disk of the log folder is full" in text
    told = summary_of(failure(stderr=STDERR, full_log_folder="/logs/run"))
    assert "rank 0 raised " in told
    assert "what to do: the disk of the log folder is full" in told


def test_stderr_is_shown_only_if_it_says_more() -> None:
    assert "stderr, last lines" not in summary_of(failure(stderr=STDERR.partition("\n")[2]))
    assert "    the config file is missing" in summary_of(failure(stderr="the config file is missing\n"))


def test_everything_is_bounded() -> None:
    stderr = "".join(f"line {n}\n" for n in range(100)) + STDERR.replace("boom", "b" * 100_000 + "\n" + "more\n" * 50)
    others = [failure(rank, exitcode=rank, stderr=STDERR.replace("boom", str(rank)), at=2e9) for rank in range(1, 21)]
    text = summary_of(failure(stderr=stderr), *others)
    assert max(map(len, text.splitlines())) <= 300
    assert len(text.splitlines()) < 60
    assert "and 12 more" in text


def test_a_thousand_ranks_of_one_mind_take_one_line() -> None:
    text = str(ChildFailedError("t", {rank: failure(rank % 8, stderr=STDERR, at=1e9 + rank) for rank in range(1000)}))
    assert "and ranks 1-999: the same" in text
    assert len(text.splitlines()) < 30


def test_those_who_failed_in_another_way_alike_take_one_line() -> None:
    killed = {rank: failure(rank % 8, -signal.SIGABRT, at=1e9 + rank) for rank in range(1, 1000)}
    text = str(ChildFailedError("t", {0: failure(0, stderr=STDERR, at=1e9), **killed}))
    assert "ranks 1-999 (999 workers on host node1, exit code -6 (SIGABRT)) from +1.000 s: was killed by SIGABRT" in text
    assert len(text.splitlines()) < 30


def test_all_of_a_job_are_told_as_all() -> None:
    """F02"""
    error = ChildFailedError("train.py", {rank: failure(rank, stderr=STDERR) for rank in range(4)})
    error.world_size = 4
    assert str(error).splitlines()[1] == "train.py FAILED: all 4 workers raised ValueError: boom"


@pytest.mark.parametrize(
    ("cause", "like_it", "shown", "title"),
    [
        (3, (3,), 3, "First cause, at"),
        (9, (2, 3), 2, "The same on this node, at"),
        (9, (), 2, "First failure on this node, a victim of the cause above, at"),
    ],
)
def test_a_screen_has_one_cause(cause: int, like_it: tuple[int, ...], shown: int, title: str) -> None:
    """F01: what the verdict calls the cause heads the box on every node; the box shows it, or what is like it, or a victim."""
    error = ChildFailedError("train.py", {rank: failure(rank, stderr=STDERR, at=1e9 + rank) for rank in (2, 3)})
    error.cause_text, error.cause_rank, error.ranks_like_cause = "rank 9 did it", cause, like_it
    lines = str(error).splitlines()
    assert lines[1] == "train.py FAILED: rank 9 did it"
    assert lines[3].startswith(title)
    assert f"rank: {shown} (" in lines[4]


def test_f02_an_exit_code_is_the_same_if_the_last_words_are() -> None:
    """F02: two programs that give up with code 1 may do so for different reasons."""
    words = ("no disk 1\n", "no disk 2\n", "no network\n")
    error = ChildFailedError("train.py", {rank: failure(rank, 1, stderr=words[rank]) for rank in range(3)})
    assert str(error).splitlines()[1] == "train.py FAILED: ranks 0-1 exited with code 1 and left no traceback"


def test_recursion_is_not_shown_again_and_again() -> None:
    frames = '  File "a.py", line 2, in f\n    f()\n' * 3 + "  [Previous line repeated 996 more times]\n"
    text = summary_of(failure(stderr="Traceback (most recent call last):\n" + frames + "RecursionError: too deep\n"))
    assert text.count("a.py:2 in f") == 1
    assert "(and again)" in text


def test_a_message_of_several_lines_is_shown_as_a_block(tmp_path: Path) -> None:
    text = summary_of(ProcessFailure(0, 1, 1, written(tmp_path, {"message": {"message": "RuntimeError: CUDA error\nset X=1"}})))
    assert text.splitlines()[1] == "train.py FAILED: rank 0 raised RuntimeError: CUDA error"
    assert "  error:\n    RuntimeError: CUDA error\n    set X=1\n" in text
    assert f"  error file: {tmp_path / 'error.json'}" in text


def test_a_crash_shows_the_python_line(tmp_path: Path) -> None:
    source = "import faulthandler, os\nfaulthandler.enable()\ndef deep(): os.abort()\ndeep()\n"
    script = tmp_path / "crash.py"
    script.write_text(source)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    text = summary_of(failure(exitcode=ended.returncode, stderr=ended.stderr))
    assert "was killed by SIGABRT" in text
    assert f"    {script}:3 in deep" in text


@given(st.text(), st.integers(-70, 300), st.text(), st.text(max_size=20), st.text(max_size=20))
def test_no_text_breaks_the_summary(stderr: str, exitcode: int, name: str, host: str, log: str) -> None:
    failed = ProcessFailure(0, 1, exitcode, "", stderr_tail=stderr, hostname=host, log_file=log)
    text = str(ChildFailedError(name, {0: failed}))
    assert all(char.isprintable() or char == "\n" for char in text)
    text.encode()
