"""Which scheduler started this process, and what is taken from it: what the user has not said."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from rallypoint.base import defaults
from rallypoint.base.text import many
from rallypoint.errors import UsageError
from rallypoint.schedulers import batch, kubernetes, mpi, slurm
from rallypoint.schedulers.found import Found, ReadFile

__all__ = ["NAMES", "find", "missing", "told"]

# mpirun comes first: it may run inside of all the others, and then it is what started this process. Flux comes before MPICH: it
# sets the same variables, for programs of MPI.
_READERS: Mapping[str, Callable[[Mapping[str, str], ReadFile], Found]] = {
    "openmpi": mpi.read_open_mpi,
    "slurm": slurm.read,
    "flux": batch.read_flux,
    "mpich": mpi.read_mpich,
    "pbs": batch.read_pbs,
    "lsf": batch.read_lsf,
    "kubernetes": kubernetes.read,
}
NAMES = (defaults.SCHEDULER_AUTO, defaults.SCHEDULER_NONE, *_READERS)
_STATIC = ("master_addr", "master_port", "node_rank")
_ELASTIC = (defaults.BACKEND_ELASTIC, defaults.BACKEND_PLUGIN)
_WORDS: Mapping[str, Callable[[str], str]] = {
    "nnodes": lambda nodes: many(int(nodes), "node"),
    "nproc_per_node": lambda workers: f"{many(int(workers), 'worker')} per node",
    "rdzv_endpoint": "meeting at {}".format,
    "rdzv_id": "run ID {}".format,
}


def find(name: str, environ: Mapping[str, str], read_file: ReadFile) -> Found | None:
    """What the scheduler of this name says, or, for ``auto``, the one that has left its mark."""
    if name == defaults.SCHEDULER_AUTO:
        name = next((one for one in _READERS if environ.get(defaults.ENV_SCHEDULERS[one])), "")
        return _READERS[name](environ, read_file) if name else None
    if not environ.get(defaults.ENV_SCHEDULERS[name]):
        raise UsageError(f"--scheduler {name}: {defaults.ENV_SCHEDULERS[name]} is not set, so this is no process of one")
    return _READERS[name](environ, read_file)


def missing(found: Found, given: Collection[str], backend: str, most_nodes: int) -> dict[str, str]:
    """What is missing on the command line, by flag. `given` are the flags that were given; `most_nodes` is what they say of it.

    Who names a master, a rank or an endpoint without a back end arranges the meeting; then only the number of workers is taken.
    """
    if "standalone" in given:
        return {}
    takes = {"nproc_per_node"}
    is_static = backend == defaults.BACKEND_CLI
    is_arranged = is_static and any(flag in given for flag in (*_STATIC, "rdzv_endpoint", "rdzv_backend"))
    if not is_arranged:
        takes |= {"nnodes", "rdzv_id"}
    if found.refusal and not is_arranged and "nnodes" not in given:
        raise UsageError(f"{found.scheduler}: {found.refusal}")
    values = {flag: value for flag, value in found.values.items() if flag in takes and flag not in given}
    several = max(most_nodes, int(values.get("nnodes", 1))) > 1
    if several and not is_arranged and "rdzv_endpoint" not in given and (is_static or backend in _ELASTIC):
        values |= {"rdzv_endpoint": _endpoint(found), "rdzv_backend": defaults.BACKEND_ELASTIC}
    return values


def _endpoint(found: Found) -> str:
    if "rdzv_endpoint" in found.values:
        return found.values["rdzv_endpoint"]
    why = found.needs_endpoint or "it does not say where the nodes can meet"
    raise UsageError(
        f"{found.scheduler}: {why}; add --rdzv-backend c10d --rdzv-endpoint HOST[:PORT] with the host of one of the nodes, or"
        " --standalone to run on this node alone"
    )


def told(found: Found, values: Mapping[str, str]) -> str:
    """One line: what was taken, and from where; empty if nothing was."""
    shown = [f"{_WORDS[flag](values[flag])} ({found.sources[flag]})" for flag in _WORDS if flag in values]
    return f"{found.scheduler}: {', '.join(shown)}" if shown else ""
