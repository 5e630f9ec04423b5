"""Helpers that torch keeps to itself by an underscore, and that programs and tests written for it import all the same.

Our own code uses none of them; each does what torch's does for those who call it.
"""

from __future__ import annotations

import random
import re
import signal
import threading
import time
import weakref

from rallypoint.base import environment
from rallypoint.errors import RankError
from rallypoint.failures.error_files import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import timedelta
    from typing import Any

__all__ = [
    "JSON",
    "GlobalRank",
    "PeriodicTimer",
    "default_signal",
    "delay",
    "kill_signal",
    "matches_machine_hostname",
    "parse_rendezvous_config",
    "run_function",
    "try_parse_port",
    "validate_full_rank",
]  # fmt: skip

JSON = dict
GlobalRank = int
_ASCII_DIGITS = re.compile(r"[0-9]+")


# --- of the rendezvous -----------------------------------------------------------------------------------------------------


def parse_rendezvous_config(config_str: str) -> dict[str, str]:
    """``key=value,key=value`` as a mapping, with values as they are."""
    config: dict[str, str] = {}
    for piece in config_str.strip().split(",") if config_str.strip() else ():
        key, _, value = (part.strip() for part in piece.partition("="))
        if not key:
            raise ValueError("The rendezvous configuration string must be in format <key1>=<value1>,...,<keyN>=<valueN>.")
        if not value:
            raise ValueError(f"The rendezvous configuration option {key!r} must have a value specified.")
        config[key] = value
    return config


def try_parse_port(port_str: str) -> int | None:
    return int(port_str) if _ASCII_DIGITS.fullmatch(port_str) else None


def matches_machine_hostname(host: str) -> bool:
    """Whether a name or an address is one of this machine's: those can be bound to."""
    import socket

    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except OSError:
        return False
    return any(_is_bindable(family, address) for family, _, _, _, address in found)


def _is_bindable(family: int, address: tuple[Any, ...]) -> bool:
    import socket

    if address[0] in ("0.0.0.0", "::"):
        return False
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            sock.bind(address)
        except OSError:
            return False
    return True


def delay(seconds: float | tuple[float, float]) -> None:
    """Sleep for this time, or for a random one between two."""
    length_s = random.uniform(*seconds) if isinstance(seconds, tuple) else seconds
    if length_s >= 0.01:  # less is not worth a sleep
        time.sleep(length_s)


class PeriodicTimer:
    """Calls a function in a thread of its own, again and again, until it is cancelled, or nobody has the timer any more."""

    def __init__(self, interval: timedelta, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._interval_s = interval.total_seconds()
        self._call = (function, args, kwargs)
        self._name: str | None = None
        self._thread: threading.Thread | None = None
        self._is_cancelled = threading.Event()
        self._finalizer: weakref.finalize[..., PeriodicTimer] | None = None

    @property
    def name(self) -> str | None:
        return self._name

    def set_name(self, name: str) -> None:
        """The name of the thread."""
        self._refuse_if_started()
        self._name = name

    def start(self) -> None:
        self._refuse_if_started()
        arguments = (self._interval_s, self._is_cancelled, *self._call)
        self._thread = threading.Thread(target=_call_periodically, args=arguments, name=self._name, daemon=True)
        self._finalizer = weakref.finalize(self, _end_thread, self._thread, self._is_cancelled)
        self._finalizer.atexit = False  # the thread does not keep the interpreter
        self._thread.start()

    def cancel(self) -> None:
        if self._finalizer is not None:
            self._finalizer()

    def _refuse_if_started(self) -> None:
        if self._thread is not None:
            raise RuntimeError("The timer has already started.")


def _call_periodically(
    interval_s: float, is_cancelled: threading.Event, function: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    while not is_cancelled.wait(interval_s):
        function(*args, **kwargs)


def _end_thread(thread: threading.Thread, is_cancelled: threading.Event) -> None:
    is_cancelled.set()
    if thread is not threading.current_thread():  # the function itself may cancel its timer
        thread.join()


# --- of processes ----------------------------------------------------------------------------------------------------------


def validate_full_rank(d: dict[int, Any], nprocs: int, what: str) -> None:
    """Refuse a mapping that does not name the local ranks 0..nprocs-1."""
    expected, actual = set(range(nprocs)), set(d)
    if actual != expected:
        raise RankError(f"{what}, local rank mapping mismatch, expected: {expected}, actual: {actual}")


def default_signal() -> signal.Signals:
    return signal.SIGTERM


def kill_signal() -> signal.Signals:
    return signal.SIGKILL


def run_function(
    local_rank: int,
    fn: Callable[..., Any],
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    stdout_redirects: dict[int, str],
    stderr_redirects: dict[int, str],
    ret_vals: dict[int, Any],
    queue_finished_reading_event: Any,
    numa_options: Any,  # noqa: ARG001  # this process is bound already, or not at all
) -> None:
    """Run one worker's function in this very process: its environment, its streams, its result in a queue, and leave together."""
    from contextlib import ExitStack

    from rallypoint.processes.redirects import redirect

    environment.write(envs[local_rank])
    redirects: Iterable[tuple[str, str]] = (("stdout", stdout_redirects[local_rank]), ("stderr", stderr_redirects[local_rank]))
    with ExitStack() as streams:
        for name, file in redirects:
            if file:
                streams.enter_context(redirect(name, file))
        ret_vals[local_rank].put(record(fn)(*args[local_rank]))
        queue_finished_reading_event.wait()
