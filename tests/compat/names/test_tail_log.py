"""Files that grow, followed line by line (P33, P34: whole lines, and the last one too)."""

from __future__ import annotations

import io
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base import outbox
from rallypoint.processes.tail_log import LINE_BYTES_MAX, TailLog, tail_logfile

INTERVAL_S = 0.005


def tailed(file: Path, log_line_filter: Callable[[str], bool] | None = None) -> str:
    """What is shown of a file that is finished."""
    finished, dst = threading.Event(), io.StringIO()
    finished.set()
    tail_logfile("H:", str(file), dst, finished, INTERVAL_S, log_line_filter)
    return dst.getvalue()


def test_several_files_are_followed(tmp_path: Path, wait_until: Callable[..., object]) -> None:
    files = {rank: str(tmp_path / f"{rank}.log") for rank in range(3)}
    dst = io.StringIO()
    tail = TailLog("writer", files, dst, log_line_prefixes={1: "<one> "}, interval_sec=INTERVAL_S)
    assert not tail.stopped()
    assert tail.start() is tail
    assert tail.start() is tail
    for file in files.values():
        Path(file).write_text("a\nb\n")
    wait_until(lambda: dst.getvalue().count("\n") == 6)
    tail.stop()
    assert tail.stopped()
    assert sorted(dst.getvalue().splitlines()) == [
        "<one> a",
        "<one> b",
        "[writer0]:a",
        "[writer0]:b",
        "[writer2]:a",
        "[writer2]:b",
    ]


def test_a_line_is_shown_whole_and_the_last_one_too(tmp_path: Path, wait_until: Callable[..., object]) -> None:
    """P33, P34."""
    dst = io.StringIO()
    with open(tmp_path / "log", "w") as log:
        tail = TailLog("w", {0: str(tmp_path / "log")}, dst, interval_sec=INTERVAL_S).start()
        print("first", flush=True, file=log)
        wait_until(lambda: dst.getvalue() == "[w0]:first\n")
        print("be", end="", flush=True, file=log)
        print("gun\nno end", end="", flush=True, file=log)
        tail.stop()
    assert dst.getvalue() == "[w0]:first\n[w0]:begun\n[w0]:no end"


def test_a_file_that_never_comes_is_no_reason_to_wait(tmp_path: Path) -> None:
    dst = io.StringIO()
    tail = TailLog("w", {0: str(tmp_path / "none")}, dst, interval_sec=60.0).start()
    tail.stop()
    tail.stop()
    assert dst.getvalue() == ""
    with pytest.raises(RuntimeError, match="make a new one"):
        tail.start()


def test_nothing_to_follow() -> None:
    tail = TailLog("w", {}, io.StringIO()).start()
    assert not tail.stopped()
    tail.stop()
    assert tail.stopped()


def test_a_filter_chooses(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("apple\nbread\n")
    assert tailed(tmp_path / "log", lambda line: "pp" in line) == "H:apple\n"
    assert tailed(tmp_path / "log") == "H:apple\nH:bread\n"


def test_bytes_that_are_no_text_and_progress_bars(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\xff\xfe\n10%\r20%\r\n\n\xc3\xa9")
    assert tailed(tmp_path / "log") == "H:\ufffd\ufffd\nH:10%\nH:20%\nH:\nH:é"


def test_a_line_without_end_takes_no_memory_without_end(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * (2 * LINE_BYTES_MAX + 10))
    assert tailed(tmp_path / "log").count("H:") == 3


def test_a_destination_that_fails_ends_only_its_tail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("disk full")

    (tmp_path / "log").write_text("a\n")
    TailLog("w", {0: str(tmp_path / "log")}, Full(), interval_sec=INTERVAL_S).start().stop()
    assert outbox.flush(10.0)
    assert "disk full" in caplog.text


@given(st.lists(st.text(alphabet="ab\n\r\u00e9", max_size=6), max_size=8))
def test_however_it_is_written_the_lines_are_the_same(pieces: list[str]) -> None:
    """A file that grows piece by piece while it is read shows what the finished one would."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "log"
        file.write_text("".join(pieces), newline="")
        whole = tailed(file)
        file.write_bytes(b"")
        dst, finished = io.StringIO(), threading.Event()
        follower = threading.Thread(target=tail_logfile, args=("H:", str(file), dst, finished, 0.0005), daemon=True)
        follower.start()
        with open(file, "ab", buffering=0) as log:
            for piece in pieces:
                log.write(piece.encode())
        finished.set()
        follower.join(10)
    assert dst.getvalue() == whole
