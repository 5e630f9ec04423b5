"""``mpirun`` and its like: one launcher for each of its processes, which belong on a node each.

They say how many processes there are, and not where. Open MPI names the host of mpirun itself, which is the first node unless
it was started from elsewhere; else the batch system that mpirun runs in knows the nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rallypoint.schedulers import slurm
from rallypoint.schedulers.found import Found, ReadFile, a_number, endpoint_of, hosts_in, too_many

__all__ = ["read_mpich", "read_open_mpi"]

SIZE, HERE = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"
NAMESPACE = "PMIX_NAMESPACE"  # Open MPI 5: prterun-HOST-PID@JOB
DAEMON = "OMPI_MCA_orte_hnp_uri"  # Open MPI 4: NUMBER.0;tcp://ADDRESS[,ADDRESS]:PORT
JOB_OF_DAEMON = "OMPI_MCA_ess_base_jobid"
PMI_SIZE, MPICH_HERE = "PMI_SIZE", "MPI_LOCALNRANKS"
SLURM_LIST, NODE_FILE = "SLURM_JOB_NODELIST", "PBS_NODEFILE"
_NAMESPACE = re.compile(r"prte(?:run|-dvm)?-(.+)-(\d+)@\d+")
_DAEMON = re.compile(r"[^;]*;tcp6?://([^:;]+|\[[^]]+\][^:;]*):\d+.*")


def read_open_mpi(environ: Mapping[str, str], read_file: ReadFile) -> Found:
    launchers, here = a_number(environ, SIZE, least=1) or 1, a_number(environ, HERE, least=1) or 1
    instead = f"`mpirun --map-by ppr:1:node rallyrun --nproc-per-node {here} ...`"
    refusal = too_many(here, 1, f"{HERE} is {here}", instead)
    host, said_by = _first_host(environ, read_file)
    key = environ.get(NAMESPACE) or environ.get(JOB_OF_DAEMON) or ""
    values, sources = {"nnodes": str(launchers)}, {"nnodes": SIZE}
    if host and key:
        name = "".join(one if one.isalnum() or one in "-_" else "-" for one in key)
        values |= {"rdzv_id": f"mpi-{name}", "rdzv_endpoint": endpoint_of(host, key.replace(".", "-"))}
        sources |= {"rdzv_id": NAMESPACE if environ.get(NAMESPACE) else JOB_OF_DAEMON, "rdzv_endpoint": said_by}
    is_enough = launchers == 1 or "rdzv_endpoint" in values
    missing = "" if is_enough else f"{SIZE} is {launchers}, but mpirun does not say where they are"
    return Found("Open MPI", values, sources, refusal=refusal, needs_endpoint=missing)


def read_mpich(environ: Mapping[str, str], _: ReadFile) -> Found:
    launchers, here = a_number(environ, PMI_SIZE, least=1) or 1, a_number(environ, MPICH_HERE, least=1) or 1
    instead = f"`mpiexec -ppn 1 rallyrun --nproc-per-node {here} ...`"
    refusal = too_many(here, 1, f"{MPICH_HERE} is {here}", instead)
    missing = f"{PMI_SIZE} is {launchers}, but mpiexec does not say where they are" if launchers > 1 else ""
    return Found("MPI", {"nnodes": str(launchers)}, {"nnodes": PMI_SIZE}, refusal=refusal, needs_endpoint=missing)


def _first_host(environ: Mapping[str, str], read_file: ReadFile) -> tuple[str, str]:
    """The host of rank 0, and which variable says so; two empty texts where none does."""
    if environ.get(SLURM_LIST):
        try:
            return slurm.expand(environ[SLURM_LIST])[0], SLURM_LIST
        except ValueError:
            pass  # mpirun knows better
    if environ.get(NODE_FILE):
        try:
            return next(iter(hosts_in(read_file(environ[NODE_FILE]))), ""), NODE_FILE
        except OSError:
            pass  # as above
    if match := _NAMESPACE.fullmatch(environ.get(NAMESPACE, "")):
        return match[1], NAMESPACE
    if match := _DAEMON.fullmatch(environ.get(DAEMON, "")):
        return match[1].split(",")[0].strip("[]"), DAEMON
    return "", ""
