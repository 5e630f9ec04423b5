"""Lines as JSON objects: of what a worker writes, of what the launcher says, and of a whole job."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.output.console import LineCutter
from rallypoint.output.json_lines import JsonLines, fields_of_host, fields_of_worker, own_line
from rallypoint.output.log_specs import Std

NOW = "2026-01-02T03:04:05.678Z"
ENVIRON = {"RANK": "5", "ROLE_NAME": "trainer", "RALLYPOINT_GENERATION": "3"}


def objects(*blocks: bytes, keeps: bool = False) -> list[dict[str, Any]]:
    """What is shown of blocks as they may come from a pipe."""
    cutter, lines = LineCutter(), JsonLines(fields_of_worker(1, ENVIRON, Std.OUT), keeps, lambda: NOW)
    shown = b"".join([*(lines.feed(cutter.feed(block)) for block in blocks), lines.feed(cutter.rest())])
    return [json.loads(line) for line in shown.splitlines()]


def texts(*blocks: bytes) -> list[str]:
    return [one["text"] for one in objects(*blocks)]


def test_an_object_has_all_that_is_known_of_a_line():
    assert objects(b"loss 0.5\n") == [{
        "time": NOW, "host": objects(b"\n")[0]["host"], "source": "worker", "rank": 5, "local_rank": 1, "role": "trainer",
        "generation": 3, "stream": "stdout", "text": "loss 0.5",
    }]  # fmt: skip
    assert json.loads(f"{{{fields_of_worker(0, {}, Std.ERR)}}}")["rank"] is None  # of a program that starts processes by itself


def test_line_ends_of_all_kinds():
    assert texts(b"a\r\nb\r", b"\nc\r", b"d\n", b"\n", b"end") == ["a", "b", "c", "d", "", "end"]
    assert texts(b'say "\\"\t\x00\xff\n') == ['say "\\"\t\x00\ufffd']


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))), st.lists(st.integers(0, 100)))
def test_however_the_blocks_are_cut(lines: list[str], cuts: list[int]):
    data = "".join(f"{line}\n" for line in lines).encode()
    places = sorted({cut for cut in cuts if cut < len(data)} | {0, len(data)})
    assert texts(*(data[first:last] for first, last in pairwise(places))) == lines


def test_objects_of_another_launcher_stay_and_those_of_a_worker_do_not():
    (line,) = objects(b"x\n")
    again = json.dumps(line).encode() + b"\n"
    assert objects(again, keeps=True) == [line]
    assert texts(again) == [json.dumps(line)]
    assert json.loads(f"{{{fields_of_host('a', Std.ERR)}}}") == {"host": "a", "source": "ssh", "stream": "stderr"}


def test_what_the_launcher_says_has_a_level():
    said = json.loads(own_line(40, "two\nlines"))
    assert (said["source"], said["level"], said["text"]) == ("rallyrun", "error", "two\nlines")
    assert json.loads(own_line(10, ""))["level"] == "debug"


def test_all_lines_of_a_job(rallyrun: Callable[..., Any], script: Callable[..., Any]):
    """Both streams, a restart, the summary of a failure; one worker's stdout is inherited otherwise."""
    worker = script("""
        import os, sys
        print("step", os.environ["TORCHELASTIC_RESTART_COUNT"])
        sys.stdout.write("no end")
        raise ValueError("bad")
    """)
    done = rallyrun(["--standalone", "--max-restarts", "1", "--log-format", "json", worker])
    assert done.returncode == 1
    out = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["generation"], one["text"]) for one in out] == [(1, "step 0"), (1, "no end"), (2, "step 1"), (2, "no end")]
    errors = [json.loads(line) for line in done.stderr.splitlines()]
    assert {(one["source"], one.get("stream")) for one in errors} == {("worker", "stderr"), ("rallyrun", None)}
    (summary,) = (one["text"] for one in errors if one.get("level") == "error")
    assert "raised ValueError: bad\n" in summary
