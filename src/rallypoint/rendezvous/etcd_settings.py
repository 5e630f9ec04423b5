"""The settings that only the etcd back end has: how to come at the cluster. Names that torchrun's back end knows are kept."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.base import defaults
from rallypoint.base.records import Value
from rallypoint.coordination.etcd.gateway import EtcdAccess
from rallypoint.errors import UsageError
from rallypoint.net.endpoint import parse_rendezvous_endpoint
from rallypoint.rendezvous.settings import converted, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.rendezvous.settings import Kind

__all__ = ["ETCD_SETTINGS", "EtcdSettings", "markdown", "parse_endpoints", "read_etcd_settings"]

_PASSWORD_BYTES = 4096


class EtcdSetting(Value):
    key: str
    kind: Kind
    default: Any
    help: str
    other_name: str = ""  # torchrun's


# A table is read by its rows.
# fmt: off
ETCD_SETTINGS: tuple[EtcdSetting, ...] = (
    EtcdSetting("protocol", "protocol", "http", "http or https."),
    EtcdSetting("cacert", "path", None, "CA file that the members' certificates must be signed by.",
                "ca_cert"),
    EtcdSetting("cert", "path", None, "This node's certificate file, if the cluster requires one.", "ssl_cert"),
    EtcdSetting("key", "path", None, "Key file for that certificate.", "ssl_cert_key"),
    EtcdSetting("user", "text", None, "User name, if the cluster requires one."),
    EtcdSetting("password_file", "path", None, "File with that user's password."),
    EtcdSetting("prefix", "text", defaults.ETCD_PREFIX, "Key prefix for all jobs; each job is under its ID.", "etcd_prefix"),
    EtcdSetting("read_timeout", "seconds", 60.0, "Time limit for one answer."),
    EtcdSetting("fence", "seconds", defaults.ETCD_FENCE_S,
                "How long the workers of a node that has lost the cluster keep running before they are killed, and how long the"
                " other nodes wait before they replace it."),
    EtcdSetting("bootstrap", "truth", False, "Start a cluster member on each host in the endpoint."),
)
# fmt: on


def markdown() -> str:
    """The settings as a table for the documentation."""
    rows = [f"| {_name(one)} | {shown(one.kind, one.default) or '-'} | {one.help} |" for one in ETCD_SETTINGS]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows])


def _name(setting: EtcdSetting) -> str:
    return f"`{setting.key}`" + (f", `{setting.other_name}`" if setting.other_name else "")


class EtcdSettings(Value):
    access: EtcdAccess
    prefix: str
    fence_s: float
    bootstrap: bool
    others: dict[str, Any]  # what is left for the settings that all elastic back ends have


def read_etcd_settings(endpoint: str, config: Mapping[str, Any], environ: Mapping[str, str]) -> EtcdSettings:
    """UsageError names the setting, its value and where that stands."""
    given, others = dict(config), dict(config)
    values = {}
    for setting in ETCD_SETTINGS:
        names = [name for name in (setting.key, setting.other_name) if name]
        values[setting.key] = _value_of(setting, names, given, environ)
        for name in names:
            others.pop(name, None)
    access = EtcdAccess(
        endpoints=parse_endpoints(endpoint),
        protocol=values["protocol"],
        ca_cert=values["cacert"],
        cert=values["cert"],
        key=values["key"],
        user=values["user"],
        password=_password(values["user"], values["password_file"]),
        read_timeout_s=values["read_timeout"],
    )
    _check_tls(access)
    return EtcdSettings(access, values["prefix"], values["fence"], values["bootstrap"], others)


def parse_endpoints(endpoint: str) -> tuple[tuple[str, int], ...]:
    """Every member of ``a:2379,b,c``; without a port it is etcd's usual one."""
    names = [name for name in map(str.strip, endpoint.split(",")) if name]
    if not names:
        raise UsageError("the etcd back end needs an endpoint: --rdzv-endpoint host:2379, or several of them behind commas")
    return tuple(parse_rendezvous_endpoint(name, defaults.ETCD_PORT) for name in names)


def _value_of(setting: EtcdSetting, names: list[str], given: Mapping[str, Any], environ: Mapping[str, str]) -> Any:
    variable = f"{defaults.ENV_SETTING_PREFIX}ETCD_{setting.key.upper()}"
    sources = [(f"--rdzv-conf: {name}", given.get(name)) for name in names] + [(variable, environ.get(variable) or None)]
    source, value = next(((source, value) for source, value in sources if value is not None), ("", None))
    return setting.default if value is None else converted(setting.kind, value, source)


def _password(user: str | None, path: str | None) -> str | None:
    if user is None or path is None:
        if user is not path:
            raise UsageError("etcd: a user needs a password_file, and a password_file a user; one of them is not given")
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline(_PASSWORD_BYTES).rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"password_file: {path} cannot be read: {error}") from None


def _check_tls(access: EtcdAccess) -> None:
    files = [path for path in (access.ca_cert, access.cert, access.key) if path is not None]
    if files and access.protocol != "https":
        raise UsageError(f"etcd: {files[0]} is given, but protocol is http; add protocol=https")
    if access.key is not None and access.cert is None:
        raise UsageError("etcd: there is a key, and no certificate that it belongs to; give cert")
