"""Looking up the addresses of a name without waiting for it: name servers may take for ever, and cannot be interrupted.

An address as such is known at once. A name is asked for in a thread of its own, whose answer rings a bell. A question that is not
answered is given up after a while and asked anew; its thread ends when the system lets it.
"""

from __future__ import annotations

import threading

from rallypoint.store.bell import Bell
from rallypoint.store.listening import address_as_such, look_up

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.store.listening import Address

__all__ = ["Lookup"]

GIVE_UP_S = 20.0  # longer than the system's own resolver asks two name servers twice


class Lookup:
    """The addresses of `host`: `ask`, and `take` what was answered; `fileno` is readable when there is an answer."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._lock = threading.Lock()
        self._bell = Bell()
        self._asked_at: float | None = None  # None: nothing is asked
        self._question = 0
        self._answer: list[Address] | OSError | None = None

    def fileno(self) -> int:
        return self._bell.fileno()

    @property
    def asked_at(self) -> float | None:
        """Since when an answer is waited for; None if none is."""
        return self._asked_at

    def ask(self, now: float) -> None:
        """Ask, unless that is under way."""
        if self._asked_at is not None and now < self._asked_at + GIVE_UP_S:
            return
        self._asked_at = now
        with self._lock:
            self._question += 1
            question = self._question
        if (address := address_as_such(self._host, self._port)) is not None:
            self._tell(question, [address])
        else:
            threading.Thread(target=self._look_up, args=(question,), name="rallypoint-lookup", daemon=True).start()

    def take(self) -> list[Address] | OSError | None:
        """The answer, once; None while there is none."""
        with self._lock:
            answer, self._answer = self._answer, None
            if answer is not None:
                self._asked_at = None
                self._bell.silence()
        return answer

    def close(self) -> None:
        """Whatever is still answered is not wanted any more."""
        with self._lock:
            self._question += 1
            self._bell.close()

    def _look_up(self, question: int) -> None:
        try:
            self._tell(question, look_up(self._host, self._port))
        except OSError as error:
            self._tell(question, error)
        except ValueError as error:  # a name that cannot be written down for a name server
            self._tell(question, OSError(0, str(error)))

    def _tell(self, question: int, answer: list[Address] | OSError) -> None:
        with self._lock:
            if question == self._question:
                self._answer = answer
                self._bell.ring()
