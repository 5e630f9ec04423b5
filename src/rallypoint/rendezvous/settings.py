"""The settings of the elastic rendezvous: read from where they are given, checked, and told with where they came from.

A setting is given in ``--rdzv-conf`` (``rdzv_configs`` in a program), else in the environment as ``RALLYPOINT_`` and its name in
capitals, else in a file of lines ``key = value`` that ``conf_file`` or ``RALLYPOINT_CONF`` names, else it has its default. A few
have a flag of their own, which fills ``--rdzv-conf``.

`Settings` is the table of them: all that is to be known of a setting stands in its field, and is read by the parser, by the line
that is printed at the start of a job, and by the documentation.

The job's secret, which every node of a job knows and nobody else does, so that no stranger can join it or read it, comes from a
file (``secret`` or ``secret_file``), or from the variable ``RALLYPOINT_SECRET``, which workers do not inherit and which is the
secret, not the place of it. Where none of them says anything, `rendezvous.secrets` sees to it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike

from rallypoint.base import defaults, report
from rallypoint.base.records import Field, Value
from rallypoint.base.text import many, parse_size, parse_truth
from rallypoint.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal

    Kind = Literal[
        "seconds", "seconds_or_0", "count", "rank", "truth", "path", "codes", "limit", "store", "number", "worker_store", "ports",
        "size", "protocol", "text", "visitors",
    ]  # fmt: skip

__all__ = [
    "BY_KEY",
    "CONVERTERS",
    "SETTINGS",
    "Setting",
    "Settings",
    "agreed",
    "announce",
    "check_node_unit",
    "converted",
    "describe",
    "is_secret_looked_for",
    "load_secret",
    "markdown",
    "mismatch",
    "node_count",
    "parse_setting",
    "read_settings",
    "setting",
    "settings_of",
    "shown",
]


# --- setting values --------------------------------------------------------------------------------------------------------


_MOST_S = 24 * 24 * 3600  # poll(2) counts milliseconds in 31 bits
_MOST_COUNT = 1_000_000
_MOST_CODES = 256
_MOST_PATH = 4096
_MOST_PORT = 65_535
_MOST_BYTES = 1 << 50
_NOTHING = ("", "none", "-1")


def shown(kind: Kind, value: Any) -> str:
    """A value in words, as it could be given."""
    if value is None or value == ():
        return ""
    match kind:
        case "seconds" | "seconds_or_0":
            return f"{value:g} s"
        case "codes":
            return "+".join(map(str, value))
        case "ports":
            return "any that is free" if value == (0, 0) else "-".join(map(str, dict.fromkeys(value)))
        case "truth":
            return "true" if value else "false"
        case _:
            return str(value)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _seconds(value: Any) -> float:
    seconds = _number(value)
    if not 0 < seconds <= _MOST_S:  # what is no number at all (nan) compares with nothing
        raise ValueError
    return seconds


def _seconds_or_0(value: Any) -> float:
    return 0.0 if _number(value) == 0 else _seconds(value)


def _whole(value: Any, least: int, most: int) -> int:
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise TypeError
    number = int(value)
    if not least <= number <= most:
        raise ValueError
    return number


def _count(value: Any) -> int:
    return _whole(value, 1, _MOST_COUNT)


def _whole_or_none(value: Any) -> int | None:
    """A number from 0; nothing, and -1 as torchrun writes it, is None."""
    return None if str(value).strip().lower() in _NOTHING else _whole(value, 0, _MOST_COUNT)


def _path(value: Any) -> str:
    path = str(value) if isinstance(value, (str, PathLike)) else ""
    if not 0 < len(path) <= _MOST_PATH or any(character in path for character in "\n\r\0"):
        raise ValueError
    return path


def _codes(value: Any) -> tuple[int, ...]:
    """Separated by +, because ``--rdzv-conf`` is split at commas; elsewhere a comma will do. Sorted: order says nothing."""
    pieces: Iterable[Any] = filter(str.strip, value.replace(",", "+").split("+")) if isinstance(value, str) else value
    codes = {_whole(piece, -64, 255) for piece in pieces}
    if 0 in codes or len(codes) > _MOST_CODES:
        raise ValueError
    return tuple(sorted(codes))


def _one_of(*words: str) -> Callable[[Any], str]:
    def choose(value: Any) -> str:
        return words[words.index(value)]  # ValueError if it is none of them

    return choose


def _ports(value: Any) -> tuple[int, int]:
    """One port, or the first and the last of several."""
    pieces = value if isinstance(value, tuple) else str(value).split("-")
    first, last = _whole(pieces[0], 0, _MOST_PORT), _whole(pieces[-1], 0, _MOST_PORT)
    if len(pieces) > 2 or last < first or (first == 0 and last > 0):
        raise ValueError
    return first, last


def _size(value: Any) -> int:
    return _whole(parse_size(value) if isinstance(value, str) else value, 1, _MOST_BYTES)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError
    return value


_WORKER_STORES = (defaults.WORKER_STORE, defaults.WORKER_STORE_RANK0)
_A_TIME = f"a number of seconds of at most {_MOST_S} (24 days)"
CONVERTERS: dict[Kind, tuple[Callable[[Any], Any], str]] = {
    "seconds": (_seconds, f"{_A_TIME}, more than 0"),
    "seconds_or_0": (_seconds_or_0, f"{_A_TIME}, 0 or more"),
    "count": (_count, f"a whole number from 1 to {_MOST_COUNT}"),
    "rank": (_whole_or_none, "a rank, from 0, or none"),
    "limit": (_whole_or_none, "a whole number of 0 or more, or none"),
    "truth": (parse_truth, "true or false"),
    "path": (_path, "the path of a file"),
    "codes": (_codes, "exit codes as in 2+64, 1 to 255 each, or -n for signal n"),
    "store": (
        _one_of("tcp"),
        "tcp (file, a shared folder, can hold no lease and tell no change, so that a dead node would never be noticed: use c10d,"
        " which is over TCP, or etcd)",
    ),
    "number": (_number, "a number"),
    "worker_store": (_one_of(*_WORKER_STORES), " or ".join(_WORKER_STORES)),
    "ports": (_ports, f"a port from 0 to {_MOST_PORT}, or the first and the last of several, as in 29600-29700"),
    "protocol": (lambda value: _one_of("http", "https")(str(value).lower()), "http or https"),
    "text": (_text, "a text"),
    "visitors": (
        _one_of(defaults.WORKER_STORE_FROM_NODES, defaults.WORKER_STORE_FROM_ANY),
        f"{defaults.WORKER_STORE_FROM_NODES} or {defaults.WORKER_STORE_FROM_ANY}",
    ),
    "size": (_size, "a number of bytes, as in 500M or 2G"),
}
"""For each kind, what makes a value of it (a ValueError or TypeError for what cannot be one), and in words what it must be."""


def converted(kind: Kind, value: object, named: str) -> Any:
    """A checked value of this kind; UsageError says what the one that is `named` so must be."""
    convert, expected = CONVERTERS[kind]
    try:
        return convert(value)
    except (ValueError, TypeError, OverflowError):
        raise UsageError(f"{named} must be {expected}, not {value!r}") from None


# --- setting table ---------------------------------------------------------------------------------------------------------


class Setting(Field):
    """One setting: a field of the class of all settings, with all that is to be known of it, whether a flag of ``rallyrun`` gives
    it too, and whether it is `shared`, the same on all nodes. `other_name` is what torchrun calls it. One that is accepted for
    torchrun's sake is not `used`: it is no field, and given its key.
    """

    used = False
    field = ""  # its name in that class

    def __init__(
        self,
        kind: Kind,
        default: Any,
        help: str,
        has_flag: bool = False,
        shared: bool = False,
        other_name: str = "",
        key: str = "",
        has_variable: bool = True,
    ) -> None:
        super().__init__(default)
        self.kind, self.help, self.key, self.other_name = kind, help, key, other_name
        self.has_flag, self.shared, self.has_variable = has_flag, shared, has_variable

    def __set_name__(self, owner: type, name: str) -> None:
        self.used, self.field, self.key = True, name, name.removesuffix("_s")

    @property
    def flag(self) -> str:
        return f"--{self.key.replace('_', '-')}" if self.has_flag else ""

    @property
    def variable(self) -> str:
        return f"{defaults.ENV_SETTING_PREFIX}{self.key.upper()}" if self.has_variable else ""


def setting(kind: Kind, default: object, help: str, **more: Any) -> Any:
    """A field that is a setting, for a class whose fields are of many types."""
    return Setting(kind, default, help, **more)


def settings_of(cls: type[Value]) -> tuple[Setting, ...]:
    return tuple(one for one in cls._fields.values() if isinstance(one, Setting))


DEFAULT = "the default"


class Settings(Value):
    """What the elastic rendezvous of one node was told. `sources` says of each key where its value came from."""

    # A table is read by its rows.
    # fmt: off
    join_timeout_s: float = setting("seconds", defaults.JOIN_TIMEOUT_S,
        "How long a node waits to join before it gives up.")
    last_call_timeout_s: float = setting("seconds_or_0", defaults.LAST_CALL_TIMEOUT_S,
        "How long the first generation waits for more nodes once the minimum is here, counted from the latest arrival.",
        shared=True)
    close_timeout_s: float = setting("seconds_or_0", defaults.CLOSE_TIMEOUT_S,
        "How long the store's host stays up at the end of the job, so that the others learn of the end.")
    keep_alive_interval_s: float = setting("seconds", defaults.KEEP_ALIVE_INTERVAL_S,
        "How often a node sends a keepalive.")
    keep_alive_max_attempt: int = setting("count", defaults.KEEP_ALIVE_MAX_ATTEMPT,
        "How many silent intervals until a node counts as dead. The lease is this times keep_alive_interval, at least 1 s.")
    store_timeout_s: float = setting("seconds", defaults.STORE_SILENCE_S,
        "How long a node that has lost the store tries to reconnect before it exits.")
    host_timeout_s: float = setting("seconds_or_0", defaults.HOST_TIMEOUT_S,
        "How long the nodes wait for the embedded store's host to be started again once it is lost, instead of store_timeout if"
        " that is shorter; 0: they do not.")
    scale_up_window_s: float = setting("seconds_or_0", defaults.SCALE_UP_WINDOW_S,
        "How long to wait for more joiners before a running job re-forms; skipped once the maximum is here.", shared=True)
    node_unit: int = setting("count", defaults.NODE_UNIT,
        "Run only on a multiple of this many nodes; the rest wait as spares.", has_flag=True)
    node_rank: int | None = setting("rank", None,
        "The rank this node must get, exclusively; -1 or none lets the job choose.", has_flag=True)
    is_host: bool | None = setting("truth", None,
        "Whether this node hosts the store: true or false. Default: it does if the endpoint is one of its addresses.")
    secret: str = setting("path", defaults.SECRET_AUTO,
        "Where the job's secret comes from: auto, by munge or from the home where these can be had; none; or a file with it.",
        has_flag=True, has_variable=False)
    secret_file: str | None = setting("path", None,
        "File with the job's secret, at least 16 bytes, the same on all nodes.", has_flag=True)
    tls_cert: str | None = setting("path", None,
        "This node's certificate, with which the agents' store speaks TLS; it needs tls_key and tls_ca too.", has_flag=True)
    tls_key: str | None = setting("path", None, "The key of tls_cert, not encrypted.", has_flag=True)
    tls_ca: str | None = setting("path", None,
        "The authority that has signed the certificates of all nodes.", has_flag=True)
    restart_backoff_s: float = setting("seconds_or_0", defaults.RESTART_BACKOFF_S,
        "Delay before the second restart; it doubles with each later one. The first restart is immediate.",
        has_flag=True, shared=True)
    restart_backoff_max_s: float = setting("seconds_or_0", defaults.RESTART_BACKOFF_MAX_S,
        "The longest such delay.", shared=True)
    restart_window_s: float = setting("seconds_or_0", defaults.RESTART_WINDOW_S,
        "Only restarts within this time count against --max-restarts; 0: all count.", has_flag=True, shared=True)
    no_retry_exit_codes: tuple[int, ...] = setting("codes", (),
        "Worker exit codes that end the job without a restart, such as 2+64; -n for signal n.", has_flag=True, shared=True)
    retry_hopeless: bool = setting("truth", False,
        "Also restart after failures that no restart can help, such as an ImportError in all workers.", has_flag=True,
        shared=True)
    max_no_progress: int | None = setting("limit", None,
        "End the job after this many attempts in a row that came no further than one before, by rallypoint.worker.progress; none:"
        " no limit.", has_flag=True, shared=True)
    max_same_failures: int | None = setting("limit", None,
        "End the job once the same rank has failed this many times in a row at the same place, each time within early_failure and"
        " before its first step; none: no limit.", shared=True)
    early_failure_s: float = setting("seconds_or_0", defaults.EARLY_FAILURE_S,
        "Failures this soon after the start of an attempt are compared with each other, to find those that no restart can help;"
        " 0: none are.", shared=True)
    max_hangs: int | None = setting("limit", None,
        "How many restarts hangs may cost; none: hangs count against --max-restarts.", shared=True)
    healthy_after_s: float = setting("seconds_or_0", defaults.HEALTHY_AFTER_S,
        "An attempt that ran this long gives back all that was spent before it, for nodes that came and went too; 0: none does.",
        shared=True)
    max_node_losses: int | None = setting("limit", None,
        "How many times nodes may be lost before the job ends; none: no limit.", shared=True)
    max_departures: int | None = setting("limit", None,
        "How many times nodes may leave, or be left out at a worker's wish, before the job ends; none: no limit.", shared=True)
    max_preemptions: int | None = setting("limit", None,
        "How many times nodes may leave after a notice before the job ends; none: no limit.", shared=True)
    max_joins: int | None = setting("limit", None,
        "How many times nodes may join a job that runs; later ones wait as spares; none: no limit.", shared=True)
    max_membership_changes: int | None = setting("limit", None,
        "How many times nodes may be lost, leave or join, together, before the job ends; notices do not count; none: no limit.",
        shared=True)
    worker_store: str | None = setting("worker_store", None,
        "Who serves the workers' store at the master address: agent (of group rank 0), or rank0 (its first worker). Default:"
        f" agent, unless {defaults.ENV_DISABLE_SHARED_STORE} is 1.", has_flag=True)
    worker_store_port: tuple[int, int] = setting("ports", defaults.WORKER_STORE_PORTS,
        "Port of the workers' store, or a range to choose from, such as 29600-29700; 0: any free port.", has_flag=True)
    worker_store_memory: int = setting("size", defaults.WORKER_STORE_BYTES,
        "Size limit of the workers' store, such as 500M or 2G.", has_flag=True)
    worker_store_from: str = setting("visitors", defaults.WORKER_STORE_FROM_NODES,
        "From where the workers' store takes connections: nodes, only from the addresses of the job's nodes, as far as these are"
        " known; or any.")
    store_type: str = setting("store", "tcp",
        "Only tcp. A shared folder (file) is refused: it cannot hold a lease, so a dead node would go unnoticed.")
    # fmt: on
    sources: tuple[tuple[str, str], ...] = ()

    @property
    def lease_s(self) -> float:
        """How long a node may be silent until it counts as dead."""
        return self.keep_alive_interval_s * self.keep_alive_max_attempt

    def restart_settings(self) -> dict[str, Any]:
        """Those on restarts that were given, by key: jobs of one node have them too."""
        given, keys = dict(self.sources), (*defaults.RESTART_SETTINGS, *defaults.OTHER_RESTART_SETTINGS)
        return {key: getattr(self, BY_KEY[key].field) for key in keys if key in given}

    def is_given(self, key: str) -> bool:
        return key in dict(self.sources)

    def source(self, key: str) -> str:
        """Where the value of `key` came from, in words."""
        return dict(self.sources).get(key, DEFAULT)


_FOR_TORCHRUN = (
    Setting("seconds_or_0", None, key="cas_backoff_max_seconds", help=
        "Accepted for torchrun; of effect only with a back end of your own, whose nodes write one state."),
    Setting("number", None, "Accepted for torchrun; no effect.", key="heartbeat_timeout"),
    Setting("number", None, "Accepted for torchrun; no effect. See store_timeout.", key="read_timeout"),
    Setting("number", None, "Accepted for torchrun (rdzv_timeout); no effect. See join_timeout.", key="timeout"),
)  # fmt: skip
SETTINGS = (*settings_of(Settings), *_FOR_TORCHRUN)
BY_KEY: dict[str, Setting] = {one.key: one for one in SETTINGS}


def markdown() -> str:
    """The settings as a table for the documentation."""
    rows = [f"| {' | '.join(_cells(setting))} |" for setting in SETTINGS]
    return "\n".join(["| setting | default | variable, flag | meaning |", "|---|---|---|---|", *rows])


def _cells(setting: Setting) -> list[str]:
    default = shown(setting.kind, setting.default)
    names = [f"`{name}`" for name in (setting.variable, setting.flag) if name]
    return [f"`{setting.key}`", default or "-", ", ".join(names), setting.help]


# --- agreement -------------------------------------------------------------------------------------------------------------


STARTED_BY = "started_by"
_NOT_COMPARED = (STARTED_BY, "role", "min_nodes", "max_nodes")
_MOST_SHOWN = 120  # characters of one value: it was written by somebody else
_MOST_NAMED = 8


def mismatch(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """A sentence that names each setting in which we differ from the job, with both values; None where we agree.

    The entry point counts only among nodes of one role: each role may run a program of its own.
    """
    differences = list(_differences(ours, theirs))
    if not differences:
        return None
    more = len(differences) - _MOST_NAMED
    named = ", ".join(differences[:_MOST_NAMED]) + (f", and {more} more" if more > 0 else "")
    starter = _show(theirs.get(STARTED_BY) or "")
    whose = f", which node {starter} started" if starter else ""
    return f"{named}{whose}: all nodes of a job need the same settings"


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    if _nnodes(ours) != _nnodes(theirs):
        yield f"nnodes is {_nnodes(ours)} here and {_nnodes(theirs)} for the job"
    same_role = ours.get("role") == theirs.get("role")
    for key in {**ours, **theirs}:
        if key in _NOT_COMPARED or (key == "entry_point" and not same_role):
            continue
        here, there = _show(ours.get(key)), _show(theirs.get(key))
        if here != there or (key in ours) != (key in theirs):
            yield f"{_show(key).removesuffix('_s')} is {here} here and {there} for the job"


def _nnodes(agreement: Mapping[str, Any]) -> str:
    return f"{_show(agreement.get('min_nodes'))}:{_show(agreement.get('max_nodes'))}"


def _show(value: object) -> str:
    match value:
        case None:
            return "none"
        case bool() | int():
            text = str(value)
        case float():
            text = f"{value:g}"
        case list() | tuple():
            text = "+".join(map(str, value)) or "none"
        case _:
            text = str(value)
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


# --- settings --------------------------------------------------------------------------------------------------------------


CONF_FILE = "conf_file"
_FILE_BYTES = 64 * 1024
_LEAST_LEASE_S = 1.0
_COMMENT = re.compile(r"(?:^|\s)#")


def read_settings(config: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """The settings from a back end's configuration, the environment and the file that either names.

    UsageError names the setting, its value and where that stands.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, value, source in _given(config, environ):
        if key not in BY_KEY and _is_of_another_back_end(key):
            report.debug(f"{source}: {key} is a setting of another back end, and has no effect here")
            continue
        setting = _known(key, source)
        if key in sources or value is None:
            continue
        sources[key] = source
        checked = converted(setting.kind, value, f"{source}: {key}")
        if setting.used:
            values[setting.field] = checked
    return _checked(Settings(**values, sources=tuple(sources.items())))


