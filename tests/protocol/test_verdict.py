"""One verdict for the whole job: who is the cause, who are the victims, and that every report of it stays small."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.base.json_text import clip, size
from rallypoint.base.text import count_of, joined
from rallypoint.protocol.verdict import (
    MAY_WAIT_ELSEWHERE,
    NAMED_MAX,
    NodeReport,
    Verdict,
    Victim,
    WorkerFailure,
    bounded,
    decode,
    decode_report,
    describe,
    encode,
    encode_report,
    explain,
    judge_failures,
)

RESET = "RuntimeError: [gloo] Connection reset by peer"


def failure(rank: int, message: str = "ValueError: bad", age_s: float = 0.0, host: str = "a", **more: Any) -> WorkerFailure:
    settings = {"local_rank": rank % 4, "role": "trainer", "pid": 70 + rank, "exitcode": 1, **more}
    return WorkerFailure(rank=rank, host=host, message=message, age_s=age_s, **settings)


def report(node: str, revision: int, *failures: WorkerFailure) -> NodeReport:
    """As the node sends it."""
    return bounded(NodeReport(node, revision, failures))


def cause_of(*reports: NodeReport, **gone: Any) -> int | None:
    cause = judge_failures(reports, **gone).cause
    return None if cause is None else cause.rank


# --- the cause -------------------------------------------------------------------------------------------------------------


def test_within_a_node_the_oldest_failure_is_the_cause() -> None:
    """P12: below a second, on that node's own clock."""
    assert cause_of(report("a", 5, failure(0, age_s=0.101), failure(1, age_s=0.102), failure(2))) == 1


def test_across_nodes_the_first_report_is_the_cause_whatever_their_clocks_say() -> None:
    """P12: ages of two nodes are never compared."""
    assert cause_of(report("b", 9, failure(4, age_s=1000.0)), report("a", 8, failure(0))) == 0


@pytest.mark.parametrize(
    "message",
    [
        RESET,
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroup",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "RuntimeError: Connection closed by peer [10.0.0.2]:4711",
        "ncclRemoteError: a call failed possibly due to a network error or a remote process exited prematurely",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)",
        "Timed out waiting 1800000ms for recv operation to complete",
        "",  # ended by SIGPIPE
    ],
)
def test_an_echo_is_passed_over_for_a_failure_of_its_own(message: str) -> None:
    """P12: the first observed failure may be a victim: the one that reads like a lost peer is not the cause."""
    early, late = failure(0, message, age_s=9.0, exitcode=-13), failure(4, "ValueError: bad", host="b")
    assert cause_of(report("a", 1, early), report("b", 2, late)) == 4
    assert cause_of(report("a", 1, early, late)) == 4


def test_a_hang_that_a_node_is_sure_of_goes_before_one_that_may_only_wait() -> None:
    """P30: both nodes were about to say who hangs; one of them knew."""
    sure = "it hung: asleep for 3.0 s (limit 3 s)"
    waits = failure(2, f"{sure}, as all workers here, which {MAY_WAIT_ELSEWHERE}", exitcode=-9)
    verdict = judge_failures([report("a", 1, waits), report("b", 2, failure(4, sure, exitcode=-9, host="b"))])
    assert (verdict.cause_node, verdict.alike, [victim.rank for victim in verdict.victims]) == ("b", ((4, 4),), [2])
    assert cause_of(report("a", 1, waits)) == 2


def test_if_all_are_echoes_the_first_is_the_cause() -> None:
    assert cause_of(report("a", 2, failure(0, RESET)), report("b", 1, failure(4, RESET), failure(5, RESET, 0.5))) == 5


def test_a_node_that_is_gone_explains_echoes_but_no_failure_of_its_own() -> None:
    echo, own = report("a", 1, failure(0, RESET)), report("b", 2, failure(4))
    assert cause_of(echo, lost=["c"]) is None
    assert cause_of(echo, departed=["c"]) is None
    assert cause_of(echo, own, lost=["c"]) == 4
    verdict = judge_failures([echo, own], lost=["c"])
    assert (verdict.cause_node, verdict.lost, [victim.rank for victim in verdict.victims]) == ("b", ("c",), [0])


def test_a_worker_that_was_stopped_is_neither_cause_nor_victim() -> None:
    stopped = failure(1, "", age_s=5.0, exitcode=-15, stopped=True)
    verdict = judge_failures([report("a", 1, stopped, failure(0)), NodeReport("b", 2, (), stopped=4)])
    assert (verdict.cause, verdict.victims, verdict.victim_count, verdict.stopped) == (failure(0), (), 0, 5)


