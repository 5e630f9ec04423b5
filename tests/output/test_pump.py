"""The stream pump with real pipes, real workers, full disks and consoles that nobody reads."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pace import is_under

from rallypoint.base import report
from rallypoint.errors import UsageError
from rallypoint.output import console as console_module
from rallypoint.output.console import console_writer, write_all
from rallypoint.output.log_specs import Std
from rallypoint.output.outlets import Route
from rallypoint.output.pump import LogFile, StreamPump

DEADLINE_S = 20.0
WaitUntil = Callable[..., object]


def open_pipe(pump: StreamPump, route: Route) -> int:
    """The end that the worker writes to."""
    read_fd, write_fd = os.pipe()
    pump.attach(route, read_fd)
    return write_fd


class Shown:
    """A console that remembers each piece that was written to it."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def __call__(self, text: bytes) -> None:
        self.pieces.append(text)

    @property
    def text(self) -> bytes:
        return b"".join(self.pieces)


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    found: list[str] = []
    report.set_sink(lambda level, text: found.append(text))
    yield found
    report.set_sink(None)


@pytest.fixture
def pump() -> Iterator[StreamPump]:
    pump = StreamPump(tail_bytes=1000)
    yield pump
    pump.close(DEADLINE_S)


def start_worker(pump: StreamPump, program: str, *routes: Route, is_shell: bool = False) -> subprocess.Popen[bytes]:
    """A worker whose stdout, or stderr, leads into the pump."""
    fds = {route.stream: open_pipe(pump, route) for route in routes}
    command = ["/bin/sh", "-c", program] if is_shell else [sys.executable, "-c", program]
    worker = subprocess.Popen(command, stdout=fds.get(Std.OUT), stderr=fds.get(Std.ERR), start_new_session=True)
    for fd in fds.values():
        os.close(fd)
    return worker


def finish(pump: StreamPump, worker: subprocess.Popen[bytes], local_rank: int = 0) -> None:
    worker.wait(DEADLINE_S)
    pump.worker_ended(local_rank)
    assert pump.wait_drained(local_rank, DEADLINE_S)


# --- lines -----------------------------------------------------------------------------------------------------------------

WRITES = st.lists(st.tuples(st.integers(0, 2), st.text("ab\n", min_size=1).map(str.encode)), max_size=30)


@settings(max_examples=40, deadline=None)
@given(WRITES)
def test_lines_of_workers_never_mix(writes: list[tuple[int, bytes]]) -> None:
    """P33, P34: the console shows each worker's lines whole, in order, and all of them, however they were written."""
    shown, pump = Shown(), StreamPump(tail_bytes=10)
    fds = [open_pipe(pump, Route(rank, Std.OUT, console=shown, prefix=f"[{rank}]")) for rank in range(3)]
    pump.start()
    for rank, block in writes:
        os.write(fds[rank], block)
    for fd in fds:
        os.close(fd)
    assert pump.close(DEADLINE_S)
    lines = shown.text.splitlines()
    for rank in range(3):
        written = b"".join(block for who, block in writes if who == rank)
        assert [line for line in lines if line.startswith(b"[%d]" % rank)] == [
            b"[%d]" % rank + line for line in written.splitlines()
        ]
        assert pump.tail(rank, Std.OUT) == written[-10:].decode()
    assert all(line.startswith((b"[0]", b"[1]", b"[2]")) for line in lines)
    assert all(piece.endswith(b"\n") for piece in shown.pieces)


def test_two_chatty_workers_lose_nothing(pump: StreamPump, tmp_path: Path) -> None:
    """P33, P34: through a real console, in blocks that end anywhere."""
    program = "for i in range(50_000): print('rank {} says line', i)"
    with (tmp_path / "console").open("wb") as console:
        routes = [
            Route(rank, Std.OUT, str(tmp_path / f"{rank}.log"), lambda text: write_all(console.fileno(), text), f"[{rank}]:")
            for rank in range(2)
        ]
        pump.start()
        workers = [start_worker(pump, program.format(route.local_rank), route) for route in routes]
        for rank, worker in enumerate(workers):
            finish(pump, worker, rank)
    shown = (tmp_path / "console").read_text().splitlines()
    assert len(shown) == 100_000
    for rank in range(2):
        said = [f"rank {rank} says line {i}" for i in range(50_000)]
        assert (tmp_path / f"{rank}.log").read_text().splitlines() == said
        assert [line for line in shown if line.startswith(f"[{rank}]:")] == [f"[{rank}]:{line}" for line in said]


