"""The classes of stores behind torch's names: torch's own where the program has imported it, for so are the objects then."""

from __future__ import annotations

from importlib import import_module

from rallypoint.base.torch_presence import imported_torch

__all__: list[str] = []  # each is looked up anew, for torch may come later

_OURS = {
    "FileStore": "rallypoint.store.file_store",
    "PrefixStore": "rallypoint.store.prefix_store",
    "Store": "rallypoint.store.interface",
    "TCPStore": "rallypoint.store.tcp_store",
}


def __getattr__(name: str) -> object:
    if name not in _OURS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    theirs: object = getattr(imported_torch("torch.distributed"), name, None)
    return theirs or getattr(import_module(_OURS[name]), name)
