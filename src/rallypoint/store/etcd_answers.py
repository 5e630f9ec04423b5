"""What an endpoint's answer means: the fields of one that is well, or an error that says why it is not."""

from __future__ import annotations

import json
from contextlib import closing

from rallypoint.store.etcd_errors import Failure, TokenRefused, error_of, failure_of, refusal
from rallypoint.store.etcd_http import HttpConnection, NotHttp
from rallypoint.store.etcd_words import Malformed, fields_of, flag

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.store.bell import Bell
    from rallypoint.store.etcd_words import Fields

__all__ = ["NOT_ETCD", "check_answer", "check_not_cancelled", "explain_hang_up", "explain_not_found"]

OLDEST_VERSION = (3, 4)
NOT_ETCD = "it is not etcd: give the address at which etcd's clients are served"
ASKED_WITHOUT_TLS = "it speaks TLS, and was asked without: see protocol"
CERTIFICATE_WITH_A_NAME = "where users are asked for, its gateway takes no client certificate with a CommonName: use one without"
PROXY_TROUBLE = range(500, 600)


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
        version = json.loads(connection.read_answer(limit)[1])["etcdserver"]
        major, minor, *_ = map(int, version.split("."))
    except (OSError, NotHttp, ValueError, KeyError, TypeError, AttributeError):
        return Failure(f"{NOT_ETCD} (it knows nothing of etcd's paths)", is_final=True)
    if (major, minor) < OLDEST_VERSION:
        return Failure(f"it is etcd {major}.{minor}, which is too old: 3.4 is the oldest that will do", is_final=True)
    return Failure("its JSON gateway is off: start etcd without --enable-grpc-gateway=false", is_final=True)


def explain_hang_up(error: OSError, endpoint: tuple[str, int], with_tls: bool, limit: float, interrupt: Bell | None) -> Failure:
    """Why an endpoint has closed a connection before it said anything: etcd does that to whoever does not use TLS as it does.

    So it is tried the other way. If that does not work either, it was just this connection.
    """
    try:
        if with_tls:
            return _explain_without_tls(endpoint, limit, interrupt)
        return _explain_with_tls(endpoint, limit, interrupt)
    except (OSError, NotHttp):
        return failure_of(error)


def _explain_without_tls(endpoint: tuple[str, int], limit: float, interrupt: Bell | None) -> Failure:
    with closing(HttpConnection(endpoint, None, limit, interrupt)) as connection:
        connection.ask("GET", "/version", {}, b"", limit)
        connection.read_answer(limit)
    return Failure("it does not speak TLS, and was asked with it: see protocol", is_final=True)


def _explain_with_tls(endpoint: tuple[str, int], limit: float, interrupt: Bell | None) -> Failure:
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
