"""What makes a machine unfit, from what was read of it; and what a node does about it. Pure.

A check is one of ours (`CHECKS`), with a threshold if it is given (``memory=8G``), a command (it has a slash or a space in it),
or the name of a plug-in. What it finds is a `Finding`; only one that is *bad* keeps a node from a seat. What cannot be read is
not known, and keeps nobody from anything: many machines hide their kernel's log.

A node's `Fitness` says when its checks are due: at first, after a failure that may have been its own, and while it is unfit,
again and again, with longer pauses each time.

    due ──started──▶ running ──finished──▶ fit ──suspected──▶ due
                                 └───────▶ unfit ──pause over──▶ due
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from rallypoint.base.records import Value
from rallypoint.base.text import listed, many, parse_rate, parse_size, plural, size_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    State = Literal["ok", "bad", "unknown"]
    Kind = Literal["built_in", "command", "plug_in"]
    Phase = Literal["due", "running", "fit", "unfit"]

__all__ = [
    "CHECKS", "CHECK_TIMEOUT_S", "FATAL_XIDS", "FIRST_PAUSE_S", "LONGEST_PAUSE_S", "REASON_CHARS_MAX", "RECENT_S", "SMI_FIELDS",
    "STILL_RUNNING", "Check", "Finding", "Fitness", "Gpu", "Spec", "finished", "is_due", "judge_clock", "judge_command",
    "judge_disks", "judge_files", "judge_gpus", "judge_memory", "judge_shm", "least_of", "next_look_at", "parse_checks",
    "parse_smi", "parse_xids", "reason", "started", "suspected", "without_rejected",
]  # fmt: skip


# --- what to check ---------------------------------------------------------------------------------------------------------


class Check(Value):
    """One of ours: its threshold, in words as it could be given, what it is about, and whether a threshold is a rate."""

    least: str
    help: str
    is_rate: bool = False

    def read(self, text: str) -> int:
        return parse_rate(text) if self.is_rate else parse_size(text)


NETWORK = "network"  # the one that needs other nodes
CHECKS: Mapping[str, Check] = {
    "memory": Check("1G", "Memory that is available, within the limit of the container."),
    "disk": Check(
        "1G", "Free space for temporary files, in the working folder and for logs, and whether files can be made there."
    ),
    "shm": Check("256M", "Free space in /dev/shm, through which data loaders and NCCL pass data."),
    "files": Check("4096", "How many files a process may open (the hard limit)."),
    "clock": Check("", "Whether the kernel takes its clock for synchronised. rallypoint compares no clocks; logs do."),
    "gpu": Check("", "Whether NVIDIA devices answer, without memory errors, and without fatal XID errors in the last hour."),
    NETWORK: Check(
        "50Mbit",
        "The ways to a few other nodes of the job and back: their rate, a sum that all get alike, and clocks.",
        is_rate=True,
    ),
}
CHECK_TIMEOUT_S = 30.0  # for each; they run beside each other
REASON_CHARS_MAX = 300
ALL_REDUCE, CLOCKS = "all-reduce", "clocks"  # of what the check of the network finds besides
_WARNED = (NETWORK, ALL_REDUCE, CLOCKS)


class Spec(Value):
    """A check that was asked for; `text` is a name or a command line."""

    kind: Kind
    text: str
    least: int | None = None  # None: as CHECKS has it
    folders: tuple[str, ...] = ()  # to be looked at besides


def parse_checks(pieces: Iterable[str], plug_ins: Iterable[str] = ()) -> tuple[Spec, ...]:
    """ValueError says which is none."""
    return tuple(_parse_check(piece.strip(), tuple(plug_ins)) for piece in pieces if piece.strip())


def _parse_check(piece: str, plug_ins: Sequence[str]) -> Spec:
    if "/" in piece or " " in piece:
        return Spec("command", piece)
    name, equals, value = piece.partition("=")
    if name in CHECKS:
        try:
            return Spec("built_in", name, CHECKS[name].read(value) if equals else None)
        except ValueError:
            examples = "a rate, as in 500Mbit or 10Gbit" if CHECKS[name].is_rate else "a number, as in 4096, 500M or 2G"
            raise ValueError(f"{piece!r}: after {name}= comes {examples}") from None
    if name in plug_ins and not equals:
        return Spec("plug_in", name)
    known = ", ".join([*CHECKS, *plug_ins])
    raise ValueError(f"{piece!r} is no check: there are {known}; a command is written with a path, as in ./check.sh")


def is_of_network(spec: Spec) -> bool:
    return (spec.kind, spec.text) == ("built_in", NETWORK)


def least_of(spec: Spec) -> int:
    check = CHECKS[spec.text]
    return spec.least if spec.least is not None else check.read(check.least) if check.least else 0


# --- what was found --------------------------------------------------------------------------------------------------------


class Finding(Value):
    """What a check says of this machine, and what to do about it."""

    check: str
    state: State
    what: str
    advice: str = ""


def reason(findings: Iterable[Finding]) -> str:
    """Why the machine is unfit, in a line; empty if nothing bad was found."""
    bad = [f"{one.check}: {one.what}" for one in findings if one.state == "bad"]
    return "; ".join(bad)[:REASON_CHARS_MAX]


def warnings(findings: Iterable[Finding]) -> list[str]:
    """What is worth a line although it keeps no machine from a seat: of the network, where two nodes see more than one."""
    found = [one for one in findings if one.state == "unknown" and one.advice and one.check in _WARNED]
    return [f"{one.check}: {one.what} ({one.advice})" for one in found]


def judge_memory(available: int | None, least: int) -> Finding:
    if available is None:
        return Finding("memory", "unknown", "/proc/meminfo cannot be read")
    what = f"{size_text(available)} available"
    if available >= least:
        return Finding("memory", "ok", what)
    advice = "see what else runs here (`ps aux --sort=-rss | head`); processes of an earlier job may be left"
    return Finding("memory", "bad", f"{what}, less than {size_text(least)}", advice)


def judge_disks(free: Mapping[str, int | str], least: int) -> Finding:
    """By folder: how much is free, or why nothing can be written there."""
    for folder, one in free.items():
        if isinstance(one, str):
            return Finding("disk", "bad", f"{folder}: {one}", "make the folder writable, or name another by TMPDIR or --log-dir")
        if one < least:
            return Finding(
                "disk", "bad", f"{folder} has {size_text(one)} left, less than {size_text(least)}", f"see `df -h {folder}`"
            )
    return Finding("disk", "ok", ", ".join(f"{folder}: {size_text(int(one))} free" for folder, one in free.items()))


def judge_shm(free: int | None, total: int, least: int) -> Finding:
    if free is None:
        return Finding(
            "shm", "bad", "there is no /dev/shm", "mount a tmpfs there; in a container, see its --shm-size or an emptyDir"
        )
    what = f"{size_text(free)} of {size_text(total)} free in /dev/shm"
    if free >= least:
        return Finding("shm", "ok", what)
    advice = "in a container, give it more (--shm-size=8g; Kubernetes: an emptyDir of medium Memory); else see `ls -la /dev/shm`"
    return Finding("shm", "bad", f"{what}, less than {size_text(least)}", advice)


def judge_files(soft: int, hard: int, least: int) -> Finding:
    """The soft limit is raised as far as the hard one by whoever needs it; -1 is no limit."""
    unlimited = hard < 0
    what = f"{'no limit' if unlimited else hard} open files (soft limit {soft})"
    if unlimited or hard >= least:
        return Finding("files", "ok", what)
    advice = "raise it: `ulimit -Hn`, LimitNOFILE= of the service, or nofile in /etc/security/limits.conf"
    return Finding("files", "bad", f"{hard} open files are allowed, fewer than {least}", advice)


def judge_clock(is_synchronised: bool | None) -> Finding:
    """A wrong clock is told, and harms nothing here; how far it is from others' is for `reach.judge_offset`."""
    advice = "see `timedatectl` or `chronyc tracking`; certificates, file times and logs of other tools depend on it"
    match is_synchronised:
        case None:
            return Finding("clock", "unknown", "the kernel does not tell whether its clock is synchronised")
        case False:
            return Finding("clock", "unknown", "nothing on this machine says that its clock is synchronised", advice)
    return Finding("clock", "ok", "synchronised")


