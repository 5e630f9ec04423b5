"""Who is meant by what a user writes, and what is made of an attempt to tell them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.notices.rules import Attempt, Command, Webhook, after_exit, after_status, read_lines, read_target

HOOK = "https://hooks.example/services/T0/B0/s3cr3t"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HOOK, Webhook(HOOK, "https://hooks.example")),
        (" HTTP://h:8080?key=s3cr3t#x ", Webhook("HTTP://h:8080?key=s3cr3t", "http://h:8080")),
        ("https://me:pa%40ss@h/a?b", Webhook("https://h/a?b", "https://h", "me:pa%40ss")),
        ("http://[::1]:80/x", Webhook("http://[::1]:80/x", "http://[::1]:80")),
        ("./tell.sh 'two words' x", Command(("./tell.sh", "two words", "x"))),
        ("sh -c 'curl http://h'", Command(("sh", "-c", "curl http://h"))),
    ],
)
def test_who_is_meant(text: str, expected: object) -> None:
    assert read_target(text) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("https:///s3cr3t", "needs a host"),
        ("https://h/s3cr3t x", "no blanks"),
        ("https://h/s3cr3t\n", None),
        ("https://h/s3crét", "beyond ASCII"),
        ("https://h:99999/s3cr3t", "https://h:99999 names a port that is none"),
        ("https://h:/s3cr3t", "https://h: names a port that is none"),
        ("ftp://h/s3cr3t", "ftp:// is none of http:// and https://"),
        ("tell 's3cr3t", "no shell could read"),
        ("   ", "neither a web address nor a command"),
    ],
)
def test_what_means_nobody_is_refused_and_no_secret_is_repeated(text: str, problem: str | None) -> None:
    if problem is None:
        assert read_target(text) == read_target(text.strip())
        return
    with pytest.raises(ValueError, match=problem) as refused:
        read_target(text)
    assert "s3cr" not in str(refused.value)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        target = read_target(text)
    except ValueError:
        return
    assert target.name


def test_a_file_names_one_a_line() -> None:
    assert read_lines("# chats\nhttps://a\n\n  tell.sh now \r\n") == ["https://a", "tell.sh now"]


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (200, Attempt()),
        (204, Attempt()),
        (302, Attempt("it answered 302 Hm", may_retry=False)),
        (404, Attempt("it answered 404 Hm", may_retry=False)),
        (429, Attempt("it answered 429 Hm", may_retry=True)),
        (500, Attempt("it answered 500 Hm", may_retry=True)),
    ],
)
def test_what_an_answer_means(status: int, expected: Attempt) -> None:
    assert after_status(status, "Hm") == expected


def test_what_the_end_of_a_command_means() -> None:
    assert after_exit(0, "noise") == Attempt()
    assert after_exit(3, "no route") == Attempt("it exited with code 3: no route", may_retry=True)
    assert after_exit(-9, "") == Attempt("it was ended by signal 9", may_retry=True)
