"""Every setting of the elastic rendezvous, once: its name, what it may be, its default, and what it means.

The table is read by the parser (`settings`), by the line that is printed at the start of a job, and by the documentation.
"""

from __future__ import annotations

from rallypoint import defaults
from rallypoint.records import Value
from rallypoint.rendezvous.setting_values import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.rendezvous.setting_values import Kind

__all__ = ["BY_KEY", "SETTINGS", "Setting", "markdown"]


class Setting(Value):
    """One setting. `flag` is the flag of ``rallyrun`` that gives it too; what is not `used` is accepted for torchrun's sake."""

    key: str
    kind: Kind
    default: Any
    help: str
    flag: str = ""
    used: bool = True

    @property
    def field(self) -> str:
        """Its name in `Settings`."""
        return f"{self.key}_s" if self.kind in ("seconds", "seconds_or_0") else self.key

    @property
    def variable(self) -> str:
        return f"{defaults.ENV_SETTING_PREFIX}{self.key.upper()}"


# A table is read by its rows.
# fmt: off
SETTINGS: tuple[Setting, ...] = (
    Setting("join_timeout", "seconds", defaults.JOIN_TIMEOUT_S,
            "How long a node waits to be let in before it gives up."),
    Setting("last_call_timeout", "seconds_or_0", defaults.LAST_CALL_TIMEOUT_S,
            "How long the first generation waits for more nodes once the least number is here; counted from the latest arrival."),
    Setting("close_timeout", "seconds_or_0", defaults.CLOSE_TIMEOUT_S,
            "How long the store's host stays at the end until the others have seen it."),
    Setting("keep_alive_interval", "seconds", defaults.KEEP_ALIVE_INTERVAL_S,
            "How often a node says that it lives."),
    Setting("keep_alive_max_attempt", "count", defaults.KEEP_ALIVE_MAX_ATTEMPT,
            "After how many such intervals of silence a node counts as dead. Their product is the lease: at least 1 s."),
    Setting("store_timeout", "seconds", defaults.STORE_SILENCE_S,
            "How long a node that has lost the store tries to reach it again before it ends."),
    Setting("scale_up_window", "seconds_or_0", defaults.SCALE_UP_WINDOW_S,
            "How long nodes that join a running job are gathered before it is re-formed; not at all once the most are here."),
    Setting("node_unit", "count", defaults.NODE_UNIT,
            "The number of nodes is always a multiple of this; the others wait as spares.", flag="--node-unit"),
    Setting("node_rank", "rank", None,
            "The rank that this node is to have, for itself alone; -1 or none leaves it to the job.", flag="--node-rank"),
    Setting("is_host", "truth", None,
            "Whether this node is the store's host: true or false. Not given: it is if the endpoint is one of its addresses."),
    Setting("secret_file", "path", None,
            "A file with the job's secret, at least 16 bytes, the same on all nodes.", flag="--secret-file"),
    Setting("restart_backoff", "seconds_or_0", defaults.RESTART_BACKOFF_S,
            "The pause before the second restart; it doubles with each one after that. The first comes at once.",
            flag="--restart-backoff"),
    Setting("restart_backoff_max", "seconds_or_0", defaults.RESTART_BACKOFF_MAX_S,
            "The longest such pause."),
    Setting("restart_window", "seconds_or_0", defaults.RESTART_WINDOW_S,
            "Only restarts within this time count against --max-restarts; 0: all of the job's.", flag="--restart-window"),
    Setting("no_retry_exit_codes", "codes", (),
            "Exit codes of workers after which the job ends without a restart, as in 2+64; -n for signal n.",
            flag="--no-retry-exit-codes"),
    Setting("max_membership_changes", "limit", None,
            "How often nodes may come and go before the job ends; none: as often as they like."),
    Setting("worker_store", "worker_store", None,
            "Who serves the workers' store at the master address: agent, that of group rank 0, or rank0, its first worker. Not"
            f" given: agent, unless {defaults.ENV_DISABLE_SHARED_STORE} is 1.", flag="--worker-store"),
    Setting("worker_store_port", "ports", defaults.WORKER_STORE_PORTS,
            "The port of the workers' store, or the first and the last of those that it may have, as in 29600-29700; 0: any that"
            " is free.", flag="--worker-store-port"),
    Setting("worker_store_memory", "size", defaults.WORKER_STORE_BYTES,
            "How much the workers' store may hold, as in 500M or 2G.", flag="--worker-store-memory"),
    Setting("store_type", "store", "tcp",
            "How the store is reached: tcp. A shared folder (file) is refused: it can hold no lease, so that a dead node would"
            " not be noticed."),
    Setting("heartbeat_timeout", "number", 5.0, "Accepted for torchrun; has no effect here.", used=False),
    Setting("read_timeout", "number", 60.0, "Accepted for torchrun; has no effect here, see store_timeout.", used=False),
    Setting("timeout", "number", float(defaults.RDZV_TIMEOUT_S),
            "Accepted for torchrun (rdzv_timeout); has no effect here, see join_timeout.", used=False),
)
# fmt: on

BY_KEY: dict[str, Setting] = {setting.key: setting for setting in SETTINGS}


def markdown() -> str:
    """The settings as a table for the documentation."""
    rows = [f"| {' | '.join(_cells(setting))} |" for setting in SETTINGS]
    return "\n".join(["| setting | default | variable, flag | meaning |", "|---|---|---|---|", *rows])


def _cells(setting: Setting) -> list[str]:
    default = shown(setting.kind, setting.default) if setting.used else ""
    names = [f"`{name}`" for name in (setting.variable, setting.flag) if name]
    return [f"`{setting.key}`", default or "-", ", ".join(names), setting.help]