def test_the_last_line_arrives_although_the_worker_is_killed_inside_it(pump: StreamPump, tmp_path: Path) -> None:
    """P34: with the newline that it lacks on the console, and as it is in the file."""
    shown = Shown()
    pump.start()
    route = Route(0, Std.OUT, str(tmp_path / "log"), shown, "[0]:")
    worker = start_worker(pump, "printf 'whole\\npart'; kill -KILL $$", route, is_shell=True)
    finish(pump, worker)
    assert worker.returncode == -signal.SIGKILL
    assert shown.text == b"[0]:whole\n[0]:part\n"
    assert (tmp_path / "log").read_bytes() == b"whole\npart"


def test_progress_bars_show_as_they_go(pump: StreamPump, wait_until: WaitUntil) -> None:
    shown = Shown()
    fd = open_pipe(pump, Route(0, Std.ERR, console=shown, prefix="[0]:"))
    pump.start()
    os.write(fd, b"10%\r")
    wait_until(lambda: shown.text == b"[0]:10%\r")
    os.write(fd, b"20%\r")
    wait_until(lambda: shown.text == b"[0]:10%\r[0]:20%\r")
    os.write(fd, b"\ndone\n")
    os.close(fd)
    assert pump.close(DEADLINE_S)
    assert shown.text == b"[0]:10%\r[0]:20%\r\n[0]:done\n"


def test_f03_a_part_of_a_line_is_shown_after_a_moment(pump: StreamPump, wait_until: WaitUntil, tmp_path: Path) -> None:
    """F03: a prompt shows before its answer; its line goes on, with one prefix, and counts as one where lines are filtered."""
    shown, filtered = Shown(), tmp_path / "filtered"
    fd = open_pipe(pump, Route(0, Std.OUT, console=shown, prefix="[0]:", filters=("42",), filtered_file=str(filtered)))
    pump.start()
    os.write(fd, b"before\nvalue? ")
    wait_until(lambda: shown.text == b"[0]:before\n[0]:value? ")
    os.write(fd, b"42\nafter\n")
    wait_until(lambda: shown.text == b"[0]:before\n[0]:value? 42\n[0]:after\n")
    os.close(fd)
    assert pump.close(DEADLINE_S)
    assert filtered.read_bytes() == b"[0]:value? 42\n"


def test_f03_a_progress_bar_looks_as_without_us(pump: StreamPump, wait_until: WaitUntil) -> None:
    """F03: each refresh is seen when it is made; two bars overwrite each other, and a line of another worker is its own."""
    shown = Shown()
    fds = [open_pipe(pump, Route(rank, Std.ERR, console=shown)) for rank in range(2)]
    pump.start()
    for rank, text, so_far in (
        (0, b"\r10%", b"\r10%"),
        (1, b"\r5%", b"\r10%\r5%"),
        (0, b"\r20%", b"\r10%\r5%\r20%"),
        (1, b"a line\n", b"\r10%\r5%\r20%\na line\n"),
    ):
        os.write(fds[rank], text)
        wait_until(lambda so_far=so_far: shown.text == so_far)
    for fd in fds:
        os.close(fd)


def test_f28_others_let_a_line_come_to_its_end(pump: StreamPump, wait_until: WaitUntil) -> None:
    """F03, F28: whoever is inside a line that shows already is not interrupted at once."""
    shown = Shown()
    fds = [open_pipe(pump, Route(rank, Std.OUT, console=shown)) for rank in range(2)]
    pump.start()
    os.write(fds[0], b"the loss is ")
    wait_until(lambda: shown.text == b"the loss is ")
    os.write(fds[1], b"another line\n")
    os.write(fds[0], b"0.5\n")
    wait_until(lambda: len(shown.text) == len(b"the loss is 0.5\nanother line\n"))
    assert shown.text == b"the loss is 0.5\nanother line\n"
    os.write(fds[0], b"never to end")
    wait_until(lambda: shown.text.endswith(b"never to end"))
    os.write(fds[1], b"somebody waits\n")
    wait_until(lambda: shown.text.endswith(b"never to end\nsomebody waits\n"))
    for fd in fds:
        os.close(fd)


