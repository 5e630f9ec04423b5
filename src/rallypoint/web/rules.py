"""Who gets what of a job's page: which part of it a request asks for, and with which token.

Everything needs the token, which only the launcher's own output names. The page itself is opened with it in the address; its
script then takes it out of there, and sends it in a header with all that it asks for. No cookie has it: cookies of 127.0.0.1 go
to every server of that machine, whatever its port, and so to those of other users. And a request with a header of its own cannot
be made by a page from elsewhere.
"""

from __future__ import annotations

import re

from rallypoint.base.records import Value
from rallypoint.net.http import Request, Response

__all__ = ["PATHS", "STREAMS", "Gate", "Log", "Page", "Stacks", "View", "Wanted", "given_token", "headers", "resolve"]

PAGE, VIEW, STACKS, LOG = PATHS = ("/", "/web/view", "/web/stacks", "/web/log")
STREAMS = ("stdout", "stderr")
TOKEN = re.compile(r"(?:^|&)token=([^&]*)")
RANK = re.compile(r"(?:^|&)rank=(\d{1,9})(?:&|$)", re.ASCII)
STREAM = re.compile(r"(?:^|&)stream=(stdout|stderr)(?:&|$)")
BEARER = "bearer "
NO_TOKEN = "this needs the token that the launcher printed, in the header Authorization: Bearer TOKEN\n"
PRIVATE = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)


class Page(Value):
    """The page itself."""


class Gate(Value):
    """What stands in its place for whoever has no token: nothing of the job."""


class View(Value):
    """The job as it is, again and again."""


class Stacks(Value):
    """Where the workers are."""


class Log(Value):
    """The end of what a worker has written, by its global rank."""

    rank: int
    stream: str


Wanted = Page | Gate | View | Stacks | Log


def given_token(request: Request) -> str:
    """The token that came with a request: in its address for the page, in a header for all else."""
    if request.path == PAGE:
        found = TOKEN.search(request.query)
        return found[1] if found is not None else ""
    said = request.headers.get("authorization", "")
    return said[len(BEARER) :].strip() if said.lower().startswith(BEARER) else ""


def resolve(request: Request, is_admitted: bool) -> Wanted | Response:
    """What is asked for, one of `PATHS`, or why it is not given; `is_admitted`: its token is the right one."""
    if request.path == PAGE:
        if request.method == "POST":
            return _wrong_method("GET, HEAD")
        return Page() if is_admitted else Gate()
    if not is_admitted:
        return Response(401, NO_TOKEN, headers=(*PRIVATE, ("WWW-Authenticate", "Bearer")))
    right = "POST" if request.path == STACKS else "GET"
    if request.method != right:
        return _wrong_method(right)
    match request.path:
        case "/web/view":
            return View()
        case "/web/stacks":
            return Stacks()
    rank, stream = RANK.search(request.query), STREAM.search(request.query)
    if rank is None or stream is None:
        return Response(400, f"{LOG}?rank=N&stream={'|'.join(STREAMS)}\n", headers=PRIVATE)
    return Log(int(rank[1]), stream[1])


def _wrong_method(right: str) -> Response:
    return Response(405, f"this path takes {right}\n", headers=(*PRIVATE, ("Allow", right)))


def headers(script_hash: str, style_hash: str) -> tuple[tuple[str, str], ...]:
    """Of a page whose only script and style are those, by their SHA-256 in base 64: it loads nothing, and is in no frame."""
    policy = (
        f"default-src 'none'; script-src 'sha256-{script_hash}'; style-src 'sha256-{style_hash}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return (*PRIVATE, ("Content-Security-Policy", policy), ("Cross-Origin-Opener-Policy", "same-origin"))
