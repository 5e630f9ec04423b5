"""Which jobs have keys in an etcd cluster: found by going from the first key of one to the first of the next."""

from __future__ import annotations

from rallypoint.coordination.engine import RefusedError
from rallypoint.coordination.etcd.codec import Malformed, Words
from rallypoint.coordination.etcd.errors import EtcdError
from rallypoint.coordination.etcd.gateway import RANGE, Caller, EtcdAccess, EtcdCluster

__all__ = ["jobs_in"]

MOST_JOBS = 1000


def jobs_in(access: EtcdAccess, prefix: str, deadline: float) -> list[str]:
    """The names of the jobs whose keys stand under a prefix, which ends with a slash; errors of an engine say why not."""
    words, caller = Words(prefix), Caller(EtcdCluster(access))
    found: list[str] = []
    try:
        least = ""
        while len(found) < MOST_JOBS and (key := words.found(caller.call(RANGE, words.looking_for(least), deadline).fields)):
            found.append(key.partition("/")[0])
            least = f"{found[-1]}0"  # the character after the slash
    except EtcdError as error:
        raise RefusedError(f"etcd refuses to list jobs: {error}") from None
    except Malformed as error:
        raise RefusedError(f"etcd gives {error}") from None
    finally:
        caller.hang_up()
    return found
