"""What is asked of a control socket, and how stacks are written: the decisions, without any socket."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.control_plane import NAME, Call, Frame, ThreadStack, resolve, write_stacks
from rallypoint.net.http import Request, Response

NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", fullmatch=True)
METHODS = st.sampled_from(["GET", "HEAD", "POST"])


def request(method: str, path: str) -> Request:
    return Request(method, path, "", {}, b"", True)


@given(method=METHODS, path=st.text() | NAMES.map("/handler/{}".format), names=st.sets(NAMES))
def test_only_a_post_to_a_known_handler_is_a_call(method: str, path: str, names: set[str]) -> None:
    match resolve(request(method, path), names):
        case Call(name):
            assert method == "POST"
            assert path == f"/handler/{name}"
            assert name in names
        case Response(status):
            assert status == 200 or status in (404, 405)
            assert status != 200 or path in ("/", "/handler/")


@given(names=st.sets(NAMES))
def test_every_handler_can_be_called_and_is_listed(names: set[str]) -> None:
    assert all(map(NAME.fullmatch, names))
    assert [resolve(request("POST", f"/handler/{name}"), names) for name in names] == [Call(name) for name in names]
    listed = resolve(request("GET", "/handler/"), names)
    assert isinstance(listed, Response)
    assert json.loads(listed.body) == sorted(names)


def test_stacks_are_written_as_pythons_faulthandler_does() -> None:
    stacks = [
        ThreadStack(2, "server", (Frame("s.py", 7, "serve"),), is_current=True),
        ThreadStack(0x7F00, "MainThread", (Frame("a.py", 3, "inner"), Frame("a.py", None, "<module>"))),
        ThreadStack(3, "native", ()),
    ]
    assert write_stacks(stacks) == (
        "Thread 0x0000000000007f00 [MainThread] (most recent call first):\n"
        '  File "a.py", line 3 in inner\n'
        '  File "a.py", line ??? in <module>\n'
        "\n"
        "Thread 0x0000000000000003 [native] (most recent call first):\n"
        "  <no Python frame>\n"
        "\n"
        "Current thread 0x0000000000000002 [server] (most recent call first):\n"
        '  File "s.py", line 7 in serve\n'
    )


@given(depth=st.integers(1, 500))
def test_deep_stacks_keep_both_ends(depth: int) -> None:
    text = write_stacks([ThreadStack(1, "t", tuple(Frame("a.py", number, "f") for number in range(1, depth + 1)))])
    lines = text.splitlines()[1:]
    assert lines[0] == '  File "a.py", line 1 in f'
    assert lines[-1] == f'  File "a.py", line {depth} in f'
    assert len(lines) == min(depth, 201)
    assert (f"  ... {depth - 200} more ..." in lines) == (depth > 200)