def parse_setting(key: str, value: object, source: str) -> Any:
    """The value of one setting, converted and checked on its own."""
    return converted(_known(key, source).kind, value, f"{source}: {key}")


def describe(settings: Settings, but: str = "") -> str:
    """Every setting that has an effect, and where it came from unless that is its default. `but` names one that has none here."""
    return ", ".join(_phrases(settings, but))


def announce(meeting: str, settings: Settings, but: str = "") -> None:
    """The first line of a job: where its nodes meet, and which settings were changed; for debugging, all of them."""
    changed = ", ".join(_phrases(settings, but, only_given=True))
    report.info(f"{meeting}; {changed}" if changed else meeting)
    report.debug(f"settings: {describe(settings, but)}")


def node_count(least: int, most: int) -> str:
    return many(most, "node") if least == most else f"{least} to {most} nodes"


def agreed(
    settings: Settings,
    min_nodes: int,
    max_nodes: int,
    max_restarts: int,
    role: str,
    entry_point: str,
    fence_s: float,
    started_by: str = "",
    alike: Iterable[tuple[str, str | int]] = (),
) -> dict[str, Any]:
    """What the first node writes down for all, of values that JSON knows; `started_by` is its own name, for messages.

    `alike` is more of that, which is no affair of the rendezvous.
    """
    return {
        "protocol": defaults.PROTOCOL_VERSION,
        "min_nodes": min_nodes,
        "max_nodes": max_nodes,
        "max_restarts": max_restarts,
        "node_unit": settings.node_unit,
        "lease_s": settings.lease_s,
        "fence_s": fence_s,
        **{one.field: getattr(settings, one.field) for one in SETTINGS if one.shared},
        "worker_store": settings.worker_store or defaults.WORKER_STORE,
        **dict(alike),
        "role": role,
        "entry_point": entry_point,
        STARTED_BY: started_by,
    }


