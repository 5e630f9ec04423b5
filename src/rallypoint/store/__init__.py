"""The store in which workers find each other, with torch's operations and wire format."""

from __future__ import annotations

from rallypoint import _lazily

TYPE_CHECKING = bool()  # see rallypoint
if TYPE_CHECKING:
    from rallypoint.store.barriers import barrier, get_all, synchronize
    from rallypoint.store.file_store import FileStore
    from rallypoint.store.hash_store import HashStore
    from rallypoint.store.interface import QueueEmptyError, Store, StoreError, StoreLike, StoreNetworkError, StoreTimeoutError
    from rallypoint.store.prefix_store import PrefixStore
    from rallypoint.store.tcp_store import TCPStore

__all__ = [
    "FileStore",
    "HashStore",
    "PrefixStore",
    "QueueEmptyError",
    "Store",
    "StoreError",
    "StoreLike",
    "StoreNetworkError",
    "StoreTimeoutError",
    "TCPStore",
    "barrier",
    "get_all",
    "synchronize",
]

_HOMES = {
    "FileStore": "store.file_store",
    "HashStore": "store.hash_store",
    "PrefixStore": "store.prefix_store",
    "QueueEmptyError": "store.interface",
    "Store": "store.interface",
    "StoreError": "store.interface",
    "StoreLike": "store.interface",
    "StoreNetworkError": "store.interface",
    "StoreTimeoutError": "store.interface",
    "TCPStore": "store.tcp_store",
    "barrier": "store.barriers",
    "get_all": "store.barriers",
    "synchronize": "store.barriers",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazily(__name__, _HOMES)