def judge_command(command: str, exit_code: int | None, output: str, timeout_s: float = CHECK_TIMEOUT_S) -> Finding:
    """It fails by its exit code; the last line that it printed says why. None: it did not end in time."""
    name = command.split(maxsplit=1)[0].rpartition("/")[2] or command
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = "".join(one if one.isprintable() else "?" for one in lines[-1][:REASON_CHARS_MAX]) if lines else ""
    if exit_code == 0:
        return Finding(name, "ok", last or "exit code 0")
    why = f"no answer within {timeout_s:g} s" if exit_code is None else f"exit code {exit_code}"
    return Finding(name, "bad", f"{last} ({why})" if last else why, f"run it by hand: {command}")


# --- GPUs ------------------------------------------------------------------------------------------------------------------

_ERRORS, _PAGE, _ROW, _ROW_FAILURE = (
    "ecc.errors.uncorrected.volatile.total", "retired_pages.pending", "remapped_rows.pending", "remapped_rows.failure",
)  # fmt: skip
SMI_FIELDS = f"index,name,{_ERRORS},{_PAGE},{_ROW},{_ROW_FAILURE}"  # pages up to Volta, rows from Ampere on
RECENT_S = 3600.0
_RESET = "reset the device (`nvidia-smi --gpu-reset`) or restart the machine; if it comes back, have it replaced"
# Errors after which a device does not work on without being reset, by NVIDIA's catalogue of XIDs: double-bit memory errors,
# engines that do not answer, NVLink, a device that has left the bus, errors that were not contained, the GPU's own processor.
FATAL_XIDS = frozenset({48, 62, 64, 74, 79, 95, 119, 120})
_REJECTED = re.compile(r'Field "([^"]*)" is not a valid field')  # by a driver that is older or newer than the field
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): ([0-9]+)")


