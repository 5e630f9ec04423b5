"""What can be seen of a job: each node as it describes itself, and the job that they make together.

All of it is plain data, with ages instead of times of day, because clocks of two hosts differ. As JSON it is what agents give to
whoever asks, over a socket or through the job's store, and what the commands print with ``--json``. Fields may be added; `FORMAT`
changes when one is taken away or means something else. A reader takes what it knows, and leaves the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rallypoint.base.json_text import clip
from rallypoint.base.records import Value, field
from rallypoint.base.text import many, plural, ranges
from rallypoint.protocol.pace import NodePace, Pace, Slow, slow_of
from rallypoint.story.phases import DONE, LOST, RUNNING, WAITING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    V = TypeVar("V", bound=Value)

__all__ = [
    "FORMAT", "Happening", "JobKey", "JobView", "NodeView", "WorkerView", "find_node", "including", "job_document", "job_of",
    "jobs_of", "keys_of", "read_job", "read_node", "slow_ranks", "stragglers", "straggling", "to_document",
]  # fmt: skip

FORMAT = 1
TEXT_BYTES = 4096
MOST_WORKERS = 4096
MOST_NODES = 100_000
MOST_HAPPENINGS = 64
JobKey = tuple[str, str]  # the id of a job, and where its nodes meet
BEHIND_STEPS = 2  # a rank that is further behind the others than a step that some have not told yet
NODES_NAMED = 8
BEHIND_S = 3.0  # and further than in so many seconds, where these are known: nodes start, and are asked, one after the other


class WorkerView(Value):
    """One worker. `state` is the kernel's word for its process; `step` and `doing` are its own, if it gives any."""

    rank: int
    local_rank: int
    pid: int
    state: str = ""
    doing: str = ""
    step: int | None = None
    silent_s: float | None = None  # since its last sign of progress
    step_s: float | None = None  # that it took for a step, over its last ones
    steps: int = 0  # that were measured for it
    busy: float | None = None  # for which share of a step its main thread is busy
    slowness: float | None = None  # its time by the median of all ranks
    cpu_s: float | None = None
    memory_bytes: int | None = None


class Happening(Value):
    """Something that changed the run, so many seconds ago."""

    ago_s: float
    what: str
    why: str


class NodeView(Value):
    """One agent and its workers."""

    job: str
    node: str  # its name among the nodes
    hostname: str
    pid: int
    format: int = FORMAT
    version: str = ""  # of rallypoint
    id: str = ""  # among the nodes of the job, for this session; empty where a job has one node
    command: str = ""
    role: str = ""
    backend: str = ""
    hosts_store: bool = False  # the job ends with it
    address: str = ""  # at which other nodes reach this one; empty where a job has one node
    store: str = ""  # what tells the store at which its nodes meet from all others; empty where a job has none, or not yet
    phase: str = ""
    phase_s: float = 0.0
    why: str = ""
    uptime_s: float = 0.0
    generation: int = 0
    slowness: float | None = None  # that of its workers, at their median
    node_rank: int | None = None
    nodes: int | None = None
    min_nodes: int = 1  # with fewer it does not go on
    world_size: int | None = None
    restarts: int = 0
    max_restarts: int = 0
    failed_workers: int = 0
    hung_workers: int = 0
    seconds: Mapping[str, float] = field(factory=dict)  # in each phase so far
    log_dir: str = ""
    attempt_dir: str = ""
    event_file: str = ""
    workers: tuple[WorkerView, ...] = ()
    history: tuple[Happening, ...] = ()  # the latest last


class JobView(Value):
    """A job: the nodes that have answered, and the names of those that have not."""

    job: str
    nodes: tuple[NodeView, ...]
    silent: tuple[str, ...] = ()
    note: str = ""  # what those who wait for nodes are told
    format: int = FORMAT

    @property
    def members(self) -> tuple[NodeView, ...]:
        """The nodes that have a seat in the latest generation that any of them knows, by their ranks there."""
        latest = max((node.generation for node in self.nodes), default=0)
        seated = [node for node in self.nodes if node.generation == latest and node.node_rank is not None and latest]
        return tuple(sorted(seated, key=lambda node: node.node_rank or 0))

    @property
    def spares(self) -> tuple[NodeView, ...]:
        """Those that wait while the others run."""
        members = self.members
        seated = set(map(id, members))  # to compare each with each takes long where there are many
        others = [node for node in self.nodes if id(node) not in seated]
        return tuple(others) if any(node.phase == RUNNING for node in members) else ()

    @property
    def phase(self) -> str:
        """That of the members where they agree; else the one that holds the others up."""
        phases = [node.phase for node in self.members or self.nodes]
        for one in (WAITING, "starting", "stopping", RUNNING, DONE):
            if one in phases:
                return one
        return phases[0] if phases else ""

    @property
    def generation(self) -> int:
        return max((node.generation for node in self.nodes), default=0)

    @property
    def restarts(self) -> int:
        return max((node.restarts for node in self.nodes), default=0)

    @property
    def step(self) -> int | None:
        """That all ranks which tell theirs have reached."""
        steps = [worker.step for node in self.members for worker in node.workers if worker.step is not None]
        return min(steps, default=None)

    @property
    def goodput(self) -> float | None:
        """The share of the nodes' time so far in which workers ran and what they did was kept; None before there is any."""
        spent = sum(sum(node.seconds.values()) for node in self.nodes)
        return sum(node.seconds.get(RUNNING, 0.0) for node in self.nodes) / spent if spent > 0 else None

    @property
    def lost_s(self) -> float:
        """Of the node that lost most: work that had to be done again."""
        return max((node.seconds.get(LOST, 0.0) for node in self.nodes), default=0.0)


