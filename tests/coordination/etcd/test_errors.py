"""What an endpoint's answers and troubles mean, and what the user is told of them."""

from __future__ import annotations

import json
import socket
import ssl
from typing import Any

import pytest

from rallypoint.coordination.engine import RefusedError, StoreGoneError, UnreachableError
from rallypoint.coordination.etcd.errors import (
    EtcdError,
    Failure,
    TokenRefused,
    check_answer,
    check_not_cancelled,
    failure_of,
    summary,
)
from rallypoint.coordination.etcd.gateway import EtcdAccess
from rallypoint.coordination.etcd.http import NotHttp


def error(code: int, message: str) -> dict[str, Any]:
    return {"error": message, "code": code, "message": message}


def caught(answer: dict[str, Any], user: str | None = None, status: int = 400) -> Exception:
    with pytest.raises(Exception) as found:  # noqa: PT011  # its type is what is looked at
        check_answer(status, json.dumps(answer).encode(), user)
    return found.value


@pytest.mark.parametrize(
    ("code", "message", "is_in_doubt"),
    [
        (14, "etcdserver: no leader", False),
        (14, "etcdserver: leader changed", True),
        (14, "etcdserver: request timed out", True),
        (14, "etcdserver: request timed out, possibly due to connection lost", True),
        (2, "context deadline exceeded", True),
        (8, "etcdserver: too many requests", False),
        (14, "etcdserver: rpc not supported for learner", False),
        (14, "etcdserver: server stopped", True),
    ],
)
def test_what_another_endpoint_may_do_better(code: int, message: str, is_in_doubt: bool) -> None:
    """Only what etcd refuses before it has begun is certain not to be done."""
    failure = caught(error(code, message))
    assert isinstance(failure, Failure)
    assert (failure.may_be_done, failure.is_final) == (is_in_doubt, False)


def test_a_streams_errors_are_one_level_deeper() -> None:
    told = {"error": {"grpc_code": 14, "http_code": 503, "message": "etcdserver: no leader"}}
    assert "no leader" in str(caught(told))


@pytest.mark.parametrize(
    ("code", "message", "user", "told"),
    [
        (3, "etcdserver: authentication failed, invalid user ID or password", "me", "user 'me', or the password is wrong"),
        (3, "etcdserver: user name is empty", None, "asks for a user and a password"),
        (7, "etcdserver: permission denied", "me", "the user 'me' may not"),
        (7, "etcdserver: permission denied", None, "nobody without a user"),
        (8, "etcdserver: mvcc: database space exceeded", None, "database is full"),
    ],
)
def test_what_no_endpoint_will_do(code: int, message: str, user: str | None, told: str) -> None:
    refused = caught(error(code, message), user)
    assert isinstance(refused, RefusedError)
    assert told in str(refused)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (16, "etcdserver: invalid auth token"),
        (3, "etcdserver: revision of auth store is old"),
        (3, "etcdserver: user name is empty"),
    ],
)
def test_what_another_token_may_help_with(code: int, message: str) -> None:
    assert isinstance(caught(error(code, message), "me"), TokenRefused)


def test_what_the_caller_has_to_know() -> None:
    gone = caught(error(5, "etcdserver: requested lease not found"))
    forgotten = caught(error(11, "etcdserver: mvcc: required revision has been compacted"))
    large = caught(error(3, "etcdserver: request is too large"))
    assert isinstance(gone, EtcdError)
    assert isinstance(forgotten, EtcdError)
    assert isinstance(large, EtcdError)
    assert (gone.is_lease_gone, forgotten.is_compacted, large.is_bad_request) == (True, True, True)
    assert (gone.is_compacted, forgotten.is_lease_gone, gone.is_bad_request) == (False, False, False)


@pytest.mark.parametrize(
    ("status", "body", "told", "is_final"),
    [
        (200, b"<html>hello</html>", "not etcd", True),
        (200, b"{}", "not etcd", True),
        (200, b"[]", "not etcd", True),
        (403, b"go away", "HTTP status 403", True),
        (502, b"<html>bad gateway</html>", "HTTP status 502", False),
        (400, b"Client sent an HTTP request to an HTTPS server.\n", "see protocol", True),
    ],
)
def test_what_is_not_etcd(status: int, body: bytes, told: str, is_final: bool) -> None:
    with pytest.raises(Failure, match=told) as found:
        check_answer(status, body, None)
    assert found.value.is_final == is_final


@pytest.mark.parametrize("reason", ["permission denied", "etcdserver: invalid auth token", "etcdserver: user name is empty"])
def test_a_watch_without_permission_is_worth_another_token_if_there_is_a_user(reason: str) -> None:
    told = {"created": True, "canceled": True, "cancel_reason": f"rpc error: code = X desc = {reason}"}
    with pytest.raises(TokenRefused):
        check_not_cancelled(told, "me")
    with pytest.raises((RefusedError, TokenRefused)):
        check_not_cancelled(told, None)


def test_a_watch_that_ends_for_another_reason_is_not_refused() -> None:
    check_not_cancelled({"created": True}, None)
    check_not_cancelled({"canceled": True, "compact_revision": "4"}, "me")


def tls_error(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}] {reason.lower()} (_ssl.c:1)")
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("error", "told", "is_final"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "connection refused", False),
        (socket.gaierror(-2, "Name or service not known"), "its name is not known", False),
        (NotHttp("it does not speak HTTP"), "so it is not etcd", True),
        (tls_error("CERTIFICATE_VERIFY_FAILED"), "see cacert", True),
        (tls_error("TLSV13_ALERT_CERTIFICATE_REQUIRED"), "see cert and key", True),
        (tls_error("TLSV1_ALERT_UNKNOWN_CA"), "see cert and key", True),
        (tls_error("WRONG_VERSION_NUMBER"), "see protocol", True),
        (tls_error("UNEXPECTED_EOF_WHILE_READING"), "eof", False),
        (ssl.SSLEOFError(8, "EOF occurred in violation of protocol"), "eof", False),
    ],
)
def test_troubles_of_a_connection(error: Exception, told: str, is_final: bool) -> None:
    failure = failure_of(error)
    assert told in str(failure)
    assert failure.is_final == is_final


def test_each_reason_is_told_once() -> None:
    refused = Failure("not etcd", is_final=True)
    error = summary({"a:1": Failure("connection refused"), "b:1": refused, "c:1": Failure("connection refused")})
    assert isinstance(error, UnreachableError)
    assert str(error) == "etcd at a:1, c:1: connection refused; etcd at b:1: not etcd"
    assert isinstance(summary({"b:1": refused}), RefusedError)
    gone = Failure("another", is_final=True, is_other_cluster=True)
    assert isinstance(summary({"b:1": gone}), StoreGoneError)
    assert isinstance(summary({"b:1": gone, "c:1": refused}), RefusedError)


def test_a_password_is_not_shown() -> None:
    access = EtcdAccess((("::1", 2379), ("host", 1)), user="me", password="hunter2")
    assert "hunter2" not in repr(access) + str(access)
    assert access.names() == ["[::1]:2379", "host:1"]