def test_f28_a_line_that_was_cut_by_a_full_buffer_waits_for_its_end(pump: StreamPump, wait_until: WaitUntil) -> None:
    """F28: a program that prints slowly into a pipe fills its buffer first, and the rest of its line may take long."""
    shown = Shown()
    fds = [open_pipe(pump, Route(rank, Std.OUT, console=shown)) for rank in range(2)]
    pump.start()
    whole = b"x" * 79 + b"\n"
    os.write(fds[0], 102 * whole + b"the loss is ")
    wait_until(lambda: shown.text == 102 * whole)
    os.write(fds[1], b"a prompt? ")
    wait_until(lambda: shown.text.endswith(b"a prompt? "))  # so this moment is over for both
    os.write(fds[0], b"0.5\n")
    for fd in fds:
        os.close(fd)
    assert pump.close(DEADLINE_S)
    assert b"the loss is 0.5\n" in shown.text


def test_a_line_too_long_to_wait_for_is_ended_before_another_worker_speaks(pump: StreamPump, wait_until: WaitUntil) -> None:
    shown = Shown()
    fds = [open_pipe(pump, Route(rank, Std.OUT, console=shown, prefix=f"[{rank}]")) for rank in range(2)]
    pump.start()
    piece = b"x" * (1 << 20)
    write_all(fds[0], piece)
    wait_until(lambda: len(shown.text) >= len(piece))
    write_all(fds[1], b"hello\n")
    wait_until(lambda: shown.text.endswith(b"hello\n"))
    write_all(fds[0], b"end\n")
    for fd in fds:
        os.close(fd)
    assert pump.close(DEADLINE_S)
    assert shown.text == b"[0]" + piece + b"\n[1]hello\n[0]end\n"


def test_filtered_lines_of_all_ranks_go_to_one_file(pump: StreamPump, tmp_path: Path) -> None:
    shown = Shown()
    filtered = tmp_path / "filtered_stdout.log"
    routes = [Route(rank, Std.OUT, "", shown, f"[{rank}]:", ("loss", "nan"), str(filtered)) for rank in range(2)]
    fds = [open_pipe(pump, route) for route in routes]
    pump.start()
    for fd in fds:
        os.write(fd, b"step 1\nloss 2\nis nan")
        os.close(fd)
    assert pump.close(DEADLINE_S)
    assert sorted(filtered.read_bytes().splitlines()) == [b"[0]:is nan", b"[0]:loss 2", b"[1]:is nan", b"[1]:loss 2"]
    assert shown.text.count(b"step 1") == 2


# --- ends ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeper", ["sleep 1000 & echo $!", "yes & echo $!"], ids=["silent", "endless"])
def test_a_grandchild_that_keeps_the_pipe_does_not_keep_us(pump: StreamPump, wait_until: WaitUntil, keeper: str) -> None:
    """P34: all that the worker wrote arrives, and a daemon of its own is not waited for."""
    shown = Shown()
    pump.start()
    worker = start_worker(pump, f"{keeper}; printf last", Route(0, Std.OUT, console=shown), is_shell=True)
    try:
        finish(pump, worker)
        assert b"last" in shown.text
        assert shown.text.endswith(b"\n")
        assert pump.close(DEADLINE_S)
    finally:
        os.killpg(worker.pid, signal.SIGKILL)


def test_f28_a_child_that_outlives_its_worker_may_go_on_to_write(pump: StreamPump, wait_until: WaitUntil) -> None:
    """F28: as it could to a stream that both had inherited."""
    shown = Shown()
    fd = open_pipe(pump, Route(0, Std.OUT, console=shown))
    pump.start()
    os.write(fd, b"from the worker\n")
    pump.worker_ended(0)
    assert pump.wait_drained(0, DEADLINE_S)
    os.write(fd, b"from its child\n")
    wait_until(lambda: shown.text == b"from the worker\nfrom its child\n")
    os.close(fd)


