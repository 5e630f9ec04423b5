"""What may hang hangs alone, in threads of its own; nothing is lost without being told."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.pace import is_under

from rallypoint.base import outbox, report
from rallypoint.base.outbox import Deputy, Outbox

DEADLINE_S = 20.0
PACKAGE = {**os.environ, "PYTHONPATH": str(Path(outbox.__file__).parents[2])}


class Destination:
    """Takes items as long as the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.taken: list[object] = []
        self.threads: set[int] = set()

    def __call__(self, item: object) -> None:
        assert self.gate.wait(DEADLINE_S)
        self.threads.add(threading.get_ident())
        self.taken.append(item)


@pytest.fixture
def destination() -> Iterator[Destination]:
    one = Destination()
    yield one
    one.gate.set()
    assert outbox.flush(DEADLINE_S)


def test_without_a_duty_it_is_done_on_the_spot(destination: Destination) -> None:
    destination.gate.set()
    Outbox(destination).put(1)
    assert destination.taken == [1]
    assert destination.threads == {threading.get_ident()}


def test_on_duty_nobody_waits_and_at_its_end_all_is_there(destination: Destination) -> None:
    box = Outbox(destination)
    with outbox.on_duty():
        with outbox.on_duty():
            for number in range(100):
                assert box.put(number)
        assert destination.taken == []
        assert outbox.is_busy()
        destination.gate.set()
    assert destination.taken == list(range(100))
    assert threading.get_ident() not in destination.threads
    assert not outbox.is_busy()


def test_a_destination_that_hangs_silences_no_other(destination: Destination) -> None:
    other = Destination()
    other.gate.set()
    with outbox.on_duty():
        Outbox(destination).put("stuck")
        healthy = Outbox(other)
        healthy.put("heard")
        assert healthy.flush(DEADLINE_S)
        assert other.taken == ["heard"]
        destination.gate.set()


def test_a_busy_destination_keeps_its_order_after_the_duty(destination: Destination) -> None:
    """Whoever comes after the duty does not overtake those who still wait, and does not wait for them."""
    box = Outbox(destination)
    outbox.begin_duty()
    box.put(1)
    outbox.end_duty(patience_s=0.0)
    box.put(2)
    assert destination.taken == []
    destination.gate.set()
    assert box.flush(DEADLINE_S)
    assert destination.taken == [1, 2]


def test_what_is_too_much_is_counted_and_told(destination: Destination) -> None:
    box = Outbox(destination, tell_loss=lambda count: f"{count} lost", most_items=3)
    with outbox.on_duty():
        box.put("first")
        while box.busy_s() == 0:  # until the thread has taken it out of the queue
            time.sleep(0.001)
        assert [box.put(number) for number in range(5)] == [True, True, True, False, False]
        destination.gate.set()
    assert destination.taken == ["first", 0, 1, 2, "2 lost"]


def test_a_destination_that_fails_is_tried_again() -> None:
    taken: list[int] = []

    def deliver(item: int) -> None:
        taken.append(item)
        raise RuntimeError("not this one")

    with outbox.on_duty():
        box = Outbox(deliver)
        for number in range(3):
            box.put(number)
    assert taken == [0, 1, 2]


def test_flushing_ends_when_it_is_interrupted(destination: Destination) -> None:
    with outbox.on_duty():
        box = Outbox(destination)
        box.put(1)
        began = time.monotonic()
        assert not outbox.flush(DEADLINE_S, lambda: True)
        assert not box.flush(0.0)
        assert is_under(time.monotonic() - began, DEADLINE_S / 2)
        destination.gate.set()


