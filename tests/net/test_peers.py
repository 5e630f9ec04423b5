"""Who is at the other end: asked of the kernel, about real connections."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
from collections.abc import Iterator

import pytest

from rallypoint.net import peers

ADDRESSES = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "127.0.0.9"), (socket.AF_INET6, "::1")]
NOBODY = 65534
PYTHON = "/usr/bin/python3"
CALL = "import socket, sys; sock = socket.create_connection((sys.argv[1], int(sys.argv[2]))); print(flush=True); sys.stdin.read()"


@pytest.fixture(params=ADDRESSES, ids=[address for _, address in ADDRESSES])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection of ours."""
    family, address = request.param
    with contextlib.ExitStack() as sockets:
        try:
            listener = sockets.enter_context(socket.create_server((address, 0), family=family))
        except OSError as error:
            pytest.skip(f"{address}: {error}")
        caller = sockets.enter_context(socket.create_connection(listener.getsockname()[:2]))
        yield caller, sockets.enter_context(listener.accept()[0])


def test_a_connection_of_ours_is_ours(pair: tuple[socket.socket, socket.socket]) -> None:
    for end in pair:
        assert peers.user_of(end) == os.geteuid()
        assert not peers.stranger_from_here(end)


def test_an_address_of_the_older_kind_in_the_newer_makes_no_difference() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_INET6) as caller:
        try:
            caller.connect((f"::ffff:{listener.getsockname()[0]}", listener.getsockname()[1]))
        except OSError as error:
            pytest.skip(str(error))
        with listener.accept()[0] as accepted:
            assert peers.user_of(accepted) == os.geteuid()


def test_who_has_gone_may_have_been_anybody(pair: tuple[socket.socket, socket.socket]) -> None:
    """What it has said is still there to be read, but no longer whose it was."""
    caller, accepted = pair
    caller.sendall(b"words")
    caller.close()
    assert peers.stranger_from_here(accepted) == "somebody who has gone already"
    assert accepted.recv(10) == b"words"


def test_who_has_reset_it_too(pair: tuple[socket.socket, socket.socket]) -> None:
    caller, accepted = pair
    caller.sendall(b"words")
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    caller.close()
    assert peers.stranger_from_here(accepted) == "somebody who has gone already"


def test_whoever_listens_at_the_same_port_here_is_not_the_other_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes from elsewhere has a port that somebody may have here: the kernel answers with that one."""
    with socket.create_server(("", 0)) as listener, socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as kernel:
        port = listener.getsockname()[1]
        assert peers._ask(kernel, socket.AF_INET, ("127.0.0.1", port), ("192.0.2.1", 9)) is None


def test_where_the_kernel_does_not_tell_nobody_is_a_stranger(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_ask", lambda *_: None)
    assert not peers.stranger_from_here(pair[1])


@pytest.mark.root
def test_another_user_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [PYTHON, "-I", "-S", "-c", CALL, *map(str, listener.getsockname())]
        with subprocess.Popen(command, user=NOBODY, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdin is not None
            with listener.accept()[0] as accepted:
                assert peers.user_of(accepted) == NOBODY
                assert peers.stranger_from_here(accepted) == f"user {NOBODY} of the same machine"
                other.stdin.close()
