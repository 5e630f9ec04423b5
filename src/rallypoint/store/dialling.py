"""Dialling a store until it welcomes us: the addresses of its name race each other, as `core.dialling` says.

Until somebody has welcomed us every address is tried, and the name is looked up anew for each round. From then on there is one
store at one address, its *home*, which alone is dialled.
"""

from __future__ import annotations

import errno
import math
import random
import select
import socket
from collections.abc import Callable

from rallypoint.core.dialling import interleave, next_dial_at
from rallypoint.store.frames import FrameError
from rallypoint.store.handshake import ClientHandshake, HandshakeRefused
from rallypoint.store.link import Link, LinkBroken
from rallypoint.store.lookup import GIVE_UP_S, Lookup

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.store.listening import Address

    Dial = Callable[[Address], socket.socket]

__all__ = ["Dialler"]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
CONNECT_S = 10.0  # for round trips of seconds, and a SYN that is lost twice
HANDSHAKE_S = 15.0  # the same, and twice more there and back; from the dialling on
REFUSAL_STANDS_S = 2.0  # who refuses us may be a stranger at one of several addresses: the others have so long to welcome us
STALE_NAME_S = 1.0  # after which the addresses that a name had the last time are tried again, if it is not answered


class Dialler:
    """Calls that are under way, in `poll`. `pump` gives the one that was answered; then `hang_up_all` begins anew."""

    def __init__(
        self, host: str, port: int, make_handshake: Callable[[], ClientHandshake], dial: Dial, poll: select.epoll
    ) -> None:
        self.refused_since: float | None = None
        self._host = host
        self._make_handshake = make_handshake
        self._dial = dial
        self._poll = poll
        self._calls: dict[Link, Address] = {}
        self._untried: list[Address] = []  # in this round
        self._home: Address | None = None
        self._lookup: Lookup | None = Lookup(host, port)  # until there is a home
        self._poll.register(self._lookup.fileno(), select.EPOLLIN)
        self._known: list[Address] = []
        self._answer: list[Address] | OSError | None = None  # of the look-up, for the next round
        self._trouble = ""  # of the latest call that failed
        self._refusal: FrameError | HandshakeRefused | None = None
        self._refused_at = math.inf
        self._last_began_at = self._last_failed_at = -math.inf
        self._failures = 0
        self._pause_s = 0.0

    # --- how it stands -----------------------------------------------------------------------------------------------------

    @property
    def is_answered(self) -> bool:
        """Whether somebody has taken a call, without having welcomed us yet."""
        return any(link.is_connected for link in self._calls)

    @property
    def home(self) -> Address | None:
        """Where the store was found; None until then."""
        return self._home

    @property
    def is_known(self) -> bool:
        """Whether the name was ever answered with an address."""
        return self._home is not None or bool(self._known)

    @property
    def trouble(self) -> str:
        """Why nobody has welcomed us so far."""
        if self._trouble:
            return self._trouble
        if not self.is_known:
            return f"no name server has answered where {self._host} is"
        return "no answer yet, although it takes connections" if self.is_answered else "no connection yet"

    def wake_at(self) -> float:
        """When to `pump` although nothing comes."""
        dial_at = self._next_dial_at()
        if not self._untried and self._lookup is not None and self._lookup.asked_at is not None:  # its answer will wake us
            dial_at = max(dial_at, self._lookup.asked_at + (STALE_NAME_S if self._known else GIVE_UP_S))
        return min([dial_at, self._refused_at + REFUSAL_STANDS_S, *map(_patient_until, self._calls)])

    def _next_dial_at(self) -> float:
        return next_dial_at(
            untried=len(self._untried),
            under_way=len(self._calls),
            is_connected=self._refusal is not None or self.is_answered,
            last_began_at=self._last_began_at,
            last_failed_at=self._last_failed_at,
            pause_s=self._pause_s,
        )

    # --- at work -----------------------------------------------------------------------------------------------------------

    def pump(self, now: float) -> tuple[Link, list[bytes]] | None:
        """Do what can be done now; the link that has brought a welcome, and what came behind it. It is the caller's from now on.

        FrameError and HandshakeRefused: who answers will not have us, and there is nobody else to ask.
        """
        self._hear_lookup()
        self._dial_those_due(now)
        for link in list(self._calls):
            if link in self._calls and (bodies := self._listen(link, now)) is not None:
                self._home = self._calls.pop(link)
                self._end_race()
                return link, bodies
        self._raise_final_refusal(now)
        self._dial_those_due(now)
        return None

    def hang_up_all(self) -> None:
        for link in self._calls:
            link.close(self._poll)
        self._calls.clear()

    def start_anew(self, broken: LinkBroken, failures: int, now: float) -> None:
        """The link that was given out has broken, and so many did before it, each soon."""
        self._failures = failures
        self._note_failure(broken, now)

    def close(self) -> None:
        self.hang_up_all()
        lookup, self._lookup = self._lookup, None
        if lookup is not None:
            self._poll.unregister(lookup.fileno())
            lookup.close()

    def _end_race(self) -> None:
        self.close()
        self._untried.clear()
        self._trouble, self._refusal, self._refused_at, self.refused_since = "", None, math.inf, None
        self._last_began_at = self._last_failed_at = -math.inf

    def _listen(self, link: Link, now: float) -> list[bytes] | None:
        """What has come behind its welcome; None while there is no welcome."""
        try:
            bodies = link.pump()
            if link.welcome is None and now >= _patient_until(link):
                stage = "answer" if link.is_connected else "connection"
                raise LinkBroken(f"no {stage} within {_patient_until(link) - link.begun_at:g} s")
        except LinkBroken as broken:
            self._drop(link, broken, now)
        except (FrameError, HandshakeRefused) as refusal:
            if self._refusal is None:
                self._refusal, self._refused_at = refusal, now
            self._drop(link, LinkBroken(str(refusal)), now)
        else:
            link.watch(self._poll)
            if link.is_connected:
                self._note_answered(link)
            return bodies if link.welcome is not None else None
        return None

    def _note_answered(self, link: Link) -> None:
        """Whoever has been called twice needs one answer."""
        if self.refused_since is not None:
            self.refused_since, self._trouble = None, ""
        for other, address in list(self._calls.items()):
            if address == self._calls[link] and not other.is_connected:
                del self._calls[other]
                other.close(self._poll)

    def _drop(self, link: Link, broken: LinkBroken, now: float) -> None:
        del self._calls[link]
        link.close(self._poll)
        self._note_failure(broken, now)

    def _note_failure(self, broken: LinkBroken, now: float) -> None:
        self._trouble = str(broken)
        self.refused_since = (self.refused_since or now) if broken.number == errno.ECONNREFUSED else None
        self._last_failed_at = now
        if not self._calls and not self._untried:
            self._failures += 1
            self._pause_s = self._next_pause_s()

    def _next_pause_s(self) -> float:
        """Longer each time, and never the same for two nodes, so that those cut off together do not come back together."""
        if self._failures == 1 and self._home is not None:
            return 0.0
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 10)) * random.uniform(0.5, 1.0)

    def _raise_final_refusal(self, now: float) -> None:
        refusal = self._refusal
        if refusal is not None and (now >= self._refused_at + REFUSAL_STANDS_S or not (self._calls or self._untried)):
            self._refusal, self._refused_at = None, math.inf
            raise refusal

    # --- dialling ----------------------------------------------------------------------------------------------------------

    def _dial_those_due(self, now: float) -> None:
        while now >= self._next_dial_at() and (self._untried or self._begin_round(now)):
            address = self._untried.pop(0)
            try:
                link = Link(self._dial(address), self._make_handshake(), now)
            except OSError as error:  # the network is not there, and may come
                self._note_failure(LinkBroken((error.strerror or str(error)).lower(), error.errno or 0), now)
            else:
                self._last_began_at = now
                self._calls[link] = address
                link.watch(self._poll)

    def _begin_round(self, now: float) -> bool:
        """Whether there is anybody to dial: a name may not be answered yet, or be unknown still."""
        if self._home is not None:
            self._untried = [self._home]
            return True
        assert self._lookup is not None
        if self._answer is None:
            self._lookup.ask(now)
            self._hear_lookup()
        answer, self._answer = self._answer, None
        if isinstance(answer, OSError):
            self._note_failure(LinkBroken((answer.strerror or str(answer)).lower()), now)
            return False
        if answer is not None:
            self._trouble = self._trouble if self._known else ""
            self._known = answer
        elif now < (self._lookup.asked_at or now) + STALE_NAME_S:
            return False
        self._untried = interleave(self._known)
        return bool(self._untried)

    def _hear_lookup(self) -> None:
        if self._lookup is not None:
            self._answer = self._lookup.take() or self._answer


def _patient_until(link: Link) -> float:
    return link.begun_at + (HANDSHAKE_S if link.is_connected else CONNECT_S)
