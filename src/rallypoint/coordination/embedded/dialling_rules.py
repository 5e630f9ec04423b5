"""When the addresses of a store's name are dialled, and in which order: a race, so that no address makes the others wait.

A name may stand for several addresses, of two families, and one that drops every packet looks for long like one that is merely
far away. So the next address is dialled a moment after the last, or at once when one fails, and whoever welcomes us first is
taken. What has not connected goes on beside the others for as long as a slow network needs; since the kernel repeats an
unanswered SYN ever more rarely, a new one is sent every second, so that a network that mends is noticed soon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    Place = TypeVar("Place")

__all__ = ["advice", "interleave", "next_dial_at"]

STAGGER_S = 0.25  # between two addresses
REPEAT_S = 1.0  # between two rounds over all of them, while none has connected
MOST_UNDER_WAY = 16


def interleave(addresses: Sequence[tuple[int, Place]]) -> list[tuple[int, Place]]:
    """The same, families in turn; the family that comes first stays first, and so does each address in its family."""
    families: dict[int, list[tuple[int, Place]]] = {}
    for address in addresses:
        families.setdefault(address[0], []).append(address)
    longest = max(map(len, families.values()), default=0)
    return [members[turn] for turn in range(longest) for members in families.values() if turn < len(members)]


def next_dial_at(
    *, untried: int, under_way: int, is_connected: bool, last_began_at: float, last_failed_at: float, pause_s: float
) -> float:
    """When the next address is dialled; infinite: not before something has become of those that are under way.

    `untried` are left in this round; `is_connected` says whether somebody has taken a call, if not welcomed us; `pause_s` is kept
    after a round in which all have failed.
    """
    if not under_way and not untried:
        return last_failed_at + pause_s
    if under_way >= MOST_UNDER_WAY:
        return math.inf
    if untried:
        return -math.inf if not under_way or last_failed_at >= last_began_at else last_began_at + STAGGER_S
    return math.inf if is_connected else last_began_at + REPEAT_S


def advice(host: str, port: int, *, is_name: bool, is_known: bool, is_refused: bool, is_connected: bool) -> str:
    """What a user may look at, whose node has not found its store for a moment."""
    if not is_known:
        return f"check the spelling of {host}, and on this machine DNS and /etc/hosts"
    if is_connected:
        return f"something takes connections there without greeting us: another program may have port {port}"
    if not is_refused:
        return f"{host} may be down, or a firewall may drop what is sent to port {port}"
    if not is_name:
        return f"nobody listens there yet: is the agent on {host} started?"
    return (
        f"nobody listens there yet: is the agent on {host} started? If it is, its own /etc/hosts may say that {host} is"
        " 127.0.1.1; then use its address as the endpoint"
    )
