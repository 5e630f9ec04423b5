"""The helpers of ``torch.distributed.elastic.utils``."""

from __future__ import annotations

import logging
import socket

import pytest

from rallypoint.compat import torch_names
from rallypoint.compat.torch_names import get_env_variable_or_raise, get_log_level, get_logger, macros
from rallypoint.net.endpoint import get_free_port, get_socket_with_port


def test_a_variable_must_be_set_but_may_be_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_NAME", "")
    assert get_env_variable_or_raise("SOME_NAME") == ""
    monkeypatch.delenv("SOME_NAME")
    with pytest.raises(ValueError, match="Environment variable SOME_NAME expected, but not set"):
        get_env_variable_or_raise("SOME_NAME")


def test_a_socket_holds_its_port() -> None:
    with get_socket_with_port() as listener:
        host, port = listener.getsockname()[:2]
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        socket.create_connection((host, port), timeout=5).close()
        with socket.socket(listener.family) as other, pytest.raises(OSError, match="in use"):
            other.bind((host, port))


def test_a_machine_where_nothing_can_listen_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("none left")

    monkeypatch.setattr(socket.socket, "listen", refuse)
    with pytest.raises(RuntimeError, match="localhost"):
        get_socket_with_port()


def test_a_free_port_is_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", get_free_port()))


def test_the_local_rank_is_put_into_arguments() -> None:
    args = ["a", f"--x={macros.local_rank}", "$local_rank", "${other}", "$", 5, None, ["${local_rank}"]]
    assert macros.substitute(args, "3") == ["a", "--x=3", "3", "${other}", "$", 5, None, ["${local_rank}"]]


def test_loggers_have_the_level_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_logger("some.name").level == logging.WARNING
    assert get_log_level() == "WARNING"
    monkeypatch.setenv("LOGLEVEL", "DEBUG")
    logger = get_logger("some.name")
    assert (logger, logger.level) == (logging.getLogger("some.name"), logging.DEBUG)
    monkeypatch.setenv("LOGLEVEL", "loud")
    with pytest.raises(ValueError, match="loud"):
        get_logger("some.name")


def test_a_logger_without_a_name_is_the_callers() -> None:
    assert get_logger().name == __name__ != torch_names.__name__
