"""Slurm: a step that ``srun`` started. `expand` reads its lists of nodes, for which containers often have no ``scontrol``.

In a batch script, outside of a step, rallyrun is on one node of the job only; all that follows from the job's size is advice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from rallypoint.errors import UsageError
from rallypoint.schedulers.found import Found, ReadFile, a_number, endpoint_of, too_many

__all__ = ["JOB", "expand", "is_first_task", "job_of", "nodes_of_step", "read", "tasks_per_node"]

MOST_NODES = 100_000
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?:/(\d+))?)?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
JOB, STEP, RESTARTS = "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"
FIRST_COMPONENT = "SLURM_JOB_ID_HET_GROUP_0"  # of a heterogeneous job, whose components have numbers of their own
STEP_NODES, STEP_LIST, STEP_TASKS = "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
JOB_NODES = "SLURM_JOB_NUM_NODES"
TASK = "SLURM_PROCID"
GPUS, VISIBLE = "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"


def read(environ: Mapping[str, str], _: ReadFile) -> Found:
    if not environ.get(STEP_LIST):
        nodes = a_number(environ, JOB_NODES) or 1
        advice = f"{JOB_NODES} is {nodes}, but this launcher runs on one node only; `srun rallyrun ...` starts one on each"
        return Found("Slurm", {}, {}, advice if nodes > 1 else "")
    hosts = _hosts(environ[STEP_LIST])
    nodes = a_number(environ, STEP_NODES, least=1) or len(hosts)
    if nodes < len(hosts):
        raise UsageError(
            f"{STEP_NODES} is {nodes}, but {STEP_LIST} names {len(hosts)}: {environ[STEP_LIST]}; --scheduler none ignores both"
        )
    tasks = tasks_per_node(environ.get(STEP_TASKS, ""))
    instead = f"`srun --ntasks-per-node=1 rallyrun --nproc-per-node {max(tasks, default=1)} ...`"
    refusal = too_many(sum(tasks), nodes, f"{STEP_TASKS} is {environ.get(STEP_TASKS)}", instead)
    values, sources = {"nnodes": str(nodes)}, {"nnodes": STEP_NODES if environ.get(STEP_NODES) else STEP_LIST}
    if (key := _key(environ)) is not None:
        values |= {"rdzv_id": _run_id(environ, key), "rdzv_endpoint": endpoint_of(hosts[0], key)}
        sources |= {"rdzv_id": JOB, "rdzv_endpoint": STEP_LIST}
    if workers := _gpus(environ):
        values["nproc_per_node"], sources["nproc_per_node"] = workers
    return Found("Slurm", values, sources, refusal=refusal)


def _hosts(text: str) -> list[str]:
    try:
        return expand(text)
    except ValueError as problem:
        raise UsageError(f"{STEP_LIST}: {problem}; --scheduler none ignores it") from None


def _key(environ: Mapping[str, str]) -> str | None:
    """What tells this step from all others, on all of its nodes alike."""
    job, step = job_of(environ), environ.get(STEP)
    return ".".join(filter(None, [job, step])) if job else None


def job_of(environ: Mapping[str, str]) -> str:
    """The number of the job, by which Slurm's commands know it; empty outside of one."""
    return environ.get(FIRST_COMPONENT) or environ.get(JOB) or ""


def nodes_of_step(environ: Mapping[str, str]) -> int:
    """On how many nodes launchers were started as one; outside of a step it is this one alone."""
    return (a_number(environ, STEP_NODES, least=1) or 1) if environ.get(STEP_LIST) else 1


def is_first_task(environ: Mapping[str, str]) -> bool:
    return not a_number(environ, TASK)


def _run_id(environ: Mapping[str, str], key: str) -> str:
    """A job that was queued again is another one to whatever remembers the first, such as etcd."""
    restarts = a_number(environ, RESTARTS)
    return f"slurm-{key}-r{restarts}" if restarts else f"slurm-{key}"


def _gpus(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """A worker for each GPU that the step has on this node and that this process sees."""
    count = a_number(environ, GPUS)
    if not count:
        return None
    visible = environ.get(VISIBLE)
    if visible is None:
        return str(count), GPUS
    seen = len([one for one in visible.split(",") if one.strip()])
    return (str(seen), VISIBLE) if seen else None


def tasks_per_node(text: str) -> list[int]:
    """``2(x3),1`` is 2, 2, 2, 1; what cannot be read is as if it were not there."""
    counts: list[int] = []
    for piece in filter(None, text.split(",")):
        match = _TASKS.fullmatch(piece)
        if match is None or len(piece) > 20 or (times := int(match[2] or 1)) > MOST_NODES:
            return []
        counts += [int(match[1])] * times
    return counts


def expand(text: str) -> list[str]:
    """The names in a list such as ``a[1-3,07],b,c[0-1]x[2-3]``, in its order; ValueError says what is wrong with it."""
    names: list[str] = []
    for piece in _pieces(text):
        for name in _expanded(piece):
            names.append(name)
            if len(names) > MOST_NODES:
                raise ValueError(f"a list of more than {MOST_NODES} nodes: {text[:60]!r}")
    if not names:
        raise ValueError("an empty list of nodes")
    return names


def _pieces(text: str) -> Iterator[str]:
    """What stands between commas that are outside of brackets."""
    depth, begin = 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if not 0 <= depth <= 1:
            break
        if letter == "," and depth == 0:
            yield text[begin:at].strip()
            begin = at + 1
    if depth != 0:
        raise ValueError(f"brackets that do not match: {text[:60]!r}")
    yield text[begin:].strip()


def _expanded(piece: str) -> Iterator[str]:
    """All names of one piece; the last bracket counts fastest."""
    before, bracket, rest = piece.partition("[")
    if not bracket:
        if not piece or any(letter in piece for letter in " \t]"):
            raise ValueError(f"{piece[:60]!r} is not the name of a node")
        yield piece
        return
    inside, _, after = rest.partition("]")
    ends = list(_expanded(after)) if after else [""]
    for number in _numbers(inside):
        for end in ends:
            yield f"{before}{number}{end}"


def _numbers(text: str) -> Iterator[str]:
    """``1-3,07`` is 1, 2, 3, 07; ``00-10/5`` is 00, 05, 10."""
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None or len(piece) > 60:
            raise ValueError(f"{piece[:60]!r} is not a number or a range of numbers")
        first, last, step = match[1], match[2] or match[1], int(match[3] or 1)
        if int(last) < int(first) or step < 1 or (int(last) - int(first)) // step >= MOST_NODES:
            raise ValueError(f"{piece[:60]!r} is not a range of at most {MOST_NODES} numbers, the lower one first")
        for number in range(int(first), int(last) + 1, step):
            yield f"{number:0{len(first)}d}"
