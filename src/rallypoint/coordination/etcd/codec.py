"""The words of `coordination.model` as etcd's JSON gateway speaks them, for the keys under one prefix.

Keys and values are base64, 64-bit numbers are text, and whatever is zero, false or empty is left out. Keys are text, and no
text in UTF-8 has the byte 255: so all keys that begin with some text lie before that text with this byte behind it, and what
begins with prefix and 255 is out of every reader's sight. There the engine keeps one key for each lease, bound to it, by which
watchers tell why a key has gone (`threads.events_of`).
"""

from __future__ import annotations

import json
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64

from rallypoint.base.json_text import from_json
from rallypoint.base.records import Value
from rallypoint.coordination.model import Compare, Delete, EndLease, Get, Item, Operation, Outcome, Put, Snapshot, Transaction

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    Fields = dict[str, Any]

__all__ = [
    "OPERATIONS", "Change", "Malformed", "Words", "counts", "encode", "fields_of", "flag", "leases", "number", "revision_of",
]  # fmt: skip

OPERATIONS = 128  # in each list of a transaction, that of its comparisons too
REQUEST_BYTES = 3 * 512 * 1024
OPERATION_BYTES = 32  # what an operation takes besides its key and its value
NUMBER_DIGITS = 20
AFTER_ALL_TEXT = b"\xff"
LEASE_KEYS = b"\xfflease/"


class Malformed(Exception):
    """An answer that is not etcd's."""


class Change(Value):
    """What a watch tells: a new item, or that a key has gone; `lease` is what that was bound to, None if nobody knows."""

    revision: int
    key: str
    item: Item | None
    lease: int | None = 0


def encode(message: Fields) -> bytes:
    return json.dumps(message, separators=(",", ":"), check_circular=False).encode("ascii")


def fields_of(body: bytes) -> Fields:
    """An answer; what a stream says stands one level deeper."""
    try:
        answer = from_json(body)
    except ValueError:
        raise Malformed("an answer that is not JSON") from None
    if type(answer) is not dict:
        raise Malformed("an answer that is no object")
    return _dict(answer, "result") if "result" in answer else answer


def number(fields: Fields, name: str) -> int:
    value = fields.get(name, "0")
    if type(value) is not str or len(value) > NUMBER_DIGITS or not (value.isascii() and value.isdecimal()):
        raise Malformed(f"something else where the number {name} was due")
    return int(value)


def flag(fields: Fields, name: str) -> bool:
    return fields.get(name) is True


def revision_of(fields: Fields) -> int:
    """Of the store, when it answered."""
    return number(_dict(fields, "header"), "revision")


def counts(answer: Fields) -> list[int]:
    """How many keys each reading of a transaction has found."""
    return [number(_dict(one, "response_range"), "count") for one in _dicts(answer, "responses")]


def leases(answer: Fields) -> list[int]:
    """To what the keys are bound that a reading has found."""
    return [number(kv, "lease") for kv in _dicts(answer, "kvs")]


def _dict(fields: Fields, name: str) -> Fields:
    value = fields.get(name, {})
    if type(value) is not dict:
        raise Malformed(f"something else where {name} was due")
    return value


def _dicts(fields: Fields, name: str) -> list[Fields]:
    value = fields.get(name, [])
    if type(value) is not list or not all(type(one) is dict for one in value):
        raise Malformed(f"something else where a list of {name} was due")
    return value


def _bytes(fields: Fields, name: str) -> bytes:
    try:
        return a2b_base64(fields.get(name, ""))
    except (Base64Error, TypeError, ValueError):
        raise Malformed(f"something else where the bytes of {name} were due") from None


def _base64(data: bytes) -> str:
    return b2a_base64(data, newline=False).decode("ascii")


