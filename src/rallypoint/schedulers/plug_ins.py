"""Schedulers of which only a site knows: entry points, each a function from the environment to what it says of the job.

What they say goes the way of what a built-in one says: the user's word wins, a line tells of it, and an error names the plug-in.
They are asked by name only: to list what is installed takes longer than to start a job.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.base import defaults
from rallypoint.errors import UsageError
from rallypoint.schedulers.choose import NAMES
from rallypoint.schedulers.found import Found

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["VALUES", "available", "read"]

VALUES = ("nnodes", "nproc_per_node", "rdzv_endpoint", "rdzv_id")  # of which it says what it knows, by the names of the flags


def available() -> tuple[str, ...]:
    """Every name that ``--scheduler`` takes."""
    return (*NAMES, *sorted(_plug_ins()))


def read(name: str, environ: Mapping[str, str]) -> Found:
    """What the plug-in of this name says; UsageError if there is none, or if it cannot tell."""
    plug_in = _plug_ins().get(name)
    if plug_in is None:
        raise UsageError(f"--scheduler: there is no {name!r}; available: {', '.join(available())}")
    try:
        told = dict(plug_in.load()(environ))
    except Exception as error:  # a plug-in is somebody else's code, and may fail in any way
        raise UsageError(f"--scheduler {name} ({plug_in.value}) failed: {type(error).__name__}: {error}") from error
    if unknown := sorted(set(told) - set(VALUES)):
        raise UsageError(f"--scheduler {name} ({plug_in.value}) says {', '.join(unknown)}; it can say {', '.join(VALUES)}")
    values = {flag: str(value) for flag, value in told.items()}
    missing = "its plug-in says no rdzv_endpoint"
    return Found(name, values, dict.fromkeys(values, f"the plug-in {plug_in.value}"), needs_endpoint=missing)


def _plug_ins() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points

    return {one.name: one for one in entry_points(group=defaults.ENTRY_POINTS_SCHEDULERS)}