class Gpu(Value):
    index: str
    name: str
    uncorrected: int = 0  # memory errors since the driver was loaded
    is_page_pending: bool = False
    is_row_pending: bool = False  # a row of memory is replaced at the next reset
    is_row_lost: bool = False  # there was no spare row left to replace it with


def parse_smi(text: str, fields: str = SMI_FIELDS) -> list[Gpu]:
    """What nvidia-smi has printed, asked for `fields` as csv,noheader,nounits; what a device does not tell is in brackets."""
    found = []
    for line in text.splitlines():
        told = dict(zip(fields.split(","), (field.strip() for field in line.split(",")), strict=False))
        if told.get("index", "").isdecimal() and "name" in told:
            errors = int(told[_ERRORS]) if told.get(_ERRORS, "").isdecimal() else 0
            pending = [told.get(name) == "Yes" for name in (_PAGE, _ROW, _ROW_FAILURE)]
            found.append(Gpu(told["index"], told["name"], errors, *pending))
    return found


def without_rejected(fields: str, text: str) -> str:
    """What may be asked instead, where nvidia-smi does not know one of them; empty if it knows all, or not even the first two."""
    match = _REJECTED.search(text)
    known = [field for field in fields.split(",") if match is None or field != match[1]]
    is_of_use = known[:2] == SMI_FIELDS.split(",")[:2] and len(known) < len(fields.split(","))
    return ",".join(known) if is_of_use else ""


def parse_xids(log: Iterable[tuple[float, str]], since_s: float) -> list[tuple[str, int]]:
    """The device and the number of each fatal error that the kernel has told of since then."""
    matches = [_XID.search(line) for at, line in log if at >= since_s]
    xids = [(match[1], int(match[2])) for match in matches if match]
    return [one for one in dict.fromkeys(xids) if one[1] in FATAL_XIDS]


