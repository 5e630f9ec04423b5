"""Which rank a node would like to have, and the name under which it is known again when its agent is started anew.

A rank that the user gives is an order: no second node may hold it. One that is found in the variables of Slurm or Kubernetes is
a wish: the job follows it where it can.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint import defaults
from rallypoint.records import Value

__all__ = ["RankHint", "find_rank_hint", "stable_name"]

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
    return _from_slurm(environ) or _from(environ, defaults.ENV_KUBERNETES_INDEX)


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