def job_of(nodes: Sequence[NodeView], silent: Iterable[str] = (), note: str = "") -> JobView:
    """Nodes of one job, in the order of their ranks."""
    ordered = sorted(nodes, key=lambda node: (node.node_rank is None, node.node_rank or 0, node.node, node.pid))
    return JobView(nodes[0].job if nodes else "", tuple(ordered), tuple(silent), note)


def including(job: JobView, own: NodeView) -> JobView:
    """The job with the node that looks at it: that one is there, even if it did not answer itself in time."""
    if any((node.hostname, node.pid) == (own.hostname, own.pid) for node in job.nodes):
        return job
    return job_of([*job.nodes, own], (name for name in job.silent if name != own.node), job.note)


def jobs_of(nodes: Iterable[NodeView]) -> list[JobView]:
    """Nodes of several jobs, job by job."""
    nodes = list(nodes)
    by_job: dict[JobKey, list[NodeView]] = {}
    for node, key in zip(nodes, keys_of(nodes), strict=True):
        by_job.setdefault(key, []).append(node)
    return [job_of(found) for found in by_job.values()]


def keys_of(nodes: Sequence[NodeView]) -> list[JobKey]:
    """To which job each belongs: two that run beside each other may have the same id. They meet at different stores, or have one
    node each. One that has not reached its store yet belongs to the one job of its id that is known, if it is one.
    """
    stores: dict[str, set[str]] = {}
    for node in nodes:
        stores.setdefault(node.job, set()).update([node.store] if node.store else [])
    return [(node.job, _meeting(node, stores[node.job])) for node in nodes]


def _meeting(node: NodeView, stores: set[str]) -> str:
    if node.store:
        return node.store
    if node.nodes == 1:
        return f"{node.hostname}:{node.pid}"
    return next(iter(stores)) if len(stores) == 1 else ""


