"""What the nodes of a job write into its coordination store: every key and every record, once.

    settings             what all nodes must agree on; written by the first, compared by the others
    down/leader          lease-bound: who decides
    down/generation      the generation that counts; written by the leader, after all of its seats
    down/signal/<g>      how generation g ends: stop or finished, and why; whoever creates it first has said it
    down/closed          the job's end and why
    down/stop            somebody has stopped the job: all nodes leave, and nobody is to start it again
    down/refused/<id>    why this node may not take part
    down/expelled/<id>   why the others go on without this node: it had not stopped its workers in time
    down/inquiry/<g>     that workers of generation g hang, and which ones, as all nodes have found together
    down/asked           what somebody from outside asks of one node or of all; each time that it is written, once
    up/nodes/<id>        lease-bound: who a node is, and whether it is ready for the next generation
    up/failures/<g>/<id> what failed there in generation g
    up/hangs/<g>/<id>    where the workers of generation g stand there, if any of them hangs on any node (`protocol.inquiry`)
    up/pace/<g>/<id>     how long the workers of generation g take for a step there, if they tell (`protocol.pace`)
    down/pace/<g>        who of all is slower than the others
    up/done/<g>/<id>     all workers of generation g have succeeded there; not lease-bound
    up/left/<g>/<id>     no worker of generation g runs there any more, and the node has left, or lives under another id
    answers/<id>         what that node has said when it was last asked
    shown/<n>/<id>       what that node shows to whoever asked it by the nth change, and takes it away: stacks, the end of a log
    down/drain/<g>/notice  a node of generation g has to leave: why, and how much time it has; the first such node says it
    down/drain/<g>/ruling  at which step all workers of generation g save for that, and whether they all have
    up/drain/<g>/<id>    what the workers of that node have told of it, and whether it is one that leaves
    up/returned/last     changed by every member that is back under its id with a new lease, and with every memory, so that no
                         leader can miss one
    up/memories/<id>     what a node remembers of a job whose store was started anew and knows nothing (`protocol.resumption`)
    seats/<g>.<a>/<id>   a node's place in generation g, as the leader whose key was created at revision a drew it up
    data/<g>.<a>/...     what the members of generation g share through the store that their agents are given
    status               who is here and what is missing, for those who wait

Every node watches ``down/``, which holds little; only the leader watches ``up/``. So what a node sends and receives does not
depend on how many nodes there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

from rallypoint.base.json_text import from_json
from rallypoint.base.records import Value
from rallypoint.coordination.model import Event, Item, Snapshot
from rallypoint.protocol import verdict as verdicts
from rallypoint.protocol.restarts import Purse
from rallypoint.protocol.verdict import Verdict
from rallypoint.protocol.worker_plan import WorkerRanks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal, TypeVar

    R = TypeVar("R", bound=Value)
    SignalKind = Literal["failure", "loss", "departure", "sick", "join", "asked", "finished"]
    ClosedKind = Literal["finished", "failed", "closed", "host_left", "preempted", "unsaved", "stopped"]
    Wish = Literal["look", "leave", "stop", "log_end", "logs", "recheck", "stacks"]

__all__ = [
    "ANSWERS", "ASKED", "CARDS", "CLOSED", "DATA", "DOWN", "GENERATION", "LEADER", "LEFT", "LOST", "MAX_WHY", "MEMORIES", "NODES",
    "NOT_READY", "NO_SEAT", "NO_STEP", "PACES", "RETURNED", "SETTINGS", "SHOWN", "STATUS", "STOP", "UP", "Asked", "Board",
    "Closed", "Generation", "Memory", "NodeDrain", "NodeRecord", "Notice", "Ruling", "Seat", "Signal", "Status", "Stop",
    "card_key", "decode", "done_key", "drain_key", "encode", "expelled_key", "failure_key", "hang_key", "inquiry_key",
    "job_pace_key", "left_key", "memory_key", "node_key", "node_pace_key", "notice_key", "refusal_key", "ruling_key", "seat_key",
    "seats_of_attempt", "seats_of_generation", "signal_key",
]  # fmt: skip

SETTINGS = "settings"
STATUS = "status"
DOWN = "down/"
LEADER = "down/leader"
GENERATION = "down/generation"
CLOSED = "down/closed"
STOP = "down/stop"
ASKED = "down/asked"
ANSWERS = "answers/"
CARDS = "cards/"
SHOWN = "shown/"
NODES = "up/nodes/"
UP = "up/"
MEMORIES = "up/memories/"
PACES = "up/pace/"
DATA = "data/"
RETURNED = "up/returned/last"
LEFT, LOST = b"", b"lost"  # what stands in left_key: it went on purpose, or was fenced and lives under another id

NOT_READY = -1
NO_STEP = -1
NO_SEAT = -1
MAX_WHY = 500  # characters of a reason: every node gets it


def signal_key(generation: int) -> str:
    return f"down/signal/{generation}"


def refusal_key(node_id: str) -> str:
    return f"down/refused/{node_id}"


def expelled_key(node_id: str) -> str:
    return f"down/expelled/{node_id}"


def node_key(node_id: str) -> str:
    return NODES + node_id


def memory_key(node_id: str) -> str:
    return MEMORIES + node_id


def failure_key(generation: int, node_id: str) -> str:
    return f"up/failures/{generation}/{node_id}"


def hang_key(generation: int, node_id: str) -> str:
    return f"up/hangs/{generation}/{node_id}"


def inquiry_key(generation: int) -> str:
    return f"down/inquiry/{generation}"


def node_pace_key(generation: int, node_id: str) -> str:
    return f"{PACES}{generation}/{node_id}"


def job_pace_key(generation: int) -> str:
    return f"down/pace/{generation}"


def done_key(generation: int, node_id: str) -> str:
    return f"up/done/{generation}/{node_id}"


def card_key(slot: int) -> str:
    """Where one of the nodes that measure the ways between them can be called."""
    return f"{CARDS}{slot}"


def left_key(generation: int, node_id: str) -> str:
    """That no worker of this generation runs at this member any more, for a leader who was not there to see it leave."""
    return f"{UP}left/{generation}/{node_id}"


def notice_key(generation: int) -> str:
    return f"down/drain/{generation}/notice"


def ruling_key(generation: int) -> str:
    return f"down/drain/{generation}/ruling"


def drain_key(generation: int, node_id: str) -> str:
    return f"up/drain/{generation}/{node_id}"


def seats_of_generation(generation: int) -> str:
    return f"seats/{generation}."


def seats_of_attempt(generation: int, attempt: int) -> str:
    return f"seats/{generation}.{attempt}/"


def seat_key(generation: int, attempt: int, node_id: str) -> str:
    return seats_of_attempt(generation, attempt) + node_id


class NodeRecord(Value):
    """One agent process. `name` stays when it is started anew. `ready_after` is the last generation whose workers are known to be
    gone here, 0 before the first, and NOT_READY while workers may run.
    """

    name: str
    address: str
    port: int
    role: str
    workers: int
    ready_after: int
    rank_hint: int = -1
    hint_is_explicit: bool = False
    unfit: str = ""  # why its machine must not run workers now, if that is so


class Seat(Value):
    """One node's place in a generation; its workers have consecutive ranks from the first ones on."""

    generation: int
    attempt: int
    name: str
    group_rank: int
    group_world_size: int
    first_rank: int
    world_size: int
    first_role_rank: int
    role_world_size: int

    def worker_ranks(self, workers: int) -> tuple[WorkerRanks, ...]:
        return tuple(
            WorkerRanks(local, self.first_rank + local, self.first_role_rank + local, self.world_size, self.role_world_size)
            for local in range(workers)
        )


