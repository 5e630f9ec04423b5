"""The live screen as text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tui.recorded import HERE, job, look, node, worker

from rallypoint.inspection.view import Happening, JobView, NodeView, WorkerView, job_of
from rallypoint.tui import lines, model
from rallypoint.tui.lines import Question
from rallypoint.tui.model import BAD, DIM, PLAIN, WARN, Row, Watch

GIB = 1 << 30


def rows(watch: Watch) -> list[Row]:
    return model.rows_of(watch, {}, HERE)


def drawn(width: int, shown: list[Row]) -> list[str]:
    columns = lines.columns_for(width, shown)
    texts = [lines.titles_of(columns), *(lines.cells_of(one, columns) for one in shown)]
    return [(" " * lines.GAP).join(cells) for cells in texts]


def test_the_table() -> None:
    shown = rows(look([job(2, 2, at_s=0.0), job(2, 2, at_s=1.0)]))
    assert drawn(79, shown) == [
        "RANK  NODE         PID  STATE      STEP   RATE  CPU%    MEMORY  GPU%   LAST",
        "   0  0 host-0    4000  running     110   10.0    50   200 MiB     -    0 s",
        "   1  0 host-0    4001  running     110   10.0    50   201 MiB     -    0 s",
        "   2  1 host-1    4002  running     110   10.0    50   202 MiB     -    0 s",
        "   3  1 host-1    4003  running     110   10.0    50   203 MiB     -    0 s",
    ]


@pytest.mark.parametrize("width", [20, 40, 60, 79, 80, 100, 119, 200])
def test_the_table_fits_and_the_columns_stand_where_they_say(width: int) -> None:
    """What is worth most stays; a long name is cut before a column is left out that would fit."""
    workers = [worker(997, 0, 0.0, step=123_456_789, doing="a long name of a section"), worker(3, 1, 0.0, step=None)]
    watch = look([job_of([node(0, workers, node="a-node-with-a-name-of-forty-characters-xx")])])
    shown = model.rows_of(watch, {4003: (55.0, 3 * GIB)}, HERE)
    columns = lines.columns_for(width, shown)
    table = drawn(width, shown)
    assert max(map(len, table)) <= width
    assert len(set(map(len, table))) == 1
    assert table[0].lstrip().startswith("RANK")
    for place in columns:
        assert table[0][place.start : place.start + place.width].strip() == place.column.title
    assert ("123456789" in table[2]) == (width >= 60)  # never a part of it
    assert ("GPU MEM" in table[0]) == (width >= 100)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0 s"), (119.4, "119 s"), (120, "2 m"), (7199, "120 m"), (7200, "2 h"), (200_000, "2 d")]
)
def test_ages_are_short(seconds: float, text: str) -> None:
    assert lines.age(seconds) == text


def test_the_headlines() -> None:
    watch = look([job(at_s=0.0), job(at_s=1.0, failed_workers=1)])
    assert lines.headlines(watch, rows(watch)) == (
        "tri: running for 1 min 1 s, 3 nodes, 6 ranks, 1 of 3 restarts, generation 2",
        "step 110, 10.0 steps/s, goodput 91.7%, 3.0 cores, 1.2 GiB, 3 workers failed",
    )
    assert lines.headlines(Watch("tri"), []) == ("tri", "")


def behind() -> JobView:
    return job_of([node(0, [worker(rank, rank, 0.0, step=5 if rank in (1, 2) else 100) for rank in range(6)])])


@pytest.mark.parametrize(
    ("watch", "now", "line"),
    [
        (Watch(""), 0.0, ("asking the job...", DIM)),
        (Watch("tri", trouble="process 7 does not answer"), 0.0, ("process 7 does not answer", BAD)),
        (look([job()]), 1.0, ("", PLAIN)),
        (look([job()]), 9.0, ("as it was 9 s ago; it has not answered since", WARN)),
        (
            model.unanswered(look([job()]), "process 7: it is of another version of rallypoint"),
            4.0,
            ("as it was 4 s ago; it does not answer: process 7: it is of another version of rallypoint", BAD),
        ),
        (
            model.missed(look([job()]), "none"),
            1.0,
            ("no agent of tri is on this machine any more: it has ended, or is started again", WARN),
        ),
        (look([job()]).replace(missing=9), 1.0, ("tri has ended on this machine", WARN)),
        (look([job(phase="starting", why="a restart")]), 1.0, ("starting for 1 min 0 s: a restart", WARN)),
        (
            look([job(phase="waiting", note="2 of 3 nodes are there")]),
            1.0,
            ("waiting for 1 min 0 s: 2 of 3 nodes are there", WARN),
        ),
        (look([job(silent=["host-7", "host-8"])]), 1.0, ("no answer from nodes host-7, host-8", BAD)),
        (look([job(note="only nodes of this machine: it is slow")]), 1.0, ("only nodes of this machine: it is slow", WARN)),
        (look([behind()]), 1.0, ("behind the others: ranks 1-2", WARN)),
        (
            look([job_of([node(0, [worker(0, 0, 0.0)]), node(4, [], generation=0, node_rank=None, phase="waiting")])]),
            1.0,
            ("1 node waiting as a spare: host-4", DIM),
        ),
    ],
)
def test_one_line_says_what_is_the_matter(watch: Watch, now: float, line: tuple[str, str]) -> None:
    assert lines.notice(watch, now) == line


def test_the_restarts_on_a_line_to_scale_and_in_words() -> None:
    history = (Happening(300.0, "restart", "rank 3 failed with exit code 7"), Happening(0.5, "restart", ""))
    shown = lines.timeline(look([job(uptime_s=599.0, history=history)]), 1.0, 40)
    assert shown == [
        ("─" * 19 + "●" + "─" * 19 + "●", PLAIN),
        ("10 min 0 s ago                       now", DIM),
        ("1.50 s ago: restart", PLAIN),
        ("5 min 1 s ago: rank 3 failed with exit", PLAIN),
        ("  code 7", PLAIN),
    ]
    quiet = lines.timeline(look([job(history=())]), 1.0, 40)
    assert quiet[2:] == [("no restart so far", DIM)]
    assert lines.timeline(Watch("tri"), 1.0, 40) == []


def test_nodes_in_lines() -> None:
    nodes = [node(0, [worker(0, 0, 0.0), worker(1, 1, 0.0)], failed_workers=2), node(1, [], phase="waiting")]
    assert lines.node_lines(look([job_of(nodes)]), 60) == [
        ("NODE      PHASE    FOR   RANKS  FAILED  HUNG  PID   LOGS", DIM),
        ("0 host-0  running  60 s  0-1    2       0     3000  /logs/r…", BAD),
        ("1 host-1  waiting  60 s  -      0       0     3001  /logs/r…", PLAIN),
    ]


@pytest.mark.parametrize(
    ("key", "who", "has_files", "otherwise"),
    [
        (("id-0", 1), "rank 1, pid 4001 on host-0", True, "--redirects 3"),
        (("id-1", 0), "rank 2, pid 4002 on host-1", True, "in /logs/run/attempt_1/0 on host-1, which cannot be read from here"),
        (("id-1", -1), "node 1 host-1", False, "it has no workers: it is running"),
        (("id-9", 0), "", False, "id-9 has not answered"),
        (None, "", False, "no rank is chosen"),
    ],
)
def test_where_the_logs_of_a_rank_are(key: model.Key | None, who: str, has_files: bool, otherwise: str) -> None:
    place = lines.log_place(look([job()]), key, HERE)
    assert (place.who, bool(place.files)) == (who, has_files)
    assert otherwise in place.otherwise
    assert (place.rank, place.node_id) == ((2, "id-1") if key == ("id-1", 0) else (1 if has_files else 0, ""))
    if key == ("id-0", 1):
        assert place.files == ("/logs/run/attempt_1/1/stdout.log", "/logs/run/attempt_1/1/stderr.log")


def test_a_job_without_log_files_says_how_to_have_some() -> None:
    assert "--log-dir" in lines.log_place(look([job(attempt_dir="")]), ("id-0", 0), HERE).otherwise


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", []),
        ("one\ntwo\n", ["one", "two"]),
        ("two\npart", ["two", "part"]),
        ("\x1b[31mred\x1b[0m \x1b]0;a title\x07and\tthen\n", ["red and then"]),
        (" 10%\r 20%\r 30%", [" 30%"]),
        (" 10%\r 20%\r\n", [" 20%"]),
        ("bell\x07 null\x00 \ufffd\n", ["bell· null· \ufffd"]),
        ("\n\nx\n", ["", "", "x"]),
        ("\u202eright to left", ["·right to left"]),
    ],
)
def test_m4_a_log_cannot_act_on_the_terminal(text: str, shown: list[str]) -> None:
    assert lines.plain_lines(text, 10) == shown


def test_a_page_is_folded_where_a_line_is_too_long() -> None:
    assert lines.folded("  File one, line 20 in step\nend", 16) == ["  File one, line", "     20 in step", "end"]
    assert lines.folded("", 16) == []


def test_only_the_last_lines_of_a_log_are_kept() -> None:
    assert lines.plain_lines("".join(f"{number}\n" for number in range(100)), 2) == ["98", "99"]


@pytest.mark.parametrize(
    ("what", "watch", "asked"),
    [
        ("stop", look([job()]), Question("Stop tri on all of its 3 nodes?", "stop")),
        ("stop", look([job(1)]), Question("Stop tri?", "stop")),
        ("restart", look([job()]), Question("Restart all workers of tri? It does not count against its restarts.", "restart")),
        ("stop", Watch("tri"), "the job has not answered yet"),
    ],
)
def test_what_is_confirmed(what: str, watch: Watch, asked: Question | str) -> None:
    assert lines.question(what, watch, None) == asked


def test_who_drains_the_host_of_the_store_is_told_that_the_job_ends_with_it() -> None:
    leave = "Have node {} stop its workers and leave tri?"
    watch = look([job()])
    assert lines.question("drain", watch, ("id-1", 0)) == Question(leave.format("1 host-1"), "drain", "id-1")
    ends = f"{leave.format('0 host-0')} It hosts the coordination store: the job ends with it."
    assert lines.question("drain", watch, ("id-0", 0)) == Question(ends, "drain", "id-0", True)
    assert lines.question("drain", watch, None) == "no node that has answered is chosen"
    assert lines.question("drain", look([job(1, id="")]), ("host-0:3000", 0)) == Question(
        leave.format("0 host-0"), "drain", "host-0"
    )


def test_stacks_are_asked_for_of_a_process_here_and_of_a_rank_elsewhere() -> None:
    watch = look([job()])
    assert lines.stacks_of(watch, ("id-0", 1), HERE) == ("stacks of rank 1, pid 4001", ("4001",))
    assert lines.stacks_of(watch, ("id-1", 0), HERE) == ("stacks of rank 2 on host-1", ("tri", "--rank", "2"))
    assert lines.stacks_of(watch, None, HERE) == "no rank is chosen"


def test_the_last_words() -> None:
    assert lines.last_words(look([job()])) == (
        "tri: it has ended on this machine; last seen running at step 100, after 1 of 3 restarts;"
        " for what happened: rallypoint explain /logs/run"
    )
    assert lines.last_words(Watch("tri", trouble="no job runs here")) == "tri: no job runs here"


@pytest.mark.parametrize(
    ("width", "height", "count", "room"),
    [
        (80, 24, 1, (1, 17, False)),
        (80, 24, 1000, (10, 8, False)),
        (120, 40, 6, (6, 28, True)),
        (120, 40, 1000, (20, 14, True)),
        (40, 8, 1000, (1, 1, False)),
        (20, 3, 1000, (1, 0, False)),
    ],
)
def test_table_and_panels_share_the_room(width: int, height: int, count: int, room: tuple[int, int, bool]) -> None:
    assert tuple(lines.room_for(width, height, count)) == room


def test_the_keys_and_the_help_fit_a_small_terminal() -> None:
    assert len(lines.KEYS) <= 80
    assert max(map(len, lines.HELP.splitlines())) <= 80
    assert len(lines.HELP.splitlines()) < 24


numbers = st.none() | st.integers(0, 10**15)
texts = st.text("ab é漢 ", max_size=40)
workers = st.builds(
    WorkerView, rank=st.integers(0, 5), local_rank=st.integers(0, 3), pid=st.integers(1, 9), state=texts, doing=texts,
    step=numbers, silent_s=st.none() | st.floats(-1, 1e12), cpu_s=st.none() | st.floats(0, 1e12), memory_bytes=numbers,
)  # fmt: skip
happenings = st.builds(Happening, ago_s=st.floats(-1, 1e9), what=texts, why=texts)
nodes = st.builds(
    NodeView, job=st.just("tri"), node=texts, hostname=st.sampled_from([HERE, "other"]), pid=st.integers(1, 9),
    id=st.sampled_from(["", "a", "b"]), phase=st.sampled_from(["running", "waiting", "stopping", "done", ""]), why=texts,
    phase_s=st.floats(0, 1e9), uptime_s=st.floats(0, 1e9), generation=st.integers(0, 3), node_rank=st.none() | st.integers(0, 3),
    hosts_store=st.booleans(), failed_workers=st.integers(0, 9), hung_workers=st.integers(0, 9), log_dir=texts, attempt_dir=texts,
    workers=st.lists(workers, max_size=4).map(tuple), history=st.lists(happenings, max_size=4).map(tuple),
)  # fmt: skip
jobs = st.builds(job_of, st.lists(nodes, max_size=3), st.lists(texts, max_size=2), texts)


@settings(max_examples=30)
@given(st.lists(jobs, min_size=1, max_size=3), st.floats(0, 1e6), st.integers(10, 200), st.integers(1, 80))
def test_whatever_is_answered_can_be_shown_and_fits(answers: list[JobView], now: float, width: int, height: int) -> None:
    """Also what no agent of today's would say: nodes that have the same id, ranks twice, times that run backwards."""
    watch = look(answers)
    for one in (watch, model.missed(watch, "none"), model.unanswered(watch, "slow")):
        shown = model.rows_of(one, {3: (50.0, GIB)}, HERE)
        assert len(lines.headlines(one, shown)) == 2
        assert len(lines.notice(one, now)) == 2
        assert lines.last_words(one)
        for order in model.ORDERS:
            assert sorted(map(id, model.arranged(shown, order, True))) == sorted(map(id, shown))
        drawn_lines = [*lines.timeline(one, now, width), *lines.node_lines(one, width)]
        assert all(len(text) <= width for text, _ in drawn_lines)
        columns = lines.columns_for(width, shown)
        assert all(sum(map(len, lines.cells_of(row, columns))) <= max(width, 9) for row in shown)
        for row in shown:
            assert lines.log_place(one, row.key, HERE).who is not None
            assert lines.stacks_of(one, row.key, HERE)
            assert lines.question("drain", one, row.key)
        room = lines.room_for(width, height, len(shown))
        assert room.table >= 1
