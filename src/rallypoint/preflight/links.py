"""The ways between this node and a few others of its job: with whom they are measured, and what they say of this node. Pure.

Each node whose network is checked leaves a *card* in the job's store: where it can be called, and the key for that. There are
`SLOTS` places for cards, however many nodes there are. A newcomer takes one that is empty, else any, and calls on a few of those
whose cards it finds. So what a check costs a node, and the store, does not depend on how many nodes there are.

Each node judges itself alone, by the ways that it has measured:

    none                         fit: there is nobody to measure with
    one, and it is bad           unfit, unless this node was there first: nothing tells the two apart
    several, more than half bad  unfit: what these have in common is this node
    else                         fit; whoever is at the other end of a bad one is told, and looks at itself

A node that is first finds nobody, and one way says little. So whoever has measured fewer than two looks again when somebody calls
whom it does not know yet.

The ring goes over those who are well: each adds its numbers to what it gets and passes them on, the last to the first, and the
sum comes back the same way. All know what each has to get, so whoever gets anything else can name the way that it came.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

from rallypoint.base.json_text import clip, from_json, read_fields, read_integer, read_text
from rallypoint.base.records import Value
from rallypoint.base.text import listed, many, rate_text
from rallypoint.coordination.model import Item
from rallypoint.preflight.reach import MOST_OFF_S
from rallypoint.preflight.rules import ALL_REDUCE, CLOCKS, NETWORK, Finding

__all__ = [
    "SLOTS", "Break", "Card", "Link", "bad_ones", "choose_slot", "decode_card", "encode_card", "is_decided", "is_out",
    "judge_clocks", "judge_links", "judge_ring", "numbers_from", "numbers_of", "pack", "rate_of", "sum_until",
    "unpack", "wants_more",
]  # fmt: skip

SLOTS = 16
ENOUGH, MOST = 2, 4  # partners: as many good ways are enough, and no more are measured than that
NUMBERS = 4096
_KEY_DIGITS = 64
_HOST_BYTES_MAX, _NAME_BYTES_MAX = 255, 255
_ADVICE = (
    "measure it by hand, with `rallypoint doctor --listen PORT` there and `rallypoint doctor --endpoint HOST:PORT` here; see"
    " `ethtool DEVICE` and `ip -s link` for the speed and errors of the interface, and the firewall of both"
)


# --- cards -----------------------------------------------------------------------------------------------------------------


class Card(Value):
    """Where a node can be called, as it says itself; `id` is that of its record, `key` is drawn once for each agent."""

    id: str
    name: str
    host: str
    port: int
    key: str


def encode_card(card: Card) -> bytes:
    return json.dumps(card.replace(name=clip(card.name, _NAME_BYTES_MAX)).__dict__).encode()


def decode_card(value: object) -> Card:
    """From what stands in the store, or was sent; ValueError names what is wrong with it."""
    return Card(**read_fields(from_json(value) if isinstance(value, bytes) else value, _READERS))


def _read_port(value: object) -> int:
    port = read_integer(value)
    if not 0 < port < 1 << 16:
        raise ValueError("must be a port")
    return port


def _read_key(value: object) -> str:
    text = read_text(_KEY_DIGITS, value)
    if len(bytes.fromhex(text)) * 2 != _KEY_DIGITS:
        raise ValueError(f"must be {_KEY_DIGITS} hexadecimal digits")
    return text


_READERS = {
    "id": lambda value: read_text(_NAME_BYTES_MAX, value),
    "name": lambda value: read_text(_NAME_BYTES_MAX, value),
    "host": lambda value: read_text(_HOST_BYTES_MAX, value),
    "port": _read_port,
    "key": _read_key,
}


def choose_slot(found: Sequence[Item | None], key: str, chance: float) -> int:
    """Where to put our card, of what stands in the slots: where it stood, else where nobody's does, else anywhere; by chance, of
    several, because others choose at the same moment.
    """
    own = [slot for slot, item in enumerate(found) if item is not None and f'"{key}"'.encode() in item.value]
    empty = [slot for slot, item in enumerate(found) if item is None]
    slots = own[:1] or empty or list(range(len(found)))
    return slots[int(chance * len(slots))]


# --- ways ------------------------------------------------------------------------------------------------------------------


class Link(Value):
    """What was seen of the way to another node: rates in bits per second, times in seconds; `error` says why there are none."""

    card: Card
    was_first: bool = False  # the other, with its card
    error: str = ""
    there: float = 0.0
    back: float = 0.0
    trip_s: float = 0.0
    off_s: float = 0.0  # by which our clock is ahead of theirs
    within_s: float = 0.0


def rate_of(moved: Sequence[tuple[float, int]]) -> float:
    """In bits per second, of moments and how many bytes had come by then: of all of it or of its second half, as a connection
    begins slowly. What has come at the first moment took a time that is not known.
    """
    if len(moved) < 2 or moved[-1][0] <= moved[0][0]:
        return 0.0
    (began, first), (ended, last) = moved[0], moved[-1]
    half_at, half = max(one for one in moved if one[0] <= (began + ended) / 2)
    return 8 * max((last - first) / (ended - began), (last - half) / (ended - half_at))


def _is_bad(link: Link, least: int) -> bool:
    return bool(link.error) or min(link.there, link.back) < least


def wants_more(links: Sequence[Link], least: int) -> bool:
    """Whether another way is to be measured."""
    return len(links) < MOST and sum(not _is_bad(one, least) for one in links) < ENOUGH


def is_decided(links: Sequence[Link]) -> bool:
    """Whether no more can be known as soon as somebody else comes."""
    return len(links) > 1


def bad_ones(links: Sequence[Link], least: int) -> list[Link]:
    return [one for one in links if _is_bad(one, least)]


def is_out(links: Sequence[Link], least: int) -> bool:
    """Whether this node is to blame for what was seen, or must be taken for it."""
    bad = bad_ones(links, least)
    return len(bad) * 2 > len(links) if is_decided(links) else any(one.was_first for one in bad)


def judge_links(links: Sequence[Link], least: int) -> Finding:
    if not links:
        return Finding(NETWORK, "unknown", "there is no other node yet to measure the way to")
    bad = bad_ones(links, least)
    good = [one for one in links if one not in bad]
    what = "; ".join([_told(one, least) for one in bad] + [_told(one, least) for one in good])
    if not bad:
        return Finding(NETWORK, "ok", what)
    if len(links) == 1:
        first = bad[0].card.name if is_out(links, least) else "this node"
        what += f"; with no third node to compare, {first}, which was there first, is believed"
    return Finding(NETWORK, "bad" if is_out(links, least) else "unknown", what, _ADVICE)


def _told(link: Link, least: int) -> str:
    if link.error:
        return f"{link.card.name}: {link.error}"
    rates = f"{rate_text(link.there)} there, {rate_text(link.back)} back"
    if _is_bad(link, least):
        return f"{link.card.name}: {rates}, less than {rate_text(least)}"
    return f"{link.card.name}: {rates}, {link.trip_s * 1000:.2f} ms"


def judge_clocks(links: Sequence[Link]) -> Finding | None:
    """How far ours is from theirs; it keeps nobody from anything."""
    told = [one for one in links if not one.error]
    off = [one for one in told if abs(one.off_s) - one.within_s > MOST_OFF_S]
    if not told:
        return None
    if not off:
        most = max(abs(one.off_s) for one in told)
        return Finding(CLOCKS, "ok", f"at most {most:.3f} s from {_names(told)}")
    each = [f"{abs(one.off_s):.1f} s {'ahead of' if one.off_s > 0 else 'behind'} {one.card.name}'s" for one in off]
    advice = "rallypoint compares no clocks; for logs and certificates see `chronyc tracking` on both"
    return Finding(CLOCKS, "unknown", f"this node's is {', '.join(each)}", advice)


def _names(links: Sequence[Link]) -> str:
    return listed([f"{one.card.name}'s" for one in links])


# --- ring ------------------------------------------------------------------------------------------------------------------

_MASK = (1 << 32) - 1


class Break(Value):
    """The sum came no further than on the way to the node at this place of the ring, and why."""

    place: int
    what: str


def numbers_of(seed: int, place: int) -> list[int]:
    """What the node at this place adds; so small that no sum over a ring overflows."""
    start = seed + place * 2654435761
    return [(start + at * 40503) * 2246822519 & _MASK for at in range(NUMBERS)]


def sum_until(seed: int, place: int) -> list[int]:
    """What the node at this place has to get."""
    return [sum(column) for column in zip(*(numbers_of(seed, one) for one in range(place)), strict=True)]


def pack(numbers: Sequence[int]) -> bytes:
    return struct.pack(f">{NUMBERS}Q", *numbers)


def unpack(block: bytes) -> list[int]:
    """ValueError: it is no block of numbers."""
    try:
        return list(struct.unpack(f">{NUMBERS}Q", block))
    except struct.error:
        raise ValueError(f"a block of {len(block)} bytes, where {8 * NUMBERS} were due") from None


def numbers_from(block: bytes, seed: int, place: int) -> list[int] | None:
    """What has come to this place, if it is what had to come."""
    found = unpack(block)
    return found if found == sum_until(seed, place) else None


def judge_ring(names: Sequence[str], broken: Break | None) -> Finding:
    """`names` are in the order of the ring, ours first."""
    if broken is None:
        return Finding(ALL_REDUCE, "ok", f"{many(len(names), 'node')} got the same sum of {NUMBERS} numbers")
    ring = [*names, names[0]]
    between = f"between {ring[broken.place - 1]} and {ring[broken.place]}"
    return Finding(
        ALL_REDUCE, "unknown", f"{between}: {broken.what}", "check the network between these two; see `rallypoint doctor`"
    )
