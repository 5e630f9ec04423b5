"""Who has begun which collective, as NCCL tells it: of what ranks have recorded, one function names the rank that never came.

Two sources know it. Flight Recorder, in torch, keeps the last collectives of each process group that a rank has called, with
their numbers and states. NCCL's RAS service counts the collectives of each communicator, for all processes of the job at once.

A rank waits for those that have begun fewer collectives of a group than itself. To blame are those for whom others wait, and who
wait for nobody: a rank that is late in one group may be so because it waits for another rank in another group. Where all wait,
they wait for each other. Where nobody is late, but one calls something else than the others at the same place, it is that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rallypoint.base.json_text import clip
from rallypoint.base.records import Value
from rallypoint.base.text import plural, ranges, runs, who_of

__all__ = ["Absence", "Group", "Taken", "absence", "groups_of_dumps", "groups_of_ras", "told"]

GROUPS_MAX = 64  # that a rank is in; and communicators of a job
ENTRIES_MAX = 100_000
RANKS_MAX = 100_000
GROUPS_TOLD = 8
_NAME_BYTES_MAX = 80
_NCCL = "nccl:"


class Taken(Value):
    """How far one rank has come in one group."""

    count: int  # collectives that it has begun
    what: str = ""  # the last of them
    state: str = ""  # of that one; empty where it is not known
    is_done: bool = False


class Group(Value):
    """Ranks that communicate, and how far each of them has come, as far as that is known."""

    name: str
    taken: Mapping[int, Taken]


class Absence(Value):
    """The ranks for which the others wait."""

    ranks: tuple[int, ...]
    why: str


def absence(groups: Sequence[Group]) -> Absence | None:
    """Who never came to where the others wait; None if nothing tells."""
    awaited: set[int] = set()
    waiting: set[int] = set()
    for group in groups:
        pending = [taken.count for taken in group.taken.values() if not taken.is_done]
        most, least = max(pending, default=0), min((taken.count for taken in group.taken.values()), default=0)
        awaited.update(rank for rank, taken in group.taken.items() if taken.count < most)
        waiting.update(rank for rank, taken in group.taken.items() if taken.count > least and not taken.is_done)
    if not awaited:
        return _other_call(groups)
    roots = awaited - waiting
    if not roots:
        return Absence(tuple(sorted(awaited)), "they wait for each other, each in another collective (NCCL)")
    group, count = _where(groups, roots)
    ahead = [rank for rank, taken in group.taken.items() if taken.count >= count and not taken.is_done]
    what = next((taken.what for taken in group.taken.values() if taken.count == count and taken.what), "")
    call = f" ({what})" if what else ""
    wait = plural(len(ahead), "waits", "wait")
    why = f"never came to collective {count}{call} of {group.name}, in which {_who(ahead)} {wait} (NCCL)"
    return Absence(tuple(sorted(roots)), why)


def _where(groups: Iterable[Group], roots: set[int]) -> tuple[Group, int]:
    """The group in which the most others wait for these, and the first collective to which they have not come."""
    found = []
    for group in groups:
        least = min((taken.count for rank, taken in group.taken.items() if rank in roots), default=None)
        if least is not None:
            ahead = sum(taken.count > least and not taken.is_done for taken in group.taken.values())
            found.append((ahead, group.name, least, group))
    _, _, least, group = max(found, key=lambda one: one[:3])
    return group, least + 1


def _other_call(groups: Sequence[Group]) -> Absence | None:
    """Those that call something else than the most of their group at the same place, where none of these is over."""
    for group in groups:
        calls: dict[str, list[int]] = {}
        for rank, taken in group.taken.items():
            if taken.is_done or not taken.what:
                break
            calls.setdefault(taken.what, []).append(rank)
        else:
            most = max(calls, key=lambda what: (len(calls[what]), what), default="")
            few = sorted(rank for what, ranks in calls.items() if what != most for rank in ranks)
            if few and 2 * len(few) < len(group.taken):
                count = group.taken[few[0]].count
                why = f"calls {group.taken[few[0]].what} as collective {count} of {group.name}"
                call = plural(len(calls[most]), "calls", "call")
                return Absence(tuple(few), f"{why}, where {_who(calls[most])} {call} {most} (NCCL)")
    return None


def told(groups: Sequence[Group]) -> list[str]:
    """A line for each group and each place in it, of those groups whose ranks are not all at the same one."""
    lines: list[str] = []
    uneven = [group for group in groups if len({(one.count, one.what, one.state) for one in group.taken.values()}) > 1]
    for group in sorted(uneven, key=lambda one: (-len(one.taken), one.name))[:GROUPS_TOLD]:
        lines.append(f"{group.name}:")
        places: dict[tuple[int, str, str], list[int]] = {}
        for rank, taken in group.taken.items():
            places.setdefault((taken.count, taken.what, taken.state), []).append(rank)
        for (count, what, state), ranks in sorted(places.items(), reverse=True):
            call = f" ({what}{', ' if what and state else ''}{state})" if what or state else ""
            lines.append(f"  {_who(ranks)}: collective {count}{call}")
    left = len(uneven) - GROUPS_TOLD
    return [*lines, f"and {left} more groups"] if left > 0 else lines


def _who(ranks: Iterable[int]) -> str:
    return who_of(tuple(runs(sorted(ranks))))


# --- Flight Recorder -------------------------------------------------------------------------------------------------------


def groups_of_dumps(dumps: Mapping[int, object]) -> tuple[Group, ...]:
    """What the dumps of these ranks say; whatever in them is not understood is left out."""
    groups: dict[str, dict[int, Taken]] = {}
    for rank, dump in dumps.items():
        if isinstance(dump, Mapping):
            for name, taken in _of_dump(dump).items():
                groups.setdefault(name, {})[rank] = taken
    return tuple(Group(name, taken) for name, taken in groups.items())


def _of_dump(dump: Mapping[object, object]) -> dict[str, Taken]:
    config, entries = dump.get("pg_config"), dump.get("entries")
    members: dict[str, str] = {}
    for name, known in list(config.items())[:GROUPS_MAX] if isinstance(config, Mapping) else ():
        if isinstance(known, Mapping) and isinstance(ranks := known.get("ranks"), str):
            members[str(name)] = _group_name(str(name), known.get("desc"), ranks)
    found = dict.fromkeys(members.values(), Taken(0, is_done=True))
    for entry in entries[-ENTRIES_MAX:] if isinstance(entries, list) else ():
        pair = entry.get("process_group") if isinstance(entry, Mapping) else None
        number = entry.get("collective_seq_id") if isinstance(entry, Mapping) else None
        if not isinstance(pair, tuple) or len(pair) != 2 or type(number) is not int or entry.get("is_p2p"):
            continue
        name = members.get(str(pair[0])) or _group_name(str(pair[0]), pair[1], "")
        if (name in found or len(found) < GROUPS_MAX) and number >= found.get(name, Taken(0)).count:
            found[name] = _taken(entry, number)
    return found


def _taken(entry: Mapping[object, object], number: int) -> Taken:
    call, state = str(entry.get("profiling_name") or ""), str(entry.get("state") or "")
    is_done = state == "completed" if call.startswith(_NCCL) else bool(entry.get("retired"))
    return Taken(number, _plain(call.removeprefix(_NCCL)), _plain(state), is_done)


def _group_name(name: str, desc: object, ranks: str) -> str:
    """The same on all its ranks: names alone may mean another group elsewhere."""
    known = [int(one) for one in ranks.strip("[] ").split(",") if one.strip().isdecimal()]
    about = f" ({desc})" if isinstance(desc, str) and desc not in ("", "undefined") else ""
    of = f" of ranks {ranges(known, most=8)}" if known else ""
    return _plain(f"process group {name}{about}{of}")


def _plain(text: str) -> str:
    return clip("".join(one if one.isprintable() else "?" for one in text), _NAME_BYTES_MAX)


# --- RAS -------------------------------------------------------------------------------------------------------------------


def groups_of_ras(document: object, pids: Mapping[int, int], world_size: int) -> tuple[Group, ...]:
    """The communicators of this job; `pids` are the ranks of our own processes. Empty if these are in none: it is another job's.

    Ranks of other nodes are known by the communicator that has all ranks, in which they are numbered alike.
    """
    listed = document.get("communicators") if isinstance(document, Mapping) else None
    comms = [_members(one) for one in listed[:GROUPS_MAX] if isinstance(one, Mapping)] if isinstance(listed, list) else []
    hosts = {host for _, members in comms for (host, pid) in members if pid in pids}
    if len(hosts) != 1:
        return ()
    host = hosts.pop()
    known = {(host, pid): rank for pid, rank in pids.items()}
    for _, members in comms:
        if len(members) == world_size and all(known.get(who, rank) == rank for who, (rank, _) in members.items()):
            known = {**{who: rank for who, (rank, _) in members.items()}, **known}
    return tuple(_group_of_comm(name, members, known) for name, members in comms if members.keys() & known.keys())


_Members = dict[tuple[str, int], tuple[int, dict[str, int]]]  # by host and process: the rank there, and collectives by kind


def _members(comm: Mapping[object, object]) -> tuple[str, _Members]:
    found: _Members = {}
    ranks = comm.get("ranks")
    for one in ranks[:RANKS_MAX] if isinstance(ranks, list) else ():
        if not isinstance(one, Mapping):
            continue
        host, pid, rank, counts = (one.get(name) for name in ("host", "pid", "rank", "collective_counts"))
        if isinstance(host, str) and type(pid) is int and type(rank) is int and isinstance(counts, Mapping):
            found[host, pid] = rank, {str(kind): count for kind, count in counts.items() if type(count) is int}
    return _plain(f"communicator {comm.get('hash')}"), found


def _group_of_comm(name: str, members: _Members, known: Mapping[tuple[str, int], int]) -> Group:
    kinds = {kind for _, counts in members.values() for kind in counts}
    least = {kind: min(counts.get(kind, 0) for _, counts in members.values()) for kind in kinds}
    taken = {}
    for who, (_, counts) in members.items():
        if who in known:
            more = sorted(kind for kind, count in counts.items() if count > least[kind])
            taken[known[who]] = Taken(sum(counts.values()), _plain(", ".join(more)))
    return Group(name, taken)
