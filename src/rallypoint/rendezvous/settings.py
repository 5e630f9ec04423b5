"""The settings of the elastic rendezvous: read from where they are given, checked, and told with where they came from.

A setting is given in ``--rdzv-conf`` (``rdzv_configs`` in a program), else in the environment as ``RALLYPOINT_`` and its name in
capitals, else in a file of lines ``key = value`` that ``conf_file`` or ``RALLYPOINT_CONF`` names, else it has its default. A few
have a flag of their own, which fills ``--rdzv-conf``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from rallypoint import defaults
from rallypoint.errors import UsageError
from rallypoint.records import Value
from rallypoint.rendezvous.agreement import STARTED_BY, mismatch
from rallypoint.rendezvous.setting_table import BY_KEY, SETTINGS, Setting
from rallypoint.rendezvous.setting_values import CONVERTERS, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Settings", "agreed", "check_node_unit", "describe", "mismatch", "parse_setting", "read_settings"]

DEFAULT = "the default"
CONF_FILE = "conf_file"
_FILE_BYTES = 64 * 1024
_LEAST_LEASE_S = 1.0
_COMMENT = re.compile(r"(?:^|\s)#")


class Settings(Value):
    """What the elastic rendezvous of one node was told. `sources` says of each key where its value came from."""

    join_timeout_s: float = defaults.JOIN_TIMEOUT_S
    last_call_timeout_s: float = defaults.LAST_CALL_TIMEOUT_S
    close_timeout_s: float = defaults.CLOSE_TIMEOUT_S
    keep_alive_interval_s: float = defaults.KEEP_ALIVE_INTERVAL_S
    keep_alive_max_attempt: int = defaults.KEEP_ALIVE_MAX_ATTEMPT
    store_timeout_s: float = defaults.STORE_SILENCE_S
    scale_up_window_s: float = defaults.SCALE_UP_WINDOW_S
    node_unit: int = defaults.NODE_UNIT
    node_rank: int | None = None
    is_host: bool | None = None
    secret_file: str | None = None
    restart_backoff_s: float = defaults.RESTART_BACKOFF_S
    restart_backoff_max_s: float = defaults.RESTART_BACKOFF_MAX_S
    restart_window_s: float = defaults.RESTART_WINDOW_S
    no_retry_exit_codes: tuple[int, ...] = ()
    max_membership_changes: int | None = None
    worker_store: str | None = None
    worker_store_port: tuple[int, int] = defaults.WORKER_STORE_PORTS
    worker_store_memory: int = defaults.WORKER_STORE_BYTES
    store_type: str = "tcp"
    sources: tuple[tuple[str, str], ...] = ()

    @property
    def lease_s(self) -> float:
        """How long a node may be silent until it counts as dead."""
        return self.keep_alive_interval_s * self.keep_alive_max_attempt

    def restart_settings(self) -> dict[str, Any]:
        """Those of `defaults.RESTART_SETTINGS` that were given, by key: jobs of one node have them too."""
        given = dict(self.sources)
        return {key: getattr(self, BY_KEY[key].field) for key in defaults.RESTART_SETTINGS if key in given}

    def is_given(self, key: str) -> bool:
        return key in dict(self.sources)

    def source(self, key: str) -> str:
        """Where the value of `key` came from, in words."""
        return dict(self.sources).get(key, DEFAULT)


def read_settings(config: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """The settings from a back end's configuration, the environment and the file that either names.

    UsageError names the setting, its value and where that stands.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, value, source in _given(config, environ):
        setting = _known(key, source)
        if key in sources or value is None:
            continue
        sources[key] = source
        converted = _convert(setting, value, source)
        if setting.used:
            values[setting.field] = converted
    return _checked(Settings(**values, sources=tuple(sources.items())))


def parse_setting(key: str, value: object, source: str) -> Any:
    """The value of one setting, converted and checked on its own."""
    return _convert(_known(key, source), value, source)


def describe(settings: Settings, but: str = "") -> str:
    """One line for the start of a job: every setting that has an effect, and where it came from unless that is its default.

    `but` names one that has none in this job.
    """
    return ", ".join(_phrases(settings, but))


def agreed(
    settings: Settings,
    min_nodes: int,
    max_nodes: int,
    max_restarts: int,
    role: str,
    entry_point: str,
    fence_s: float,
    started_by: str = "",
) -> dict[str, Any]:
    """What the first node writes down for all, of values that JSON knows; `started_by` is its own name, for messages."""
    return {
        "protocol": defaults.PROTOCOL_VERSION,
        "min_nodes": min_nodes,
        "max_nodes": max_nodes,
        "max_restarts": max_restarts,
        "node_unit": settings.node_unit,
        "lease_s": settings.lease_s,
        "fence_s": fence_s,
        "last_call_timeout_s": settings.last_call_timeout_s,
        "scale_up_window_s": settings.scale_up_window_s,
        "restart_backoff_s": settings.restart_backoff_s,
        "restart_backoff_max_s": settings.restart_backoff_max_s,
        "restart_window_s": settings.restart_window_s,
        "no_retry_exit_codes": list(settings.no_retry_exit_codes),
        "max_membership_changes": settings.max_membership_changes,
        "worker_store": settings.worker_store or defaults.WORKER_STORE,
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


def _phrases(settings: Settings, but: str) -> Iterator[str]:
    for setting in SETTINGS:
        value = getattr(settings, setting.field, None)
        if value is None or value == () or setting.key == but:
            continue
        source = settings.source(setting.key)
        yield f"{setting.key} {shown(setting.kind, value)}" + (f" ({source})" if source != DEFAULT else "")


def _given(config: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    """All that was given, the strongest first, with where it stands; an empty variable says nothing."""
    for key, value in config.items():
        if key != CONF_FILE:
            yield key, value, _config_source(key)
    for setting in SETTINGS:
        if environ.get(setting.variable):
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


def _convert(setting: Setting, value: object, source: str) -> Any:
    convert, expected = CONVERTERS[setting.kind]
    try:
        return convert(value)
    except (ValueError, TypeError, OverflowError):
        raise UsageError(f"{source}: {setting.key} must be {expected}, not {value!r}") from None


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