# --- those that fail alike -------------------------------------------------------------------------------------------------


def test_the_same_failure_has_no_victims() -> None:
    """F01: whichever node was first, and whatever rank or process id stands in the words."""
    failures = [failure(rank, f"E: bad rank {rank}", place="t.py:3") for rank in range(6)]
    crowd = [report(f"n{at}", 9 - at, *failures[2 * at : 2 * at + 2]) for at in range(3)]
    verdict = judge_failures(crowd, world_size=6)
    assert (verdict.cause_node, verdict.alike, verdict.victim_count) == ("n2", ((0, 5),), 0)
    assert describe(verdict) == "all 6 workers raised the same error: E: bad rank 4"
    assert explain(verdict)[:2] == [
        "Cause: all 6 workers raised the same error: E: bad rank 4",
        "  first: rank 4 (host a, pid 74)",
    ]


def test_who_failed_the_same_way_when_it_was_stopped_is_told_with_the_cause() -> None:
    """F01: a worker that was told to stop while it failed is not merely stopped; one that ended in another way is."""
    late = [failure(1, place="t.py:3", stopped=True), failure(2, "KeyError: 'x'", place="t.py:3", stopped=True)]
    told = report("b", 2, *late)
    assert decode_report(encode_report(told), 2) == told
    verdict = judge_failures([report("a", 1, failure(0, place="t.py:3")), told], world_size=4)
    assert (verdict.alike, verdict.victim_count, verdict.stopped) == (((0, 1),), 0, 1)
    assert describe(verdict) == "ranks 0-1 raised the same error: ValueError: bad; 1 stopped by the launcher"


@pytest.mark.parametrize("other", [{"place": "t.py:4"}, {"exitcode": 2}, {"message": "ValueError: worse"}])
def test_another_place_or_end_or_message_is_another_failure(other: dict[str, Any]) -> None:
    """F01: what differs in any of these is not the same."""
    second = failure(1, **{"place": "t.py:3", **other})
    verdict = judge_failures([report("a", 1, failure(0, place="t.py:3")), report("b", 2, second)])
    assert (verdict.alike, [victim.rank for victim in verdict.victims]) == (((0, 0),), [1])


# --- the words -------------------------------------------------------------------------------------------------------------


def story() -> Verdict:
    """P28: what every node is told after one failure."""
    first = failure(3, "ValueError: bad", host="b", log_file="/logs/3/stderr.log")
    victims = [failure(rank, RESET, age_s=1 - rank / 8) for rank in range(2)]
    return judge_failures([NodeReport("a/0", 8, tuple(victims), stopped=4), report("b/0", 7, first)], ["c"], ["d", "e"], 8)


def test_one_line_tells_it_all() -> None:
    line = "rank 3 (host b, pid 73): ValueError: bad; 2 victims (ranks 0-1), 4 stopped by the launcher"
    assert describe(story().replace(lost=(), departed=())) == line
    assert describe(story()) == line.replace("bad;", "bad; lost node c; nodes d, e left;")


def test_a_few_lines_tell_more() -> None:
    assert explain(story()) == [
        "Cause: rank 3 (host b, pid 73): ValueError: bad",
        "  node: b/0   local rank: 3   role: trainer   exit code: 1",
        "  log: /logs/3/stderr.log",
        "Also: lost node c",
        "Also: nodes d, e left",
        "Victims: 2 of 8 workers",
        "  ranks 0-1 (host a): RuntimeError: [gloo] Connection reset by peer",
        "Stopped by the launcher: 4 of 8 workers",
    ]


def test_a_lost_node_alone_is_the_cause() -> None:
    verdict = judge_failures([report("a", 1, failure(0, RESET))], lost=["c"])
    assert describe(verdict) == "lost node c; 1 victim (rank 0)"
    assert explain(verdict) == ["Cause: lost node c", "Victims: 1 worker", f"  rank 0 (host a): {RESET}"]


def test_many_are_counted() -> None:
    """P12: a crowd of victims is sixteen names and a number, for the lost nodes too."""
    crowd = [report(f"n{at}", at, *(failure(at * 8 + local, RESET) for local in range(8))) for at in range(100)]
    verdict = judge_failures(crowd, lost=[f"gone{at:03}" for at in range(40)])
    assert (len(verdict.victims), verdict.victim_count, len(verdict.lost), verdict.unnamed_lost) == (16, 800, 16, 24)
    assert "gone015 and 24 more; 800 victims (ranks 0-15 and 784 more" in describe(verdict)
    assert explain(verdict)[-1] == "  and 784 more"