class Generation(Value):
    """The generation that counts. Its members find their seats under its attempt."""

    number: int
    attempt: int
    nodes: int
    world_size: int
    master_addr: str
    master_port: int
    why: str
    purse: Purse
    strikes: tuple[str, ...] = ()  # names of nodes whose workers have failed of late, once for each time
    after: str = ""  # what ended the one before: failure, hang, loss, departure, preemption, join or none; empty for the first


class Memory(Value):
    """What the node of this name knows of the last generation that it was told of: how many nodes that had, where it sat itself,
    NO_SEAT if it did not, what was spent by then, and whose workers had failed. Ages are as of when it lost the store.
    """

    number: int
    nodes: int
    name: str
    group_rank: int
    purse: Purse
    strikes: tuple[str, ...] = ()


class Signal(Value):
    """How a generation ends: for which kind of reason, why in words, and who said so.

    With `looks_hopeless` it matters whether all workers fail so: those that run are given a moment for it.
    """

    kind: SignalKind
    why: str
    by: str
    looks_hopeless: bool = False

    @property
    def is_stop(self) -> bool:
        return self.kind != "finished"


class Closed(Value):
    """The job's end. `verdict` is there when it failed through its workers, `signal` is the one that it was stopped with;
    `is_hopeless` if no restart could have helped, however many were left. After a notice it is ``preempted`` if all workers had
    saved, else ``unsaved``.
    """

    kind: ClosedKind
    why: str
    by: str
    verdict: Verdict | None = None
    signal: int = 0
    is_hopeless: bool = False


