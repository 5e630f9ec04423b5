"""What members of a bootstrapped cluster say of it: who is in it, how one that has no data comes in, and who still uses it."""

from __future__ import annotations

import socket
import time

from rallypoint import report
from rallypoint.core.coordination import Snapshot
from rallypoint.rendezvous.etcd_member import Entry, Plan
from rallypoint.store.bell import Bell
from rallypoint.store.coordination import CoordinationError, RefusedError, UnreachableError
from rallypoint.store.etcd_access import EtcdAccess
from rallypoint.store.etcd_cluster import EtcdCluster
from rallypoint.store.etcd_errors import EtcdError
from rallypoint.store.etcd_gateway import Caller
from rallypoint.store.etcd_words import Malformed, Words, number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.store.etcd_words import Fields

__all__ = ["Membership"]

LIST, ADD, REMOVE = "/v3/cluster/member/list", "/v3/cluster/member/add", "/v3/cluster/member/remove"
RANGE = "/v3/kv/range"
ASK_S = 0.5  # how long a cluster may take to show that it is there
CHANGE_S = 5.0
READ_S = 1.0
CONNECT_S = 0.3


class Membership:
    """The cluster of a plan, as a client sees it. Used by any thread; `interrupt` ends what it is doing in `entry`."""

    def __init__(self, plan: Plan, access: EtcdAccess) -> None:
        self._plan = plan
        self._access = access

    def beginning(self) -> Entry:
        """With all the others. Should the cluster be there all the same, etcd asks its peers, and ends if they know it."""
        return Entry(self._plan.initial_cluster(), True)

    def entry(self, index: int, interrupt: Bell | None) -> Entry | None:
        """How a member that has no data comes into the cluster, which is changed for it; None if that cannot be told now."""
        there = [endpoint for one, endpoint in enumerate(self._plan.endpoints) if one != index and _is_listening(endpoint)]
        if not there:
            return self.beginning()
        caller = Caller(EtcdCluster(self._access.replace(endpoints=tuple(there))), interrupt)
        try:
            members = _members(caller)
            return self.beginning() if members is None else self._entry_into(caller, members, index)
        except (UnreachableError, EtcdError, Malformed) as error:
            report.debug(f"the etcd member of this node cannot join yet: {error}")
            return None
        finally:
            caller.hang_up()

    def _entry_into(self, caller: Caller, members: list[Fields], index: int) -> Entry:
        own_url, name = self._plan.peer_urls()[index], self._plan.names()[index]
        if not any(url in self._plan.peer_urls() for member in members for url in _peer_urls(member)):
            others = "an etcd is there already, whose members are not those that the endpoint names"
            raise RefusedError(f"{others}: leave out bootstrap=true to use it")
        own = next((member for member in members if own_url in _peer_urls(member)), None)
        if own is not None and own.get("name") == name and not own.get("clientURLs"):
            return self.beginning()  # it was never there
        if own is not None:
            report.info(f"the etcd member at {name} comes back without its data: it is replaced")
            caller.call(REMOVE, {"ID": str(number(own, "ID"))}, time.monotonic() + CHANGE_S, is_repeatable=False)
        answer = caller.call(ADD, {"peerURLs": [own_url]}, time.monotonic() + CHANGE_S, is_repeatable=False)
        return Entry(self._written(_members_of(answer.fields)), False)

    def _written(self, members: list[Fields]) -> str:
        """Those that there are, by the names that are planned: who has not started yet has none."""
        names = dict(zip(self._plan.peer_urls(), self._plan.names(), strict=True))
        return ",".join(f"{names.get(url, member.get('name'))}={url}" for member in members for url in _peer_urls(member))

    def missing(self) -> list[str]:
        """The members at whose address nobody listens."""
        pairs = zip(self._plan.names(), self._plan.endpoints, strict=True)
        return [name for name, endpoint in pairs if not _is_listening(endpoint)]

    def is_lost(self, missing: list[str]) -> bool:
        """Whether there is no majority without these."""
        return 2 * len(missing) > len(self._plan.endpoints)

    def read(self, prefix: str) -> Snapshot | None:
        """All that stands there; None where nobody says."""
        words, caller = Words(prefix), Caller(EtcdCluster(self._access))
        try:
            return words.snapshot(caller.call(RANGE, words.reading(""), time.monotonic() + READ_S).fields)
        except (CoordinationError, EtcdError, Malformed):
            return None
        finally:
            caller.hang_up()


def _members(caller: Caller) -> list[Fields] | None:
    """The members as a majority knows them; None where there is none."""
    try:
        caller.call(RANGE, Words("/").presence(), time.monotonic() + ASK_S)
    except UnreachableError:
        return None
    return _members_of(caller.call(LIST, {"linearizable": True}, time.monotonic() + CHANGE_S).fields)


def _members_of(answer: Fields) -> list[Fields]:
    members = answer.get("members")
    if type(members) is not list or not all(type(member) is dict for member in members):
        raise Malformed("something else where a list of members was due")
    return members


def _peer_urls(member: Fields) -> list[str]:
    urls = member.get("peerURLs")
    return [url for url in urls if type(url) is str] if type(urls) is list else []


def _is_listening(endpoint: tuple[str, int]) -> bool:
    try:
        socket.create_connection(endpoint, CONNECT_S).close()
    except OSError:
        return False
    return True