@pytest.mark.parametrize(
    ("exitcode", "said"), [(3, "exited with code 3"), (-9, "was ended by SIGKILL"), (-63, "was ended by signal 63")]
)
def test_without_a_message_the_exit_code_speaks(exitcode: int, said: str) -> None:
    verdict = judge_failures([report("a", 1, failure(0, "", exitcode=exitcode))])
    assert describe(verdict) == f"rank 0 (host a, pid 70): {said}"


def test_nothing_to_tell() -> None:
    assert judge_failures([]) == Verdict()
    assert (describe(Verdict()), explain(Verdict())) == ("no failure was reported", ["Cause: no failure was reported"])


# --- bounds ----------------------------------------------------------------------------------------------------------------


def test_a_node_with_many_workers_keeps_the_failures_that_may_be_the_cause() -> None:
    crowd = [failure(rank, RESET, age_s=200.0 - rank) for rank in range(128)]
    kept = report("a", 1, *crowd, failure(500))
    assert [one.rank for one in kept.failures] == [*range(15), 500]
    assert (kept.unnamed, kept.failures[0].same, cause_of(kept)) == (0, ((15, 127),), 500)
    assert judge_failures([kept]).victim_count == 128


def test_text_is_one_printable_line_and_a_path_is_never_cut() -> None:
    told = report("a", 1, failure(0, "one\n\ttwo\x00\x1b[31m\ud800" + "x" * 9000, age_s=math.nan, log_file="/" + "p" * 700))
    assert told.failures[0].message.startswith("one two [31m xxx")
    assert (len(told.failures[0].message), told.failures[0].log_file, told.failures[0].age_s) == (500, "", 0.0)


def test_wordy_failures_cost_names_and_the_cause_stays() -> None:
    wordy = [failure(rank, "\N{ROCKET}" * 1000, age_s=rank, host="\N{ROCKET}" * 99) for rank in range(128)]
    kept = report("a", 1, *wordy)
    assert 5 <= len(kept.failures) < NAMED_MAX
    assert (kept.failures[0].rank, kept.unnamed + sum(count_of(one.ranks) for one in kept.failures)) == (127, 128)
    assert len(encode_report(kept)) < 16 * 1024


def test_a_thousand_reports_are_judged_quickly() -> None:
    """P28: the leader's verdict is not what peers wait for."""
    crowd = [report(f"n{at}", at, *(failure(at * 8 + local, RESET) for local in range(8))) for at in range(1000)]
    begin = time.process_time()
    judge_failures(crowd)
    assert time.process_time() - begin < 2.0


def test_a_node_that_counts_wrongly_cannot_make_a_verdict_that_nobody_reads() -> None:
    liar = NodeReport("a", 1, (failure(0),), unnamed=10**9, stopped=10**9)
    verdict = judge_failures([liar, liar.replace(revision=2)])
    assert decode(encode(verdict)) == verdict


# --- reading what others sent ----------------------------------------------------------------------------------------------

GOOD_FAILURE = json.loads(encode_report(report("a", 1, failure(0))))["failures"][0]
BAD_FAILURES = [
    {**GOOD_FAILURE, "rank": "0"},
    {**GOOD_FAILURE, "rank": True},
    {**GOOD_FAILURE, "pid": 2**31},
    {**GOOD_FAILURE, "age_s": math.inf},
    {**GOOD_FAILURE, "message": "x" * 2001},
    {**GOOD_FAILURE, "message": "two\nlines"},
    {**GOOD_FAILURE, "host": None},
    {**GOOD_FAILURE, "wish": "more"},
    {**GOOD_FAILURE, "extra": 1},
    {name: value for name, value in GOOD_FAILURE.items() if name != "rank"},
    [],
    None,
]


@pytest.mark.parametrize("bad", BAD_FAILURES)
def test_a_report_with_a_bad_failure_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="failures: "):
        decode_report(json.dumps({"node": "a", "failures": [bad], "unnamed": 0, "stopped": 0, "step": -1}).encode(), 1)


