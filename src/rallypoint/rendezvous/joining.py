"""What a node brings to a job: who it is, and what its settings mean for the protocol."""

from __future__ import annotations

import os

from rallypoint.core import job_records as job
from rallypoint.core.generation import Policy
from rallypoint.core.participant import Joining
from rallypoint.core.restarts import RestartPolicy
from rallypoint.records import Value
from rallypoint.rendezvous.coordinated import Introduction
from rallypoint.rendezvous.handler import RendezvousParameters
from rallypoint.rendezvous.rank_hint import RankHint
from rallypoint.rendezvous.settings import Settings, agreed, mismatch

__all__ = ["Identity", "lease_s", "make_joining"]

LEAST_READY_MARGIN_S = 5.0
FENCE_MARGIN_S = 0.5
NODES_PER_KEEPALIVE_SECOND = 1000


class Identity(Value):
    """A node in one session: its name stays, its lease is new."""

    name: str
    hint: RankHint | None
    address: str
    lease: int


def lease_s(settings: Settings, max_nodes: int) -> float:
    """Many nodes speak less often, so that the store's host is not kept busy by keepalives alone."""
    interval_s = max(settings.keep_alive_interval_s, max_nodes / NODES_PER_KEEPALIVE_SECOND)
    return interval_s * settings.keep_alive_max_attempt


def make_joining(params: RendezvousParameters, settings: Settings, introduction: Introduction, me: Identity) -> Joining:
    shared = agreed(
        settings,
        params.min_nodes,
        params.max_nodes,
        introduction.max_restarts,
        introduction.role,
        introduction.entry_point,
        me.name,
    )
    record = _record(introduction, me)
    policy = _policy(params, settings, introduction)
    return Joining(os.urandom(8).hex(), me.lease, record, shared, mismatch, policy, _restarts(settings, introduction))


def _record(introduction: Introduction, me: Identity) -> job.NodeRecord:
    return job.NodeRecord(
        name=me.name,
        address=me.address,
        port=0,
        role=introduction.role,
        workers=introduction.workers,
        ready_after=job.NOT_READY,
        rank_hint=me.hint.rank if me.hint else -1,
        hint_is_explicit=me.hint.is_explicit if me.hint else False,
    )


def _policy(params: RendezvousParameters, settings: Settings, introduction: Introduction) -> Policy:
    return Policy(
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        node_unit=settings.node_unit,
        join_timeout_s=settings.join_timeout_s,
        last_call_s=settings.last_call_timeout_s,
        scale_up_window_s=settings.scale_up_window_s,
        lease_s=lease_s(settings, params.max_nodes),
        ready_timeout_s=introduction.shutdown_timeout_s + _ready_margin_s(settings, params.max_nodes),
    )


def _ready_margin_s(settings: Settings, max_nodes: int) -> float:
    """Beyond the time that workers have to stop. A node that cannot hear the signal has fenced itself by then."""
    return max(LEAST_READY_MARGIN_S, lease_s(settings, max_nodes) + FENCE_MARGIN_S)


def _restarts(settings: Settings, introduction: Introduction) -> RestartPolicy:
    return RestartPolicy(
        max_restarts=introduction.max_restarts,
        no_retry_exit_codes=settings.no_retry_exit_codes,
        backoff_s=settings.restart_backoff_s,
        max_backoff_s=settings.restart_backoff_max_s,
        window_s=settings.restart_window_s,
        max_membership_changes=settings.max_membership_changes,
    )
