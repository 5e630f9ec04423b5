"""How a job is told about its etcd cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rallypoint.errors import UsageError
from rallypoint.rendezvous import registry
from rallypoint.rendezvous.dynamic import DynamicRendezvous
from rallypoint.rendezvous.etcd import ETCD_SETTINGS, markdown, parse_endpoints, read_etcd_settings
from rallypoint.rendezvous.handler import RendezvousParameters


def params(backend: str = "etcd", run_id: str = "job", endpoint: str = "host:2379", **settings: Any) -> RendezvousParameters:
    return RendezvousParameters(backend, endpoint, run_id, 1, 4, **settings)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a", (("a", 2379),)),
        ("a:1, b ,[::1]:3", (("a", 1), ("b", 2379), ("::1", 3))),
        ("a,", (("a", 2379),)),
    ],
)
def test_endpoints(text: str, found: tuple[tuple[str, int], ...]) -> None:
    assert parse_endpoints(text) == found


@pytest.mark.parametrize("text", ["", " , ", "a:x", "a,b:99999"])
def test_endpoints_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_endpoints(text)


def test_what_torchrun_calls_them_is_taken_too(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret\n")
    files = {"cacert": "/ca", "ssl_cert": "/cert", "ssl_cert_key": "/key"}
    config = {"protocol": "hTTpS", **files, "user": "me", "password_file": str(password), "read_timeout": 7, "timeout": 900}
    read = read_etcd_settings(config, {})
    access = read.access("a,b")
    assert (access.protocol, access.ca_cert, access.cert, access.key) == ("https", "/ca", "/cert", "/key")
    assert (access.user, access.password, access.read_timeout_s) == ("me", "secret", 7)
    assert (read.prefix, read.fence_s, read.bootstrap, read.others) == ("/rallypoint", 30.0, False, {"timeout": 900})
    assert "secret" not in repr(access)


def test_a_variable_says_it_too_and_the_nearest_wins() -> None:
    environ = {"RALLYPOINT_ETCD_FENCE": "12", "RALLYPOINT_ETCD_PREFIX": "/jobs"}
    read = read_etcd_settings({"prefix": "/mine"}, environ)
    assert (read.fence_s, read.prefix) == (12.0, "/mine")


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"protocol": "gopher"}, "protocol must be http or https, not 'gopher'"),
        ({"fence": 0}, "fence must be a number of seconds"),
        ({"bootstrap": "perhaps"}, "bootstrap must be true or false"),
        ({"cacert": "/ca"}, "/ca is given, but protocol is http"),
        ({"protocol": "https", "key": "/key"}, "no certificate"),
        ({"user": "me"}, "password_file"),
        ({"password_file": "/no/such/file"}, "a password_file a user"),
        ({"user": "me", "password_file": "/no/such/file"}, "/no/such/file cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_by_name(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        read_etcd_settings(config, {}).access("a")


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_a_handler_opens_nothing_yet(backend: str) -> None:
    """P32"""
    handler = registry.get_rendezvous_handler(params(backend))
    assert isinstance(handler, DynamicRendezvous)
    assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store) == (backend, "job", True)
    assert handler.shutdown()


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"run_id": "none"}, "^run_id is 'none'.*name this one"),
        ({"run_id": "a/b"}, "cannot have a slash"),
        ({"endpoint": ""}, "^rdzv_endpoint is empty"),
        ({"protocl": "https"}, "there is no rendezvous setting 'protocl'"),
        ({"node_unit": 5}, "could never run"),
    ],
)
def test_a_job_that_cannot_be_is_refused_before_anything_is_opened(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        registry.get_rendezvous_handler(params(**given))


def test_a_secret_that_would_protect_nothing_is_said_to_do_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RALLYPOINT_SECRET", "x" * 32)
    registry.get_rendezvous_handler(params()).shutdown()
    assert "the job's secret has no effect on etcd" in caplog.text


def test_the_page_has_the_table_as_it_is() -> None:
    """P24: to renew it, put what `markdown()` gives into the page."""
    assert f"\n{markdown()}\n" in (Path(__file__).parents[2] / "docs" / "etcd.md").read_text()
    assert len({setting.key for setting in ETCD_SETTINGS}) == len(ETCD_SETTINGS)
