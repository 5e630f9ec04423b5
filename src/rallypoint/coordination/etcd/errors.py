"""What can go wrong with an etcd cluster, told in one line that says what to do.

A `Failure` is one endpoint's: another may do better. When none does, all of them together become the error that the caller
sees: RefusedError where waiting does not help at any of them, UnreachableError where it may.
"""

from __future__ import annotations

import socket
from contextlib import closing

from rallypoint.base.json_text import from_json
from rallypoint.coordination.engine import CoordinationError, RefusedError, StoreGoneError, UnreachableError
from rallypoint.coordination.etcd.codec import Malformed, fields_of, flag
from rallypoint.coordination.etcd.http import HttpConnection, NotHttp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from rallypoint.coordination.etcd.codec import Fields
    from rallypoint.net.wake_fd import WakeFd

__all__ = [
    "NOT_ETCD", "EtcdError", "Failure", "TokenRefused", "check_answer", "check_not_cancelled", "error_of", "explain_hang_up",
    "explain_not_found", "failure_of", "is_hang_up", "refusal", "summary",
]  # fmt: skip

CANCELLED, UNKNOWN, INVALID, LATE, NOT_FOUND, DENIED, EXHAUSTED, OUT_OF_RANGE, UNAVAILABLE, UNAUTHENTICATED = (
    1, 2, 3, 4, 5, 7, 8, 11, 14, 16,
)  # fmt: skip
NO_LEADER = "its cluster has no leader (its quorum is lost): too few of its members are up, or they cannot reach each other"
# What etcd says before it has begun with a request.
NOT_BEGUN = ("no leader", "too many requests", "learner", "not capable")
TOKEN_REFUSALS = ("invalid auth token", "revision of auth store is old")
LONGEST_MESSAGE = 200
OLDEST_VERSION = (3, 4)
NOT_ETCD = "it is not etcd: give the address at which etcd's clients are served"
ASKED_WITHOUT_TLS = "it speaks TLS, and was asked without: see protocol"
CERTIFICATE_WITH_A_NAME = "where users are asked for, its gateway takes no client certificate with a CommonName: use one without"
PROXY_TROUBLE = range(500, 600)


class Failure(Exception):
    """An endpoint is of no use now; `may_be_done`: it may have done what it was asked for; `is_final`: waiting will not help."""

    def __init__(self, why: str, *, may_be_done: bool = False, is_final: bool = False, is_other_cluster: bool = False) -> None:
        super().__init__(why)
        self.may_be_done = may_be_done
        self.is_final = is_final
        self.is_other_cluster = is_other_cluster


class TokenRefused(Exception):
    """The token that stands for user and password is not taken: it has run out, or was another cluster's."""


