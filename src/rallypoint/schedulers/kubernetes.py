"""Kubernetes: pods of an Indexed Job with a headless Service, of a JobSet too.

Pods of such a job are called by the job's name and their index, and their full name stands in their file of hosts. Nothing tells
them how many they are: the manifest does, as ``PET_NNODES``. Operators that set ``PET_`` variables need none of this.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.base import defaults
from rallypoint.base.text import host_port
from rallypoint.errors import UsageError
from rallypoint.schedulers.found import Found, ReadFile, a_number

__all__ = ["HOSTS", "read"]

HOSTS = "/etc/hosts"
INDEX, POD = defaults.ENV_KUBERNETES_INDEX, "HOSTNAME"


def read(environ: Mapping[str, str], read_file: ReadFile) -> Found:
    index, pod = a_number(environ, INDEX), environ.get(POD, "")
    job = pod.removesuffix(f"-{index}")
    if index is None or job in ("", pod):
        return Found("Kubernetes", {}, {})  # a pod with a name of its own: nothing is known of the others
    values, sources = {"rdzv_id": job}, {"rdzv_id": POD}
    domain = _domain(pod, read_file)
    if domain:
        values["rdzv_endpoint"] = host_port(f"{job}-0.{domain}", defaults.ELASTIC_PORT)
        sources["rdzv_endpoint"] = HOSTS
    advice = "give the job a headless Service, and its pods that one's name as their subdomain"
    missing = "" if domain else f"this pod ({pod}) has no name that other pods could find: {advice}"
    return Found("Kubernetes", values, sources, needs_endpoint=missing)


def _domain(pod: str, read_file: ReadFile) -> str:
    """What follows the pod's name in its full name, without which other pods do not find it; empty if it has none."""
    try:
        lines = read_file(HOSTS).splitlines()
    except OSError as error:
        raise UsageError(f"{HOSTS} cannot be read: {error.strerror}; --scheduler none ignores it") from error
    names = (name for line in lines for name in line.partition("#")[0].split()[1:])
    return next((name.removeprefix(f"{pod}.") for name in names if name.startswith(f"{pod}.")), "")
