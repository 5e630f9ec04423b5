"""What programs import from ``torch.distributed.elastic.utils``, and the stores that they get behind torch's names.

A store is one of torch's where the program has imported torch, else ours, which speaks the same protocol. Nothing is imported to
find that out, and each class is looked up anew, for torch may come later.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from importlib import import_module

from rallypoint.base import defaults, environment, report
from rallypoint.net.endpoint import get_free_port
from rallypoint.store.interface import StoreError, StoreNetworkError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from collections.abc import Sequence
    from typing import Any

__all__ = [
    "create_c10d_store", "get_env_variable_or_raise", "get_log_level", "get_logger", "macros", "new_file_store", "new_tcp_store",
]  # fmt: skip

ADDRESS_IN_USE = ("address already in use", "eaddrinuse")
_OURS = {
    "FileStore": "rallypoint.store.file_store",
    "PrefixStore": "rallypoint.store.prefix_store",
    "Store": "rallypoint.store.interface",
    "TCPStore": "rallypoint.store.tcp_store",
}
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


def __getattr__(name: str) -> Any:
    if name not in _OURS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    torch = environment.torch_distributed()
    return getattr(torch or import_module(_OURS[name]), name)


def new_tcp_store(host: str, port: int, *, is_master: bool, timeout_s: float, **options: Any) -> Any:
    return __getattr__("TCPStore")(host, port, is_master=is_master, timeout=timedelta(seconds=timeout_s), **options)


def new_file_store(path: str) -> Any:
    return __getattr__("FileStore")(path)


def create_c10d_store(
    is_server: bool,
    server_addr: str,
    server_port: int = -1,
    world_size: int = 1,
    timeout: float = 60 * 10,
    wait_for_workers: bool = True,
    retries: int = 3,
    use_libuv: bool | None = None,
) -> Any:
    """A TCPStore at `server_addr`, which is served here if `is_server`; at a port of -1 a free one is looked for.

    One that somebody takes in the meantime is looked for again, up to `retries` times. A port that was given is tried once.
    """
    if server_port == -1 and world_size > 1:
        raise ValueError(
            f"server_port must be specified when world_size > 1, got server_port={server_port}, world_size={world_size}"
        )
    if use_libuv is not None:
        report.warn(f"use_libuv has no effect here; {defaults.ENV_USE_LIBUV}=0 in the environment switches libuv off")
    uses_libuv = environment.is_on(defaults.ENV_USE_LIBUV, "1")
    options = {"world_size": world_size, "wait_for_workers": wait_for_workers, "use_libuv": uses_libuv}
    tries_left = max(1, retries)
    while True:
        port = get_free_port() if server_port == -1 else server_port
        tries_left -= 1
        try:
            return new_tcp_store(server_addr, port, is_master=is_server, timeout_s=timeout, **options)
        except (RuntimeError, OSError) as error:
            if server_port != -1 or not tries_left or not _is_address_in_use(error):
                raise _as_store_error(error) from error.__cause__
            report.info(f"port {port} was taken by somebody else meanwhile; another one is tried: {error}")


def _is_address_in_use(error: Exception) -> bool:
    return any(words in str(error).lower() for words in ADDRESS_IN_USE)


def _as_store_error(error: RuntimeError | OSError) -> RuntimeError:
    """Stores raise RuntimeErrors, torch's and ours; a plain error of the system becomes one."""
    return error if isinstance(error, RuntimeError | StoreError) else StoreNetworkError(str(error))
