"""How a job goes on in a store that was started anew: what its nodes remember takes the place of what the store has lost.

The embedded store ends with the agent that hosts it. Its members end their workers at their fence, and wait for the endpoint.
When the host is started again, its store is a new *incarnation*, which knows nothing. Each node that comes back writes its memory
with its record: the number of the last generation that it was told of, how many nodes that had, its own rank, and what was spent.
The newest of these memories is the job's past, whoever leads now.

What follows from a past:

    numbers     go on above it, so that no two generations of a job share one
    budgets     go on from it; that the host was lost is one membership change
    ranks       nodes that come back sit where they sat; who is new, the host too, fills the gaps
    waiting     as many nodes as there were then are waited for; if fewer come, the last call counts, from the latest arrival
    workers     none is started before all those of the past are surely gone

Why the last is so. Whoever runs workers of an old generation holds a licence that the old store has renewed, at its death at the
latest, and that is good for one fence. Two stores cannot listen at one address: whoever has read the new one knows that the old
one is dead. So one fence and a margin after the leader has read it for the first time, no such licence is left, neither of those
who have come back nor of those who have not; the wardens have seen to that, whatever is stuck in their agents.

What is guaranteed, then: once a node with a memory has written it, before a generation was formed in the new store or after,
nothing is formed in which workers could meet those of the old incarnation, a number is used again, or a budget is forgotten. No
leader can miss such a memory: forming is compared with the key that each of them changes.

What is not: where nobody who remembers has come before the first generation of the new store is formed, that is formed as in any
new job, for which nobody would want to wait. That takes the maximum of nodes, or the minimum and a last call that is shorter than
members need to come back, and all of them started anew. For one fence at most, workers of members that were cut off may run
beside it. And all of this holds for one machine at the endpoint: where its address moves to another while the old host lives on
out of reach, there are two stores, as there would be two jobs.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.protocol.generation import DRIFT, MARGIN_S, Past, Policy, Seated
from rallypoint.protocol.job_records import Memory
from rallypoint.protocol.restarts import Purse

__all__ = ["HOST", "newest", "past_of", "spent"]

HOST = "(the host of the coordination store)"  # as a lost node: nobody who comes back knows its name


def newest(memories: Mapping[str, Memory], known_number: int) -> tuple[str, ...]:
    """The ids of those who remember the last generation, if that is newer than what the store knows of."""
    number = max((memory.number for memory in memories.values()), default=0)
    return tuple(one for one, memory in memories.items() if memory.number == number) if number > known_number else ()


def past_of(memories: Mapping[str, Memory], known_number: int, read_at: float, policy: Policy) -> Past | None:
    """What `memories` tell, for a leader that has read the store first at `read_at` and found the generation `known_number`."""
    ids = newest(memories, known_number)
    if not ids:
        return None
    members = {one: Seated(memories[one].name, memories[one].group_rank) for one in ids if memories[one].group_rank >= 0}
    last = memories[ids[0]]
    return Past(last.number, last.nodes, members, read_at + policy.fence_s * DRIFT + MARGIN_S)


def spent(memories: Mapping[str, Memory], known_number: int, known: Purse) -> Purse:
    """What is spent by all accounts; the memories of one generation are alike, but for their ages."""
    for one in newest(memories, known_number):
        known = known.most(memories[one].purse)
    return known
