"""Binding workers to CPUs near their devices: what ``--numa-binding`` and ``numa_options`` ask for, on this machine.

`hardware.binding` decides, `topology` looks; here the two meet, and a binding that cannot be had becomes an error or, if the user
prefers that, a warning. Nothing of this is imported by a job that does not ask for it. The binding itself is done in each new
process before it becomes the worker, so that it holds from the first instruction, for every thread and for all descendants;
memory follows, because Linux takes a page from the node of the CPU that touches it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rallypoint.base import defaults, environment, report
from rallypoint.base.records import Record
from rallypoint.base.text import ranges
from rallypoint.errors import UsageError
from rallypoint.hardware import binding as affinity
from rallypoint.hardware.binding import AffinityMode, Plan
from rallypoint.hardware.topology import read_topology, worker_devices

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["AffinityMode", "NumaOptions", "check_binding", "cpus_of_workers", "plan_binding", "read_options"]

_told: set[str] = set()  # notes that have been given: a restart does not repeat them


class NumaOptions(Record):
    """How to bind workers, and whether they may run unbound where that fails."""

    affinity_mode: AffinityMode
    should_fall_back_if_binding_fails: bool = False

    def __post_init__(self) -> None:
        mode = getattr(self.affinity_mode, "value", self.affinity_mode)  # an enum of somebody else has the same values
        known = [one.value for one in AffinityMode]
        if mode not in known:
            raise UsageError(f"numa_options: affinity_mode must be one of {', '.join(known)}, not {mode!r}")
        self.affinity_mode = AffinityMode(mode)


def read_options(given: Any) -> NumaOptions:
    """Options from an object that has these attributes, as torch's class of the same name has."""
    if isinstance(given, NumaOptions):
        return given
    if not hasattr(given, "affinity_mode"):
        raise UsageError(f"numa_options must be NumaOptions, not {given!r}")
    return NumaOptions(given.affinity_mode, bool(getattr(given, "should_fall_back_if_binding_fails", False)))


def plan_binding(
    mode: AffinityMode, envs: Mapping[int, Mapping[str, str]], root: str = "/", allowed: Iterable[int] | None = None
) -> Plan:
    """Who would get which CPUs, given what each local rank finds in its environment besides ours; UsageError: nobody can."""
    # A launcher above this one has given us a local rank; it is not the workers'.
    inherited = {name: value for name, value in environment.own.items() if name != defaults.ENV_LOCAL_RANK}
    environs = [{**inherited, **envs[rank]} for rank in sorted(envs)]
    return affinity.bind(read_topology(root, allowed), mode, worker_devices(environs, root))


def cpus_of_workers(given: Any, envs: Mapping[int, Mapping[str, str]]) -> dict[int, tuple[int, ...]]:
    """The CPUs of each local rank, for a group of workers that is about to start; none at all if they are to run unbound."""
    options = read_options(given)
    try:
        plan = plan_binding(options.affinity_mode, envs)
    except UsageError as problem:
        if not options.should_fall_back_if_binding_fails:
            raise
        _tell_once(f"workers run without being bound to CPUs: {problem}", report.warn)
        return {}
    for note in plan.notes:
        _tell_once(note, report.info)
    for binding in plan.bindings:
        report.debug(f"worker {binding.local_rank} is bound to CPUs {ranges(binding.cpus)}: {binding.why}")
    return {binding.local_rank: binding.cpus for binding in plan.bindings}


def check_binding(given: Any, workers: int) -> None:
    """Refuse, before the nodes meet, what could not be bound on this one."""
    cpus_of_workers(given, {rank: {} for rank in range(workers)})


def _tell_once(text: str, tell: Callable[[str], None]) -> None:
    if text not in _told:
        _told.add(text)
        tell(text)
