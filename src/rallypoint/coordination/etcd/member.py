"""A member of the cluster that a job runs on its own nodes: which members there are to be, which is this process's, its etcd.

As those of EtcdServer, its ports are held by sockets that are bound but do not listen; see there. That does not keep out another
agent of this machine, which does the same. So whoever has an endpoint also has a socket of a name that only one can have, and
that the kernel frees when its process ends, however that ends.
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
import socket
import subprocess
import tempfile
import time
from hashlib import sha256
from ipaddress import ip_address

from rallypoint.base import environment, report
from rallypoint.base.json_text import from_json
from rallypoint.base.records import Value
from rallypoint.base.text import host_port
from rallypoint.coordination.engine import CoordinationError, RefusedError, UnreachableError
from rallypoint.coordination.etcd.codec import Malformed, Words, number
from rallypoint.coordination.etcd.errors import EtcdError
from rallypoint.coordination.etcd.gateway import RANGE, Caller, EtcdAccess, EtcdCluster
from rallypoint.coordination.etcd.server import EtcdProcess
from rallypoint.coordination.model import Snapshot
from rallypoint.errors import UsageError
from rallypoint.net.endpoint import resolve
from rallypoint.net.wake_fd import WakeFd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.coordination.etcd.codec import Fields
    from rallypoint.net.endpoint import Address

__all__ = ["Claim", "Entry", "Member", "Membership", "Plan", "PortTaken", "UnreachableName", "claim_endpoint", "plan_cluster"]

SIZES = (1, 3, 5)
LAST_PORT = 65535
NOT_LOCAL = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
PREFIX = "rallypoint_etcd_"
KEPT_REVISIONS = 10_000  # etcd looks every five minutes, and forgets what is older
QUOTED_CHARACTERS = 300
FAREWELL_S = 0.5
LIST, ADD, REMOVE = "/v3/cluster/member/list", "/v3/cluster/member/add", "/v3/cluster/member/remove"
ASK_S = 0.5  # how long a cluster may take to show that it is there
CHANGE_S = 5.0
READ_S = 1.0
CONNECT_S = 0.3


class PortTaken(Exception):
    """Something listens at a port that a member of ours is to have."""


class UnreachableName(Exception):
    """A name that others know as this machine's, and this machine as that of its loopback only."""


class Plan(Value):
    """The members that there are to be, and the cluster's token, by which its members know those of another one."""

    endpoints: tuple[tuple[str, int], ...]
    token: str

    def names(self) -> list[str]:
        return [host_port(host, port) for host, port in self.endpoints]

    def peer_urls(self) -> list[str]:
        return [f"http://{host_port(host, port + 1)}" for host, port in self.endpoints]

    def initial_cluster(self) -> str:
        return ",".join(f"{name}={url}" for name, url in zip(self.names(), self.peer_urls(), strict=True))


class Entry(Value):
    """How a member without data comes into the cluster: with all of them, or into one that is there."""

    initial_cluster: str
    is_new: bool


def plan_cluster(access: EtcdAccess, run_id: str) -> Plan:
    """UsageError where no cluster can be made of it, or none that would be of use."""
    count, endpoints = len(access.endpoints), access.endpoints
    if count not in SIZES:
        why = f"{count} endure the loss of no more than {count - 1} do" if count in (2, 4) else "more only make it slower"
        raise UsageError(f"bootstrap=true with {count} endpoints: a cluster has 1, 3 or 5 members; {why}")
    if access.protocol != "http" or access.user is not None:
        raise UsageError("bootstrap=true starts members that speak http and know no users: leave out protocol and user")
    for host, port in endpoints:
        if not 0 < port < LAST_PORT or endpoints.count((host, port)) > 1 or (host, port + 1) in endpoints:
            name = host_port(host, port)
            raise UsageError(f"bootstrap=true: the member at {name} needs that port and the next one (for its peers) for itself")
    return Plan(endpoints, sha256(f"rallypoint {run_id}".encode()).hexdigest()[:16])


class Claim:
    """An endpoint that is ours until `close`: its ports are held at `addresses`, which are this machine's."""

    def __init__(self, index: int, addresses: list[str], port: int, sockets: list[socket.socket]) -> None:
        self.index, self.addresses, self.port = index, addresses, port
        self._sockets = sockets

    def close(self) -> None:
        for one in self._sockets:
            one.close()


def claim_endpoint(plan: Plan) -> Claim | None:
    """The first endpoint that is an address of this machine, and no other agent's of this job; None if there is none.

    Raises PortTaken where it cannot be had although no agent of this job has it, and UnreachableName.
    """
    for index, (host, port) in enumerate(plan.endpoints):
        addresses = _local_addresses(plan, host)
        lock = _lock(f"{plan.token} {addresses[0][1][0]} {port}") if addresses else None
        if lock is not None:
            sockets = [lock]
            try:
                sockets += [_bound(address, one) for address in addresses for one in (port, port + 1)]
            except OSError as error:
                Claim(index, [], port, sockets).close()
                raise PortTaken(f"{error.filename} is taken") from error
            return Claim(index, [address[0] for _, address in addresses], port, sockets)
    return None


