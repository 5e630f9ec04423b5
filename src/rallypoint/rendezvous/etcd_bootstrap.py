"""An etcd cluster on the job's own nodes: each host that an endpoint names runs a member, and any one of three may die.

A thread keeps this process's member running. A member that starts without data begins the cluster together with the others,
unless that is there: then one that was a part of it before is replaced by itself. It must not come back as who it was, since it
has forgotten what it once acknowledged.
"""

from __future__ import annotations

import atexit
import math
import threading
import time

from rallypoint.base import report
from rallypoint.coordination.engine import CoordinationError, RefusedError, UnreachableError
from rallypoint.coordination.etcd.gateway import EtcdAccess
from rallypoint.coordination.etcd.http import Interrupted, is_set
from rallypoint.coordination.etcd.member import Claim, Member, Membership, Plan, PortTaken, UnreachableName, claim_endpoint
from rallypoint.coordination.etcd.server import EtcdServerError, etcd_version, find_etcd
from rallypoint.net.wake_fd import WakeFd
from rallypoint.protocol import job_records as job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Bootstrap"]

LOOK_EVERY_S = 0.3
STAY_EVERY_S = 0.1
QUIET_LINGER_S = 2.0
WATCH_EVERY_S = 0.1
CLAIM_EVERY_S = 2.0
AGAIN_AFTER_S = 0.5
STEADY_S = 3.0  # who ends earlier does not get along with its data
PORT_PATIENCE_S = 3.0  # as long as the member of an agent that was killed may take to end
PORT_TAKEN = "address already in use"
JOIN_S = 10.0
ELECTION_S = 3.0