class EtcdError(Exception):
    """etcd has understood the request, and will not do it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def is_lease_gone(self) -> bool:
        return self.code == NOT_FOUND and "lease" in str(self)

    @property
    def is_compacted(self) -> bool:
        return self.code == OUT_OF_RANGE and "compacted" in str(self)

    @property
    def is_bad_request(self) -> bool:
        """Too large, or a key twice: what every etcd would refuse."""
        return self.code in (INVALID, EXHAUSTED)


def error_of(answer: Mapping[str, Any], user: str | None) -> Exception:
    """What an answer says that tells of an error."""
    error = answer["error"]
    told = error if isinstance(error, dict) else answer
    code = told.get("grpc_code", told.get("code", UNKNOWN))
    message = str(told.get("message", error))[:LONGEST_MESSAGE].removeprefix("etcdserver: ")
    return _classified(code if isinstance(code, int) else UNKNOWN, message, user)


def _classified(code: int, message: str, user: str | None) -> Exception:
    if code == UNAUTHENTICATED or message in TOKEN_REFUSALS or (user is not None and message == "user name is empty"):
        return TokenRefused(message)
    if message.startswith("no leader"):
        return Failure(NO_LEADER)
    if code in (UNAVAILABLE, LATE, CANCELLED, UNKNOWN) or message == "too many requests":
        return Failure(f"it says: {message}", may_be_done=not any(text in message for text in NOT_BEGUN))
    return refusal(message, user) or EtcdError(code, message)


def refusal(message: str, user: str | None) -> RefusedError | None:
    """What no other endpoint would answer otherwise."""
    if "authentication failed" in message:
        return RefusedError(f"etcd does not know the user {user!r}, or the password is wrong: see user and password_file")
    if "user name is empty" in message:
        return RefusedError("etcd asks for a user and a password: see user and password_file")
    if "permission denied" in message:
        if not user:
            return RefusedError("nobody without a user and a password may use etcd here: see user and password_file")
        return RefusedError(
            f"the user {user!r} may not use the keys of this job in etcd: grant a role that may read and write under its prefix"
        )
    if "space exceeded" in message:
        return RefusedError("etcd's database is full: compact and defragment it, raise its quota, and disarm the alarm")
    return None


def failure_of(error: Exception) -> Failure:
    """What an error of the connection means."""
    if isinstance(error, NotHttp):
        return Failure(f"{error}, so it is not etcd: give the address at which etcd's clients are served", is_final=True)
    if isinstance(error, socket.gaierror):
        return Failure(f"its name is not known ({str(error.strerror).lower()})")
    text = ((getattr(error, "strerror", None) or str(error)) or type(error).__name__).lower()
    return _tls_failure(error, text) or Failure(text)


def is_hang_up(error: Exception) -> bool:
    """Whether the other side has closed the connection, as TLS tells it or without."""
    return isinstance(error, ConnectionResetError) or "EOF" in f"{getattr(error, 'reason', '')} {type(error).__name__}"


def _tls_failure(error: Exception, text: str) -> Failure | None:
    """What TLS does not like. An end in the midst of it is none of it: servers do end."""
    reason = str(getattr(error, "reason", None) or "").upper()
    if not type(error).__module__.startswith("ssl") or is_hang_up(error):
        return None
    if "verify" in text or "VERIFY" in reason:
        why = getattr(error, "verify_message", "") or text
        return Failure(f"its certificate cannot be trusted ({why}): see cacert, and the names in the certificate", is_final=True)
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason or "HANDSHAKE" in reason):
        return Failure("it does not take our certificate, or asks for one: see cert and key", is_final=True)
    return Failure(f"it does not speak TLS as we do ({text}): see protocol", is_final=True)


def summary(failures: Mapping[str, Failure]) -> CoordinationError:
    """What the caller is told when no endpoint was of use: each reason once, with the endpoints that it is true of."""
    by_reason: dict[str, list[str]] = {}
    for name, failure in failures.items():
        by_reason.setdefault(str(failure), []).append(name)
    text = "; ".join(f"etcd at {', '.join(names)}: {reason}" for reason, names in by_reason.items())
    found = failures.values()
    if all(failure.is_other_cluster for failure in found):
        return StoreGoneError(text)
    return RefusedError(text) if all(failure.is_final for failure in found) else UnreachableError(text)


def check_answer(status: int, body: bytes, user: str | None) -> Fields:
    """The fields of an answer that is well."""
    try:
        answer = fields_of(body)
    except Malformed:
        raise _foreign(status, body) from None
    if "error" in answer:
        raise error_of(answer, user)
    if type(answer.get("header")) is not dict:
        raise Failure(NOT_ETCD, is_final=True)
    return answer


def _foreign(status: int, body: bytes) -> Failure:
    if b"HTTPS server" in body:
        return Failure(ASKED_WITHOUT_TLS, is_final=True)
    if b"CommonName" in body:
        return Failure(CERTIFICATE_WITH_A_NAME, is_final=True)
    if status in PROXY_TROUBLE:
        return Failure(f"it answers with HTTP status {status}", may_be_done=True)
    return Failure(f"{NOT_ETCD} (it answers with HTTP status {status})", is_final=True)


def explain_not_found(connection: HttpConnection, limit: float) -> Failure:
    """Why there is no gateway where there should be one: etcd's other door says which etcd it is, if it is one."""
    try:
        connection.ask("GET", "/version", {}, b"", limit)
        version = from_json(connection.read_answer(limit)[1])["etcdserver"]
        major, minor, *_ = map(int, version.split("."))
    except (OSError, NotHttp, ValueError, KeyError, TypeError, AttributeError):
        return Failure(f"{NOT_ETCD} (it knows nothing of etcd's paths)", is_final=True)
    if (major, minor) < OLDEST_VERSION:
        return Failure(f"it is etcd {major}.{minor}, which is too old: 3.4 is the oldest that will do", is_final=True)
    return Failure("its JSON gateway is off: start etcd without --enable-grpc-gateway=false", is_final=True)


def explain_hang_up(error: OSError, endpoint: tuple[str, int], with_tls: bool, limit: float, interrupt: WakeFd | None) -> Failure:
    """Why an endpoint has closed a connection before it said anything: etcd does that to whoever does not use TLS as it does.

    So it is tried the other way. If that does not work either, it was just this connection.
    """
    try:
        if with_tls:
            return _explain_without_tls(endpoint, limit, interrupt)
        return _explain_with_tls(endpoint, limit, interrupt)
    except (OSError, NotHttp):
        return failure_of(error)


def _explain_without_tls(endpoint: tuple[str, int], limit: float, interrupt: WakeFd | None) -> Failure:
    with closing(HttpConnection(endpoint, None, limit, interrupt)) as connection:
        connection.ask("GET", "/version", {}, b"", limit)
        connection.read_answer(limit)
    return Failure("it does not speak TLS, and was asked with it: see protocol", is_final=True)


def _explain_with_tls(endpoint: tuple[str, int], limit: float, interrupt: WakeFd | None) -> Failure:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is said to it that it should not know
    try:
        HttpConnection(endpoint, context, limit, interrupt).close()
    except ssl.SSLError as error:
        if "ALERT" not in str(error.reason):  # it says in TLS what it does not like about us
            raise
    return Failure(ASKED_WITHOUT_TLS, is_final=True)


def check_not_cancelled(opening: Fields, user: str | None) -> None:
    """Raise why a watch ended where it began, if that was for want of permission.

    A token that has run out may be told as that; so with a user it is worth another token, and only then a refusal.
    """
    reason = str(opening.get("cancel_reason", ""))
    found = refusal(reason, user)
    if not flag(opening, "canceled") or (found is None and "auth token" not in reason):
        return
    if user is not None or found is None:
        raise TokenRefused(reason)
    raise found
