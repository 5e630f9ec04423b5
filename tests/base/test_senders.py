"""Who has sent a signal is known, whichever thread it came in, and what the signal does is as it was."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time

import pytest

from rallypoint.base import senders
from rallypoint.base.senders import Sender, describe
from rallypoint.base.signals import inbox

here = pytest.mark.skipif(platform.machine() != "x86_64", reason="senders are known on x86-64 alone")


def other_process(text: str) -> int:
    """One that runs this and ends; its number."""
    other = subprocess.Popen([sys.executable, "-S", "-c", f"import os\n{text}"])
    assert other.wait() == 0
    return other.pid


def raise_in_other_thread(number: int) -> None:
    other = threading.Thread(target=lambda: signal.pthread_kill(threading.get_ident(), number))
    other.start()
    other.join()


@here
def test_each_signal_has_its_sender() -> None:
    """M1: from other processes, from ourselves, and where another thread got it; two are two, in their order."""
    with inbox.watch("SIGUSR1,SIGUSR2"):
        inbox.learn_senders()
        raise_in_other_thread(signal.SIGUSR2)
        first = other_process(f"os.kill({os.getpid()}, {int(signal.SIGUSR1)})")
        second = other_process(f"os.kill({os.getpid()}, {int(signal.SIGUSR1)})")
        seen = []
        while (number := inbox.take()) is not None:
            seen.append((number, inbox.sender))
        assert inbox.received == 3
    uid = os.getuid()
    assert seen == [
        (signal.SIGUSR2, Sender(os.getpid(), uid, False)),
        (signal.SIGUSR1, Sender(first, uid, False)),
        (signal.SIGUSR1, Sender(second, uid, False)),
    ]


@here
def test_the_signal_that_ends_a_wait_tells_its_sender() -> None:
    with inbox.watch("SIGUSR1"):
        inbox.learn_senders()
        pid = other_process(f"os.kill({os.getpid()}, {int(signal.SIGUSR1)})")
        with pytest.raises(Exception, match="received SIGUSR1") as caught:
            inbox.raise_pending()
    assert caught.value.sender.pid == pid
    assert caught.value.sender.origin == f" from process {pid}"


def test_nothing_is_known_of_what_came_before_anybody_asked() -> None:
    with inbox.watch("SIGUSR1"):
        signal.raise_signal(signal.SIGUSR1)
        inbox.learn_senders()
        assert (inbox.take(), inbox.sender) == (signal.SIGUSR1, None)


@here
def test_more_signals_than_there_is_room_for_are_all_received() -> None:
    """Only who has sent the oldest is not known any more."""
    with inbox.watch("SIGUSR1"):
        inbox.learn_senders()
        for _ in range(200):
            signal.raise_signal(signal.SIGUSR1)
        seen = []
        while inbox.take() is not None:
            seen.append(inbox.sender)
    assert len(seen) == 200
    assert sum(one is not None for one in seen) == 64


@here
def test_whoever_watches_next_hears_nothing_of_what_was_left() -> None:
    for _ in range(2):
        with inbox.watch("SIGUSR1"):
            inbox.learn_senders()
            assert (inbox.take(), inbox.sender) == (None, None)
            signal.raise_signal(signal.SIGUSR1)


def test_handlers_of_before_are_there_again() -> None:
    calls: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda number, _: calls.append(number))
    try:
        with inbox.watch("SIGUSR1,SIGUSR2"):
            inbox.learn_senders()
        signal.raise_signal(signal.SIGUSR1)
        assert calls == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


@here
def test_a_fork_and_a_new_program_begin_without_it() -> None:
    """Both end of the signal, as they would without it."""
    with inbox.watch("SIGUSR1"):
        inbox.learn_senders()
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.write(write, b"!")
            time.sleep(60)
            os._exit(0)
        os.read(read, 1)
        os.close(read)
        os.close(write)
        program = subprocess.Popen(["sleep", "60"])
        os.kill(child, signal.SIGUSR1)
        assert os.waitpid(child, 0)[1] == signal.SIGUSR1
        program.send_signal(signal.SIGUSR1)
        assert program.wait() == -signal.SIGUSR1
        assert inbox.take() is None


@pytest.mark.parametrize("machine", ["aarch64", "riscv64"])
def test_where_it_cannot_be_known_signals_come_all_the_same(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr(senders, "_MACHINE", machine)
    with inbox.watch("SIGUSR1"):
        inbox.learn_senders()
        signal.raise_signal(signal.SIGUSR1)
        assert (inbox.take(), inbox.sender) == (signal.SIGUSR1, None)


@here
def test_a_host_that_allows_no_code_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError("not here")

    monkeypatch.setattr(senders, "_notes", None)
    monkeypatch.setattr(senders._Library, "map_code", refuse)
    with inbox.watch("SIGUSR1"):
        inbox.learn_senders()
        signal.raise_signal(signal.SIGUSR1)
        assert (inbox.take(), inbox.sender) == (signal.SIGUSR1, None)


def test_what_is_told_of_a_sender() -> None:
    uid = os.getuid()
    with open(f"/proc/{os.getppid()}/comm") as file:
        name = file.read().strip()
    parent = Sender(os.getppid(), uid, False)
    assert describe("SIGTERM", parent) == f"SIGTERM came from process {os.getppid()} ({name})"
    assert describe("SIGTERM", parent.replace(uid=uid + 7)).endswith(f"({name}, of user {uid + 7})")
    gone = Sender(other_process("pass"), uid, False)
    assert describe("SIGHUP", gone) == f"SIGHUP came from process {gone.pid} (which has ended since then)"
    outside = Sender(0, uid, False)
    assert describe("SIGTERM", outside) == "SIGTERM came from outside of this container, whose processes have no number here"
    for nobody in (None, Sender(os.getpid(), uid, False), Sender(0, 0, True)):  # ourselves; Ctrl-C at a terminal
        assert describe("SIGINT", nobody) == ""
    assert outside.origin == Sender(0, 0, True).origin == Sender(os.getpid(), uid, False).origin == ""
