"""Small helpers that programs import from ``torch.distributed.elastic.utils``, under the same names."""

from __future__ import annotations

import os
import sys
from contextlib import closing

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    import socket
    from collections.abc import Sequence
    from typing import Any

__all__ = [
    "get_env_variable_or_raise",
    "get_free_port",
    "get_log_level",
    "get_logger",
    "get_socket_with_port",
    "macros",
]

ENV_LOG_LEVEL = "LOGLEVEL"
_LOG_LEVEL = "WARNING"


def get_env_variable_or_raise(env_name: str) -> str:
    """The value of an environment variable, which may be empty; ValueError where it is not set."""
    value = os.environ.get(env_name)
    if value is None:
        raise ValueError(f"Environment variable {env_name} expected, but not set")
    return value


def get_socket_with_port() -> socket.socket:
    """A socket that listens at a free port of this machine; whoever closes it gives the port back."""
    import socket

    problem: OSError | None = None
    for family, kind, protocol, _, _ in socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM):
        listener = socket.socket(family, kind, protocol)
        try:
            listener.bind(("localhost", 0))
            listener.listen(0)
            return listener
        except OSError as error:
            listener.close()
            problem = error
    raise RuntimeError("no socket could be made at localhost") from problem


def get_free_port() -> int:
    """A port that is free now. Nobody holds it for the caller: better keep the socket of `get_socket_with_port`."""
    with closing(get_socket_with_port()) as listener:
        return int(listener.getsockname()[1])


class macros:
    """What stands for something else in the arguments of a script."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: Sequence[Any], local_rank: str) -> list[Any]:
        """The arguments of one worker: texts with its local rank in them, and all else as it is."""
        from string import Template

        return [Template(arg).safe_substitute(local_rank=local_rank) if isinstance(arg, str) else arg for arg in args]


def get_log_level() -> str:
    """The level of loggers where ``LOGLEVEL`` says nothing."""
    return _LOG_LEVEL


def get_logger(name: str | None = None) -> logging.Logger:
    """A logger with the level that ``LOGLEVEL`` names; without a name it has that of the calling module."""
    import logging

    logger = logging.getLogger(name or sys._getframe(1).f_globals.get("__name__", __name__))
    wanted = os.environ.get(ENV_LOG_LEVEL)
    logger.setLevel(get_log_level() if wanted is None else wanted)
    return logger
