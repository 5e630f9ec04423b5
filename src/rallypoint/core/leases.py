"""Who is alive: leases that run out unless they are renewed, on a clock that stands still while nobody looks at it.

A lease that is not renewed for its time to live is *due*. Nothing ends by itself: whoever keeps the leases calls `due` often,
ends what it names, and reads what has come in before it asks, so that a renewal which was already there counts.

If nobody looked for more than `AWAY_S`, the fault is ours and not the owners': the process was stopped, or starved. All leases
are then extended by as long as that was, before any becomes due. That is why their ends are kept in *lease time*, which is
``now`` less all such absences: to extend ten thousand leases is one addition. `look_at` lets only half of `AWAY_S` pass, so
that whoever sleeps until then is not taken for absent.

The schedule is a sorted list in which a renewed lease keeps its old place until that has come. So a renewal is free, and a
lease is moved once in its time to live.
"""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["AWAY_S", "LOOK_EVERY_S", "Leases"]

AWAY_S = 0.5  # who does not look for longer than that was away
LOOK_EVERY_S = AWAY_S / 2  # often enough that a loop which is a little late was not away


class _Lease:
    """`ends_at` and `scheduled_at` are in lease time; the place in the schedule is never later than the end."""

    __slots__ = ("ends_at", "keys", "scheduled_at", "ttl_s")

    def __init__(self, ttl_s: float, ends_at: float) -> None:
        self.ttl_s = ttl_s
        self.ends_at = self.scheduled_at = ends_at
        self.keys: set[str] = set()


class Leases:
    """All leases of a store by their numbers, with the keys that are bound to each."""

    def __init__(self) -> None:
        self._leases: dict[int, _Lease] = {}
        self._schedule: list[tuple[float, int]] = []
        self._granted = 0
        self._looked_at: float | None = None
        self._away_s = 0.0

    def __contains__(self, number: int) -> bool:
        return number in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, ttl_s: float, now: float) -> int:
        """A new lease; the numbers are 1, 2, 3 and so on, and none is used twice."""
        if not ttl_s > 0:
            raise ValueError(f"a lease must live for a time, not for {ttl_s!r} s")
        self._granted += 1
        lease = self._leases[self._granted] = _Lease(ttl_s, self._lease_time(now) + ttl_s)
        insort(self._schedule, (lease.scheduled_at, self._granted))
        return self._granted

    def take_up(self, number: int, ttl_s: float) -> None:
        """A lease that was granted elsewhere, and whose time is kept there: `due` is not asked about it."""
        self._granted = max(self._granted, number)
        lease = self._leases[number] = _Lease(ttl_s, ttl_s)
        insort(self._schedule, (lease.scheduled_at, number))

    def renew(self, number: int, now: float) -> bool:
        """The owner was heard of: its lease runs from now on. False if the lease has ended."""
        time = self._lease_time(now)
        if (lease := self._leases.get(number)) is None:
            return False
        lease.ends_at = time + lease.ttl_s
        if lease.ends_at < lease.scheduled_at:  # an absence that is noticed sets lease time back a little
            self._schedule_at(number, lease)
        return True

    def end(self, number: int) -> list[str]:
        """Forget the lease; the keys that were bound to it, sorted."""
        lease = self._leases.pop(number, None)
        return sorted(lease.keys) if lease is not None else []

    def due(self, now: float) -> list[int]:
        """The leases that are over, in the order in which they ran out; they are to be ended now."""
        self._lease_time(now)
        self._looked_at = now
        found: list[int] = []
        while self._schedule and self._schedule[0][0] + self._away_s <= now:
            at, number = self._schedule.pop(0)
            lease = self._leases.get(number)
            if lease is None or lease.scheduled_at != at:
                continue  # it has ended, or has another place
            if lease.ends_at > at:
                self._schedule_at(number, lease)
            else:
                found.append(number)
        return found

    def look_at(self) -> float | None:
        """When to call `due` at the latest; None while there are no leases."""
        if not self._leases or self._looked_at is None:
            return None
        return min(self._schedule[0][0] + self._away_s, self._looked_at + LOOK_EVERY_S)

    def bind(self, key: str, number: int) -> None:
        if number:
            self._leases[number].keys.add(key)

    def unbind(self, key: str, number: int) -> None:
        if (lease := self._leases.get(number)) is not None:
            lease.keys.discard(key)

    def bound_keys(self) -> dict[str, int]:
        """Which lease each bound key has."""
        return {key: number for number, lease in self._leases.items() for key in lease.keys}

    def check(self) -> None:
        """Raise ValueError if a lease has no place in the schedule, or one after its end."""
        places = set(self._schedule)
        if self._schedule != sorted(places):
            raise ValueError("the leases' schedule is not sorted, or names a place twice")
        for number, lease in self._leases.items():
            if (lease.scheduled_at, number) not in places or lease.scheduled_at > lease.ends_at:
                raise ValueError(f"lease {number} ends at {lease.ends_at}, and nobody would look at it then")

    def _schedule_at(self, number: int, lease: _Lease) -> None:
        """A place that the lease once had, and has again, is still there."""
        lease.scheduled_at = lease.ends_at
        place = (lease.ends_at, number)
        index = bisect_left(self._schedule, place)
        if self._schedule[index : index + 1] != [place]:
            self._schedule.insert(index, place)

    def _lease_time(self, now: float) -> float:
        """`now` in lease time. An absence is noticed by whatever is called first after it, so that it is counted once."""
        if self._looked_at is None:
            self._looked_at = now
        elif (gap_s := now - self._looked_at) > AWAY_S:
            self._away_s += gap_s
            self._looked_at = now
        return now - self._away_s