@pytest.mark.parametrize("bad", [{"unnamed": -1}, {"failures": [GOOD_FAILURE] * 17}, {"failures": {}}, {"node": "n" * 256}])
def test_a_bad_report_is_refused_and_the_field_named(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(bad))}: "):
        decode_report(json.dumps({"node": "a", "failures": [], "unnamed": 0, "stopped": 0, "step": -1, **bad}).encode(), 1)


@pytest.mark.parametrize(
    "bad",
    [
        {"cause": {}},
        {"cause": BAD_FAILURES[0]},
        {"victims": [[0, "a"]]},
        {"victims": [[0, "a", 1]]},
        {"lost": ["a"] * 17},
        {"stopped": 1.0},
    ],
)
def test_a_bad_verdict_is_refused_and_the_field_named(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(bad))}: "):
        decode({**encode(story()), **bad})


# --- properties ------------------------------------------------------------------------------------------------------------

NUMBERS = st.integers(0, 2**31 - 1)
TEXTS = st.text(max_size=30) | st.builds(lambda text, times: text * times, st.text(min_size=1, max_size=5), st.integers(1, 3000))
MESSAGES = TEXTS | st.sampled_from([RESET, "", "ValueError: bad"])
FAILURES = st.builds(
    WorkerFailure, NUMBERS, NUMBERS, TEXTS, TEXTS, NUMBERS, st.integers(-64, 255), MESSAGES, st.floats(), TEXTS, st.booleans()
)
CROWDS = st.lists(FAILURES, max_size=6, unique_by=lambda one: one.rank) | st.builds(
    lambda one: [one.replace(rank=rank) for rank in range(40)], FAILURES
)
REPORTS = st.builds(NodeReport, TEXTS, NUMBERS, CROWDS.map(tuple), st.integers(0, 1000), st.integers(0, 1000))
NAMES = st.lists(TEXTS, max_size=40)


def of_distinct_revisions(reports: list[NodeReport]) -> list[NodeReport]:
    return list({report.revision: report for report in reports}.values())


@settings(deadline=None)
@given(st.lists(REPORTS, max_size=5), NAMES, NAMES, st.randoms())
def test_every_node_would_reach_the_same_small_verdict(
    reports: list[NodeReport], lost: list[str], left: list[str], random: Any
) -> None:
    """P12: whichever order the reports are read in, and after any number of trips through the store."""
    reports = [bounded(report) for report in of_distinct_revisions(reports)]
    verdict = judge_failures(reports, lost, left)
    random.shuffle(reports)
    assert judge_failures([decode_report(encode_report(one), one.revision) for one in reports], lost[::-1], left) == verdict
    sent = json.dumps(encode(verdict))
    assert len(sent) <= size(encode(verdict)) < 8 * 1024
    assert decode(json.loads(sent)) == verdict
    assert describe(verdict).isprintable()
    assert len(describe(verdict)) < 4000
    failures = [failure for one in reports for failure in one.failures]
    workers = sum(one.unnamed + one.stopped for one in reports) + sum(count_of(failure.ranks) for failure in failures)
    ranks = [run for failure in failures for run in failure.ranks]
    if count_of(joined(ranks)) == count_of(ranks):  # nobody lied about whose worker it was
        assert verdict.alike_count + verdict.victim_count + verdict.stopped == workers


@settings(deadline=None)
@given(REPORTS)
def test_any_report_is_small_and_comes_back_as_it_was_sent(report: NodeReport) -> None:
    sent = encode_report(bounded(report))
    assert len(sent) < 16 * 1024
    assert decode_report(sent, report.revision) == bounded(report) == bounded(bounded(report))


@given(st.text() | TEXTS, st.integers(4, 100), st.integers(4, 100))
def test_a_clipped_text_fits_and_is_clipped_once(text: str, most_bytes: int, most_chars: int) -> None:
    line = clip(text, most_bytes, most_chars)
    assert len(json.dumps(line)) - 2 <= most_bytes
    assert len(line) <= most_chars
    assert line.isprintable()
    assert clip(line, most_bytes, most_chars) == line


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
)


@given(JSON, st.sampled_from(sorted(encode(Verdict()))))
def test_whatever_is_sent_is_read_or_refused(data: object, name: str) -> None:
    for sent in (data, {**encode(Verdict()), name: data}):
        try:
            verdict = decode(sent)
        except ValueError:
            continue
        assert isinstance(verdict, Verdict)
        assert all(isinstance(victim, Victim) for victim in verdict.victims)
        assert explain(verdict)
