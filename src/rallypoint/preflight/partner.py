"""Being there for other nodes that measure the way to this one: a port of this agent's, and what can be asked there.

One connection is for one of these, and whoever calls has proven that it knows the key that stands on our card:

    meet, card            → met, why we cannot call back; then as often as wanted: time → time, nanoseconds
    take; bulk            → took, rate, bytes, whether they were right; or busy
    give                  → go, and bulk; or busy
    sum, seed, place, places, path; numbers   → total, and numbers; or broken, place, why

Only one measurement of bulk goes on at a time, be it asked for here or by this node elsewhere: two would take each other's rate.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from rallypoint.base import report
from rallypoint.checkpoint.transfer import TransferError
from rallypoint.net.endpoint import address_of, hold_port
from rallypoint.net.service_thread import ServiceThread
from rallypoint.net.wake_fd import WakeFd
from rallypoint.preflight.links import Break, Card, decode_card, numbers_from, numbers_of, pack
from rallypoint.preflight.probe import ANSWER_S, NAME, Probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["KEY_BYTES", "Partner", "pass_on"]

KEY_BYTES = 32
MOST_GUESTS = 16  # at a time
MOST_PLACES = 8
GUEST_S = 20.0  # nothing that is asked here takes so long
END_S = 1.0


class Partner:
    """Serves from when it is made, and says who has called. OSError: this machine cannot listen at `host`."""

    def __init__(self, host: str, called: Callable[[Card], None] = lambda _: None) -> None:
        self.host, self.key = host, os.urandom(KEY_BYTES).hex()
        self._called = called
        self.floor = threading.Lock()  # who has it may measure
        self._guests: dict[Probe, float] = {}  # and since when
        self._lock = threading.Condition()
        self._listeners = [socket.socket(fileno=sock.detach()) for sock in hold_port(host, (0,))]
        for listener in self._listeners:
            listener.setblocking(False)  # who comes may have gone by then
        _, self.port = address_of(self._listeners[0])
        self._service = ServiceThread("partner", WakeFd(), self._serve, self._let_go)
        self._service.start()

    def close(self) -> None:
        self._service.stop(END_S)
        with self._lock:
            self._lock.wait_for(lambda: not self._guests, END_S)

    # --- who comes ---------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        poll = select.poll()
        for fd in (*(one.fileno() for one in self._listeners), self._service.wake_fd.fileno()):
            poll.register(fd, select.POLLIN)
        by_fd = {one.fileno(): one for one in self._listeners}
        while not self._service.is_ending:
            for fd, _ in poll.poll(1000 if self._guests else None):
                if fd in by_fd:
                    self._accept(by_fd[fd])
            self._end_those_who_stay()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:  # it has gone again, or there is no descriptor left: whoever waits is still there in a moment
            time.sleep(0.05)
            return
        with self._lock:
            if len(self._guests) >= MOST_GUESTS:
                sock.close()
                return
            guest = Probe(sock)
            self._guests[guest] = time.monotonic()
        threading.Thread(target=self._attend, args=(guest,), name="rallypoint-partner-guest", daemon=True).start()

    def _end_those_who_stay(self) -> None:
        now = time.monotonic()
        with self._lock:
            for guest, since in self._guests.items():
                if now - since > GUEST_S:
                    guest.abort()

    def _let_go(self) -> None:
        for listener in self._listeners:
            listener.close()
        with self._lock:
            for guest in self._guests:
                guest.abort()

    def _attend(self, guest: Probe) -> None:
        with closing(guest):
            try:
                guest.welcome(bytes.fromhex(self.key), NAME)
                guest.wait_up_to(ANSWER_S)
                self._do(guest, guest.hear())
            except (TransferError, OSError, ValueError) as error:  # ValueError: what it says is not what may be said
                report.debug(f"preflight: a connection has ended: {error}")
            finally:
                with self._lock:
                    del self._guests[guest]
                    self._lock.notify_all()

    def _do(self, guest: Probe, message: list[Any]) -> None:
        match message:
            case ["meet", card]:
                caller = decode_card(card)
                self._called(caller)
                guest.say("met", _why_not_reached(caller))
                while guest.hear() == ["time"]:
                    guest.say("time", time.time_ns())
            case ["take"] | ["give"] if not self.floor.acquire(blocking=False):
                guest.say("busy")
            case ["take"] | ["give"]:
                try:
                    _take(guest) if message == ["take"] else _give(guest)
                finally:
                    self.floor.release()
            case ["sum", int(seed), int(place), int(places), list(path)] if 0 < place <= places <= MOST_PLACES:
                _add(guest, seed, place, places, [decode_card(one) for one in path])
            case _:
                raise TransferError("it asks for what there is not")


def _why_not_reached(card: Card) -> str:
    """By us, if it is so: whoever can call us may not be there for calls."""
    try:
        Probe.to(card.host, card.port, card.key).close()
    except TransferError as error:
        return str(error)
    return ""


def _take(guest: Probe) -> None:
    guest.say("go")
    bulk = guest.drain()
    guest.say("took", bulk.rate, bulk.moved, bulk.is_right)
    guest.discard()


def _give(guest: Probe) -> None:
    guest.say("go")
    guest.pour()
    guest.discard()


# --- the ring --------------------------------------------------------------------------------------------------------------


def _add(guest: Probe, seed: int, place: int, places: int, path: Sequence[Card]) -> None:
    numbers = numbers_from(guest.receive(), seed, place)
    if numbers is None:
        guest.say("broken", place, "the numbers that arrive are not those that were sent")
        return
    result: list[int] | Break = numbers  # where the ring ends
    if path:
        own = numbers_of(seed, place)
        result = pass_on([a + b for a, b in zip(numbers, own, strict=True)], seed, place + 1, places, path)
    if isinstance(result, Break):
        guest.say("broken", result.place, result.what)
    else:
        guest.say("total")
        guest.send(pack(result))


def pass_on(numbers: Sequence[int], seed: int, place: int, places: int, path: Sequence[Card]) -> list[int] | Break:
    """Let the first of `path`, who is at this place, and those after it add theirs; the sum of all, or where it has got stuck."""
    card, *rest = path
    try:
        probe = Probe.to(card.host, card.port, card.key)
        with closing(probe):
            probe.wait_up_to(ANSWER_S * (1 + len(path)))
            probe.say("sum", seed, place, places, [one.__dict__ for one in rest])
            probe.send(pack(numbers))
            match probe.hear():
                case ["total"]:
                    total = numbers_from(probe.receive(), seed, places)
                    return Break(place, "the sum that comes back is not what it must be") if total is None else total
                case ["broken", int(at), str(what)] if place <= at <= places:
                    return Break(at, what[:200])
    except (TransferError, OSError, ValueError) as error:
        return Break(place, str(error)[:200])
    return Break(place, "it says what cannot be understood")
