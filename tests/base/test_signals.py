"""A signal that another thread got ends a call of the main thread all the same."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from tests.pace import is_under

from rallypoint.base.signals import inbox
from rallypoint.errors import SignalException


def test_p20_a_signal_that_the_kernel_gives_to_another_thread_ends_a_blocking_call() -> None:
    """That is also what it looks like when it comes in the instant before the call blocks."""
    lock, is_over = threading.Lock(), threading.Event()
    lock.acquire()

    def send_to_itself() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        is_over.wait(20)

    other = threading.Thread(target=send_to_itself)
    began = time.monotonic()

    def block() -> None:
        with inbox.interrupting():
            other.start()
            lock.acquire(timeout=10)

    with inbox.watch("SIGUSR1"):
        with pytest.raises(SignalException) as caught:
            block()
        assert inbox.received == 1
    is_over.set()
    other.join()
    assert caught.value.sigval is signal.SIGUSR1
    assert is_under(time.monotonic() - began, 10)


def test_a_signal_that_was_handled_is_not_sent_again() -> None:
    seen = []

    def clean_up_slowly() -> None:
        with inbox.interrupting():
            try:
                signal.raise_signal(signal.SIGUSR1)
            finally:
                threading.Event().wait(0.3)  # longer than a nudge
                seen.append(inbox.received)

    with inbox.watch("SIGUSR1"):
        with pytest.raises(SignalException):
            clean_up_slowly()
        assert inbox.received == 1
    assert seen == [1]


def test_whoever_had_a_wakeup_descriptor_has_it_again() -> None:
    with inbox.watch("SIGUSR1"):
        before = signal.set_wakeup_fd(-1)
        with inbox.interrupting():
            pass
        assert signal.set_wakeup_fd(before) == -1


# --- the wakeup descriptor ---------------------------------------------------------------------------------------------------


def raise_in_other_thread(*numbers: signal.Signals) -> None:
    """As if the kernel had picked a thread that is not the main one."""

    def send() -> None:
        for number in numbers:
            signal.pthread_kill(threading.get_ident(), number)

    other = threading.Thread(target=send)
    other.start()
    other.join()


def test_M1_a_signal_of_another_thread_is_there_before_python_has_handled_it() -> None:
    """M1: what counts is the byte in the pipe; two signals are two, in their order."""
    with inbox.watch("SIGUSR1,SIGUSR2"):
        raise_in_other_thread(signal.SIGUSR2, signal.SIGUSR1)
        assert inbox.collect() == [signal.SIGUSR2, signal.SIGUSR1]
        assert inbox.received == 2
        assert inbox.take() is signal.SIGUSR2
        assert inbox.take() is signal.SIGUSR1
        assert inbox.take() is None


def test_M1_signals_that_are_not_ours_go_to_the_wakeup_descriptor_of_before() -> None:
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    old = signal.signal(signal.SIGUSR2, lambda *_: None)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        with inbox.watch("SIGUSR1"):
            raise_in_other_thread(signal.SIGUSR2, signal.SIGUSR1)
            assert inbox.take() is signal.SIGUSR1
        assert os.read(read, 16) == bytes([signal.SIGUSR2])
        raise_in_other_thread(signal.SIGUSR2)
        assert os.read(read, 16) == bytes([signal.SIGUSR2])
    finally:
        assert signal.set_wakeup_fd(before) == write
        signal.signal(signal.SIGUSR2, old)
        os.close(read)
        os.close(write)


def test_M1_whoever_takes_the_wakeup_descriptor_from_us_takes_no_signal() -> None:
    with inbox.watch("SIGUSR1"):
        ours = signal.set_wakeup_fd(-1)
        signal.raise_signal(signal.SIGUSR1)
        assert signal.set_wakeup_fd(ours) == -1
        assert inbox.take() is signal.SIGUSR1
        assert inbox.received == 1


def test_a_signal_that_nobody_took_is_forgotten_with_the_last_watcher() -> None:
    """A second one, say, while the first one's end of the workers was under way: it concerns nobody who comes later."""
    with inbox.watch("SIGUSR1"):
        for _ in range(3):
            signal.raise_signal(signal.SIGUSR1)
        assert inbox.take() is signal.SIGUSR1
    assert inbox.take() is None


def test_other_threads_do_not_take_the_main_threads_signals() -> None:
    taken: list[object] = []
    with inbox.watch("SIGUSR1"):
        signal.raise_signal(signal.SIGUSR1)
        other = threading.Thread(target=lambda: taken.extend((inbox.fileno(), inbox.collect(), inbox.take())))
        other.start()
        other.join()
        assert taken == [None, [], None]
        assert inbox.take() is signal.SIGUSR1
