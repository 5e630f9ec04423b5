"""Who gets what of the page: by path, method and token."""

from __future__ import annotations

import pytest

from rallypoint.net.http import Request, Response
from rallypoint.web.rules import PATHS, Gate, Log, Page, Stacks, View, Wanted, given_token, headers, resolve


def request(path: str, query: str = "", method: str = "GET", **named: str) -> Request:
    return Request(method, path, query, named, b"", True)


@pytest.mark.parametrize(
    ("asked", "token"),
    [
        (request("/", "token=abc"), "abc"),
        (request("/", "x=1&token=abc&y=2"), "abc"),
        (request("/", "mytoken=abc"), ""),
        (request("/"), ""),
        (request("/", authorization="Bearer abc"), ""),
        (request("/web/view", authorization="Bearer abc"), "abc"),
        (request("/web/view", authorization="bearer  abc "), "abc"),
        (request("/web/view", "token=abc"), ""),
        (request("/web/view", authorization="Basic abc"), ""),
        (request("/web/view", cookie="token=abc"), ""),
    ],
)
def test_where_the_token_stands(asked: Request, token: str) -> None:
    assert given_token(asked) == token


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (request("/"), Page()),
        (request("/", method="HEAD"), Page()),
        (request("/web/view"), View()),
        (request("/web/stacks", method="POST"), Stacks()),
        (request("/web/log", "rank=12&stream=stderr"), Log(12, "stderr")),
        (request("/web/log", "stream=stdout&rank=0"), Log(0, "stdout")),
    ],
)
def test_what_is_asked_for(asked: Request, wanted: Wanted) -> None:
    assert resolve(asked, is_admitted=True) == wanted
    without = resolve(asked, is_admitted=False)
    assert without == Gate() if asked.path == "/" else isinstance(without, Response) and without.status == 401


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (request("/", method="POST"), 405),
        (request("/web/view", method="POST"), 405),
        (request("/web/stacks"), 405),  # a link or an image cannot ask workers for anything
        (request("/web/log"), 400),
        (request("/web/log", "rank=-1&stream=stderr"), 400),
        (request("/web/log", "rank=1&stream=../../etc/passwd"), 400),
        (request("/web/log", "rank=99999999999&stream=stderr"), 400),
        (request("/web/log", "rank=\u0661&stream=stderr"), 400),
    ],
)
def test_what_is_refused(asked: Request, status: int) -> None:
    refused = resolve(asked, is_admitted=True)
    assert isinstance(refused, Response)
    assert refused.status == status


def test_the_page_may_load_nothing_and_stand_in_no_frame() -> None:
    named = dict(headers("AAA=", "BBB="))
    policy = dict(part.strip().partition(" ")[::2] for part in named["Content-Security-Policy"].split(";"))
    assert policy == {
        "default-src": "'none'", "script-src": "'sha256-AAA='", "style-src": "'sha256-BBB='", "connect-src": "'self'",
        "img-src": "data:", "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
    }  # fmt: skip
    assert named["Cache-Control"] == "no-store"
    assert named["Referrer-Policy"] == "no-referrer"
    assert len(PATHS) == len(set(PATHS)) == 4
