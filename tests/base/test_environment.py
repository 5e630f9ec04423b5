"""Variables, as they are when they are asked for."""

from __future__ import annotations

import pytest

from rallypoint.base import environment


def test_an_empty_variable_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_NAME", raising=False)
    assert (environment.text("SOME_NAME"), environment.text("SOME_NAME", "default")) == ("", "default")
    monkeypatch.setenv("SOME_NAME", "")
    assert environment.text("SOME_NAME", "default") == "default"
    monkeypatch.setenv("SOME_NAME", "said")
    assert environment.text("SOME_NAME", "default") == "said"


def test_only_1_switches_something_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_NAME", raising=False)
    assert (environment.is_on("SOME_NAME"), environment.is_on("SOME_NAME", "1")) == (False, True)
    for text, is_on in (("1", True), ("0", False), ("true", False), ("", False)):
        monkeypatch.setenv("SOME_NAME", text)
        assert environment.is_on("SOME_NAME", "1") is is_on


def test_the_first_that_says_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRST_NAME", "")
    monkeypatch.setenv("SECOND_NAME", "2")
    monkeypatch.setenv("THIRD_NAME", "3")
    assert environment.first_of(["NO_SUCH_NAME", "FIRST_NAME", "SECOND_NAME", "THIRD_NAME"]) == "2"
    assert environment.first_of(["FIRST_NAME"]) is None


def test_temporary_files_have_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    assert environment.temporary_dir() == "/tmp"
    monkeypatch.setenv("TMPDIR", "/scratch")
    assert environment.temporary_dir() == "/scratch"
