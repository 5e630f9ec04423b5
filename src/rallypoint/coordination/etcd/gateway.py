"""Questions to an etcd cluster: how to come at it, and each to one endpoint after the other until one answers.

A question that must not be done twice is not asked again once it was sent; and before it is sent to an endpoint that has not
been heard of for a second, that one is asked how it is.

An endpoint that takes a question and is silent may be a paused process, a machine cut off, or a member whose leader has just
died. So whoever has waited a little asks the same endpoint how it is, over another connection. If it does not say, it is given
up. If it says that the leader has changed meanwhile, the answer will not come: etcd has lost the question.
"""

from __future__ import annotations

import math
import random
import threading
import time
from contextlib import closing

from rallypoint.base.backoff import Backoff
from rallypoint.base.records import Value
from rallypoint.base.text import host_port
from rallypoint.coordination.engine import CoordinationError, RefusedError, UnreachableError
from rallypoint.coordination.etcd import errors
from rallypoint.coordination.etcd.codec import Malformed, encode, number
from rallypoint.coordination.etcd.errors import EtcdError, Failure, TokenRefused, failure_of, refusal, summary
from rallypoint.coordination.etcd.http import HttpConnection, Interrupted, NotHttp, is_set
from rallypoint.net.wake_fd import WakeFd

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from typing import Any, Literal, TypeVar

    from rallypoint.coordination.etcd.codec import Fields

    Clock = Callable[[], float]
    Result = TypeVar("Result")
    Attempt = Callable[[int, float], Result]  # with an endpoint, until a time

__all__ = [
    "AUTHENTICATE", "GRANT", "PATIENCE_S", "RANGE", "STATUS", "TXN", "Answer", "Caller", "EtcdAccess", "EtcdCluster", "Talk",
    "access_of", "tls_context",
]  # fmt: skip

RANGE, TXN, GRANT = "/v3/kv/range", "/v3/kv/txn", "/v3/lease/grant"
STATUS, AUTHENTICATE = "/v3/maintenance/status", "/v3/auth/authenticate"
# etcd refuses at once what it could not do without a leader.
HEADERS = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}
FRESH_S = 1.0  # whoever has answered so lately is there
CHECK_S = 1.0  # how long an endpoint may take to say how it is
PATIENCE_S = 0.5  # after which one that does not answer is asked
PROBE_PATIENCES = 3  # how much longer it may take to say so, with all that a new connection takes
HTTP_OK, HTTP_NOT_FOUND = 200, 404
LEAST_TRY_S = 0.3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.5
TOKENS_PER_CALL = 2


class EtcdAccess(Value):
    """Every member that is known, and the paths of what TLS needs; without `ca_cert` the machine's own authorities count.

    Nobody waits longer than `read_timeout_s` for one answer.
    """

    endpoints: tuple[tuple[str, int], ...]
    protocol: Literal["http", "https"] = "http"
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str | None = None
    read_timeout_s: float = 60.0

    def __repr__(self) -> str:
        """Without the password, since it may end up in a log."""
        return f"EtcdAccess({', '.join(self.names())}; protocol={self.protocol!r}, user={self.user!r})"

    def names(self) -> list[str]:
        """The endpoints, as users write them."""
        return [host_port(*endpoint) for endpoint in self.endpoints]


def access_of(client: Any) -> EtcdAccess:
    """The way to a cluster, from what stands for it: that itself, an endpoint as text, or a client of python-etcd."""
    if isinstance(client, EtcdAccess):
        return client
    if isinstance(client, str):
        name, _, number = client.rpartition(":")
        return EtcdAccess(((name.strip("[]"), int(number)),))
    host, port = getattr(client, "host", None), getattr(client, "port", None)
    if not isinstance(host, str) or not isinstance(port, int):
        raise TypeError(f"an etcd client is an EtcdAccess, an endpoint as text, or one of python-etcd, not {client!r}")
    return EtcdAccess(((host, port),), "https" if getattr(client, "protocol", "http") == "https" else "http")


def tls_context(access: EtcdAccess) -> ssl.SSLContext | None:
    """What every connection to this cluster is made with; None where it speaks plain HTTP."""
    if access.protocol != "https":
        return None
    import ssl

    try:
        context = ssl.create_default_context(cafile=access.ca_cert)
    except (OSError, ValueError) as error:
        raise RefusedError(f"the authorities in {access.ca_cert!r} cannot be used: {_told(error)}; see cacert") from None
    if access.cert is not None:
        try:
            context.load_cert_chain(access.cert, access.key, password=_no_passphrase)
        except (OSError, ValueError) as error:
            files = f"{access.cert!r} and {access.key or access.cert!r}"
            raise RefusedError(f"the certificate and key in {files} cannot be used: {_told(error)}; see cert and key") from None
    return context


