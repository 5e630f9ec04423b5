"""What all nodes reported about a generation becomes one verdict: the cause, its victims, and who was merely stopped.

When one worker dies, many others fail a moment later because it is gone, and the launcher stops the rest. Only the first is worth
reading. The leader finds it from the nodes' reports, and every node prints the same.

No two hosts' clocks are compared. Across nodes the order is that in which the store got their first reports (its revision),
within a node it is by the node's own clock. A failure that reads like the echo of a lost peer is passed over as long as there
is another explanation: a failure that does not, or else a node that was lost or left.

A verdict is bounded: it names at most `NAMED_MAX` victims, lost nodes and departed nodes, and counts the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from rallypoint.base.bounded_json import (
    COUNT_MAX,
    clip,
    count_fitting,
    read_count,
    read_fields,
    read_integer,
    read_list,
    read_text,
    size,
)
from rallypoint.base.records import Value
from rallypoint.base.text import many, plural
from rallypoint.protocol.failure_reports import (
    NAME_BYTES_MAX,
    NAMED_MAX,
    NODE_BYTES_MAX,
    NodeReport,
    WorkerFailure,
    decode_failure,
    encode_failure,
)

__all__ = ["Verdict", "Victim", "decode", "describe", "encode", "explain", "judge_failures"]

_VERDICT_BYTES_MAX = 8_000
_VICTIM_BYTES_MAX = 100


class Victim(Value):
    rank: int
    host: str
    line: str


class Verdict(Value):
    """`cause` is None if nodes that were lost, or left, are all the explanation there is, or if nothing failed."""

    cause: WorkerFailure | None = None
    cause_node: str = ""
    victims: tuple[Victim, ...] = ()
    unnamed_victims: int = 0
    stopped: int = 0  # workers that the launcher stopped: neither failures nor victims
    lost: tuple[str, ...] = ()
    unnamed_lost: int = 0
    departed: tuple[str, ...] = ()
    unnamed_departed: int = 0
    world_size: int = 0  # 0: unknown

    @property
    def victim_count(self) -> int:
        return len(self.victims) + self.unnamed_victims


def judge_failures(
    reports: Iterable[NodeReport], lost: Iterable[str] = (), departed: Iterable[str] = (), world_size: int = 0
) -> Verdict:
    """The verdict on reports as the nodes sent them; the same in any order of them."""
    reports = sorted(reports, key=lambda report: (report.revision, report.node))
    failures = [(report.node, failure) for report in reports for failure in report.failures]
    gone, left = sorted(set(lost)), sorted(set(departed))
    at = _find_cause([failure for _, failure in failures], bool(gone or left))
    node, cause = failures.pop(at) if at is not None else ("", None)
    unnamed, stopped = sum(report.unnamed for report in reports), sum(report.stopped for report in reports)
    verdict = Verdict(cause, node, (), unnamed, min(stopped, COUNT_MAX), *_some_names(gone), *_some_names(left), world_size)
    victims = [Victim(one.rank, one.host, clip(one.what, _VICTIM_BYTES_MAX)) for _, one in failures[:NAMED_MAX]]
    named = count_fitting(map(list, victims), _VERDICT_BYTES_MAX - size(encode(verdict)))
    return verdict.replace(victims=tuple(victims[:named]), unnamed_victims=min(unnamed + len(failures) - named, COUNT_MAX))


def _find_cause(failures: Sequence[WorkerFailure], is_explained: bool) -> int | None:
    """The place of the first that is no echo; of the first, if all are and nothing else explains them."""
    own = (at for at, failure in enumerate(failures) if not failure.is_echo)
    return next(own, 0 if failures and not is_explained else None)


def _some_names(names: Sequence[str]) -> tuple[tuple[str, ...], int]:
    return tuple(clip(name, NAME_BYTES_MAX) for name in names[:NAMED_MAX]), max(len(names) - NAMED_MAX, 0)


# --- for people ------------------------------------------------------------------------------------------------------------


def describe(verdict: Verdict) -> str:
    """All of it in one line."""
    others = []
    if verdict.victim_count:
        ranks = [str(victim.rank) for victim in verdict.victims]
        named = f" ({plural(verdict.victim_count, 'rank')} {_list(ranks, verdict.unnamed_victims)})" if ranks else ""
        others.append(f"{many(verdict.victim_count, 'victim')}{named}")
    if verdict.stopped:
        others.append(f"{verdict.stopped} stopped by the launcher")
    return "; ".join([*_causes(verdict), *([", ".join(others)] if others else [])])


def explain(verdict: Verdict) -> list[str]:
    """The same in a few lines, for the end of the job."""
    first, *further = _causes(verdict)
    lines = [f"Cause: {first}", *_details(verdict), *(f"Also: {cause}" for cause in further)]
    if verdict.victim_count:
        lines += [f"Victims: {_workers(verdict, verdict.victim_count)}", *_victim_lines(verdict)]
    if verdict.stopped:
        lines.append(f"Stopped by the launcher: {_workers(verdict, verdict.stopped)}")
    return lines


def _causes(verdict: Verdict) -> list[str]:
    """What explains the end, best first; at least one."""
    causes, cause = [], verdict.cause
    if cause is not None:
        causes.append(f"rank {cause.rank} (host {cause.host}, pid {cause.pid}): {cause.what}")
    if verdict.lost:
        causes.append(f"lost {_nodes(verdict.lost, verdict.unnamed_lost)}")
    if verdict.departed:
        causes.append(f"{_nodes(verdict.departed, verdict.unnamed_departed)} left")
    return causes or ["no failure was reported"]


def _details(verdict: Verdict) -> list[str]:
    if verdict.cause is None:
        return []
    _, local_rank, role, _, _, exitcode, *_ = verdict.cause
    log = [f"  log: {verdict.cause.log_file}"] if verdict.cause.log_file else []
    return [f"  node: {verdict.cause_node}   local rank: {local_rank}   role: {role}   exit code: {exitcode}", *log]


def _victim_lines(verdict: Verdict) -> list[str]:
    """One line for all on a host who failed alike."""
    alike: dict[tuple[str, str], list[str]] = {}
    for rank, host, line in verdict.victims:
        alike.setdefault((host, line), []).append(str(rank))
    lines = [f"  {plural(len(ranks), 'rank')} {', '.join(ranks)} (host {host}): {line}" for (host, line), ranks in alike.items()]
    return [*lines, *([f"  and {verdict.unnamed_victims} more"] if verdict.unnamed_victims else [])]


def _workers(verdict: Verdict, count: int) -> str:
    return f"{count} of {verdict.world_size} workers" if verdict.world_size else many(count, "worker")


def _nodes(names: Sequence[str], unnamed: int) -> str:
    return f"{plural(len(names) + unnamed, 'node')} {_list(names, unnamed)}"


def _list(names: Iterable[str], unnamed: int) -> str:
    return ", ".join(names) + (f" and {unnamed} more" if unnamed else "")


# --- for the other nodes ---------------------------------------------------------------------------------------------------


def _read_cause(data: object) -> WorkerFailure | None:
    return None if data is None else decode_failure(data)


def _read_victim(data: object) -> Victim:
    if not isinstance(data, list) or len(data) != 3:
        raise ValueError("must be lists of a rank, a host and a line")
    return Victim(read_integer(data[0]), read_text(NAME_BYTES_MAX, data[1]), read_text(_VICTIM_BYTES_MAX, data[2]))


_read_names = partial(read_list, NAMED_MAX, partial(read_text, NAME_BYTES_MAX))

_VERDICT: Mapping[str, Callable[[object], object]] = {
    "cause": _read_cause,
    "cause_node": partial(read_text, NODE_BYTES_MAX),
    "victims": partial(read_list, NAMED_MAX, _read_victim),
    "unnamed_victims": read_count,
    "stopped": read_count,
    "lost": _read_names,
    "unnamed_lost": read_count,
    "departed": _read_names,
    "unnamed_departed": read_count,
    "world_size": read_count,
}


def encode(verdict: Verdict) -> dict[str, object]:
    """For JSON; what `judge_failures` made is under 8 KiB then."""
    return {
        **{name: getattr(verdict, name) for name in _VERDICT},
        "cause": None if verdict.cause is None else encode_failure(verdict.cause),
        "victims": [list(victim) for victim in verdict.victims],
        "lost": list(verdict.lost),
        "departed": list(verdict.departed),
    }


def decode(data: object) -> Verdict:
    """What `encode` made; ValueError, with the name of the field, for anything else."""
    return Verdict(**read_fields(data, _VERDICT))
