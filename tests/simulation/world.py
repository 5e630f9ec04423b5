"""Virtual time: a heap of what happens next, one source of chance, and clocks that do not agree with each other.

Nothing here knows what is simulated. Everything that happens in a run follows from its seed: there is one thread, no real clock,
and one `random.Random`; `aside` is a second one, for what came to the simulator later and shall not change what older seeds mean.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from random import Random
from typing import TypeVar

__all__ = ["NEVER", "TRACED", "Clock", "Violation", "World"]

NEVER = float("inf")
TRACED = 1000
T = TypeVar("T")


class Violation(BaseException):
    """Something happened that must never happen; nothing that is tested may catch it."""


class Clock:
    """A machine's own clock: it began anywhere, and it goes a little too fast or too slow."""

    __slots__ = ("offset_s", "rate")

    def __init__(self, offset_s: float = 0.0, rate: float = 1.0) -> None:
        self.offset_s = offset_s
        self.rate = rate

    def read(self, now: float) -> float:
        return self.offset_s + now * self.rate

    def when(self, time: float) -> float:
        """The moment at which this clock shows `time`, or a microsecond later: a timer never goes off too early."""
        return (time - self.offset_s) / self.rate + 1e-6


class World:
    """Time, chance, and the record of what happened."""

    __slots__ = ("_heap", "_pushed", "aside", "is_over", "now", "random", "tally", "trace")

    def __init__(self, seed: int | str) -> None:
        self.now = 0.0
        self.is_over = False
        self.random = Random(seed).random
        self.aside = Random(f"{seed} aside")
        self.trace: deque[tuple[float, str, str, object]] = deque(maxlen=TRACED)
        self.tally: Counter[str] = Counter()
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._pushed = 0

    def at(self, time: float, act: Callable[..., None], *args: object) -> None:
        self._pushed += 1
        heappush(self._heap, (time, self._pushed, act, args))

    def after(self, delay_s: float, act: Callable[..., None], *args: object) -> None:
        self._pushed += 1
        heappush(self._heap, (self.now + delay_s, self._pushed, act, args))

    def run(self, until: float) -> None:
        """Let things happen until that time, or until somebody says that it is over."""
        heap = self._heap
        while heap and not self.is_over:
            time, _, act, args = heappop(heap)
            if time > until:
                return
            self.now = max(self.now, time)
            act(*args)

    # Chance.

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.random()

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def below(self, count: int) -> int:
        return int(self.random() * count)

    def choice(self, options: Sequence[T]) -> T:
        return options[int(self.random() * len(options))]

    def log_between(self, low: float, high: float) -> float:
        """As likely between 1 and 2 as between 10 and 20."""
        return low * (high / low) ** self.random()

    # The record.

    def note(self, who: str, what: str, detail: object = "") -> None:
        self.trace.append((self.now, who, what, detail))