class Bootstrap:
    """This node's part in the cluster: a member of its own, if an endpoint is its own, and the knowledge of the others."""

    def __init__(self, plan: Plan, access: EtcdAccess, environ: Mapping[str, str]) -> None:
        self._plan, self._environ = plan, environ
        self._membership = Membership(plan, access)
        self._lock = threading.Lock()
        self._wake_fd: WakeFd | None = None  # set when it is time to end
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._failure: Exception | None = None
        self._has_member = False
        self._port_taken_since = 0.0
        self._told = ""  # why the member has ended, if it has of late
        self._missing: list[str] = []
        self._look_again_at = 0.0
        self._is_formed = False

    def start(self) -> None:
        """Once; a second time, or after the end, nothing happens."""
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._wake_fd = WakeFd()
                self._thread = threading.Thread(target=self._run, name="rallypoint-etcd-member", daemon=True)
                self._thread.start()
                atexit.register(self.close)

    @property
    def is_whole_cluster(self) -> bool:
        return self._has_member and len(self._plan.endpoints) == 1

    def check(self) -> None:
        """RefusedError if this node's member cannot be started, UnreachableError while too few are there for a cluster."""
        if self._failure is not None and not self._is_formed:
            raise RefusedError(str(self._failure))
        if time.monotonic() >= self._look_again_at:
            self._missing = self._membership.missing()
            self._look_again_at = time.monotonic() + LOOK_EVERY_S
        if self._membership.is_lost(self._missing):
            own = f"; that of this node has ended: {self._told}" if self._told else ""
            count = f"{len(self._missing)} of {len(self._plan.endpoints)} members are missing"
            raise UnreachableError(f"{count}: {', '.join(self._missing)}{own}")
        self._is_formed = True

    def leave(self, prefix: str, close_timeout_s: float) -> None:
        """This node has left the job under `prefix`: its member follows, once it may."""
        try:
            self._stay_for_others(prefix, close_timeout_s)
        finally:
            self.close()

    def _stay_for_others(self, prefix: str, close_timeout_s: float) -> None:
        """Wait until the other nodes have left: they cannot leave in peace without a cluster.

        A job that goes on without this node is left soon, so that it can be stopped; any one member may be missing.
        """
        began = answered_at = time.monotonic()
        has_told = False
        while self._has_member and close_timeout_s > 0:
            snapshot, now = self._membership.read(prefix), time.monotonic()
            if snapshot is None:
                if self._is_deserted(now - answered_at, close_timeout_s):
                    return
            elif not any(item.lease for item in snapshot.items):
                return
            else:
                answered_at = now
                if close_timeout_s < math.inf and not any(item.key == job.CLOSED for item in snapshot.items):
                    close_timeout_s = min(close_timeout_s, QUIET_LINGER_S)
            if now - began >= close_timeout_s:
                report.info(f"this node's etcd member ends {now - began:.0f} s after its part in the job; others are still there")
                return
            if now - began >= QUIET_LINGER_S and not has_told:
                has_told = True
                report.info("staying for the other nodes, who use the etcd member that is here")
            time.sleep(STAY_EVERY_S)

    def _is_deserted(self, silent_s: float, close_timeout_s: float) -> bool:
        """Whether nobody has a cluster any more. That of a job that has ended is over when it takes longer than an election."""
        is_silent = silent_s >= ELECTION_S and close_timeout_s < math.inf
        return is_silent or self._membership.is_lost(self._membership.missing())

    def close(self) -> None:
        """End the member and remove its data."""
        with self._lock:
            thread, self._thread, self._is_closed = self._thread, None, True
        if thread is None or self._wake_fd is None:
            return
        atexit.unregister(self.close)
        self._wake_fd.set()
        thread.join(JOIN_S)
        if not thread.is_alive():
            self._wake_fd.close()

    # --- the thread --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over(0.0):
                claim = self._claim()  # again and again: an agent of this machine may end, and leave us its endpoint
                if claim is not None:
                    self._serve(claim)
                elif self._is_over(AGAIN_AFTER_S if self._port_taken_since else CLAIM_EVERY_S):
                    break
        except Interrupted:
            pass
        except (EtcdServerError, CoordinationError, UnreachableName, OSError) as error:
            self._failure = error
            if self._is_formed:  # else the job cannot begin, which says why
                report.warn(f"this node has no etcd member any more: {error}")

    def _is_over(self, wait_s: float) -> bool:
        return is_set(self._wake_fd, wait_s)

    def _claim(self) -> Claim | None:
        try:
            claim = claim_endpoint(self._plan)
        except PortTaken as error:
            since = self._port_taken_since = self._port_taken_since or time.monotonic()
            if time.monotonic() - since > PORT_PATIENCE_S:
                raise RefusedError(f"{error} by something else: bootstrap=true cannot start an etcd member there") from None
            return None
        self._port_taken_since = 0.0
        return claim

    def _serve(self, claim: Claim) -> None:
        """Run the member of this endpoint until it is time to end."""
        try:
            binary = find_etcd(self._environ)
            etcd_version(binary, self._environ)
            member = Member(binary, self._plan, claim)
            self._has_member = True
            try:
                self._keep(member, claim.index)
            finally:
                member.close()
        finally:
            self._has_member = False
            claim.close()

    def _keep(self, member: Member, index: int) -> None:
        report.info(f"this node runs the etcd member at {member.name}; whoever reaches it can change or end the job")
        while not self._is_over(0.0):
            has_data = member.has_data
            entry = self._membership.beginning() if has_data else self._membership.entry(index, self._wake_fd)
            if entry is not None:
                member.start(entry)
                self._watch(member, is_restart=has_data)
            if self._is_over(AGAIN_AFTER_S):
                break

    def _watch(self, member: Member, is_restart: bool) -> None:
        """Until it ends, of itself or because we do."""
        began = time.monotonic()
        while member.exit_code is None:
            if self._is_over(WATCH_EVERY_S):
                return
            if self._told and time.monotonic() - began > STEADY_S:
                self._told = ""
        why = member.last_words()
        if PORT_TAKEN in why:
            raise RefusedError(f"the etcd member at {member.name} cannot be started: {why}")
        trouble = f"it ended with {member.exit_code}" + (f" ({why})" if why else "")
        if trouble != self._told:
            self._told = trouble
            report.warn(f"the etcd member at {member.name} is started again: {trouble}")
        if time.monotonic() - began < STEADY_S and (is_restart or member.gave_up):
            member.forget()
