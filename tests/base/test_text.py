"""Sizes, truth words, addresses, runs of numbers and plurals."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.text import host_port, many, parse_size, parse_span, parse_truth, plural, ranges, runs, span_text
from rallypoint.cli import command_line
from rallypoint.errors import UsageError
from rallypoint.rendezvous.handler import RendezvousParameters
from rallypoint.rendezvous.settings import read_settings

WORDS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
}


@pytest.mark.parametrize(("text", "size"), [("4096", 4096), ("500M", 500 << 20), (" 2g ", 2 << 30), ("0K", 0)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "1T", "1.5G", "many"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parse_size(text)


@pytest.mark.parametrize(("word", "truth"), WORDS.items())
def test_f30_every_setting_takes_the_same_words(word: str, truth: bool) -> None:
    """In any case: a flag's variable, a setting of the rendezvous, and one that a back end asks for."""
    for spelt in (word, word.upper(), word.capitalize()):
        assert parse_truth(spelt) is truth
        assert command_line.parse(["script"], {"PET_STANDALONE": spelt}).standalone is truth
        assert read_settings({"is_host": spelt}, {}).is_host is truth
        assert RendezvousParameters("c10d", "", "job", 1, 1, is_host=spelt).get_as_bool("is_host") is truth


@pytest.mark.parametrize("word", ["", "maybe", "2", "yess", "-1"])
def test_other_words_are_refused_by_name(word: str) -> None:
    with pytest.raises(ValueError, match="neither true nor false"):
        parse_truth(word)
    with pytest.raises(UsageError, match="is_host"):
        read_settings({"is_host": word}, {})


@pytest.mark.parametrize("value", [1.0, None, b"1", ["1"]])
def test_only_words_and_whole_numbers_are_truths(value: object) -> None:
    assert (parse_truth(1), parse_truth(0), parse_truth(True)) == (True, False, True)
    with pytest.raises(ValueError, match="neither true nor false"):
        parse_truth(value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("8s", 8.0), ("1.5s", 1.5), ("10m", 600.0), ("1h30m", 5400.0), ("2d", 172_800.0), ("1m54.942s", 114.942)],
)
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert parse_span(text) == seconds


@pytest.mark.parametrize("text", ["", "8", "s", "8 s", "-8s", "1e3s", "8s8", "1..5s", ".5s", "٣s", "99999999999s"])
def test_what_is_no_length_of_time(text: str) -> None:
    with pytest.raises(ValueError, match="is no length of time, as 8s"):
        parse_span(text)


@given(st.integers(0, 10**10))
def test_a_length_of_time_is_read_as_it_is_written(milliseconds: int) -> None:
    assert parse_span(span_text(milliseconds / 1000)) == milliseconds / 1000


def test_an_address_with_colons_is_in_brackets() -> None:
    assert [host_port(host, 80) for host in ("node1", "10.0.0.1", "::1")] == ["node1:80", "10.0.0.1:80", "[::1]:80"]


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [([], ""), ([3], "3"), ([1, 0], "0-1"), ([5, 0, 1, 2, 2], "0-2,5"), (range(10), "0-9")],
)
def test_runs_of_numbers(numbers: list[int], shown: str) -> None:
    assert ranges(numbers) == shown


def test_a_list_of_ranges_may_be_cut() -> None:
    assert ranges([0, 2, 4, 6], ", ", 4) == "0, 2, 4, 6"
    assert ranges([0, 2, 4, 6], ", ", 3) == "0, 2, 4, ..."


@given(st.lists(st.integers(-50, 50)))
def test_runs_hold_every_number_once_and_no_other(numbers: list[int]) -> None:
    found = runs(numbers)
    assert [number for first, last in found for number in range(first, last + 1)] == sorted(set(numbers))
    assert all(before[1] + 1 < after[0] for before, after in pairwise(found))


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranges_name_every_rank(ranks: set[int]) -> None:
    named = set()
    for part in ranges(ranks, ", ", 8).removesuffix(", ...").split(", "):
        low, _, high = part.partition("-")
        named |= set(range(int(low), int(high or low) + 1))
    assert named <= ranks
    assert named == ranks or ranges(ranks, ", ", 8).endswith(", ...")


def test_plurals() -> None:
    assert [many(number, "node") for number in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]
    assert (plural(1, "process", "processes"), plural(2, "process", "processes")) == ("process", "processes")
