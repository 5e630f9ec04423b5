"""How the members of a group wait for each other and exchange what each knows, through any store.

Every function works on a `Store` and on torch's stores alike, and uses the keys that torch's agents use, so that both can stand
at one barrier. A barrier that is not complete in time says who is missing. For that each rank leaves its name before it
waits: nobody has to ask the others, which is more than one could rely on when something has gone wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rallypoint.base import defaults
from rallypoint.store.interface import StoreLike, check_in, get_timeout_s, set_timeout_s

__all__ = ["barrier", "get_all", "store_timeout", "synchronize"]

MAX_MISSING_NAMED = 16

# How stores say that they waited in vain. Torch's raise RuntimeError or, those that are written in Python, LookupError.
STORE_FAILURES = (RuntimeError, LookupError, TimeoutError)


@contextmanager
def store_timeout(store: StoreLike, timeout: float) -> Iterator[None]:
    """Within the block `store` waits for `timeout` seconds; afterwards, in any case, as long as before."""
    timeout_before_s = get_timeout_s(store)
    set_timeout_s(store, timeout)
    try:
        yield
    finally:
        set_timeout_s(store, timeout_before_s)


def get_all(store: StoreLike, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """The values of ``<prefix>0`` to ``<prefix><world_size - 1>``; rank 0 stays until all have read them.

    Rank 0 may be the host of the store, which must not go while others are reading.

    >>> from rallypoint import HashStore
    >>> from rallypoint.store import get_all
    >>> store = HashStore()
    >>> store.set("host0", "n1")
    >>> get_all(store, rank=0, prefix="host", world_size=1)
    [b'n1']
    """
    values = store.multi_get([f"{prefix}{member}" for member in range(world_size)])
    all_have_read = check_in(store, f"{prefix}/finished", world_size)
    if rank == 0:
        store.wait([all_have_read])
    return values


def synchronize(
    store: StoreLike,
    data: bytes | str,
    rank: int,
    world_size: int,
    key_prefix: str,
    timeout: float = defaults.BARRIER_TIMEOUT_S,
) -> list[bytes]:
    """Give `data` to all, and get everybody's, ordered by rank.

    >>> from rallypoint import HashStore
    >>> from rallypoint.store import synchronize
    >>> synchronize(HashStore(), "n1", rank=0, world_size=1, key_prefix="hosts/")
    [b'n1']
    """
    with store_timeout(store, timeout):
        store.set(f"{key_prefix}{rank}", data)
        return get_all(store, rank, key_prefix, world_size)


def barrier(
    store: StoreLike,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = defaults.BARRIER_TIMEOUT_S,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = defaults.TRACE_TIMEOUT_S,
) -> None:
    """Wait until `world_size` members are here.

    If that takes longer than `barrier_timeout`, the error says how many came and, where members gave their `rank`, which did
    not: as numbers, or as `rank_tracing_decoder` names them. Finding out takes at most about `trace_timeout` seconds.

    >>> from rallypoint import HashStore
    >>> from rallypoint.store import barrier
    >>> barrier(HashStore(), world_size=1, key_prefix="start", rank=0)
    """
    if rank is None and rank_tracing_decoder is not None:
        raise ValueError("barrier: rank_tracing_decoder was given without rank, and cannot name anybody")
    with store_timeout(store, barrier_timeout):
        if rank is not None:
            store.set(_name_key(key_prefix, rank), "1")
        all_are_here = check_in(store, key_prefix, world_size)
        try:
            store.wait([all_are_here])
        except STORE_FAILURES as error:
            decode = None if rank is None else rank_tracing_decoder or str
            who = _who_is_missing(store, world_size, key_prefix, decode, trace_timeout)
            if who is None:
                raise
            # The same type, for those who catch what their kind of store raises.
            raise type(error)(f"the barrier {key_prefix!r} was not complete within {barrier_timeout:g} s: {who}") from error


def _name_key(key_prefix: str, rank: int) -> str:
    return f"{key_prefix}/rank/{rank}"


def _who_is_missing(
    store: StoreLike, world_size: int, key_prefix: str, decode: Callable[[int], str] | None, trace_timeout: float
) -> str | None:
    """A clause for the error, or None where the store no longer answers; without `decode` it gives no names."""
    deadline = time.monotonic() + trace_timeout
    try:
        came = store.add(f"{key_prefix}/num_members", 0)
        can_tell = decode is not None and hasattr(store, "check")  # not every store of others can
        missing = _missing_ranks(store, world_size, key_prefix, deadline) if can_tell else []
    except STORE_FAILURES:
        return None
    clause = f"{came} of {world_size} came"
    # More missing than the count allows: some came without giving their rank, so that no name is certain.
    if decode is None or not missing or len(missing) > world_size - came:
        return clause
    names = [decode(member) for member in missing[:MAX_MISSING_NAMED]] + ["…"] * (len(missing) < world_size - came)
    return f"{clause}, missing_ranks=[{', '.join(names)}]"


def _missing_ranks(store: StoreLike, world_size: int, key_prefix: str, deadline: float) -> list[int]:
    """The ranks that left no name, found by halving: one missing among 4,096 takes 25 questions."""
    missing: list[int] = []
    suspects = [range(world_size)]
    while suspects and len(missing) < MAX_MISSING_NAMED and time.monotonic() < deadline:
        ranks = suspects.pop()
        if store.check([_name_key(key_prefix, member) for member in ranks]):
            continue
        if len(ranks) == 1:
            missing.append(ranks[0])
        else:
            middle = len(ranks) // 2
            suspects += [ranks[middle:], ranks[:middle]]
    return missing
