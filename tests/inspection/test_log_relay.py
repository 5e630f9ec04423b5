"""Logs that come from another node: what is taken from it, and who may send."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rallypoint.base.json_text import to_json
from rallypoint.checkpoint.transfer import Channel
from rallypoint.errors import RallypointError
from rallypoint.inspection import client, log_relay
from rallypoint.inspection.log_reading import Wish
from rallypoint.inspection.log_relay import Mirror, Sent, read_frame, send_logs
from rallypoint.inspection.view import NodeView

NODE = NodeView("r", "n1", "h1", 2, id="id1", log_dir="/there")
HERE = [client.Agent("", NodeView("r", "n0", "h0", 1, address="127.0.0.1"))]


def frame(head: object, block: bytes = b"") -> bytes:
    return to_json(head).encode() + b"\n" + block


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (frame({}), Sent()),
        (frame({"end": True}), Sent(is_last=True)),
        (frame({"end": True, "error": "no\nfiles"}), Sent(is_last=True, error="no files")),
        (frame({"file": "events.jsonl", "written_us": 5}, b"a\nb\n"), Sent("events.jsonl", 5, b"a\nb\n")),
        (frame({"file": "attempt_12/3/stderr.log"}, b"x\n"), Sent("attempt_12/3/stderr.log", 0, b"x\n")),
    ],
)
def test_what_a_node_sends(sent: bytes, expected: Sent) -> None:
    assert read_frame(sent) == expected


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"[]\n",
        b"[" * 100_000,
        frame({"file": "../x"}),
        frame({"file": "/etc/passwd"}),
        frame({"file": "attempt_0/0/../stdout.log"}),
        frame({"file": "attempt_0/0/stdout.log\n"}),
        frame({"file": 3}),
        frame({"file": "events.jsonl", "written_us": -1}),
        frame({"file": "events.jsonl", "written_us": "x"}),
    ],
)
def test_what_no_node_sends(sent: bytes) -> None:
    with pytest.raises(ValueError, match=r"cannot be understood|is no log file|is no time"):
        read_frame(sent)


@pytest.fixture
def run(tmp_path: Path) -> NodeView:
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    (tmp_path / "attempt_0" / "0" / "stdout.log").write_text("a\nb\n")
    return NODE.replace(log_dir=str(tmp_path))


def test_a_stranger_is_not_listened_to(run: NodeView, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not know the key is let go; the node, which calls after that, is heard."""

    def ask(_: object, __: str, node: str, detail: str) -> str:
        asked = json.loads(detail)
        assert node == "id1"

        def call() -> None:
            with pytest.raises(RallypointError):
                send_logs(json.dumps({**asked, "key": "00" * 32}), run, lambda: True)
            send_logs(detail, run, lambda: True)

        caller.append(threading.Thread(target=call))
        caller[0].start()
        return ""

    caller: list[threading.Thread] = []
    monkeypatch.setattr(client.LocalJob, "_tell", ask)
    with closing(Mirror(NODE, HERE, Wish(), follow=False)) as mirror:
        caller[0].join()
        assert (mirror.has_ended, mirror.take_error()) == (True, "")
        assert (Path(mirror.folder) / "attempt_0" / "0" / "stdout.log").read_text() == "a\nb\n"
    assert not Path(mirror.folder).exists()


def test_a_node_that_does_not_call(monkeypatch: pytest.MonkeyPatch, private_tmpdir: Path) -> None:
    monkeypatch.setattr(client.LocalJob, "_tell", lambda *_, **__: "")
    monkeypatch.setattr(log_relay, "ANSWER_S", 0.01)
    with pytest.raises(RallypointError, match="has not sent them within"):
        Mirror(NODE, HERE, Wish(), follow=False)
    assert list(private_tmpdir.iterdir()) == []


def test_a_connection_that_breaks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(_: object, __: str, detail: str, **___: Any) -> str:
        asked = json.loads(detail)

        def call() -> None:
            with closing(Channel.call(asked["host"], asked["port"], bytes.fromhex(asked["key"]), "logs")) as channel:
                channel.send(frame({"file": "events.jsonl"}, b"{}\n"))

        caller.append(threading.Thread(target=call))
        caller[0].start()
        return ""

    caller: list[threading.Thread] = []
    monkeypatch.setattr(client.LocalJob, "_tell", ask)
    with closing(Mirror(NODE, HERE, Wish(), follow=False)) as mirror:
        caller[0].join()
        assert mirror.has_ended
        assert mirror.take_error() != ""
        assert mirror.take_error() == ""


@pytest.mark.parametrize("detail", ["", "[]", "{}", '{"ranks": null}'])
def test_a_question_that_makes_no_sense(run: NodeView, detail: str) -> None:
    with pytest.raises(RallypointError, match="logs cannot be sent"):
        send_logs(detail, run, lambda: True)


def test_nobody_is_there_any_more(run: NodeView) -> None:
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        port = gone.getsockname()[1]
    asked = {"host": "127.0.0.1", "port": port, "key": "00" * 32, "ranks": None, "streams": [], "since_us": None, "tail": None}
    with pytest.raises(RallypointError, match="logs cannot be sent"):
        send_logs(json.dumps({**asked, "follow": False}), run, lambda: True)