def test_f28_whoever_inherits_a_broken_pipe_finds_it_broken(pump: StreamPump, wait_until: WaitUntil, warnings: list[str]) -> None:
    """F28: as it is with one worker, which writes to ours itself."""

    def broken(_: bytes) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    def finds_it_broken() -> bool:
        try:
            os.write(fd, b"a line\n")
        except BrokenPipeError:
            return True
        return False

    fd = open_pipe(pump, Route(0, Std.OUT, console=broken, is_inherited=True))
    pump.start()
    wait_until(finds_it_broken)
    os.close(fd)
    wait_until(lambda: warnings)  # it acts first, and speaks later
    assert "Broken pipe" in warnings[0]


def test_a_worker_that_says_nothing_is_drained_too(pump: StreamPump) -> None:
    shown = Shown()
    pump.start()
    finish(pump, start_worker(pump, "", Route(0, Std.OUT, console=shown, prefix="[0]"), Route(0, Std.ERR, console=shown)))
    assert shown.pieces == []


def test_an_ended_worker_leaves_the_others_alone(pump: StreamPump, wait_until: WaitUntil) -> None:
    shown = Shown()
    fds = [open_pipe(pump, Route(rank, Std.OUT, console=shown)) for rank in range(2)]
    pump.start()
    pump.worker_ended(0)
    assert pump.wait_drained(0, DEADLINE_S)
    assert not pump.wait_drained(1, 0.0)
    assert pump.wait_drained(7, 0.0), "nothing is awaited from a rank without streams"
    os.write(fds[1], b"still here\n")
    wait_until(lambda: shown.text == b"still here\n")
    for fd in fds:
        os.close(fd)


def test_streams_may_be_opened_at_any_time(pump: StreamPump) -> None:
    shown = Shown()
    pump.worker_ended(0)
    pump.start()
    for _ in range(100):
        fd = open_pipe(pump, Route(0, Std.OUT, console=shown))
        os.write(fd, b"again\n")
        pump.worker_ended(0)
        os.close(fd)
    assert pump.wait_drained(0, DEADLINE_S)
    assert shown.text == 100 * b"again\n"


def test_closing_is_enough(tmp_path: Path) -> None:
    """Also for a pump that was never started, and more than once."""
    assert StreamPump(10).close(0.0)
    shown, pump = Shown(), StreamPump(10)
    fd = open_pipe(pump, Route(0, Std.OUT, str(tmp_path / "log"), shown))
    assert not os.get_inheritable(fd)
    os.write(fd, b"before the start")
    assert pump.close(DEADLINE_S)
    assert pump.close(DEADLINE_S)
    pump.worker_ended(0)
    assert shown.text == b"before the start\n"
    assert (tmp_path / "log").read_bytes() == b"before the start"
    with pytest.raises(BrokenPipeError):
        os.write(fd, b"too late")
    os.close(fd)


# --- tails and interrupts --------------------------------------------------------------------------------------------------


def test_the_tail_is_the_last_that_was_written(pump: StreamPump) -> None:
    pump.start()
    program = "import sys; sys.stderr.write('é' * 10_000 + 'end'); print('other stream')"
    finish(pump, start_worker(pump, program, Route(0, Std.ERR), Route(0, Std.OUT)))
    tail = pump.tail(0, Std.ERR)
    assert tail.endswith("ééend")
    assert 1000 - 2 <= len(tail.encode()) <= 1000 + 2
    assert pump.tail(0, Std.OUT) == "other stream\n"
    assert pump.tail(1, Std.OUT) == ""


@pytest.mark.parametrize("is_quiet", [True, False])
def test_interrupted_workers_are_quiet(pump: StreamPump, tmp_path: Path, wait_until: WaitUntil, is_quiet: bool) -> None:
    """P20: no traceback on the console; the file and the tail have it, and all else is shown."""
    shown = Shown()
    pump.start()
    program = """if True:
        import atexit, sys, time
        atexit.register(lambda: sys.stderr.write("goodbye\\n"))
        sys.stderr.write("ready\\n")
        time.sleep(1000)
    """
    worker = start_worker(pump, program, Route(0, Std.ERR, str(tmp_path / "log"), shown))
    wait_until(lambda: shown.text == b"ready\n")
    if is_quiet:
        pump.quiet_interrupts()
    worker.send_signal(signal.SIGINT)
    finish(pump, worker)
    assert (b"KeyboardInterrupt" in shown.text, b"Traceback" in shown.text) == (not is_quiet, not is_quiet)
    assert shown.text.endswith(b"goodbye\n")
    assert "\nKeyboardInterrupt\n" in pump.tail(0, Std.ERR)
    assert b"\nKeyboardInterrupt\n" in (tmp_path / "log").read_bytes()


