"""A job's secret that nobody gave: what the host makes of a munge or a home, and who finds it there."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.base import defaults, report
from rallypoint.errors import UsageError
from rallypoint.rendezvous import munge, secrets
from rallypoint.rendezvous.secrets import HOME, MUNGE, Keyring, secret_of, tls_of
from rallypoint.rendezvous.settings import read_settings

SECRET = "a secret of some length"
# Stands in for munge's two commands, where it is about what is made of them; real munge is in tests/e2e/nodes/test_strangers.py.
COMMAND = """#!/bin/sh
{how}
"""


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    report.set_sink(lambda level, text: lines.append(text) if level > logging.DEBUG else None)
    yield lines
    report.set_sink(None)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """``home(name)``: from now on this is ours; where the key is in it."""

    def choose(name: str) -> Path:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / name))
        return tmp_path / name / "rallypoint" / "secret"

    choose("own")
    return choose


@pytest.fixture(autouse=True)
def no_munge(commands: Callable[..., None]) -> None:
    commands(munge="echo no munged here >&2; exit 6", unmunge="echo no munged here >&2; exit 6")


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``commands(munge=…, unmunge=…)``: what these do, as shell scripts."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(**scripts: str) -> None:
        for name, how in scripts.items():
            (folder / name).write_text(COMMAND.format(how=how))
            (folder / name).chmod(0o755)

    return put


WORKS = {
    "munge": 'test "$2" = "$(id -u)" && printf "MUNGE:%s:" "$(cat)"',
    "unmunge": "printf 'STATUS:          17\\nUID:             %s\\n\\n' $(id -u); sed 's/MUNGE://; s/:$//'",
}


def test_what_is_in_the_home_is_for_all_jobs_of_one_user(home: Any, said: list[str]) -> None:
    host = Keyring()
    offer, other = host.offer(), Keyring().offer()
    assert offer is not None
    assert other is not None
    assert list(offer.boxes) == [HOME]
    assert not offer.is_strict
    assert offer.secret != other.secret, "each job has its own"
    assert Keyring().open(offer.boxes) == offer.secret
    assert Keyring().open(other.boxes) == other.secret
    key = home("own")
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(key.parent) == ["secret"]
    assert key.read_text().strip() not in str(offer.boxes)
    assert said == []


def test_another_home_is_known_as_such_and_not_taken_for_a_wrong_secret(home: Any, said: list[str]) -> None:
    offer = Keyring().offer()
    assert offer is not None
    for name in ("empty", "with another key"):
        key = home(name)
        if name != "empty":
            assert Keyring().offer() is not None
        node = Keyring()
        assert node.open(offer.boxes) is None
        assert node.open(offer.boxes) is None
        assert not node.has_opened
        (line,) = said
        assert line.startswith("this node cannot find the job's secret where its store says that it is (home: ")
        assert key.exists() == (name != "empty"), "who looks makes nothing"
        said.clear()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_none(home: Any, mode: int, said: list[str]) -> None:
    offer = Keyring().offer()
    assert offer is not None
    home("own").chmod(mode)
    assert Keyring().offer() is None
    assert Keyring().open(offer.boxes) is None
    assert "chmod 600 it" in said[-1]


def test_what_is_no_key_is_none(home: Any, tmp_path: Path) -> None:
    key = home("own")
    key.parent.mkdir(parents=True)
    key.write_text("short")
    key.chmod(0o600)
    assert Keyring().offer() is None
    key.unlink()
    os.mkfifo(key, 0o600)
    assert Keyring().offer() is None
    key.unlink()
    (tmp_path / "elsewhere").write_text("x" * 64)
    (tmp_path / "elsewhere").chmod(0o600)
    key.symlink_to(tmp_path / "elsewhere")
    assert Keyring().offer() is None


def test_where_there_is_no_home_there_is_nothing(home: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a file").touch()
    home("a file")
    assert Keyring().offer() is None
    monkeypatch.setenv("XDG_STATE_HOME", "")
    monkeypatch.setenv("HOME", "")
    assert Keyring().offer() is None
    assert Keyring().open({HOME: "00 00"}) is None


def test_a_home_that_hangs_is_given_up(home: Any, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """A dead file server holds nobody up for long, and is not asked twice."""
    answers = threading.Event()
    monkeypatch.setattr(secrets, "FILE_S", 0.05)
    monkeypatch.setattr(secrets, "_read_key", answers.wait)
    node = Keyring()
    assert node.offer() is None
    assert node.open({HOME: "00 00"}) is None
    assert "no answer" in said[-1]
    answers.set()


def test_hosts_that_start_at_once_make_one_key(home: Any) -> None:
    offers: list[Any] = []
    threads = [threading.Thread(target=lambda: offers.append(Keyring().offer())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({offer.boxes[HOME].split()[0] for offer in offers}) == 1
    assert os.listdir(home("own").parent) == ["secret"]


@pytest.mark.parametrize("box", ["", "x", "00", "zz zz"])
def test_a_box_that_makes_no_sense_is_not_opened(home: Any, box: str) -> None:
    assert Keyring().offer() is not None
    name = secrets._name_of(secrets._read_key())
    for text in (box, f"{name} {box}z"):
        assert Keyring().open({HOME: text}) is None
    assert Keyring().open({"another kind": box}) is None


def test_munge_is_offered_too_and_asked_once(home: Any, commands: Any, tmp_path: Path) -> None:
    commands(munge=WORKS["munge"], unmunge=f"echo >> {tmp_path}/asked; {WORKS['unmunge']}")
    offer = Keyring().offer()
    assert offer is not None
    assert list(offer.boxes) == [MUNGE, HOME]
    assert not offer.is_strict
    home("of another node")
    (tmp_path / "asked").unlink()
    node = Keyring()
    assert [node.open(offer.boxes) for _ in range(3)] == [offer.secret] * 3
    assert (tmp_path / "asked").read_text() == "\n"


def test_in_a_job_of_slurm_it_is_asked_of_everybody(home: Any, commands: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    without = Keyring().offer()
    assert without is not None
    assert not without.is_strict
    commands(**WORKS)
    offer = Keyring().offer()
    assert offer is not None
    assert offer.is_strict


@pytest.mark.parametrize(
    ("scripts", "trouble"),
    [
        ({"munge": "echo no munged here >&2; exit 6"}, "no munged here"),
        ({"munge": "exit 3"}, "munge ended with code 3"),
        ({"unmunge": "echo 'Unauthorized credential' >&2; exit 18"}, "Unauthorized credential"),
        ({"unmunge": "printf 'STATUS: 0\\nUID: 4242\\n\\n00'"}, "it was made by user 4242"),
        ({"unmunge": "printf 'STATUS: 18\\nUID: %s\\n\\n00' $(id -u)"}, "unmunge says nothing of it"),
        ({"unmunge": "printf 'STATUS: 0\\nUID: %s\\n\\nno number' $(id -u)"}, "unmunge gives something else"),
        ({"unmunge": "printf 'STATUS: 0\\nUID: %s\\n\\n00' $(id -u)"}, "munge does not open what it has sealed"),
        ({"unmunge": "echo"}, "unmunge says nothing of it"),
        ({"munge": "head -c 2000 /dev/zero | tr '\\0' x"}, "munge does not open what it has sealed"),
    ],
)
def test_a_munge_that_does_not_work_is_not_offered(home: Any, commands: Any, scripts: dict[str, str], trouble: str) -> None:
    commands(**{**WORKS, **scripts})
    with pytest.raises(OSError, match=trouble):
        munge.seal(b"secret")
    offer = Keyring().offer()
    assert offer is not None
    assert list(offer.boxes) == [HOME]


def test_a_munge_that_hangs_is_given_up(home: Any, commands: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(munge, "TIMEOUT_S", 0.2)
    commands(munge="exec sleep 600")
    with pytest.raises(TimeoutError, match=r"munge does not answer within 0\.2 s"):
        munge.seal(b"secret")


# --- what was chosen ---------------------------------------------------------------------------------------------------------


def chosen(config: dict[str, object]) -> Any:
    return secret_of(read_settings(config, os.environ))


def test_what_is_given_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, mounted = tmp_path / "given", tmp_path / "mounted"
    for one in (path, mounted):
        one.write_text(f"{SECRET}, {one.name}\n")
        one.chmod(0o600)
    assert isinstance(chosen({}), Keyring)
    assert isinstance(chosen({"secret": "auto"}), Keyring)
    assert chosen({"secret": "none"}) is None
    assert chosen({"secret": str(path)}) == f"{SECRET}, given".encode()
    assert chosen({"secret": str(path), "secret_file": str(path)}) == f"{SECRET}, given".encode()
    monkeypatch.setattr(defaults, "MOUNTED_SECRET", str(mounted))
    assert chosen({}) == f"{SECRET}, mounted".encode()
    assert chosen({"secret_file": str(path)}) == f"{SECRET}, given".encode()
    assert chosen({"secret": "none"}) is None
    monkeypatch.setenv("RALLYPOINT_SECRET", SECRET)
    assert chosen({}) == SECRET.encode()


@pytest.mark.parametrize("word", ["none", "auto"])
def test_the_variable_may_say_a_word_instead(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLYPOINT_SECRET", word)
    assert (chosen({}) is None) == (word == "none")
    assert isinstance(chosen({"secret": "auto"}), Keyring)
    path = tmp_path / "given"
    path.write_text(SECRET)
    path.chmod(0o600)
    assert chosen({"secret_file": str(path)}) == SECRET.encode()


@pytest.mark.parametrize(
    ("config", "variable", "told"),
    [
        ({"secret": "none", "secret_file": "/a"}, "", r"secret \(--secret or --rdzv-conf\) is none, and secret_file .* is /a"),
        ({"secret": "/b", "secret_file": "/a"}, "", "is /b, and secret_file .* is /a; leave one out"),
        ({"secret": "none"}, SECRET, "is none, and RALLYPOINT_SECRET has a secret"),
        ({"secret": "/a"}, SECRET, "given twice"),
        ({"secret": "/no/such/file"}, "", "/no/such/file cannot be read"),
    ],
)
def test_what_contradicts_itself_is_refused(
    config: dict[str, object], variable: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RALLYPOINT_SECRET", variable)
    with pytest.raises(UsageError, match=told):
        chosen(config)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("cert", "key"), r"tls_cert \(--tls-cert or --rdzv-conf\) is given, and tls_ca is not; TLS needs all three"),
        (("ca",), "and tls_cert and tls_key is not"),
        (("cert", "key", "ca"), "do not do for TLS"),
    ],
)
def test_tls_takes_three_files_that_belong_together(given: tuple[str, ...], told: str, tmp_path: Path) -> None:
    for name in given:
        (tmp_path / name).write_text("no certificate")
    with pytest.raises(UsageError, match=told):
        tls_of(read_settings({f"tls_{name}": str(tmp_path / name) for name in given}, {}))
    there = str(tmp_path / given[0])
    with pytest.raises(UsageError, match=r"tls_key .*: /no/such/key cannot be read"):
        tls_of(read_settings({"tls_cert": there, "tls_key": "/no/such/key", "tls_ca": there}, {}))


def test_with_tls_no_secret_is_looked_for(tmp_path: Path) -> None:
    """But one that is given is asked for too."""
    assert chosen({"tls_cert": "/a"}) is None
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    assert chosen({"tls_cert": "/a", "secret": str(tmp_path / "secret")}) == SECRET.encode()
