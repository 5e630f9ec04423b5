"""What an engine's leases have to be: kept while their owner calls, and never over before it must think so."""

from __future__ import annotations

import math
import time

from rallypoint.coordination.engine import Coordination, LeaseLostError
from rallypoint.coordination.model import EndLease, Event, Put
from rallypoint.testing.driving import TIMEOUT_S, do, events_until, get, keys, put, raises, read, same, soon, wait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.testing.driving import Connect

__all__ = ["LeaseContract"]


def watching(client: Coordination) -> Coordination:
    client.watch("n/", read(client, "n/").revision + 1, soon())
    return client


def is_deleted(key: str, events: list[Event]) -> bool:
    return any(event.key == key and event.item is None for event in events)


def causes(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.key, event.cause) for event in events]


def wait_for_loss(client: Coordination) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not raises(LeaseLostError, client.take_events):
        assert time.monotonic() < deadline, "the owner is not told that its lease has ended"
        wait([client], deadline)


class LeaseContract:
    """Leases."""

    least_ttl_s = 1.0  # the shortest lease that the engine keeps to

    def test_a_silent_owner_is_taken_for_dead_but_not_before_it_must_think_so(self, connect: Connect) -> None:
        owner, other = connect(), watching(connect())
        lease = owner.grant(self.least_ttl_s, soon())
        do(owner, Put("n/a", b"1", lease), Put("n/b", b"2", lease), Put("n/free", b"3"))
        same([item.lease for item in read(other, "n/").items], [lease, lease, 0])
        valid_until = owner.valid_until()
        told = events_until(other, lambda events: is_deleted("n/b", events), self.least_ttl_s + TIMEOUT_S)
        assert time.monotonic() >= valid_until, "it was taken for dead while it was valid"
        same(causes(told[3:]), [("n/a", "expired"), ("n/b", "expired")])
        same(keys(read(other, "n/")), ["n/free"])
        wait_for_loss(owner)
        assert raises(LeaseLostError, put, owner, "n/a", b"", lease), "nothing can be bound to a lease that has ended"
        same(get(other, "n/a"), None)

    def test_after_a_loss_there_can_be_another_lease(self, connect: Connect) -> None:
        owner, other = connect(), watching(connect())
        put(owner, "n/a", b"", owner.grant(self.least_ttl_s, soon()))
        events_until(other, lambda events: is_deleted("n/a", events), self.least_ttl_s + TIMEOUT_S)
        wait_for_loss(owner)
        put(owner, "n/a", b"again", owner.grant(self.least_ttl_s, soon()))
        owner.take_events()
        assert owner.valid_until() > time.monotonic(), "a new lease is valid"

    def test_a_lease_is_kept_while_its_owner_calls_and_another_is_not(self, connect: Connect) -> None:
        alive, silent, other = connect(), connect(), watching(connect())
        put(silent, "n/silent", b"", silent.grant(self.least_ttl_s, soon()))
        put(alive, "n/alive", b"", alive.grant(self.least_ttl_s, soon()))
        until = time.monotonic() + 2.5 * self.least_ttl_s
        told = events_until(other, lambda _: time.monotonic() >= until, self.least_ttl_s + TIMEOUT_S, keep=[alive])
        same(causes(told[2:]), [("n/silent", "expired")])
        assert time.monotonic() < alive.valid_until(), "its keepalives were answered"
        same(keys(read(other, "n/")), ["n/alive"])

    def test_a_revoked_lease_takes_its_items_with_it_at_once(self, connect: Connect) -> None:
        owner, other, third = connect(), watching(connect()), connect()
        lease = owner.grant(30 * self.least_ttl_s, soon())
        do(owner, Put("n/a", b"", lease), Put("n/b", b"", lease))
        put(third, "n/c", b"", third.grant(30 * self.least_ttl_s, soon()))
        owner.revoke(soon())
        told = events_until(other, lambda events: is_deleted("n/b", events))
        same(causes(told[3:]), [("n/a", "deleted"), ("n/b", "deleted")])
        same(len({event.revision for event in told[3:]}), 1)
        same((owner.take_events(), keys(read(other, "n/"))), ([], ["n/c"]))
        assert raises(LeaseLostError, put, owner, "n/a", b"", lease), "nothing can be bound to a lease that was revoked"

    def test_a_put_decides_anew_to_what_an_item_is_bound(self, connect: Connect) -> None:
        owner = connect()
        lease = owner.grant(30 * self.least_ttl_s, soon())
        for key, leases in {"n/kept": [lease, lease], "n/bound": [0, lease], "n/freed": [lease, 0]}.items():
            for one in leases:
                put(owner, key, b"", one)
        owner.revoke(soon())
        same(keys(read(owner, "n/")), ["n/freed"])

    def test_the_lease_of_another_cannot_be_used(self, connect: Connect) -> None:
        owner, other = connect(), connect()
        lease = owner.grant(30 * self.least_ttl_s, soon())
        for foreign in (lease, lease + 1000):
            assert raises(LeaseLostError, put, other, "n/a", b"", foreign), "it is not its own lease"
        same(keys(read(other, "n/")), [])

    def test_a_client_says_when_it_is_to_be_called(self, connect: Connect) -> None:
        owner = connect()
        same(owner.valid_until(), math.inf)
        before = time.monotonic()
        owner.grant(30 * self.least_ttl_s, soon())
        assert before < owner.wake_at() < owner.valid_until(), "in time to keep the lease"
        assert owner.valid_until() <= time.monotonic() + 30 * self.least_ttl_s, "counted from when it asked"
        trouble = owner.connection()
        same((trouble.valid_until, trouble.unreachable_since, trouble.refused_since), (owner.valid_until(), None, None))
        owner.revoke(soon())
        same(owner.valid_until(), math.inf)

    def test_a_closed_connection_is_silence_and_nothing_more(self, connect: Connect) -> None:
        owner, other = connect(), watching(connect())
        put(owner, "n/a", b"", owner.grant(self.least_ttl_s, soon()))
        valid_until = owner.valid_until()
        owner.close()
        told = events_until(other, lambda events: is_deleted("n/a", events), self.least_ttl_s + TIMEOUT_S)
        assert time.monotonic() >= valid_until, "a reset may be seen by one side only: its owner may run"
        same(causes(told[1:]), [("n/a", "expired")])

    def test_a_lease_can_be_ended_by_another(self, connect: Connect) -> None:
        """Whoever did not stop in time gets no more keepalives answered."""
        owner, other = connect(), watching(connect())
        lease = owner.grant(3 * self.least_ttl_s, soon())
        do(owner, Put("n/a", b"", lease), Put("n/free", b""))
        do(other, EndLease(lease), Put("n/why", b"it was late"))
        told = events_until(other, lambda events: is_deleted("n/a", events) and "n/why" in [event.key for event in events])
        assert ("n/a", "expired") in causes(told), "as if it had run out"
        same(keys(read(other, "n/")), ["n/free", "n/why"])
        wait_for_loss(owner)
        assert raises(LeaseLostError, put, owner, "n/a", b"", lease), "nothing can be bound to it any more"
        do(other, EndLease(lease), Put("n/why", b"again"))