class Stop(Value):
    """That the job is to end, on all nodes, by whose word."""

    by: str


class Notice(Value):
    """A node has to leave: why, by whose word, and how many seconds it had left when this was written."""

    why: str
    by: str
    left_s: float


class NodeDrain(Value):
    """What the workers of a node have told since then: the highest step that they have asked about, once all have asked, and
    whether all have saved. `is_leaving` if it is that node, or another that has notice too; `is_host` if the store is there.
    """

    is_leaving: bool
    is_host: bool
    step: int = NO_STEP
    has_saved: bool = False


class Ruling(Value):
    """At which step all save, once it is known, and whether all have."""

    step: int
    is_complete: bool


class Asked(Value):
    """What is asked of the node of this id, or of all where none is named, and by whom; `detail` is for who answers it."""

    what: Wish
    node: str
    by: str
    detail: str = ""


class Status(Value):
    """For those who wait."""

    text: str


# --- as bytes --------------------------------------------------------------------------------------------------------------


_MOST_CHARACTERS = 4096
_MOST_COUNTED = 1 << 53
_SIGNAL_KINDS = ("failure", "loss", "departure", "sick", "join", "asked", "finished")
_CLOSED_KINDS = ("finished", "failed", "closed", "host_left", "preempted", "unsaved", "stopped")
_WISHES = ("look", "leave", "stop", "log_end", "logs", "recheck", "stacks")

# Whether a value may stand in a field of that annotation: all of it comes from the network.
_FITS: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int and NOT_READY <= value <= _MOST_COUNTED,
    "str": lambda value: type(value) is str and len(value) <= _MOST_CHARACTERS,
    "bool": lambda value: type(value) is bool,
    "float": lambda value: type(value) in (int, float) and 0 <= value < _MOST_COUNTED,
    "SignalKind": _SIGNAL_KINDS.__contains__,
    "ClosedKind": _CLOSED_KINDS.__contains__,
    "Wish": _WISHES.__contains__,
    "Purse": lambda value: type(value) is dict,
    "Verdict | None": lambda value: value is None or type(value) is dict,
    "tuple[str, ...]": lambda value: all(type(one) is str and len(one) <= _MOST_CHARACTERS for one in value),
    "tuple[float, ...]": lambda value: all(type(one) in (int, float) and 0 <= one < _MOST_COUNTED for one in value),
}


def encode(record: Value) -> bytes:
    return json.dumps(_as_dict(record), separators=(",", ":")).encode()


def _as_dict(record: Value) -> dict[str, Any]:
    if isinstance(record, Verdict):
        return verdicts.encode(record)
    return {name: _as_dict(value) if isinstance(value, Value) else value for name, value in record.__dict__.items()}


def decode(kind: type[R], data: bytes) -> R:
    """The record that `data` holds; a ValueError if it holds anything else."""
    try:
        return _from_dict(kind, from_json(data))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{data[:80]!r} is no {kind.__name__}: {error}") from error


def _from_dict(kind: type[R], found: Any) -> R:
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    return kind(**{name: _read(kind.__annotations__.get(name, ""), name, value) for name, value in found.items()})


def _read(annotation: str, name: str, value: Any) -> Any:
    """`value`, if it is of the type that the field is annotated with."""
    if not _FITS[annotation](value):
        raise ValueError(f"{name} is {value!r:.80}")
    match annotation:
        case "Purse":
            return _from_dict(Purse, value)
        case "Verdict | None":
            return None if value is None else _read_verdict(value)
    return tuple(value) if annotation.startswith("tuple[") else value


def _read_verdict(found: dict[str, Any]) -> Verdict | None:
    """The end of a job counts, whether or not its verdict can be read."""
    with suppress(ValueError):
        return verdicts.decode(found)
    return None


# --- as one node sees it ---------------------------------------------------------------------------------------------------