def test_a_fork_begins_with_nothing_to_deliver(destination: Destination) -> None:
    box = Outbox(destination)
    with outbox.on_duty():
        box.put("the parent's")
        pid = os.fork()
        if pid == 0:
            is_clean = not outbox.is_busy() and outbox.flush(0.0)
            destination.gate.set()
            box.put("its own")
            os._exit(0 if is_clean and destination.taken == ["its own"] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        destination.gate.set()
    assert destination.taken == ["the parent's"]


# --- work on files ---------------------------------------------------------------------------------------------------------


def test_a_deputy_gives_what_the_work_gives() -> None:
    assert Deputy().do(lambda: 7, DEADLINE_S) == 7
    with pytest.raises(KeyError, match="none"):
        Deputy().do(lambda: {}["none"], DEADLINE_S)


def test_a_deputy_that_is_away_takes_no_other_work() -> None:
    deputy, gate, late = Deputy(), threading.Event(), []
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        deputy.do(lambda: gate.wait(DEADLINE_S), 0.05, discard=late.append)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        deputy.do(lambda: 7, DEADLINE_S)
    assert is_under(time.monotonic() - began, DEADLINE_S / 2)
    gate.set()
    deadline = time.monotonic() + DEADLINE_S
    while not late and time.monotonic() < deadline:
        time.sleep(0.001)
    assert late == [True]
    while deputy._given_up and time.monotonic() < deadline:
        time.sleep(0.001)
    assert deputy.do(lambda: 7, DEADLINE_S) == 7


def test_a_deputy_is_left_when_something_else_comes() -> None:
    class Signal(Exception):
        pass

    def interrupt() -> None:
        raise Signal

    gate = threading.Event()
    with pytest.raises(Signal):
        Deputy().do(lambda: gate.wait(DEADLINE_S), DEADLINE_S, interrupt)
    gate.set()


# --- lines -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("plain, with umlauts: äöü 漢字", "plain, with umlauts: äöü 漢字"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("one\nrallyrun: two", "one\\nrallyrun: two"),
        ("back\r\b\x07space", "back\\r\\x08\\x07space"),
        ("\u202eright to left\u2028line", "\\u202eright to left\\u2028line"),
        ("\x9bC1\udcff", "\\x9bC1\\udcff"),
        ("a\ttab", "a\ttab"),
    ],
)
def test_m4_what_could_act_on_a_terminal_is_escaped(said: str, shown: str) -> None:
    """m4: host names, messages and stacks come from elsewhere; whatever they hold, a line stays a line."""
    lines: list[str] = []
    report.set_sink(lambda _, text: lines.append(text))
    try:
        for say in (report.debug, report.info, report.warn):
            say(said)
        report.error(f"first\n{said}")
    finally:
        report.set_sink(None)
    assert lines[:3] == [shown] * 3
    assert lines[3].split("\n")[1] == shown.split("\\n", maxsplit=1)[0]


def test_lines_of_other_threads_never_wait(destination: Destination) -> None:
    """They keep leases and serve the store, with or without an agent."""
    report.set_sink(lambda _, text: destination(text))
    try:
        thread = threading.Thread(target=report.warn, args=["the store has turned away somebody"])
        thread.start()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert destination.taken == []
        destination.gate.set()
        assert outbox.flush(DEADLINE_S)
        assert destination.taken == ["the store has turned away somebody"]
    finally:
        report.set_sink(None)


def test_a_held_thread_waits_for_more_and_is_not_busy(destination: Destination) -> None:
    destination.gate.set()
    box = Outbox(destination)
    box.hold()
    for number in range(3):
        box.put(number, may_wait=False)
        assert outbox.flush(DEADLINE_S)
        deadline = time.monotonic() + DEADLINE_S
        while outbox.is_busy() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not outbox.is_busy()
    assert len(destination.threads) == 1
    box.release()
    while box._is_running:
        time.sleep(0.001)
    assert destination.taken == [0, 1, 2]


def test_logging_is_imported_before_a_line_is_delivered(script: Any) -> None:
    """The thread that delivers imports nothing: whoever asks at the same time, or forks, would find half a module."""
    program = script("""
        import sys
        from rallypoint.base import outbox, report

        before = "logging" in sys.modules
        with outbox.on_duty():
            report.info("nobody has asked for this")
            assert before or "logging" not in sys.modules
            report._outbox.put = lambda *_, **__: print("logging" in sys.modules)
            report.warn("this is shown to everybody")
        """)
    ended = subprocess.run([sys.executable, "-S", program], env=PACKAGE, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "True\n"
