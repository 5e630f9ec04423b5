"""The end of a log: of the file that was written last, and of one on another node, through the store of the job."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.coordination.model import Delete, Put
from rallypoint.errors import RallypointError
from rallypoint.inspection import log_ends, store_relay
from rallypoint.inspection.log_ends import Answers, LogEnd, LogFile, LogWish, ask_node, find_end, pack, read_end, unpack
from rallypoint.inspection.view import to_document
from rallypoint.output.log_specs import LogFolder
from rallypoint.protocol import job_records as job
from rallypoint.testing.memory import MemoryEngine

MOST = 100


@pytest.fixture
def files(tmp_path: Path) -> list[LogFile]:
    return [LogFile(str(tmp_path / "stdout.log")), LogFile(str(tmp_path / "stderr.log"))]


def write(file: LogFile, text: str, at_s: float) -> None:
    Path(file.path).write_text(text)
    os.utime(file.path, (at_s, at_s))


def test_the_one_that_was_written_last_and_the_other(files: list[LogFile]) -> None:
    assert read_end(files, 0, MOST) is None
    write(files[0], "one\ntwo\n", 1)
    write(files[1], "", 2)
    first, second = read_end(files, 0, MOST), read_end(files, 1, MOST)
    assert first is not None
    assert second is not None
    assert (first.path, first.size, first.text, first.is_cut) == (files[0].path, 8, "one\ntwo\n", False)
    assert (second.path, second.text) == (files[1].path, "")  # it is newer, but there is nothing in it
    write(files[1], "three\n", 3)
    assert [getattr(read_end(files, choice, MOST), "text", "") for choice in (0, 1, 2)] == ["three\n", "one\ntwo\n", "three\n"]


def test_of_a_long_one_whole_lines_are_left(files: list[LogFile]) -> None:
    write(files[0], "".join(f"line {number:03}\n" for number in range(100)), 1)
    found = read_end(files, 0, MOST)
    assert found is not None
    assert (found.is_cut, found.size) == (True, 900)
    assert found.text == "".join(f"line {number:03}\n" for number in range(89, 100))[-99:]
    write(files[0], "x" * 1000, 1)
    found = read_end(files, 0, MOST)
    assert found is not None
    assert found.text == "x" * MOST


def test_no_link_is_followed_below_the_folder_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    run = tmp_path / "run"
    run.mkdir()
    (run / "stdout.log").symlink_to(tmp_path / "secret")
    folder = LogFolder(str(run), run.stat().st_dev, run.stat().st_ino)
    assert read_end([LogFile(str(run / "stdout.log"), folder)], 0, MOST) is None


def test_a_rank_of_another_node_and_one_without_a_file(files: list[LogFile]) -> None:
    wish = LogWish(3, ("stdout",))
    assert find_end(wish, lambda _rank, _stream: None) is None
    found = find_end(wish, lambda _rank, _stream: files[0])
    assert found == LogEnd(error="no file has the stdout of rank 3; --tee 3 or --redirects 3 keeps what workers write")


# --- from another node -----------------------------------------------------------------------------------------------------


@pytest.fixture
def store() -> Iterator[MemoryEngine]:
    engine = MemoryEngine()
    yield engine
    engine.close()


def test_a_node_that_does_not_answer(store: MemoryEngine) -> None:
    with pytest.raises(RallypointError, match=r"its node has not sent it within 0\.05 s"):
        ask_node(store.connect(), "n#1", LogWish(0), "me", 0.05)


def test_a_node_puts_its_answers_beside_each_other_and_only_so_many(files: list[LogFile]) -> None:
    write(files[0], "at work\n", 1)
    answers = Answers(lambda rank, stream: files[0] if (rank, stream) == (3, "stdout") else None)
    detail = json.dumps(to_document(LogWish(3)))
    done = [answers.make("n#1", number, detail) for number in range(log_ends.SHELF + 2)]
    for number, transaction in enumerate(done):
        put = transaction.then[-1]
        assert isinstance(put, Put)
        assert put.key == f"{job.SHOWN}{number}/n#1"
        assert unpack(put.value).text == "at work\n"
    assert [one.then[0] for one in done[-2:]] == [Delete(f"{job.SHOWN}{number}/n#1") for number in (0, 1)]
    put = answers.make("n#1", 99, json.dumps(to_document(LogWish(7)))).then[-1]
    assert isinstance(put, Put)
    assert unpack(put.value).error == "rank 7 is none of this node's any more"


def test_an_answer_has_its_size_whatever_is_in_it() -> None:
    noise = "".join(random.Random(7).choices([chr(letter) for letter in range(0x4E00, 0x9000)], k=log_ends.END_BYTES))
    told = pack(LogEnd("/a", 1, 1.0, False, noise))
    assert len(told) <= store_relay.MOST_BYTES
    found = unpack(told)
    assert found.is_cut
    assert len(found.text) > 10_000
    assert noise.endswith(found.text)


@pytest.mark.parametrize(
    "detail",
    ["", "[]", "7", "{}", "[" * 100_000, '{"rank": "x", "streams": [], "choice": 0}', '{"rank": 1, "streams": [], "choice": 0}',
     '{"rank": 1e999, "streams": ["stdout"], "choice": 0}', '{"rank": 1, "streams": 7, "choice": 0}'],
)  # fmt: skip
def test_what_is_no_question_gets_no_answer(detail: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Answers(lambda _rank, _stream: None).make("n#1", 1, detail)


@pytest.mark.parametrize("told", [7, [], {"text": 7}, {"size": "x"}, {"written_s": None}, {"size": True}], ids=str)
def test_what_is_no_end_of_a_log_is_said_to_be_none(told: Any) -> None:
    with pytest.raises(RallypointError, match="what its node has sent cannot be understood"):
        unpack(store_relay.packed(told))


@pytest.mark.parametrize("junk", [b"", b"#", b"junk", store_relay.packed(1)[:-4]])
def test_what_cannot_be_unpacked_is_none(junk: bytes) -> None:
    with pytest.raises(RallypointError, match="what its node has sent cannot be understood"):
        unpack(junk)
