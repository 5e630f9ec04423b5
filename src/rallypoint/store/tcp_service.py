"""What each request of torch's TCPStore protocol does to a store, and what is replied.

What an operation means, and who waits for it, is the affair of `store.values`; here both get their wire format. A connection is
known by its number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rallypoint.store import tcp_protocol as wire
from rallypoint.store.values import StoreFull, Values, Waiters

TYPE_CHECKING = False
if TYPE_CHECKING:
    Reply = bytes | list[bytes]  # in pieces where joining them would copy much
    Operation = Callable[[int, list[bytes], int], Reply]

__all__ = ["TcpService"]

NOTHING = b""
WAIT_BYTES = 400  # what it takes that one waits for one key, roughly
JOINED_BYTES = 64 * 1024  # what is copied without a thought
_pack_i64, _pack_u64 = wire.I64.pack, wire.U64.pack


class TcpService:
    """One store for any number of connections. `tell` says something to one of them that is not the one being served.

    NotANumber, StoreFull and ProtocolError end the connection whose request caused them.
    """

    def __init__(self, values: Values, tell: Callable[[int, bytes], None]) -> None:
        self._values = values
        self._waiters = Waiters()
        self._awaited = self._waiters.by_key  # most of what changes is awaited by nobody
        self._tell = tell
        # From the operation to what does it. Each takes the connection, the byte strings and the number of the request.
        self.operations: dict[int, Operation] = {
            wire.VALIDATE: self._refuse_greeting,
            wire.SET: self._set,
            wire.COMPARE_SET: self._compare_set,
            wire.GET: self._get,
            wire.ADD: self._add,
            wire.CHECK: self._check,
            wire.WAIT: self._wait,
            wire.GETNUMKEYS: self._count_keys,
            wire.DELETE_KEY: self._delete,
            wire.APPEND: self._append,
            wire.MULTI_GET: self._get_many,
            wire.MULTI_SET: self._set_many,
            wire.CANCEL_WAIT: self._cancel_wait,
            wire.PING: self._ping,
            wire.QUEUE_PUSH: self._push,
            wire.QUEUE_POP: self._pop,
            wire.QUEUE_LEN: self._queue_length,
            wire.LIST_KEYS: self._list_keys,
            wire.BARRIER: self._barrier,
        }

    def leave(self, who: int) -> None:
        """That connection has ended, and waits for nothing any more."""
        self._waiters.forget(who)

    def _release(self, waiters: Iterable[int]) -> None:
        for who in waiters:
            self._tell(who, wire.STOP_WAITING)

    # --- values ------------------------------------------------------------------------------------------------------------

    def _set(self, who: int, strings: list[bytes], _: int) -> Reply:
        key, value = strings
        self._values.set(key, value)
        if key in self._awaited:
            self._release(self._waiters.changed(key))
        return NOTHING

    def _set_many(self, who: int, strings: list[bytes], _: int) -> Reply:
        for place in range(0, len(strings), 2):
            self._set(who, strings[place : place + 2], _)
        return NOTHING

    def _append(self, who: int, strings: list[bytes], _: int) -> Reply:
        key, more = strings
        self._values.append(key, more)
        self._release(self._waiters.changed(key))
        return NOTHING

    def _compare_set(self, who: int, strings: list[bytes], _: int) -> Reply:
        key, expected, desired = strings
        value, is_written = self._values.compare_set(key, expected, desired)
        if is_written:
            self._release(self._waiters.changed(key))
        return wire.packed(value)

    def _add(self, who: int, strings: list[bytes], amount: int) -> Reply:
        (key,) = strings
        count = self._values.add(key, amount)
        if key in self._awaited:
            self._release(self._waiters.changed(key))
        return _pack_i64(count)

    def _get(self, who: int, strings: list[bytes], _: int) -> Reply:
        """Clients wait for a key before they ask for it; one that has gone since is empty."""
        return wire.packed(self._values.values.get(strings[0], b""))

    def _get_many(self, who: int, strings: list[bytes], _: int) -> Reply:
        values = self._values.values
        return _all_packed([values.get(key, b"") for key in strings])

    def _delete(self, who: int, strings: list[bytes], _: int) -> Reply:
        return _pack_i64(self._values.delete(strings[0]))

    def _count_keys(self, who: int, strings: list[bytes], _: int) -> Reply:
        return _pack_i64(len(self._values.values))

    def _list_keys(self, who: int, strings: list[bytes], _: int) -> Reply:
        keys = list(self._values.values)
        packed = _all_packed(keys)
        return [_pack_i64(len(keys)), *packed] if isinstance(packed, list) else _pack_i64(len(keys)) + packed

    # --- waiting -----------------------------------------------------------------------------------------------------------

    def _check(self, who: int, strings: list[bytes], _: int) -> Reply:
        return wire.NOT_READY if self._values.missing(strings) else wire.READY

    def _wait(self, who: int, strings: list[bytes], _: int) -> Reply:
        missing = self._values.missing(strings)
        if not missing:
            return wire.STOP_WAITING
        self._let_wait(who, missing)
        return NOTHING

    def _let_wait(self, who: int, keys: list[bytes]) -> None:
        limit_bytes = self._values.limit_bytes
        if self._values.held_bytes + (self._waiters.pairs + len(keys)) * WAIT_BYTES > limit_bytes:
            raise StoreFull(limit_bytes)
        self._waiters.add(who, keys)

    def _cancel_wait(self, who: int, strings: list[bytes], _: int) -> Reply:
        self._waiters.forget(who)
        return wire.WAIT_CANCELED

    def _barrier(self, who: int, strings: list[bytes], world_size: int) -> Reply:
        """The key counts who has come; only the last one's coming is told."""
        (key,) = strings
        if self._values.add(key, 1) < world_size:
            self._let_wait(who, strings)
            return NOTHING
        self._release(self._waiters.changed(key))
        return wire.STOP_WAITING

    def _refuse_greeting(self, who: int, strings: list[bytes], _: int) -> Reply:
        raise wire.ProtocolError("it greeted twice")

    def _ping(self, who: int, strings: list[bytes], number: int) -> Reply:
        return wire.U32.pack(number)

    # --- queues ------------------------------------------------------------------------------------------------------------

    def _push(self, who: int, strings: list[bytes], _: int) -> Reply:
        key, value = strings
        self._values.push(key, value)
        self._release(self._waiters.pushed(key))
        return NOTHING

    def _pop(self, who: int, strings: list[bytes], _: int) -> Reply:
        length = self._values.queue_length(strings[0])
        first = self._values.pop(strings[0])
        return _pack_i64(length) if first is None else _pack_i64(length) + wire.packed(first)

    def _queue_length(self, who: int, strings: list[bytes], _: int) -> Reply:
        return _pack_i64(self._values.queue_length(strings[0]))


def _all_packed(strings: list[bytes]) -> Reply:
    """Byte strings, each behind its length; in pieces if they are large: the same one may be asked for many times at once."""
    if sum(map(len, strings)) <= JOINED_BYTES:
        return b"".join([_pack_u64(len(one)) + one for one in strings])
    return [piece for one in strings for piece in (_pack_u64(len(one)), one)]