def _local_addresses(plan: Plan, host: str) -> list[Address]:
    try:
        found = resolve(host, 0)
    except OSError:  # a name that is not known, or not yet, is not ours
        return []
    local = [address for address in found if _is_local(address)]
    named = [name for name, _ in plan.endpoints]
    if local and all(ip_address(address[0]).is_loopback for _, address in local) and not all(map(_means_loopback, named)):
        raise UnreachableName(
            f"the endpoint {host} is {local[0][1][0]} on this machine, where no other node can reach it: see /etc/hosts, or name"
            " an address"
        )
    return local


def _means_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _is_local(address: Address) -> bool:
    try:
        _bound(address, 0).close()
    except OSError as error:
        if error.errno in NOT_LOCAL:
            return False
        raise
    return True


def _bound(address: Address, port: int) -> socket.socket:
    family, (host, _, *rest) = address
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((host, port, *rest))
    except OSError as error:
        one.close()
        raise OSError(error.errno, error.strerror, host_port(host, port)) from None
    return one


def _lock(name: str) -> socket.socket | None:
    """What only one process of this machine has; None if that is another one."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0rallypoint etcd {name}")
    except OSError as error:
        lock.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return lock


class Member:
    """The etcd of one endpoint, and its folder, which is gone after `close`. What one that was killed has left goes before."""

    def __init__(self, binary: str, plan: Plan, claim: Claim) -> None:
        self.name = plan.names()[claim.index]
        self._binary, self._plan, self._claim = binary, plan, claim
        prefix = f"{PREFIX}{os.uname().nodename}_{claim.addresses[0].replace(':', '-')}_{claim.port}_"
        for old in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f"{glob.escape(prefix)}*")):
            shutil.rmtree(old, ignore_errors=True)
        self._folder = tempfile.mkdtemp(prefix=prefix)
        self._data = os.path.join(self._folder, "data")
        self._log = os.path.join(self._folder, "etcd.log")
        self._process: EtcdProcess | None = None

    @property
    def has_data(self) -> bool:
        return os.path.isdir(self._data)

    @property
    def exit_code(self) -> int | None:
        return self._process.exit_code if self._process is not None else None

    @property
    def gave_up(self) -> bool:
        """Whether it ended of itself, not by a signal."""
        return self.exit_code is not None and self.exit_code >= 0

    def start(self, entry: Entry) -> None:
        """With the data that it has, if it has any; then `entry` is of no interest to it."""
        with open(self._log, "wb"):
            """What the one before has said is no longer of interest."""
        self._process = EtcdProcess(self._binary, self._flags(entry), environment.own, self._log)

    def _flags(self, entry: Entry) -> list[str]:
        index, port = self._claim.index, self._claim.port
        at_clients, at_peers = (
            ",".join(f"http://{host_port(address, one)}" for address in self._claim.addresses) for one in (port, port + 1)
        )
        return [
            f"--name={self.name}", f"--data-dir={self._data}",
            f"--listen-client-urls={at_clients}", f"--advertise-client-urls=http://{self.name}",
            f"--listen-peer-urls={at_peers}", f"--initial-advertise-peer-urls={self._plan.peer_urls()[index]}",
            f"--initial-cluster={entry.initial_cluster}", f"--initial-cluster-token={self._plan.token}",
            f"--initial-cluster-state={'new' if entry.is_new else 'existing'}",
            # A member that is lost is replaced at once, also while another one is lost.
            "--strict-reconfig-check=false",
            "--auto-compaction-mode=revision", f"--auto-compaction-retention={KEPT_REVISIONS}",
            "--logger=zap", "--log-outputs=stderr", "--log-level=error",
        ]  # fmt: skip

    def last_words(self) -> str:
        """Why it has ended, if it has said so, in one line."""
        line = (self._process.last_lines() if self._process is not None else "").rpartition("\n")[2]
        try:
            told = from_json(line)
            return str(told.get("error") or told["msg"])[:QUOTED_CHARACTERS]
        except (ValueError, KeyError, AttributeError):
            return line[:QUOTED_CHARACTERS]

    def forget(self) -> None:
        """Remove its data."""
        shutil.rmtree(self._data, ignore_errors=True)

    def close(self) -> None:
        """A leader has the time to name another. One that waits for members that have gone is killed: its data go anyway."""
        if self._process is not None:
            self._process.popen.terminate()
            try:
                self._process.popen.wait(FAREWELL_S)
            except subprocess.TimeoutExpired:
                self._process.popen.kill()
            self._process.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


class Membership:
    """The cluster of a plan, as a client sees it: who is in it, how one that has no data comes in, and who still uses it.

    Used by any thread; `interrupt` ends what it is doing in `entry`.
    """

    def __init__(self, plan: Plan, access: EtcdAccess) -> None:
        self._plan = plan
        self._access = access

    def beginning(self) -> Entry:
        """With all the others. Should the cluster be there all the same, etcd asks its peers, and ends if they know it."""
        return Entry(self._plan.initial_cluster(), True)

    def entry(self, index: int, interrupt: WakeFd | None) -> Entry | None:
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