# --- files that cannot be written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_file", ["/dev/full", "/dev/null/no/folder"])
def test_a_log_file_that_fails_stops_nothing(pump: StreamPump, warnings: list[str], log_file: str) -> None:
    shown = Shown()
    pump.start()
    finish(pump, start_worker(pump, "for i in range(100_000): print(i)", Route(0, Std.OUT, log_file, shown)))
    assert shown.text == b"".join(b"%d\n" % i for i in range(100_000))
    (warning,) = warnings
    assert log_file in warning
    assert ("No space left" if log_file == "/dev/full" else "Not a directory") in warning


def test_a_stream_never_uses_more_than_twice_its_cap(tmp_path: Path) -> None:
    """P35: the older half is put aside, and the newest lines are always there."""
    log, old = tmp_path / "log", tmp_path / "log.1"
    pump = StreamPump(tail_bytes=0, max_log_bytes=1000)
    fd = open_pipe(pump, Route(0, Std.OUT, str(log)))
    pump.start()
    written = b""
    for count in (1, 7, 50, 300, 3):
        block = b"".join(b"%d of %d\n" % (i, count) for i in range(count))
        written += block
        write_all(fd, block)
    os.close(fd)
    assert pump.close(DEADLINE_S)
    assert log.stat().st_size <= 1000
    assert old.stat().st_size <= 1000
    kept = old.read_bytes() + log.read_bytes()
    assert written.endswith(kept)
    assert kept.startswith(b"".join(kept.partition(b" of ")[:2]))
    assert len(kept) > 1000
    assert sorted(tmp_path.glob("log*")) == [log, old]
    assert pump.tail(0, Std.OUT) == ""


@given(st.lists(st.text("ab\n").map(str.encode)), st.integers(1, 20))
def test_a_capped_file_keeps_the_end_of_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[bytes], cap: int
) -> None:
    path = tmp_path_factory.mktemp("capped") / "log"
    file = LogFile(str(path), cap).open()
    for block in blocks:
        file.write(block)
    file.close()
    old = path.with_name("log.1").read_bytes() if path.with_name("log.1").exists() else b""
    assert max(len(old), path.stat().st_size) <= cap
    assert b"".join(blocks).endswith(old + path.read_bytes())


def test_a_device_is_never_put_aside(tmp_path: Path) -> None:
    """A cap on /dev/null must not rename it, which root could do."""
    pipe = tmp_path / "fifo"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    file = LogFile(str(pipe), max_bytes=4).open()
    file.write(b"longer than its cap")
    file.close()
    assert os.read(reader, 100) == b"longer than its cap"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)


def test_a_cap_that_is_no_size_is_refused() -> None:
    with pytest.raises(UsageError, match="max_log_bytes"):
        StreamPump(10, max_log_bytes=0)


# --- consoles that fail ----------------------------------------------------------------------------------------------------


def test_a_broken_console_stops_no_log_file(pump: StreamPump, tmp_path: Path, warnings: list[str]) -> None:
    """One warning for all workers, as when the output goes to `head`."""
    reader, writer = os.pipe()
    os.close(reader)
    pump.start()
    routes = [Route(rank, Std.OUT, str(tmp_path / f"{rank}.log"), lambda text: write_all(writer, text)) for rank in range(2)]
    for route in routes:
        finish(pump, start_worker(pump, "for i in range(100_000): print(i)", route), route.local_rank)
        assert Path(route.log_file).read_bytes() == b"".join(b"%d\n" % i for i in range(100_000))
    os.close(writer)
    (warning,) = warnings
    assert "stdout" in warning
    assert "Broken pipe" in warning