def check_node_unit(settings: Settings, min_nodes: int, max_nodes: int) -> None:
    """Refuse a job that could never run: no multiple of node_unit lies within its numbers of nodes."""
    unit = settings.node_unit
    if max_nodes // unit * unit < min_nodes:
        raise UsageError(
            f"node_unit is {unit} ({settings.source('node_unit')}) and nnodes is {min_nodes}:{max_nodes}: no multiple of {unit}"
            f" lies between {min_nodes} and {max_nodes}, so the job could never run"
        )


def _phrases(settings: Settings, but: str, only_given: bool = False) -> Iterator[str]:
    for setting in SETTINGS:
        value = getattr(settings, setting.field, None)
        if value is None or value == () or setting.key == but:
            continue
        source = settings.source(setting.key)
        if only_given and source == DEFAULT:
            continue
        yield f"{setting.key} {shown(setting.kind, value)}" + (f" ({source})" if source != DEFAULT else "")


def _given(config: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    """All that was given, the strongest first, with where it stands; an empty variable says nothing."""
    for key, value in config.items():
        if key != CONF_FILE:
            yield key, value, _config_source(key)
    for setting in SETTINGS:
        if setting.variable and environ.get(setting.variable):
            yield setting.key, environ[setting.variable], setting.variable
    path = config.get(CONF_FILE) or environ.get(defaults.ENV_CONF)
    if path:
        yield from _file_lines(str(path))


def _config_source(key: str) -> str:
    flag = BY_KEY[key].flag if key in BY_KEY else ""
    return f"{flag} or --rdzv-conf" if flag else "--rdzv-conf"


def _file_lines(path: str) -> Iterator[tuple[str, str, str]]:
    """The settings of a file, each with its line; comments begin with # at the start of a line or after a space."""
    seen: dict[str, str] = {}
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        where = f"{path}:{number}"
        key, equals, value = (part.strip() for part in _COMMENT.split(line)[0].partition("="))
        if not (key or equals):
            continue
        if not (key and equals and value):
            raise UsageError(f"{where}: {line.strip()!r} is not of the form key = value")
        if key in seen:
            raise UsageError(f"{where}: {key} stands in {seen[key]} already")
        seen[key] = where
        yield key, value, where


def _read_text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(_FILE_BYTES + 1)
        if len(data) > _FILE_BYTES:
            raise UsageError(f"{path}: a file of settings has at most {_FILE_BYTES} bytes")
        return data.decode()
    except OSError as error:
        raise UsageError(f"{path}: the file of settings cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: the file of settings is not UTF-8 text") from error


def _known(key: str, source: str) -> Setting:
    setting = BY_KEY.get(key)
    if setting is not None:
        return setting
    import difflib

    known = [*BY_KEY, CONF_FILE]
    meant = difflib.get_close_matches(key, known, n=1)
    advice = f"did you mean {meant[0]}?" if meant else f"the settings are {', '.join(known)}"
    raise UsageError(f"{source}: there is no rendezvous setting {key!r}; {advice}")


def _is_of_another_back_end(key: str) -> bool:
    """One command may be used with several of them."""
    from rallypoint.rendezvous.etcd import ETCD_SETTINGS

    return key == "rank" or any(key in (setting.key, setting.other_name) for setting in ETCD_SETTINGS)


def _checked(settings: Settings) -> Settings:
    """What only shows when the settings are seen together."""
    interval, attempts = (settings.source(key) for key in ("keep_alive_interval", "keep_alive_max_attempt"))
    if settings.lease_s < _LEAST_LEASE_S:
        raise UsageError(
            f"the lease, keep_alive_interval ({settings.keep_alive_interval_s:g} s, {interval}) times keep_alive_max_attempt"
            f" ({settings.keep_alive_max_attempt}, {attempts}), is {settings.lease_s:g} s; it takes {_LEAST_LEASE_S:g} s or more,"
            " or healthy nodes would be taken for dead"
        )
    if settings.restart_backoff_max_s >= settings.restart_backoff_s:
        return settings
    if settings.source("restart_backoff_max") == DEFAULT:
        return settings.replace(restart_backoff_max_s=settings.restart_backoff_s)
    raise UsageError(
        f"restart_backoff is {settings.restart_backoff_s:g} s ({settings.source('restart_backoff')}), longer than"
        f" restart_backoff_max, {settings.restart_backoff_max_s:g} s ({settings.source('restart_backoff_max')})"
    )


# --- the job's secret ------------------------------------------------------------------------------------------------------


_LEAST_SECRET = 16  # fewer could be guessed
_MOST_SECRET = 4096
_NEW_SECRET = "make one with: python3 -c 'import secrets; print(secrets.token_hex(32))'"


def load_secret(settings: Settings, environ: Mapping[str, str]) -> bytes | None:
    """The secret, or None where none was given; blanks and line ends after it do not belong to it."""
    path, source, variable = *_secret_path(settings), environ.get(defaults.ENV_SECRET)
    if path is None:
        if not variable or variable in defaults.SECRET_WORDS:
            return None
        if settings.is_given("secret"):
            raise UsageError(f"{source} is {settings.secret}, and {defaults.ENV_SECRET} has a secret; leave one out")
        return _checked_secret(os.fsencode(variable), defaults.ENV_SECRET)
    if variable and variable not in defaults.SECRET_WORDS:
        raise UsageError(f"the job's secret is given twice, in {source} and in {defaults.ENV_SECRET}; leave one out")
    try:
        return _checked_secret(_read_secret(path, source), f"{source}: {path}")
    except OSError as error:
        raise UsageError(f"{source}: {path} cannot be read: {error.strerror}") from error


def is_secret_looked_for(settings: Settings, environ: Mapping[str, str]) -> bool:
    """Whether one is to be had that nobody has given."""
    word = settings.secret if settings.is_given("secret") else environ.get(defaults.ENV_SECRET) or settings.secret
    return settings.secret_file is None and word == defaults.SECRET_AUTO


def _secret_path(settings: Settings) -> tuple[str | None, str]:
    """The file with the secret, and where it was given."""
    has_path = settings.secret not in defaults.SECRET_WORDS
    secret, file = (f"{key} ({settings.source(key)})" for key in ("secret", "secret_file"))
    if settings.is_given("secret") and settings.secret_file is not None and settings.secret != settings.secret_file:
        raise UsageError(f"{secret} is {settings.secret}, and {file} is {settings.secret_file}; leave one out")
    return (settings.secret, secret) if has_path else (settings.secret_file, secret if settings.is_given("secret") else file)


def _read_secret(path: str, source: str) -> bytes:
    """The start of a file; what is none, such as a pipe that nobody writes to, is not waited for."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise UsageError(f"{source}: {path} is not a regular file")
        if mode & (stat.S_IRGRP | stat.S_IROTH) and path != defaults.MOUNTED_SECRET:
            report.warn(f"{source}: {path} can be read by other users of this machine; chmod 600 it")
        return file.read(_MOST_SECRET + 1)


def _checked_secret(data: bytes, source: str) -> bytes:
    if len(data) > _MOST_SECRET:
        raise UsageError(f"{source}: the job's secret has at most {_MOST_SECRET} bytes")
    secret = data.rstrip()
    if len(secret) < _LEAST_SECRET:
        raise UsageError(f"{source}: the job's secret has {len(secret)} bytes, and needs {_LEAST_SECRET} or more; {_NEW_SECRET}")
    return secret
