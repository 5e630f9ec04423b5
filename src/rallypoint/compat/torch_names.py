"""Small helpers that programs import from ``torch.distributed.elastic.utils``, under the same names."""

from __future__ import annotations

import sys

from rallypoint.base import defaults, environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from collections.abc import Sequence
    from typing import Any

__all__ = [
    "get_env_variable_or_raise",
    "get_log_level",
    "get_logger",
    "macros",
]

_LOG_LEVEL = "WARNING"


def get_env_variable_or_raise(env_name: str) -> str:
    """The value of an environment variable, which may be empty; ValueError where it is not set."""
    value = environment.own.get(env_name)
    if value is None:
        raise ValueError(f"Environment variable {env_name} expected, but not set")
    return value


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
    wanted = environment.own.get(defaults.ENV_LOG_LEVEL)
    logger.setLevel(get_log_level() if wanted is None else wanted)
    return logger