def stragglers(job: JobView) -> tuple[WorkerView, ...]:
    """The ranks that take clearly longer for a step than the others, or are clearly behind most of them by now."""
    workers = [worker for node in job.members for worker in node.workers if worker.step is not None]
    steps = sorted(worker.step or 0 for worker in workers)
    if len(steps) < 2:
        return ()
    slow = {one.rank for one in slow_ranks(job)}
    paces = sorted(worker.step_s for worker in workers if worker.step_s)
    margin = max(BEHIND_STEPS, BEHIND_S / paces[len(paces) // 2] if paces else 0.0)
    behind = steps[len(steps) // 2] - margin
    return tuple(worker for worker in workers if (worker.step or 0) < behind or worker.rank in slow)


def straggling(job: JobView) -> str:
    """Who straggles, in a few words, with by how much where that is known; empty where nobody does."""
    behind = stragglers(job)
    if not behind:
        return ""
    who = _by_nodes(job, {worker.rank for worker in behind})
    worst = next(iter(slow_ranks(job)), None)
    if worst is None:
        return who
    return f"{who}; {'it' if len(behind) == 1 else f'rank {worst.rank}'} {worst.text}"


def _by_nodes(job: JobView, behind: set[int]) -> str:
    """These ranks, and where they are."""
    members = [(node.node, [worker.rank for worker in node.workers if worker.rank in behind]) for node in job.members]
    homes = [(node, found) for node, found in members if found]
    named = [
        f"{plural(len(found), 'rank')} {ranges(found, most=8)}{f' (node {node})' if len(members) > 1 else ''}"
        for node, found in homes
    ]
    more = [f"and {many(len(named) - NODES_NAMED, 'more node')}"] if len(named) > NODES_NAMED else []
    return ", ".join([*named[:NODES_NAMED], *more])


def slow_ranks(job: JobView) -> tuple[Slow, ...]:
    """Those that take clearly longer for a step than the others, the slowest first."""
    return slow_of(NodePace(node.node, tuple(_paces(node))) for node in job.members)


def _paces(node: NodeView) -> Iterator[Pace]:
    return (Pace(one.rank, one.step_s, one.steps, one.busy) for one in node.workers if one.step_s is not None)


def find_node(job: JobView, name: str) -> list[NodeView]:
    """Those that are meant by a name: that of the node, of its host, or its rank."""
    by_name = [node for node in job.nodes if name in (node.node, node.hostname, node.id)]
    return by_name or [node for node in job.nodes if name.isdecimal() and node.node_rank == int(name)]


# --- as JSON ---------------------------------------------------------------------------------------------------------------


def to_document(view: Value) -> dict[str, Any]:
    """As JSON has it."""
    return {name: _plain(value) for name, value in view.__dict__.items()}


def job_document(job: JobView) -> dict[str, Any]:
    """The same, with what follows from it for the job as a whole: for who reads it elsewhere, and would have to find it out."""
    first = next(iter(job.members or job.nodes), None)
    slow = {one.rank: round(one.factor, 3) for one in slow_ranks(job)}
    return {
        "job": job.job,
        "format": job.format,
        "phase": job.phase,
        "generation": job.generation,
        "world_size": first.world_size if first is not None else None,
        "restarts": job.restarts,
        "max_restarts": first.max_restarts if first is not None else None,
        "step": job.step,
        "goodput": None if job.goodput is None else round(job.goodput, 6),
        "lost_s": round(job.lost_s, 3),
        "stragglers": [
            {"rank": one.rank, "step": one.step, "step_s": one.step_s, "times_median": slow.get(one.rank)}
            for one in stragglers(job)
        ],
        "spares": [{"node": one.node, "id": one.id, "pid": one.pid} for one in job.spares],
        **to_document(job),
    }


def _plain(value: object) -> object:
    if isinstance(value, Value):
        return to_document(value)
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def read_node(found: object) -> NodeView:
    """ValueError: it is not the description of a node, or one of another format."""
    _check_format(found)
    return _read(NodeView, found)


def _check_format(found: object) -> None:
    if isinstance(found, dict) and found.get("format", FORMAT) != FORMAT:
        version = f"rallypoint {clip(str(found.get('version') or ''), 40)}".strip()
        raise ValueError(
            f"it runs {version}, which answers in the format {found['format']!r:.20}, and this reads {FORMAT}:"
            " ask it with the version that started it"
        )


def read_job(found: object) -> JobView:
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    _check_format(found)
    nodes = found.get("nodes")
    if not isinstance(nodes, list) or len(nodes) > MOST_NODES:
        raise ValueError("nodes must be a list")
    silent = found.get("silent")
    names = [clip(str(name), TEXT_BYTES) for name in silent] if isinstance(silent, list) else []
    return JobView(_text(found.get("job")), tuple(map(read_node, nodes)), tuple(names), _text(found.get("note", "")))


def _read(kind: type[V], found: object) -> V:
    """The fields that we know, each of its type; ValueError for one that does not fit, or is missing."""
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    known = {name: _READERS[annotation](found[name]) for name, annotation in kind.__annotations__.items() if name in found}
    try:
        return kind(**known)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is no text")
    return clip(value, TEXT_BYTES)


def _integer(value: object) -> int:
    if type(value) is not int or abs(value) > 1 << 62:
        raise ValueError(f"{value!r:.40} is no number")
    return value


def _number(value: object) -> float:
    if type(value) not in (int, float) or not -1e18 < value < 1e18:  # type: ignore[operator]  # it is a number by then
        raise ValueError(f"{value!r:.40} is no number")
    return float(value)  # type: ignore[arg-type]


def _seconds(value: object) -> dict[str, float]:
    if not isinstance(value, dict) or len(value) > MOST_HAPPENINGS:
        raise ValueError("seconds must be an object")
    return {_text(name): _number(one) for name, one in value.items()}


def _list(kind: type[V], most: int, value: object) -> tuple[V, ...]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"it must be a list of at most {most}")
    return tuple(_read(kind, one) for one in value)


_READERS: dict[str, Any] = {
    "str": _text,
    "bool": bool,
    "int": _integer,
    "float": _number,
    "int | None": lambda value: None if value is None else _integer(value),
    "float | None": lambda value: None if value is None else _number(value),
    "Mapping[str, float]": _seconds,
    "tuple[WorkerView, ...]": lambda value: _list(WorkerView, MOST_WORKERS, value),
    "tuple[Happening, ...]": lambda value: _list(Happening, MOST_HAPPENINGS, value),
}
