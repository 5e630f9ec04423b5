"""What a node brings to a job: who it is, and what its settings mean for the protocol.

A rank that the user gives is an order: no second node may hold it. One that is found in the variables of Slurm or Kubernetes is
a wish: the job follows it where it can.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rallypoint.base import defaults
from rallypoint.base.records import Value
from rallypoint.protocol import job_records as job
from rallypoint.protocol.generation import READY_MARGIN_S, Policy
from rallypoint.protocol.leader import STATUS_INTERVAL_S
from rallypoint.protocol.participant import Joining
from rallypoint.protocol.restarts import RestartPolicy
from rallypoint.rendezvous.coordinated import Introduction
from rallypoint.rendezvous.handler import RendezvousParameters
from rallypoint.rendezvous.settings import Settings, agreed, mismatch

__all__ = [
    "NODES_PER_KEEPALIVE_SECOND",
    "Identity",
    "RankHint",
    "Terms",
    "find_rank_hint",
    "make_joining",
    "stable_name",
    "terms_of",
]


# --- rank hint -------------------------------------------------------------------------------------------------------------


_MOST_DIGITS = 6


class RankHint(Value):
    """A rank among the nodes, where it stands, and whether the user gave it for this job."""

    rank: int
    source: str
    is_explicit: bool


def find_rank_hint(explicit: int | None, environ: Mapping[str, str]) -> RankHint | None:
    """The rank that was given for this node, else the one that a scheduler has for it, else None."""
    if explicit is not None:
        return RankHint(explicit, "node_rank", is_explicit=True)
    started_by_us = _from(environ, defaults.ENV_HOST_INDEX)
    return started_by_us or _from_slurm(environ) or _from(environ, defaults.ENV_KUBERNETES_INDEX)


def stable_name(hint: RankHint | None, hostname: str) -> str:
    """The name of this node that stays when its agent is started anew; several on one machine need a slot besides."""
    return f"rank{hint.rank}" if hint is not None and hint.is_explicit else hostname


def _from_slurm(environ: Mapping[str, str]) -> RankHint | None:
    """Slurm's number of this node; it says nothing where each node has an allocation of its own."""
    nodes = next((_number(environ[name]) for name in defaults.ENV_SLURM_NODES if name in environ), None)
    return _from(environ, defaults.ENV_SLURM_NODE) if nodes is not None and nodes > 1 else None


def _from(environ: Mapping[str, str], variable: str) -> RankHint | None:
    rank = _number(environ.get(variable, ""))
    return None if rank is None else RankHint(rank, variable, is_explicit=False)


def _number(text: str) -> int | None:
    """A variable of somebody else's: what is no plain number is ignored."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


# --- joining ---------------------------------------------------------------------------------------------------------------


WATCHED_STATUS_INTERVAL_S = 1.0
NODES_PER_KEEPALIVE_SECOND = 1000  # of the embedded store


class Identity(Value):
    """A node in one session: its name stays, its lease is new."""

    name: str
    hint: RankHint | None
    address: str
    lease: int


class Terms(Value):
    """How long a lease is, and for how long a node that hears nothing of the store may still run its workers."""

    lease_s: float
    fence_s: float

    def patience_s(self, store_timeout_s: float) -> float:
        """How long a silent store is hoped for: where the fence is longer than a lease, not less than that."""
        return store_timeout_s if self.fence_s <= self.lease_s else max(store_timeout_s, self.fence_s + self.lease_s)


def terms_of(settings: Settings, max_nodes: int, nodes_per_s: int, fence_s: float = 0.0) -> Terms:
    """Many nodes speak less often, so that a store that can hear so many in a second is not kept busy by keepalives alone.

    Without a fence that is longer than a lease, a node that is not heard of for one lease is dead. A cluster of etcd is away for
    seconds when its leader dies, and workers need not die of that.
    """
    lease_s = max(settings.keep_alive_interval_s, max_nodes / nodes_per_s) * settings.keep_alive_max_attempt
    return Terms(lease_s, max(fence_s, lease_s))


def make_joining(
    params: RendezvousParameters, settings: Settings, introduction: Introduction, me: Identity, terms: Terms
) -> Joining:
    shared = agreed(
        settings,
        params.min_nodes,
        params.max_nodes,
        introduction.max_restarts,
        introduction.role,
        introduction.entry_point,
        terms.fence_s,
        me.name,
        introduction.alike,
    )
    record = job.NodeRecord(
        name=me.name,
        address=me.address,
        port=0,
        role=introduction.role,
        workers=introduction.workers,
        ready_after=job.NOT_READY,
        rank_hint=me.hint.rank if me.hint else -1,
        hint_is_explicit=me.hint.is_explicit if me.hint else False,
    )
    policy = Policy(
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        node_unit=settings.node_unit,
        join_timeout_s=settings.join_timeout_s,
        last_call_s=settings.last_call_timeout_s,
        scale_up_window_s=settings.scale_up_window_s,
        lease_s=terms.lease_s,
        after_expiry_s=terms.fence_s - terms.lease_s,
        ready_timeout_s=introduction.shutdown_timeout_s + READY_MARGIN_S,
    )
    restarts = RestartPolicy(
        max_restarts=introduction.max_restarts,
        no_retry_exit_codes=settings.no_retry_exit_codes,
        backoff_s=settings.restart_backoff_s,
        max_backoff_s=settings.restart_backoff_max_s,
        window_s=settings.restart_window_s,
        max_membership_changes=settings.max_membership_changes,
        max_node_losses=settings.max_node_losses,
        max_departures=settings.max_departures,
        max_preemptions=settings.max_preemptions,
        max_joins=settings.max_joins,
        max_hangs=settings.max_hangs,
        healthy_after_s=settings.healthy_after_s,
        max_no_progress=settings.max_no_progress,
        max_same_failures=settings.max_same_failures,
        early_s=settings.early_failure_s,
        retry_hopeless=settings.retry_hopeless,
    )
    interval_s = WATCHED_STATUS_INTERVAL_S if introduction.is_watched else STATUS_INTERVAL_S
    return Joining(os.urandom(8).hex(), me.lease, record, shared, mismatch, policy, restarts, status_interval_s=interval_s)