def test_a_console_that_nobody_reads_delays_neither_the_files_nor_the_end(
    tmp_path: Path, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_module, "MAX_QUEUED_BYTES", 100_000)
    reader, writer = os.pipe()
    pump = StreamPump(tail_bytes=10)
    pump.start()
    program = "import os; os.write(1, b'x' * 79 + b'\\n'); os.write(1, (b'y' * 79 + b'\\n') * 12_000)"
    route = Route(0, Std.OUT, str(tmp_path / "log"), lambda text: write_all(writer, text))
    worker = start_worker(pump, program, route)
    worker.wait(DEADLINE_S)
    pump.worker_ended(0)
    assert not pump.wait_drained(0, 0.2)
    start = time.monotonic()
    assert not pump.close(0.2)
    assert is_under(time.monotonic() - start, 5.0)
    assert (tmp_path / "log").stat().st_size == 80 * 12_001
    assert pump.tail(0, Std.OUT) == "y" * 9 + "\n"
    os.close(reader)  # which lets the abandoned thread go
    wait_until(lambda: not any(thread.name.startswith("rallypoint") for thread in threading.enumerate()))
    os.close(writer)


def test_the_console_is_given_time_to_take_the_rest(pump: StreamPump) -> None:
    pieces: list[bytes] = []
    may_go = threading.Event()

    def slow(text: bytes) -> None:
        assert may_go.wait(DEADLINE_S)
        pieces.append(text)

    fd = open_pipe(pump, Route(0, Std.OUT, console=slow))
    pump.start()
    os.write(fd, b"late, but here\n")
    os.close(fd)
    threading.Timer(0.05, may_go.set).start()
    assert pump.close(DEADLINE_S)
    assert pieces == [b"late, but here\n"]


# --- our own stdout and stderr ---------------------------------------------------------------------------------------------

WRITER_PROGRAM = """
import os, sys
from rallypoint.output.console import console_writer, write_all
from rallypoint.output.log_specs import Std
sys.stdout.write("buffered before ")
console_writer(Std.OUT)(b"\\xff" * {count})
console_writer(Std.ERR)(b"to stderr")
"""


def test_bytes_go_to_our_own_streams_untouched_and_in_order() -> None:
    result = subprocess.run([sys.executable, "-c", WRITER_PROGRAM.format(count=3)], capture_output=True, timeout=DEADLINE_S)
    assert (result.stdout, result.stderr) == (b"buffered before \xff\xff\xff", b"to stderr")


def test_a_console_that_somebody_made_non_blocking_gets_everything() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER_PROGRAM.format(count=3_000_000)], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    with open(reader, "rb") as stream:
        assert len(stream.read()) == len("buffered before ") + 3_000_000
    assert process.communicate(timeout=DEADLINE_S)[1] == b"to stderr"


def test_a_stream_without_a_file_gets_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, whose streams have a file number that leads elsewhere."""

    class Notebook(io.StringIO):
        def fileno(self) -> int:
            return 1

    for stream in (Notebook(), io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding="utf-8")):
        monkeypatch.setattr(sys, "stdout", stream)
        console_writer(Std.OUT)("né\n".encode() + b"\xff")
        stream.seek(0)
        assert stream.read() == "né\n\ufffd"


def test_no_stream_at_all_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    console_writer(Std.ERR)(b"into the void")


def test_an_idle_pump_sleeps(pump: StreamPump, wait_until: WaitUntil) -> None:
    """Not even a timeout wakes it: its thread is scheduled for a line, and for nothing else."""
    shown = Shown()
    fd = open_pipe(pump, Route(0, Std.OUT, console=shown))
    pump.start()
    os.write(fd, b"one\n")
    wait_until(lambda: shown.text == b"one\n")
    tasks = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("rallypoint")]
    assert len(tasks) == 2
    wait_until(lambda: all(_state(task) == "S" for task in tasks))
    before = [_switches(task) for task in tasks]
    select.poll().poll(300)
    assert [_switches(task) for task in tasks] == before
    os.close(fd)


def _status(task: int | None) -> dict[str, str]:
    lines = Path(f"/proc/self/task/{task}/status").read_text().splitlines()
    return dict(line.partition(":")[::2] for line in lines)


def _state(task: int | None) -> str:
    return _status(task)["State"].split()[0]


def _switches(task: int | None) -> int:
    with contextlib.suppress(KeyError):
        return int(_status(task)["voluntary_ctxt_switches"])
    pytest.skip("this kernel does not count context switches")