class Words:
    """The dialect of the keys under one prefix, which nobody above sees."""

    def __init__(self, prefix: str) -> None:
        if not prefix:
            raise ValueError("the keys of a job in etcd need a prefix")
        self._root = prefix.encode()

    # --- questions ---------------------------------------------------------------------------------------------------------

    def transaction(self, transaction: Transaction) -> Fields:
        """ValueError if it is larger than etcd takes. Leases cannot be ended in a transaction of etcd: that comes after it."""
        lists = (transaction.compares, transaction.then, transaction.otherwise)
        if max(map(len, lists)) > OPERATIONS:
            raise ValueError(f"a transaction of more than {OPERATIONS} comparisons or operations, which is as many as etcd takes")
        size = sum(self._size(one) for one in (*transaction.compares, *transaction.then, *transaction.otherwise))
        if size > REQUEST_BYTES:
            raise ValueError(f"a transaction of {size} bytes; etcd takes {REQUEST_BYTES}")
        return {
            "compare": [self._compare(compare) for compare in transaction.compares],
            "success": [self._operation(operation) for operation in transaction.then if not isinstance(operation, EndLease)],
            "failure": [self._operation(operation) for operation in transaction.otherwise if not isinstance(operation, EndLease)],
        }

    def presence(self) -> Fields:
        """Asks for next to nothing, but as one who may read here."""
        return {**self.reading(""), "count_only": True}

    def past(self, revision: int) -> Fields:
        """Asks whether that revision is remembered."""
        return {**self.reading(""), "count_only": True, "revision": str(revision)}

    def watching(self, prefix: str, from_revision: int) -> Fields:
        """From the oldest there is on, if from 0: etcd would take that for now."""
        begin = str(max(1, from_revision))
        return {"create_request": {**self.reading(prefix), "start_revision": begin, "prev_kv": True, "progress_notify": True}}

    def were_bound(self, leases: Iterable[tuple[int, int]]) -> Fields:
        """Asks, for each lease, whether its own key was there at that revision."""
        asked = [{"key": self.lease_key(lease), "revision": str(revision), "count_only": True} for lease, revision in leases]
        return {"success": [{"request_range": one} for one in asked]}

    def lease_key(self, lease: int) -> str:
        """The key, hidden from readers, that is bound to this lease."""
        return _base64(self._root + LEASE_KEYS + f"{lease:x}".encode())

    def reading(self, prefix: str) -> Fields:
        """All keys under the prefix."""
        first = self._root + prefix.encode()
        return {"key": _base64(first), "range_end": _base64(first + AFTER_ALL_TEXT)}

    def looking_for(self, least: str) -> Fields:
        """The first key under the prefix that is not before this one, without its value."""
        return {**self.reading(""), "key": self._key(least), "limit": "1", "keys_only": True}

    def _key(self, key: str) -> str:
        return _base64(self._root + key.encode())

    def _size(self, one: Compare | Operation) -> int:
        if isinstance(one, EndLease):
            return 0
        value_bytes = len(one.value) if isinstance(one, Put) else 0
        return OPERATION_BYTES + len(self._root) + len(one.key.encode()) + value_bytes

    def _compare(self, compare: Compare) -> Fields:
        target = f"{compare.target}_revision"
        return {"key": self._key(compare.key), "target": compare.target.upper(), "result": "EQUAL", target: str(compare.revision)}

    def _operation(self, operation: Put | Delete | Get) -> Fields:
        match operation:
            case Put(key, value, lease):
                return {"request_put": {"key": self._key(key), "value": _base64(value), "lease": str(lease)}}
            case Delete(key, is_prefix):
                return {"request_delete_range": self.reading(key) if is_prefix else {"key": self._key(key)}}
            case Get(key):
                return {"request_range": {"key": self._key(key)}}

    # --- answers -----------------------------------------------------------------------------------------------------------

    def outcome(self, answer: Fields) -> Outcome:
        found = [_dict(one, "response_range") for one in _dicts(answer, "responses") if "response_range" in one]
        items = [self._items(one) for one in found]
        return Outcome(flag(answer, "succeeded"), revision_of(answer), tuple(one[0] if one else None for one in items))

    def snapshot(self, answer: Fields) -> Snapshot:
        return Snapshot(revision_of(answer), tuple(self._items(answer)))

    def found(self, answer: Fields) -> str | None:
        return next(map(self._text, _dicts(answer, "kvs")), None)

    def changes(self, answer: Fields) -> list[Change]:
        return [self._change(event) for event in _dicts(answer, "events")]

    def _items(self, answer: Fields) -> list[Item]:
        return [self._item(kv) for kv in _dicts(answer, "kvs")]

    def _item(self, kv: Fields) -> Item:
        created, changed = number(kv, "create_revision"), number(kv, "mod_revision")
        return Item(self._text(kv), _bytes(kv, "value"), created, changed, number(kv, "lease"))

    def _text(self, kv: Fields) -> str:
        key = _bytes(kv, "key")
        if not key.startswith(self._root):
            raise Malformed("a key that nobody asked for")
        return key[len(self._root) :].decode(errors="replace")

    def _change(self, event: Fields) -> Change:
        kv = _dict(event, "kv")
        revision = number(kv, "mod_revision")
        if event.get("type") != "DELETE":
            return Change(revision, self._text(kv), self._item(kv))
        return Change(revision, self._text(kv), None, number(_dict(event, "prev_kv"), "lease") if "prev_kv" in event else None)