class Board:
    """What is posted for all nodes, under ``down/``, as one of them has seen it so far.

    It is filled from one read and kept up by the changes that follow it. It may lag behind the store, but never shows a state
    that the store was not in: whoever acts on it lets the store compare revisions, and looks again if they differ.
    """

    def __init__(self) -> None:
        self.is_loaded = False
        self.first_read_at = 0.0  # when the store was there for sure, and another that was before it was not any more
        self._read_at = 0
        self.leader: Item | None = None
        self.generation: Generation | None = None
        self.generation_revision = 0
        self.generation_at = 0.0
        self.closed: Closed | None = None
        self.stop: Stop | None = None
        self.signals: dict[int, Signal] = {}
        self.signal_at: dict[int, float] = {}
        self.inquiries: dict[int, bytes] = {}  # into hangs, as they stand there; read by whoever takes part in them
        self.inquired_at: dict[int, float] = {}
        self.paces: dict[int, bytes] = {}  # who is slower than the others; read by whoever tells of it
        self.refusals: dict[str, str] = {}
        self.expelled: dict[str, str] = {}
        self.notices: dict[int, Notice] = {}
        self.rulings: dict[int, Ruling] = {}

    def load(self, snapshot: Snapshot, now: float) -> None:
        """Begin anew with what was read; what was known already keeps the time at which it was seen."""
        self.leader = None
        self.first_read_at = self.first_read_at or now
        for item in snapshot.items:
            self._put(item, now)
        self._read_at = snapshot.revision
        self.is_loaded = True

    def post(self, item: Item, now: float) -> None:
        """What this node has just written itself; the change that tells of it follows, and changes nothing."""
        self._put(item, now)

    def apply(self, event: Event, now: float) -> None:
        """Take in one change; one that is older than what was read is known already."""
        if event.revision <= self._read_at:
            return
        if event.item is not None:
            self._put(event.item, now)
        elif event.key == LEADER and (self.leader is None or event.revision > self.leader.mod_revision):
            self.leader = None  # unless it is the end of an earlier one, which an answer has overtaken

    def _put(self, item: Item, now: float) -> None:
        """Take in what was written; what nobody can read is not there."""
        with suppress(ValueError):
            self._read(item, now)

    def _read(self, item: Item, now: float) -> None:
        head, _, tail = item.key.rpartition("/")
        if item.key == LEADER:
            if self.leader is None or item.mod_revision >= self.leader.mod_revision:  # else an answer has overtaken it
                self.leader = item
        elif item.key == GENERATION:
            self._put_generation(item, now)
        elif item.key == CLOSED:
            self.closed = self.closed or decode(Closed, item.value)
        elif item.key == STOP:
            self.stop = self.stop or decode(Stop, item.value)
        elif head == "down/signal":
            number = int(tail)
            self.signals.setdefault(number, decode(Signal, item.value))
            self.signal_at.setdefault(number, now)
        elif head.startswith("down/drain/"):
            self._put_drain(int(head.rpartition("/")[2]), tail, item.value)
        elif head == "down/inquiry":
            number = int(tail)
            self.inquiries[number] = item.value
            self.inquired_at.setdefault(number, now)
        elif head == "down/pace":
            self.paces[int(tail)] = item.value
        elif head == "down/refused":
            self.refusals[tail] = item.value.decode(errors="replace")
        elif head == "down/expelled":
            self.expelled[tail] = item.value.decode(errors="replace")

    def _put_generation(self, item: Item, now: float) -> None:
        if item.mod_revision <= self.generation_revision:
            return
        self.generation = decode(Generation, item.value)
        self.generation_revision = item.mod_revision
        self.generation_at = now
        for number in [number for number in self.signals if number < self.generation.number]:
            del self.signals[number], self.signal_at[number]
        for told in (self.notices, self.rulings, self.paces):
            for number in [number for number in told if number < self.generation.number]:
                del told[number]
        for number in [number for number in self.inquiries if number < self.generation.number]:
            del self.inquiries[number], self.inquired_at[number]

    def _put_drain(self, number: int, kind: str, value: bytes) -> None:
        """What was said once holds, whatever an answer has overtaken."""
        if kind == "notice":
            self.notices.setdefault(number, decode(Notice, value))
            return
        ruling = decode(Ruling, value)
        known = self.rulings.get(number, Ruling(NO_STEP, False))
        self.rulings[number] = Ruling(max(known.step, ruling.step), known.is_complete or ruling.is_complete)

    @property
    def number(self) -> int:
        """The generation that counts; 0 before the first."""
        return self.generation.number if self.generation else 0

    def signal(self) -> Signal | None:
        """How the generation that counts ends, if it does."""
        return self.signals.get(self.number)

    def notice(self) -> Notice | None:
        """Whether a node of that generation has to leave."""
        return self.notices.get(self.number)

    def ruling(self) -> Ruling | None:
        """When its workers save for that, as far as it is known."""
        return self.rulings.get(self.number)
