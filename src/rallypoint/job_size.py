"""How many nodes and workers the command line asks for: what it says, and whether there can be so many."""

from __future__ import annotations

from rallypoint.devices import determine_local_world_size
from rallypoint.errors import UsageError

__all__ = ["NodeCountError", "parse_min_max_nnodes", "read_nodes", "read_workers"]


class NodeCountError(UsageError, RuntimeError):
    """``--nnodes`` is not of its form; a RuntimeError too, as callers of `parse_min_max_nnodes` know it."""


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """The least and the most nodes that ``--nnodes`` asks for, whether there can be so many or not."""
    try:
        least, *more = map(int, nnodes.split(":"))
        (most,) = more or [least]
    except ValueError:
        raise NodeCountError(f"{nnodes!r} is neither a number of nodes nor MIN:MAX") from None
    return least, most


def read_nodes(nnodes: str) -> tuple[int, int]:
    """The least and the most nodes, if there can be so many."""
    least, most = parse_min_max_nnodes(nnodes)
    if not 0 < least <= most:
        raise UsageError(f"{nnodes!r} asks for at least {least} and at most {most} nodes; it takes 1 <= MIN <= MAX")
    return least, most


def read_workers(nproc_per_node: str) -> int:
    """The workers on this node, if there can be so many."""
    workers = determine_local_world_size(nproc_per_node)
    if workers < 1:
        raise UsageError(f"{workers} is too few: each node needs at least one worker")
    return workers