def _no_passphrase() -> str:
    """A key with a passphrase would be asked for at the terminal, by every node."""
    raise ValueError("the key asks for a passphrase")


def _told(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()


class EtcdCluster:
    """Used by all threads of one client. `home` is the endpoint that serves it; the first is drawn, so that clients spread."""

    def __init__(self, access: EtcdAccess, clock: Clock = time.monotonic) -> None:
        if not access.endpoints:
            raise ValueError("an etcd cluster needs at least one endpoint")
        self.access = access
        self.clock = clock
        self.names = access.names()
        self.home = random.randrange(len(access.endpoints))
        self.id = 0  # of the cluster; 0 until it has answered
        self.local_address = ""
        self.token: str | None = None  # stands for user and password; "" where the cluster asks for none
        self.on_move: Callable[[], None] = lambda: None  # called, from any thread, when the home is another one
        self._lock = threading.Lock()
        self._suspects: set[int] = set()  # endpoints that were of no use when they were asked last
        self._tls = tls_context(access)

    def order(self) -> list[int]:
        """All endpoints, in the order in which to try them: the home first, and those that were of no use last."""
        count, suspects = len(self.names), frozenset(self._suspects)
        return sorted(range(count), key=lambda index: (index in suspects, (index - self.home) % count))

    def open(self, index: int, deadline: float, interrupt: WakeFd | None) -> HttpConnection:
        """A new connection to one endpoint."""
        return HttpConnection(self.access.endpoints[index], self._tls, deadline, interrupt, self.clock)

    def adopt(self, index: int) -> None:
        """This endpoint has served us, after those before it in the order did not."""
        with self._lock:
            self._suspects.discard(index)
            has_moved, self.home = self.home != index, index
        if has_moved:
            self.on_move()

    def suspect(self, index: int) -> None:
        """This endpoint was of no use."""
        with self._lock:
            self._suspects.add(index)

    def forget_token(self, token: str | None) -> None:
        """It was refused; whoever needs one asks for another."""
        with self._lock:
            if self.token == token:
                self.token = None

    def check_id(self, answer: Fields) -> None:
        """There is one cluster, the one that has answered first."""
        header = answer.get("header")
        found = number(header, "cluster_id") if type(header) is dict else 0
        with self._lock:
            self.id = self.id or found
        if found not in (0, self.id):
            raise Failure("another etcd cluster answers there", is_final=True, is_other_cluster=True)


class Answer(Value):
    """What an endpoint said, and when that was sent which it answers."""

    fields: Fields
    sent_at: float


class Talk:
    """A connection, opened when it is made. Whatever is wrong with the endpoint is a Failure."""

    def __init__(self, cluster: EtcdCluster, index: int, limit: float, interrupt: WakeFd | None) -> None:
        self.index = index
        self._cluster = cluster
        self._interrupt = interrupt
        self._clock = cluster.clock
        self._heard_at = 0.0
        self._term = 0  # of the cluster's leader, as we heard last
        try:
            self.connection = cluster.open(index, limit, interrupt)
        except OSError as error:
            raise self._failure_of(error) from None

    def close(self) -> None:
        self.connection.close()

    def interrupt_by(self, wake_fd: WakeFd | None) -> None:
        self._interrupt = wake_fd
        self.connection.interrupt_by(wake_fd)

    # --- questions ---------------------------------------------------------------------------------------------------------

    def ask(self, path: str, body: bytes, limit: float, patience_s: float = PATIENCE_S) -> Answer:
        """EtcdError if etcd will not, TokenRefused if it wants to know again who we are."""
        sent_at = self._clock()
        self._send(path, body, limit)
        try:
            self._wait(limit, math.inf if path == STATUS else patience_s)
            status, raw = self.connection.read_answer(limit)
        except (OSError, NotHttp) as error:
            failure = self._failure_of(error)
            failure.may_be_done = not failure.is_final
            raise failure from None
        return Answer(self._heard(status, raw, limit), sent_at)

    def authorise(self, limit: float) -> None:
        """Get the token that stands for user and password, if we are to have one and have none yet."""
        access = self._cluster.access
        if access.user is None or self._cluster.token is not None:
            return
        try:
            answer = self.ask(AUTHENTICATE, encode({"name": access.user, "password": access.password or ""}), limit)
            self._cluster.token = str(answer.fields.get("token", ""))
        except EtcdError as error:
            if "not enabled" not in str(error):
                raise RefusedError(f"etcd does not let the user {access.user!r} in: {error}") from None
            self._cluster.token = ""  # who we are is of no interest there
        except Failure as failure:
            failure.may_be_done = False  # what we really want was not asked for
            raise

    def check(self, limit: float) -> None:
        """Failure if nothing was heard of this endpoint of late, and it does not say now how it is."""
        now = self._clock()
        if now <= self._heard_at + FRESH_S:
            return
        try:
            self.ask(STATUS, b"{}", min(limit, now + CHECK_S))
        except Failure as failure:
            failure.may_be_done = False
            raise
        except (EtcdError, RefusedError):  # it may not tell us, but it is there
            return

    # --- streams -----------------------------------------------------------------------------------------------------------

    def begin(self, path: str, body: bytes, limit: float) -> Fields:
        """The first line of an answer that does not end."""
        self._send(path, body, limit)
        try:
            status = self.connection.read_head(limit)
            line = self.connection.read_line(limit)
        except (OSError, NotHttp) as error:
            raise self._failure_of(error) from None
        fields = self._heard(status, line, limit)
        errors.check_not_cancelled(fields, self._cluster.access.user)
        return fields

    def go_on(self, deadline: float) -> Fields:
        """Its next line."""
        try:
            line = self.connection.read_line(deadline)
        except (OSError, NotHttp) as error:
            raise failure_of(error) from None
        if not line:
            raise Failure("it has ended its answer")
        return self._heard(HTTP_OK, line, deadline)

    # --- pieces ------------------------------------------------------------------------------------------------------------

    def _send(self, path: str, body: bytes, limit: float) -> None:
        """What fails here has not been done: a question of which a part is missing is none."""
        token = self._cluster.token
        try:
            self.connection.ask("POST", path, {**HEADERS, "Authorization": token} if token else HEADERS, body, limit)
        except OSError as error:
            raise failure_of(error) from None

    def _failure_of(self, error: OSError | NotHttp) -> Failure:
        if self._heard_at or not isinstance(error, OSError) or not errors.is_hang_up(error):
            return failure_of(error)
        access, limit = self._cluster.access, self._clock() + CHECK_S
        return errors.explain_hang_up(error, access.endpoints[self.index], access.protocol == "https", limit, self._interrupt)

    def _heard(self, status: int, raw: bytes, limit: float) -> Fields:
        if status == HTTP_NOT_FOUND and not raw.startswith(b"{"):
            raise errors.explain_not_found(self.connection, limit)
        fields = errors.check_answer(status, raw, self._cluster.access.user)
        try:
            self._cluster.check_id(fields)
            self._heard_at, self._term = self._clock(), number(fields["header"], "raft_term")
        except Malformed:
            raise Failure(errors.NOT_ETCD, is_final=True) from None
        return fields

    def _wait(self, limit: float, patience_s: float) -> None:
        """Until the answer begins to come; Failure when there is reason to think that it will not."""
        term, changes = self._term, 0
        while not self.connection.has_answer(min(limit, self._clock() + patience_s)):
            if self._clock() >= limit:
                raise Failure("it does not answer in time", may_be_done=True)
            now_term = self._ask_term(self._clock() + PROBE_PATIENCES * patience_s)
            term = term or now_term
            changes += now_term > term
            if changes > 1:  # seen twice, so that the answer had the time to come after the change
                raise Failure("its leader has changed, and it does not answer", may_be_done=True)

    def _ask_term(self, limit: float) -> int:
        """What the endpoint says, over another connection, of how it is: the term of its leader, 0 if it may not tell us.

        What else it says is not said of the question that this is about: that one was sent, and must not be taken for refused.
        """
        try:
            with closing(Talk(self._cluster, self.index, limit, self._interrupt)) as other:
                other.ask(STATUS, b"{}", limit)
                return other._term
        except Failure as failure:
            failure.may_be_done = True
            raise
        except (EtcdError, RefusedError, TokenRefused):
            return 0


class Caller:
    """One thread's way to the cluster; it keeps its latest connection. `interrupt` ends whatever it is doing."""

    def __init__(self, cluster: EtcdCluster, interrupt: WakeFd | None = None) -> None:
        self._cluster = cluster
        self._clock = cluster.clock
        self._interrupt = interrupt
        self._talk: Talk | None = None

    def call(
        self, path: str, question: Fields, deadline: float, *, is_repeatable: bool = True, patience_s: float = PATIENCE_S
    ) -> Answer:
        """The answer; EtcdError where that is a refusal. With `is_repeatable` it may be done more than once.

        An endpoint that has not answered after `patience_s` is asked how it is.

        UnreachableError where nobody answers until `deadline`, RefusedError and StoreGoneError where nobody ever will.
        """
        body = encode(question)

        def attempt(index: int, limit: float) -> Answer:
            talk = self._talk_with(index, limit)
            if is_repeatable:
                return talk.ask(path, body, limit, patience_s)
            talk.check(limit)
            return talk.ask(path, body, self._cap(deadline), patience_s)

        return self._somewhere(attempt, deadline, is_repeatable)

    def open_stream(self, path: str, question: Fields, deadline: float) -> tuple[Fields, Talk]:
        """An answer that does not end: its first line, and the talk, over a connection of its own, in which the others come."""
        body = encode(question)

        def attempt(index: int, limit: float) -> tuple[Fields, Talk]:
            talk = Talk(self._cluster, index, limit, self._interrupt)
            try:
                talk.authorise(limit)
                return talk.begin(path, body, limit), talk
            except BaseException:  # whatever it was, nothing half done may stay; it is raised again
                talk.close()
                raise

        return self._somewhere(attempt, deadline, is_repeatable=True)

    def pause(self, pause_s: float) -> None:
        if is_set(self._interrupt, pause_s):
            raise Interrupted

    def hang_up(self) -> None:
        if self._talk is not None:
            self._talk.close()
            self._talk = None

    # --- one endpoint after the other --------------------------------------------------------------------------------------

    def _somewhere(self, attempt: Attempt[Result], deadline: float, is_repeatable: bool) -> Result:
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        failures: dict[str, Failure] = {}
        while True:
            order = self._cluster.order()
            for place, index in enumerate(order):
                began_at, limit = self._clock(), self._share(deadline, len(order) - place)
                try:
                    result = self._with_token(attempt, index, limit)
                except Failure as failure:
                    self._cluster.suspect(index)
                    name = self._cluster.names[index]
                    if failure.may_be_done and not is_repeatable:
                        raise UnreachableError(f"{summary({name: failure})}; what it was asked for may have been done") from None
                    if name not in failures or not self._was_cut_short(began_at, limit):
                        failures[name] = failure
                else:
                    self._cluster.adopt(index)
                    return result
            self._give_up_or_pause(summary(failures), deadline, backoff.next_s())

    def _was_cut_short(self, began_at: float, limit: float) -> bool:
        """Whether there was too little time left to say that an endpoint is silent: then what it said before still stands."""
        return self._clock() >= limit and limit - began_at < PATIENCE_S

    def _give_up_or_pause(self, verdict: CoordinationError, deadline: float, pause_s: float) -> None:
        left_s = deadline - self._clock()
        if not isinstance(verdict, UnreachableError) or left_s <= FIRST_PAUSE_S:
            raise verdict
        self.pause(min(pause_s, left_s / 2))

    def _share(self, deadline: float, tries: int) -> float:
        """Until when one of so many endpoints may take our time."""
        now = self._clock()
        return min(self._cap(deadline), now + max((deadline - now) / tries, LEAST_TRY_S))

    def _cap(self, deadline: float) -> float:
        return min(deadline, self._clock() + self._cluster.access.read_timeout_s)

    def _with_token(self, attempt: Attempt[Result], index: int, limit: float) -> Result:
        """Tokens run out, at each member by its own clock; so one that is refused is replaced."""
        trouble, user = "", self._cluster.access.user
        for _ in range(TOKENS_PER_CALL):
            token = self._cluster.token
            try:
                return attempt(index, limit)
            except TokenRefused as error:
                self._cluster.forget_token(token)
                trouble = str(error)
            except (EtcdError, RefusedError):
                raise
            except BaseException:  # half an answer is of no use for the next question; it is raised again
                self.hang_up()
                raise
        raise refusal(trouble, user) or RefusedError(f"etcd does not let the user {user!r} in: {trouble}")

    def _talk_with(self, index: int, limit: float) -> Talk:
        """The talk that there is, if it is with that endpoint, or a new one."""
        if self._talk is None or self._talk.index != index or not self._talk.connection.can_ask:
            self.hang_up()
            self._talk = Talk(self._cluster, index, limit, self._interrupt)
            self._cluster.local_address = self._talk.connection.local_address()
        self._talk.authorise(limit)
        return self._talk
