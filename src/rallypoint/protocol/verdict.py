"""What failed, as nodes tell each other: each node reports its own failures, and of all reports the leader makes one verdict.

When one worker dies, many others fail a moment later because it is gone, and the launcher stops the rest. Only the first is worth
reading. The leader finds it from the nodes' reports, and every node prints the same.

No two hosts' clocks are compared. Across nodes the order is that in which the store got their first reports (its revision),
within a node it is by the node's own clock. A failure that reads like the *echo* of a lost peer is passed over as long as there
is another explanation: a failure that does not, or else a node that was lost or left. Workers that failed just as the cause did,
in the same words at the same place, are no victims of it: they are told with it, once. That goes for those too that were stopped
meanwhile: many have raised their error by then, and only it shows that it was the same.

Both are bounded, whatever workers wrote and however many they are: at most `NAMED_MAX` of anything is named, fewer where they are
wordy, and the rest is counted. A report is cut to size once, by the node that makes it (`bounded`), echoes first; whoever reads
one refuses what is larger.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from rallypoint.base.json_text import (
    COUNT_MAX,
    clip,
    count_fitting,
    from_json,
    read_count,
    read_fields,
    read_flag,
    read_integer,
    read_list,
    read_seconds,
    read_text,
    size,
)  # fmt: skip
from rallypoint.base.records import Value
from rallypoint.base.text import Run, count_of, failure_kind, joined, many, plural, ranges, runs, who_of
from rallypoint.protocol.restarts import WISHES, ended_text, looks_hopeless

__all__ = [
    "ECHOES", "MAY_WAIT_ELSEWHERE", "NAMED_MAX", "PROBABLE_VICTIM", "NodeReport", "Verdict", "Victim", "WorkerFailure", "bounded",
    "cause_text", "decode", "decode_report", "describe", "encode", "encode_report", "explain", "is_echo", "judge_failures",
]  # fmt: skip

NAMED_MAX = 16
_NAME_BYTES_MAX = 64
_NODE_BYTES_MAX = 255  # as long as any host's full name
_REPORT_BYTES_MAX = 16_000
_MESSAGE_BYTES_MAX, _MESSAGE_CHARS_MAX = 2_000, 500
_PATH_BYTES_MAX = 600
_VERDICT_BYTES_MAX = 8_000
_VICTIM_BYTES_MAX = 100
_PLACE_BYTES_MAX = 200
_SAME_MAX = 8  # runs of ranks; those of a node are in one, mostly
_SAME_BYTES_MAX = _SAME_MAX * 28
_FRAMES_MAX = 6
_ADVICE_BYTES_MAX = 400

HUNG = "it hung: "
PROBABLE_VICTIM = ", probably because another did"  # for those who cannot know yet what failed elsewhere
MAY_WAIT_ELSEWHERE = "may wait for one of another node"
# What a worker's last words contain, in lower case, when somebody that it talked to has gone away.
ECHOES = (
    "connection reset by peer",  # TCP, as the C library says it
    "connection closed by peer",  # TCP, as collective libraries say it
    "connection was likely closed",  # a store's client whose server has gone
    "has ended: the server closed it",  # our own
    "remote process exited",
    "broken pipe",
    "sigpipe",
    "socketexception",
    "nccl",  # its own errors, its watchdog and its timeouts all name it
    "heartbeat",
    "watchdog caught collective",
    "collective operation timeout",
    "recv operation to complete",
    "send operation to complete",
    "timed out waiting for clients",
    MAY_WAIT_ELSEWHERE,  # a hang of which its own node knows no more
)


# --- reports ---------------------------------------------------------------------------------------------------------------


class WorkerFailure(Value):
    """One worker that ended badly. `age_s` is how long before its node's report that was, on that node's own clock."""

    rank: int
    local_rank: int
    role: str
    host: str
    pid: int
    exitcode: int  # -N: ended by signal N
    message: str
    age_s: float
    log_file: str = ""
    stopped: bool = False  # it ended only after the launcher had told it to
    place: str = ""  # where it failed, as far as that tells failures apart
    same: tuple[Run, ...] = ()  # ranks that failed so too, and are not told of by themselves
    hung: bool = False  # it was ended for that
    wish: str = ""  # of `restarts.WISHES`, what it asked for when it failed
    # Of the one that may be the cause of all, for the screens of other nodes: the last calls, each with its line of the program,
    # what is known to help, and where the stacks of one that hung are.
    frames: tuple[tuple[str, str], ...] = ()
    advice: str = ""
    stacks_file: str = ""

    @property
    def what(self) -> str:
        """Why it ended, as well as is known."""
        return self.message or ended_text(self.exitcode)

    @property
    def kind(self) -> tuple[int, str, str]:
        """Equal for failures that are the same."""
        return failure_kind(self.exitcode, self.what, self.place)

    @property
    def looks_hopeless(self) -> bool:
        return looks_hopeless(self.exitcode, self.message, self.place)

    @property
    def ranks(self) -> list[Run]:
        """All that it tells of."""
        return joined([(self.rank, self.rank), *self.same])

    @property
    def is_echo(self) -> bool:
        return is_echo(self.what)


def is_echo(what: str) -> bool:
    """Whether this reads as if somebody else had failed. A hang does not, whatever is told of heartbeats or frames there."""
    lowered = what.lower()
    if lowered.startswith(HUNG) and MAY_WAIT_ELSEWHERE not in lowered:
        return False
    return any(echo in lowered for echo in ECHOES)


class NodeReport(Value):
    """What failed on one node. `revision` is the store's when it got this node's first report."""

    node: str = ""  # its stable name, once it is known
    revision: int = 0
    failures: tuple[WorkerFailure, ...] = ()
    unnamed: int = 0  # further failures
    stopped: int = 0  # workers that the launcher stopped, beside any among the failures
    step: int = -1  # the furthest that a worker of it has told of


def bounded(report: NodeReport) -> NodeReport:
    """The same, small enough for the store, the oldest failure first; who is not named beside one of its kind is counted."""
    failures = [_bounded_failure(failure) for failure in report.failures]
    failures.sort(key=lambda failure: (failure.stopped, failure.is_echo, -failure.age_s, failure.rank))
    failures[1:] = [
        failure.replace(frames=(), advice="", stacks_file="") for failure in failures[1:]
    ]  # none of these is the cause
    empty = report.replace(node=clip(report.node, _NODE_BYTES_MAX), failures=())
    room = _REPORT_BYTES_MAX - size(_record(empty)) - NAMED_MAX * _SAME_BYTES_MAX
    named = count_fitting((_encode_failure(one.replace(same=())) for one in failures[:NAMED_MAX]), room)
    kept, rest = _fold(failures[:named], failures[named:])
    kept.sort(key=lambda failure: (failure.stopped, -failure.age_s, failure.rank))
    stopped = sum(failure.stopped for failure in rest)
    unnamed = report.unnamed + len(rest) - stopped
    return empty.replace(failures=tuple(kept), unnamed=unnamed, stopped=report.stopped + stopped)


def _fold(named: Sequence[WorkerFailure], more: Sequence[WorkerFailure]) -> tuple[list[WorkerFailure], list[WorkerFailure]]:
    """Each of `more` with the first of its kind that is named; and those that are of no such kind."""
    kinds: dict[object, int] = {}
    for at, failure in enumerate(named):
        kinds.setdefault((failure.kind, failure.stopped), at)
    same = {at: list(failure.same) for at, failure in enumerate(named)}
    rest = []
    for failure in more:
        at = kinds.get((failure.kind, failure.stopped), -1)
        ranks = joined([*same.get(at, ()), (failure.rank, failure.rank)])
        if at >= 0 and len(ranks) <= _SAME_MAX:
            same[at] = ranks
        else:
            rest.append(failure)
    return [failure.replace(same=tuple(same[at])) for at, failure in enumerate(named)], rest


def _bounded_failure(failure: WorkerFailure) -> WorkerFailure:
    path = failure.log_file
    return failure.replace(
        role=clip(failure.role, _NAME_BYTES_MAX),
        host=clip(failure.host, _NAME_BYTES_MAX),
        message=clip(failure.message, _MESSAGE_BYTES_MAX, _MESSAGE_CHARS_MAX),
        age_s=float(failure.age_s) if math.isfinite(failure.age_s) else 0.0,
        log_file=path if clip(path, _PATH_BYTES_MAX) == path else "",  # half a path is of no use
        place=clip(failure.place, _PLACE_BYTES_MAX),
        frames=tuple(
            (clip(at, _PLACE_BYTES_MAX), clip(source, _PLACE_BYTES_MAX)) for at, source in failure.frames[-_FRAMES_MAX:]
        ),
        advice=clip(failure.advice, _ADVICE_BYTES_MAX),
        stacks_file=failure.stacks_file if clip(failure.stacks_file, _PATH_BYTES_MAX) == failure.stacks_file else "",
    )


def _read_run(value: object) -> Run:
    first, last = read_list(2, read_integer, value) if isinstance(value, list) and len(value) == 2 else (1, 0)
    if not 0 <= first <= last:
        raise ValueError("must be lists of the first and the last of some ranks")
    return first, last


def _read_frame(value: object) -> tuple[str, str]:
    at, source = (
        read_list(2, partial(read_text, _PLACE_BYTES_MAX), value) if isinstance(value, list) and len(value) == 2 else ("", "")
    )
    if not at:
        raise ValueError("must be lists of a place and a line of the program")
    return at, source


_read_name = partial(read_text, _NAME_BYTES_MAX)


def _read_wish(value: object) -> str:
    if value not in ("", *WISHES):
        raise ValueError(f"must be one of {', '.join(WISHES)}, or nothing")
    return str(value)


_FAILURE: Mapping[str, Callable[[object], object]] = {
    "rank": read_integer,
    "local_rank": read_integer,
    "role": _read_name,
    "host": _read_name,
    "pid": read_integer,
    "exitcode": read_integer,
    "message": partial(read_text, _MESSAGE_BYTES_MAX),
    "age_s": read_seconds,
    "log_file": partial(read_text, _PATH_BYTES_MAX),
    "stopped": read_flag,
    "place": partial(read_text, _PLACE_BYTES_MAX),
    "wish": _read_wish,
    "same": partial(read_list, _SAME_MAX, _read_run),
    "hung": read_flag,
    "frames": partial(read_list, _FRAMES_MAX, _read_frame),
    "advice": partial(read_text, _ADVICE_BYTES_MAX),
    "stacks_file": partial(read_text, _PATH_BYTES_MAX),
}


def _encode_failure(failure: WorkerFailure) -> dict[str, object]:
    """For JSON."""
    lists = {"same": [list(run) for run in failure.same], "frames": [list(frame) for frame in failure.frames]}
    return {**{name: getattr(failure, name) for name in _FAILURE}, **lists}


def _decode_failure(data: object) -> WorkerFailure:
    return WorkerFailure(**read_fields(data, _FAILURE))


def _read_step(value: object) -> int:
    return -1 if value == -1 else read_count(value)


_REPORT: Mapping[str, Callable[[object], object]] = {
    "node": partial(read_text, _NODE_BYTES_MAX),
    "failures": partial(read_list, NAMED_MAX, _decode_failure),
    "unnamed": read_count,
    "stopped": read_count,
    "step": _read_step,
}


def encode_report(report: NodeReport) -> bytes:
    """As it stands in the store, under 16 KiB if it is bounded. Without the revision, which only the store knows."""
    return json.dumps(_record(report)).encode()


def _record(report: NodeReport) -> dict[str, object]:
    return {**{name: getattr(report, name) for name in _REPORT}, "failures": [_encode_failure(one) for one in report.failures]}


def decode_report(data: bytes, revision: int) -> NodeReport:
    """What `encode_report` made; ValueError, with the name of the field, for anything else."""
    return NodeReport(revision=revision, **read_fields(from_json(data), _REPORT))


# --- verdicts --------------------------------------------------------------------------------------------------------------


class Victim(Value):
    rank: int
    host: str
    line: str


class Verdict(Value):
    """`cause` is None if nodes that were lost, or left, are all the explanation there is, or if nothing failed."""

    cause: WorkerFailure | None = None
    cause_node: str = ""
    alike: tuple[Run, ...] = ()  # the ranks that failed as the cause did, its own included
    unnamed_alike: int = 0
    victims: tuple[Victim, ...] = ()
    unnamed_victims: int = 0
    stopped: int = 0  # workers that the launcher stopped: neither failures nor victims
    lost: tuple[str, ...] = ()
    unnamed_lost: int = 0
    departed: tuple[str, ...] = ()
    unnamed_departed: int = 0
    world_size: int = 0  # 0: unknown

    @property
    def alike_count(self) -> int:
        """How many failed as the cause did, itself included."""
        return count_of(self.alike) + self.unnamed_alike

    @property
    def victim_count(self) -> int:
        return len(self.victims) + self.unnamed_victims


def judge_failures(
    reports: Iterable[NodeReport], lost: Iterable[str] = (), departed: Iterable[str] = (), world_size: int = 0
) -> Verdict:
    """The verdict on reports as the nodes sent them; the same in any order of them."""
    reports = sorted(reports, key=lambda report: (report.revision, report.node))
    told = [(report.node, failure) for report in reports for failure in report.failures]
    failures = [one for one in told if not one[1].stopped]
    gone, left = sorted(set(lost)), sorted(set(departed))
    at = _find_cause([failure for _, failure in failures], bool(gone or left))
    node, cause = failures[at] if at is not None else ("", None)
    alike, others = _part(cause, [failure for _, failure in told])
    ranks = joined(run for one in alike for run in one.ranks)
    victims_of = sorted((one for one in others if not one.stopped), key=lambda one: one.rank)
    unnamed = sum(report.unnamed for report in reports) + sum(count_of(one.same) for one in victims_of)
    stopped = sum(report.stopped for report in reports) + sum(count_of(one.ranks) for one in others if one.stopped)
    verdict = Verdict(
        cause, node, tuple(ranks[:NAMED_MAX]), min(count_of(ranks[NAMED_MAX:]), COUNT_MAX), (), 0, min(stopped, COUNT_MAX),
        *_some_names(gone), *_some_names(left), world_size,
    )  # fmt: skip
    victims = [Victim(one.rank, one.host, clip(one.what, _VICTIM_BYTES_MAX)) for one in victims_of[:NAMED_MAX]]
    named = count_fitting(map(list, victims), _VERDICT_BYTES_MAX - size(encode(verdict.replace(unnamed_victims=COUNT_MAX))))
    return verdict.replace(victims=tuple(victims[:named]), unnamed_victims=min(unnamed + len(victims_of) - named, COUNT_MAX))


def _part(cause: WorkerFailure | None, failures: Iterable[WorkerFailure]) -> tuple[list[WorkerFailure], list[WorkerFailure]]:
    """Those that failed as the cause did, itself included, and the others."""
    kind = None if cause is None else cause.kind
    alike: list[WorkerFailure] = []
    others: list[WorkerFailure] = []
    for one in failures:
        (alike if one.kind == kind else others).append(one)
    return alike, others


def _find_cause(failures: Sequence[WorkerFailure], is_explained: bool) -> int | None:
    """The place of the first that is no echo; of the first, if all are and nothing else explains them."""
    own = (at for at, failure in enumerate(failures) if not failure.is_echo)
    return next(own, 0 if failures and not is_explained else None)


def _some_names(names: Sequence[str]) -> tuple[tuple[str, ...], int]:
    return tuple(clip(name, _NAME_BYTES_MAX) for name in names[:NAMED_MAX]), max(len(names) - NAMED_MAX, 0)


# --- for people ------------------------------------------------------------------------------------------------------------


def describe(verdict: Verdict) -> str:
    """All of it in one line."""
    others = []
    if verdict.victim_count:
        ranks = ranges((victim.rank for victim in verdict.victims), ", ")
        named = f" ({plural(verdict.victim_count, 'rank')} {_list([ranks], verdict.unnamed_victims)})" if ranks else ""
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
    causes = []
    if verdict.cause is not None:
        causes.append(cause_text(verdict))
    if verdict.lost:
        causes.append(f"lost {_nodes(verdict.lost, verdict.unnamed_lost)}")
    if verdict.departed:
        causes.append(f"{_nodes(verdict.departed, verdict.unnamed_departed)} left")
    return causes or ["no failure was reported"]


def cause_text(verdict: Verdict) -> str:
    """Who failed first and why, and who did the same; empty where no worker is to blame."""
    cause = verdict.cause
    if cause is None:
        return ""
    if verdict.alike_count <= 1:
        return f"rank {cause.rank} ({_process(cause)}): {cause.what}"
    more = f" and {verdict.unnamed_alike} more" if verdict.unnamed_alike else ""
    who = who_of(verdict.alike, verdict.world_size) + more
    is_raised = cause.exitcode > 0 and not cause.what.startswith("exited with code ")
    return f"{who} {'raised the same error' if is_raised else 'failed the same way'}: {cause.what}"


def _process(cause: WorkerFailure) -> str:
    return f"host {cause.host}, pid {cause.pid}"


def _details(verdict: Verdict) -> list[str]:
    if verdict.cause is None:
        return []
    cause = verdict.cause
    rank, local_rank, role, _, _, exitcode, *_ = cause
    first = [f"  first: rank {rank} ({_process(verdict.cause)})"] if verdict.alike_count > 1 else []
    frames = [line for at, source in cause.frames for line in (f"    {at}", *([f"      {source}"] if source else []))]
    named = (("log", cause.log_file), ("stacks", cause.stacks_file), ("what to do", cause.advice))
    return [
        *first,
        f"  node: {verdict.cause_node}   local rank: {local_rank}   role: {role}   exit code: {exitcode}",
        *(["  at:", *frames] if frames else []),
        *(f"  {title}: {text}" for title, text in named if text),
    ]


def _victim_lines(verdict: Verdict) -> list[str]:
    """One line for all on a host who failed alike."""
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, host, line in verdict.victims:
        alike.setdefault((host, line), []).append(rank)
    lines = [f"  {who_of(runs(ranks))} (host {host}): {line}" for (host, line), ranks in alike.items()]
    return [*lines, *([f"  and {verdict.unnamed_victims} more"] if verdict.unnamed_victims else [])]


def _workers(verdict: Verdict, count: int) -> str:
    return f"{count} of {verdict.world_size} workers" if verdict.world_size else many(count, "worker")


def _nodes(names: Sequence[str], unnamed: int) -> str:
    return f"{plural(len(names) + unnamed, 'node')} {_list(names, unnamed)}"


def _list(names: Iterable[str], unnamed: int) -> str:
    return ", ".join(names) + (f" and {unnamed} more" if unnamed else "")


# --- for the other nodes ---------------------------------------------------------------------------------------------------


def _read_cause(data: object) -> WorkerFailure | None:
    return None if data is None else _decode_failure(data)


def _read_victim(data: object) -> Victim:
    if not isinstance(data, list) or len(data) != 3:
        raise ValueError("must be lists of a rank, a host and a line")
    return Victim(read_integer(data[0]), _read_name(data[1]), read_text(_VICTIM_BYTES_MAX, data[2]))


_read_names = partial(read_list, NAMED_MAX, _read_name)

_VERDICT: Mapping[str, Callable[[object], object]] = {
    "cause": _read_cause,
    "cause_node": partial(read_text, _NODE_BYTES_MAX),
    "alike": partial(read_list, NAMED_MAX, _read_run),
    "unnamed_alike": read_count,
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
        "cause": None if verdict.cause is None else _encode_failure(verdict.cause),
        "alike": [list(run) for run in verdict.alike],
        "victims": [list(victim) for victim in verdict.victims],
        "lost": list(verdict.lost),
        "departed": list(verdict.departed),
    }


def decode(data: object) -> Verdict:
    """What `encode` made; ValueError, with the name of the field, for anything else."""
    return Verdict(**read_fields(data, _VERDICT))
