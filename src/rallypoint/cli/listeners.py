"""Where a launch would listen: at which address and port, who is meant to come there, and what keeps others out.

It is said before anything is opened, so what is chosen later (a free port, the node of rank 0) is named as such.
"""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint.agent.config import LaunchConfig
from rallypoint.base import defaults, environment
from rallypoint.base.records import Value
from rallypoint.base.text import host_port
from rallypoint.net.endpoint import parse_rendezvous_endpoint
from rallypoint.rendezvous.settings import BY_KEY, Settings, is_secret_looked_for, load_secret, read_settings

__all__ = ["Listener", "listeners"]

ANY_PORT = "any free port"
OWN_ADDRESS = "the address by which others reach this node"
SAME_USER = "the same user, as the kernel says"
NODES_KEY = "agents of this job; a key that only they are told, and what is said is sealed"
NO_GUARD = "torch's protocol has no secret"


class Listener(Value):
    """One of them; `who` may come includes how it is guarded."""

    what: str
    where: str
    who: str

    def __str__(self) -> str:
        return f"{self.what}: {self.where}; {self.who}"


def listeners(config: LaunchConfig) -> Iterator[Listener]:
    """Those that all nodes may have are told for this one."""
    settings = _settings(config)
    if config.max_nodes > 1:
        yield from _meeting(config, settings)
    yield _workers_store(config, settings)
    if config.checkpoint_copies and config.max_nodes > 1:
        yield Listener("copies of snapshots", f"{_own_address(config)}, {ANY_PORT}", NODES_KEY)
    if any(check.partition("=")[0] == "network" for check in config.preflight) and config.max_nodes > 1:
        yield Listener("measurements between nodes", f"{_own_address(config)}, {ANY_PORT}", NODES_KEY)
    yield from _health(config)
    yield Listener("commands such as ps and stop", "a socket in a folder of this user's own", SAME_USER)
    if path := environment.text(defaults.ENV_CONTROL_SOCKET):
        yield Listener("control of workers", f"{path}, a socket", SAME_USER)


def _settings(config: LaunchConfig) -> Settings:
    ours = {key: value for key, value in config.rdzv_configs.items() if key in BY_KEY or key == "conf_file"}
    return read_settings(ours, environment.own)


def _meeting(config: LaunchConfig, settings: Settings) -> Iterator[Listener]:
    if config.rdzv_backend in defaults.ETCD_BACKENDS:
        if str(config.rdzv_configs.get("bootstrap", "")).lower() in ("true", "1"):
            yield Listener(
                "etcd, for agents and its own members",
                f"{config.rdzv_endpoint}, on those of these hosts that this is",
                "whoever the cluster's certificates and users allow",
            )
        return
    if config.rdzv_backend not in (defaults.BACKEND_ELASTIC, defaults.BACKEND_CLI):
        return  # another's
    is_static = config.rdzv_backend == defaults.BACKEND_CLI
    host, port = parse_rendezvous_endpoint(config.rdzv_endpoint, defaults.MASTER_PORT if is_static else defaults.ELASTIC_PORT)
    whom = "agents and workers of this job" if is_static else "agents of this job"
    yield Listener(
        f"the store of the agents, {_where_host(config, settings)}", host_port(host, port), f"{whom}; {_guard(settings)}"
    )


def _where_host(config: LaunchConfig, settings: Settings) -> str:
    if config.rdzv_backend == defaults.BACKEND_CLI:
        return "here, as this is node 0" if config.rdzv_configs.get("rank") == 0 else "on node 0, and not here"
    if settings.is_host is None:
        return "on the node whose address it is"
    return "here" if settings.is_host else "on another node"


def _guard(settings: Settings) -> str:
    """In words, how the agents' store is guarded."""
    if settings.tls_cert is not None:
        return "each shows a certificate of the authority in tls_ca, and speaks TLS"
    if load_secret(settings, environment.own) is not None:
        return "they prove that they know the secret that was given"
    if is_secret_looked_for(settings, environment.own):
        return "they prove that they know the job's secret, as far as they can find one (--secret auto)"
    return "but there is no secret, so whoever reaches it (--secret none)"


def _workers_store(config: LaunchConfig, settings: Settings) -> Listener:
    first, last = settings.worker_store_port
    port = f"port {first}" + (f" to {last}" if last > first else "") if first else ANY_PORT
    is_static = config.rdzv_backend == defaults.BACKEND_CLI
    what = "the store of the workers" + ("" if config.max_nodes == 1 else ", on the node of rank 0")
    by_worker = settings.worker_store == defaults.WORKER_STORE_RANK0
    if is_static:
        host, number = parse_rendezvous_endpoint(config.rdzv_endpoint, defaults.MASTER_PORT)
        where = host_port(host, number) if number else f"{host}, {ANY_PORT}"
    else:
        where = f"{(config.local_addr or defaults.MASTER_ADDR) if config.max_nodes == 1 else _own_address(config)}, {port}"
    if by_worker:
        return Listener(f"{what}, opened by its first worker", where, f"whoever reaches it; {NO_GUARD}")
    if config.max_nodes == 1 or settings.worker_store_from == defaults.WORKER_STORE_FROM_ANY:
        return Listener(what, where, f"whoever reaches it; {NO_GUARD}")
    return Listener(what, where, f"from the addresses of the job's nodes, as far as these are known; {NO_GUARD}")


def _own_address(config: LaunchConfig) -> str:
    return config.local_addr or OWN_ADDRESS


def _health(config: LaunchConfig) -> Iterator[Listener]:
    port = config.health_port if config.health_port is not None else environment.text(defaults.ENV_HEALTH_CHECK_PORT)
    if port in (None, "") and not config.web:
        return
    where = host_port(config.health_addr, int(port)) if str(port or "").isdecimal() and int(port or 0) else ""
    where = where or f"{config.health_addr}, {ANY_PORT}"
    yield Listener("health", where, "whoever reaches it may read; nobody can change anything")
    if config.web:
        yield Listener("the web page", where, "who has the token that the launcher prints at its start")
