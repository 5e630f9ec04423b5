"""Stores for code that expects torch's: torch's own where the program has imported it, else ours, which speak the same protocol.

Nothing is imported for it: `torch_distributed` looks whether it is there.
"""

from __future__ import annotations

from datetime import timedelta

from rallypoint.base import defaults, environment, report
from rallypoint.base.torch_presence import imported_torch
from rallypoint.net.endpoint import get_free_port
from rallypoint.store.interface import StoreError, StoreNetworkError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["create_c10d_store", "new_file_store", "new_tcp_store", "torch_distributed"]

ADDRESS_IN_USE = ("address already in use", "eaddrinuse")


def torch_distributed() -> Any | None:
    """``torch.distributed``, if the program has imported it and it has stores; never imported here."""
    module = imported_torch("torch.distributed")
    return module if isinstance(getattr(module, "TCPStore", None), type) else None


def new_tcp_store(host: str, port: int, *, is_master: bool, timeout_s: float, **options: Any) -> Any:
    """A TCPStore of torch's, or ours."""
    torch = torch_distributed()
    if torch is not None:
        return torch.TCPStore(host, port, is_master=is_master, timeout=timedelta(seconds=timeout_s), **options)
    from rallypoint.store.tcp_store import TCPStore

    return TCPStore(host, port, is_master=is_master, timeout=timeout_s, **options)


def new_file_store(path: str) -> Any:
    """A FileStore of torch's, or ours."""
    torch = torch_distributed()
    if torch is not None:
        return torch.FileStore(path)
    from rallypoint.store.file_store import FileStore

    return FileStore(path)


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
