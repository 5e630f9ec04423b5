"""PBS, LSF and Flux: batch systems whose node files and variables say who is part of a job.

On PBS, a batch script runs on the first node only, and ``pbsdsh`` starts the launchers; on LSF ``jsrun`` does. Flux says how many
nodes there are, and not which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rallypoint.errors import UsageError
from rallypoint.schedulers.found import Found, ReadFile, a_number, endpoint_of, hosts_in, too_many

__all__ = ["read_flux", "read_lsf", "read_pbs"]

PBS_FILE, PBS_JOB, PBS_TASK = "PBS_NODEFILE", "PBS_JOBID", "PBS_TASKNUM"
THE_SCRIPT = 1  # the number of the task that is the batch script itself
LSF_FILE, LSF_JOB, LSF_HOSTS = "LSB_DJOB_HOSTFILE", "LSB_JOBID", "LSB_MCPU_HOSTS"
JSM_SIZE = "JSM_NAMESPACE_SIZE"
FLUX_JOB, FLUX_NODES, FLUX_TASKS = "FLUX_JOB_ID", "FLUX_JOB_NNODES", "FLUX_JOB_SIZE"


def read_pbs(environ: Mapping[str, str], read_file: ReadFile) -> Found:
    hosts = hosts_in(_text_of(PBS_FILE, environ, read_file))
    task = a_number(environ, PBS_TASK)
    if len(hosts) > 1 and task in (None, THE_SCRIPT):
        return Found("PBS", {}, {}, _alone(PBS_FILE, hosts, "pbsdsh -u --"))
    return _found("PBS", hosts, PBS_FILE, environ.get(PBS_JOB, "").partition(".")[0], PBS_JOB)


def read_lsf(environ: Mapping[str, str], read_file: ReadFile) -> Found:
    hosts, said_by = _hosts_of_lsf(environ, read_file)
    launchers = a_number(environ, JSM_SIZE, least=1)
    if launchers is None:
        return Found("LSF", {}, {}, _alone(said_by, hosts, "jsrun -r 1") if len(hosts) > 1 else "")
    hosts = _compute_hosts(hosts, launchers)
    refusal = too_many(launchers, len(hosts), f"{JSM_SIZE} is {launchers}", "`jsrun -r 1 rallyrun ...`")
    return _found("LSF", hosts, said_by, environ.get(LSF_JOB, ""), LSF_JOB, refusal)


def read_flux(environ: Mapping[str, str], _: ReadFile) -> Found:
    nodes, tasks = a_number(environ, FLUX_NODES, least=1) or 1, a_number(environ, FLUX_TASKS, least=1) or 1
    refusal = too_many(tasks, nodes, f"{FLUX_TASKS} is {tasks}", "`flux run --tasks-per-node=1 rallyrun ...`")
    missing = f"{FLUX_NODES} is {nodes}, but Flux does not say which nodes these are" if nodes > 1 else ""
    values, sources = {"nnodes": str(nodes)}, {"nnodes": FLUX_NODES}
    if job := environ.get(FLUX_JOB):
        values["rdzv_id"], sources["rdzv_id"] = f"flux-{job}", FLUX_JOB
    return Found("Flux", values, sources, refusal=refusal, needs_endpoint=missing)


def _alone(said_by: str, hosts: Sequence[str], starter: str) -> str:
    return f"{said_by} names {len(hosts)} hosts, but this launcher runs on one only; `{starter} rallyrun ...` starts one on each"


def _found(scheduler: str, hosts: Sequence[str], said_by: str, job: str, job_said_by: str, refusal: str = "") -> Found:
    values, sources = {"nnodes": str(len(hosts) or 1)}, {"nnodes": said_by}
    if job and hosts:
        values |= {"rdzv_id": f"{scheduler.lower()}-{job}", "rdzv_endpoint": endpoint_of(hosts[0], job)}
        sources |= {"rdzv_id": job_said_by, "rdzv_endpoint": said_by}
    return Found(scheduler, values, sources, refusal=refusal)


def _hosts_of_lsf(environ: Mapping[str, str], read_file: ReadFile) -> tuple[Sequence[str], str]:
    """``hostA 8 hostB 8``, or a file with a line for each slot."""
    if environ.get(LSF_FILE):
        return hosts_in(_text_of(LSF_FILE, environ, read_file)), LSF_FILE
    return list(dict.fromkeys(environ.get(LSF_HOSTS, "").split()[::2])), LSF_HOSTS


def _compute_hosts(hosts: Sequence[str], launchers: int) -> Sequence[str]:
    """Without the host of the batch script, which comes first and on which jsrun starts nothing."""
    return hosts[1:] if len(hosts) == launchers + 1 else hosts


def _text_of(name: str, environ: Mapping[str, str], read_file: ReadFile) -> str:
    path = environ.get(name, "")
    try:
        return read_file(path)
    except OSError as error:
        raise UsageError(f"{name}: {path} cannot be read: {error.strerror}; --scheduler none ignores it") from error
