"""What the steps of the script are run and recorded with: what came out of each, in words that are the same for both kinds of
stores, however differently their exceptions are called.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

HOST = "127.0.0.1"
TIMEOUT_S = 40.0
LONGEST_S = 30  # a process of a step lives no longer
MODULES = {"ours": "rallypoint.store.tcp_store", "torch": "torch.distributed"}

# By the name of the exception's class, or of a base of it; the first that fits.
MEANINGS = {
    "QueueEmptyError": "empty",
    "StoreNetworkError": "network",
    "DistNetworkError": "network",
    "StoreTimeoutError": "timeout",
    "StoreError": "store error",
    "DistStoreError": "store error",
    "TypeError": "TypeError",
    "ValueError": "ValueError",
}
TORCHS_TIMEOUTS = ("timeout after", "Timed out after")  # which have no class of their own there
CALLED_WRONGLY = ("TypeError", "ValueError")  # all else is a RuntimeError, which is what callers catch


class Failure(NamedTuple):
    """An exception with this meaning; after so many seconds, if they are named, and never before."""

    meaning: str
    after_s: float | None = None
    slack_s: float = 1.5  # on a busy machine

    def told(self, waited_s: float) -> str:
        """The time in words: that of the expectation where it was kept."""
        if self.after_s is None:
            return ""
        is_kept = self.after_s <= waited_s <= self.after_s + self.slack_s
        return f" after {self.after_s:g} s" if is_kept else f" after {waited_s:.4f} s"


class Difference(NamedTuple):
    """What torch's makes of a step, and why ours does not do the same on purpose."""

    side: str  # which of the two ends makes it: the client or the server
    torchs: object
    why: str


def meaning_of(error: Exception) -> str:
    classes = {one.__name__ for one in type(error).__mro__}
    meaning = next((MEANINGS[name] for name in MEANINGS if name in classes), f"{type(error).__name__}: {error}")
    if meaning not in CALLED_WRONGLY and not isinstance(error, RuntimeError):
        return f"{meaning}, but it is no RuntimeError"
    return "timeout" if meaning == "store error" and any(words in str(error) for words in TORCHS_TIMEOUTS) else meaning


def outcome_of(expected: object, work: Callable[[], object]) -> str:
    """What `work` gives or raises, in words."""
    failure = expected if isinstance(expected, Failure) else Failure("")
    begun_at = time.monotonic()
    try:
        return repr(work())
    except Exception as error:  # each of them is an outcome
        return meaning_of(error) + failure.told(time.monotonic() - begun_at)


def in_words(expected: object) -> str:
    return expected.meaning + expected.told(expected.after_s or 0.0) if isinstance(expected, Failure) else repr(expected)


class Run:
    """One of the four ways: clients of one kind at the server of one kind. `records` has name, outcome and expectation."""

    def __init__(self, client: str, server: str, port: Callable[[], int], differences: Mapping[str, Difference]) -> None:
        self.store_class = store_class(client)
        self.port = port()  # the server may start while the client is loaded
        self.records: dict[str, tuple[str, str]] = {}
        self._kinds = {"client": client, "server": server}
        self._differences = differences

    def store(self, timeout_s: float = TIMEOUT_S, host: str = HOST, port: int | None = None, **options: Any) -> Any:
        """A store by a new connection."""
        timeout, port = timedelta(seconds=timeout_s), self.port if port is None else port
        return self.store_class(host, port, **{"is_master": False, "timeout": timeout, "wait_for_workers": False, **options})

    def step(self, name: str, expected: object, function: Callable[..., object], *arguments: object) -> None:
        """Call it, and record what comes of it."""
        expected = self._expected(name, expected)
        self._record(name, outcome_of(expected, lambda: function(*arguments)), expected)

    def steps_at_once(self, steps: Mapping[str, tuple[object, Callable[[], object]]]) -> None:
        """The same for several, by name: what is expected and what to do, each in a process of its own."""
        expected = {name: self._expected(name, wanted) for name, (wanted, _) in steps.items()}
        outcomes = in_processes([(expected[name], work) for name, (_, work) in steps.items()])
        for name, outcome in zip(steps, outcomes, strict=True):
            self._record(name, outcome, expected[name])

    def _expected(self, name: str, ours: object) -> object:
        difference = self._differences.get(name)
        return difference.torchs if difference and self._kinds[difference.side] == "torch" else ours

    def _record(self, name: str, outcome: str, expected: object) -> None:
        assert name not in self.records, f"two steps are called {name!r}"
        self.records[name] = (outcome, in_words(expected))


def store_class(kind: str) -> Any:
    return importlib.import_module(MODULES[kind]).TCPStore


def open_as_many_files_as_allowed() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def in_processes(works: Sequence[tuple[object, Callable[[], object]]]) -> list[str]:
    """The outcome of each of these, with what is expected, in a process of its own, all at once."""
    begun = [_begin(expected, work) for expected, work in works]
    return [_end(pid, outcomes) for pid, outcomes in begun]


def _begin(expected: object, work: Callable[[], object]) -> tuple[int, int]:
    outcomes, outcome = os.pipe()
    pid = fork(lambda: os.write(outcome, outcome_of(expected, work).encode()))
    os.close(outcome)
    return pid, outcomes


def _end(pid: int, outcomes: int) -> str:
    with open(outcomes, encoding="utf-8") as told:
        outcome = told.read()
    os.waitpid(pid, 0)
    return outcome or "its process has died"


def fork(work: Callable[[], object]) -> int:
    """Do it in a new process, and in no other way leave a trace there; the caller waits for it."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.alarm(LONGEST_S)
        work()
    finally:
        os._exit(0)