def judge_gpus(
    devices: int, smi: tuple[int | None, str] | None, xids: Sequence[tuple[str, int]], least: int = 0, fields: str = SMI_FIELDS
) -> Finding:
    """`devices` are those of the driver, `smi` is how nvidia-smi ended and what it printed of `fields`; None: there is none."""
    if xids:
        told = ", ".join(f"XID {number} on {device}" for device, number in xids[:4])
        return Finding("gpu", "bad", f"the kernel has reported {told}", _RESET)
    if smi is None:
        if max(devices, 0) >= max(least, 1):
            return Finding("gpu", "unknown", f"{many(devices, 'device')}, but no nvidia-smi to ask them")
        return Finding(
            "gpu", "bad", "no NVIDIA device is visible", "see `ls /dev/nvidia*`, and whether the container was given any"
        )
    code, text = smi
    gpus, last = parse_smi(text, fields), (text.strip().splitlines() or [""])[-1].strip()[:REASON_CHARS_MAX]
    if code is None:
        return Finding("gpu", "bad", f"nvidia-smi did not answer within {CHECK_TIMEOUT_S:g} s", _RESET)
    if _REJECTED.search(text):
        return Finding("gpu", "unknown", f"nvidia-smi cannot be asked: {last}")
    if code or not gpus:
        return Finding("gpu", "bad", last or f"nvidia-smi exited with code {code}", "run `nvidia-smi`; see `dmesg | grep NVRM`")
    wanted = max(least, devices)
    if len(gpus) < wanted:
        return Finding("gpu", "bad", f"{len(gpus)} of {many(wanted, 'device')} {plural(len(gpus), 'answers', 'answer')}", _RESET)
    return _judge_memory_of(gpus)


def _judge_memory_of(gpus: Sequence[Gpu]) -> Finding:
    lost = [gpu for gpu in gpus if gpu.is_row_lost]
    if lost:
        return Finding("gpu", "bad", f"memory that cannot be repaired any more on device {_names(lost)}", "have it replaced")
    sick = [gpu for gpu in gpus if gpu.uncorrected or gpu.is_page_pending]
    if sick:
        errors = sum(gpu.uncorrected for gpu in sick)
        return Finding("gpu", "bad", f"memory errors on device {_names(sick)}: {errors} that could not be corrected", _RESET)
    waiting = [gpu for gpu in gpus if gpu.is_row_pending]
    if waiting:
        return Finding("gpu", "bad", f"memory that a reset would repair on device {_names(waiting)}", _RESET)
    return Finding("gpu", "ok", f"{many(len(gpus), 'device')}: {listed(list(dict.fromkeys(gpu.name for gpu in gpus)), 4)}")


def _names(gpus: Sequence[Gpu]) -> str:
    return listed([f"{gpu.index} ({gpu.name})" for gpu in gpus], 4)


# --- fitness ---------------------------------------------------------------------------------------------------------------

FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0
DOUBT_PAUSE_S = 600.0  # for so long one node can make another look at itself only once: two that doubt each other would never end
STILL_RUNNING = "its checks (--preflight) are not done yet"
_DOUBLINGS_MAX = 10


class Fitness(Value):
    """How this node stands with its checks; `why` is why it is unfit."""

    phase: Phase = "due"
    why: str = ""
    times: int = 0  # that it was found unfit, in a row
    again_at: float = 0.0

    @property
    def told(self) -> str:
        """What the others are told: why it cannot have a seat. While a check is repeated, what was found before."""
        return "" if self.phase == "fit" else self.why or STILL_RUNNING


def is_due(fitness: Fitness, now: float) -> bool:
    return fitness.phase == "due" or (fitness.phase == "unfit" and now >= fitness.again_at)


def next_look_at(fitness: Fitness) -> float | None:
    """When to look again even if nothing happens."""
    return fitness.again_at if fitness.phase == "unfit" else None


def started(fitness: Fitness) -> Fitness:
    return fitness.replace(phase="running")


def finished(fitness: Fitness, findings: Iterable[Finding], now: float) -> Fitness:
    why = reason(findings)
    if not why:
        return Fitness("fit")
    pause_s = min(FIRST_PAUSE_S * 2.0 ** min(fitness.times, _DOUBLINGS_MAX), LONGEST_PAUSE_S)
    return Fitness("unfit", why, fitness.times + 1, now + pause_s)


def may_doubt(last_at: float | None, now: float) -> bool:
    """Whether a node may make us look at ourselves, which it has done then."""
    return last_at is None or now - last_at >= DOUBT_PAUSE_S


def suspected(fitness: Fitness) -> Fitness:
    """Workers of this node have failed, and it may be the machine's fault; or another has found the way to it bad."""
    return Fitness("due") if fitness.phase == "fit" else fitness
