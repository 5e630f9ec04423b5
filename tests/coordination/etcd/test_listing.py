"""Which jobs have keys in a cluster: each is found by its first key, however many keys and jobs there are."""

from __future__ import annotations

import base64
import json
import time

import pytest
from tests.conftest import PATIENCE_S
from tests.coordination.etcd.peers import Visitor, fake_endpoint

from rallypoint.coordination.engine import RefusedError
from rallypoint.coordination.etcd.gateway import EtcdAccess
from rallypoint.coordination.etcd.listing import jobs_in

KEYS = sorted(
    key.encode()
    for key in (
        "/other/x", "/rallypoint/a/settings", "/rallypoint/a/up/nodes/1", "/rallypoint/a-1/settings", "/rallypoint/a0/settings",
        "/rallypoint/é/settings", "/rallypoint2/b/settings", *(f"/rallypoint/many/seats/{number}" for number in range(50)),
    )
)  # fmt: skip


def answer_ranges(visitor: Visitor) -> None:
    """As etcd does: keys in the order of their bytes, from the first of a range to before its end."""
    while True:
        _, body = visitor.request()
        asked = json.loads(body)
        first, end = base64.b64decode(asked["key"]), base64.b64decode(asked["range_end"])
        assert asked["keys_only"]
        found = [key for key in KEYS if first <= key < end][: int(asked["limit"])]
        visitor.answer({"kvs": [{"key": base64.b64encode(key).decode()} for key in found]})


def test_each_job_is_found_once() -> None:
    with fake_endpoint(answer_ranges) as endpoint:
        access = EtcdAccess((endpoint.address,))
        assert sorted(jobs_in(access, "/rallypoint/", time.monotonic() + PATIENCE_S)) == ["a", "a-1", "a0", "many", "é"]
        assert jobs_in(access, "/nobody/", time.monotonic() + PATIENCE_S) == []


def test_a_cluster_that_refuses_says_why() -> None:
    def refuse(visitor: Visitor) -> None:
        while True:
            visitor.request()
            visitor.answer({"error": "etcdserver: permission denied", "code": 7}, "403 Forbidden")

    with (
        fake_endpoint(refuse) as endpoint,
        pytest.raises(RefusedError, match="nobody without a user and a password may use etcd here"),
    ):
        jobs_in(EtcdAccess((endpoint.address,)), "/rallypoint/", time.monotonic() + PATIENCE_S)
