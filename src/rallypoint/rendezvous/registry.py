"""From a back end's name to its handler.

Built-in back ends are imported when they are asked for. Plug-ins, the entry points of ``torchrun.handlers``, are looked up only
when the name is not built in: listing what is installed takes longer than starting a job. A back end that the user's own program
has registered goes before both. `rendezvous_handler_registry` asks here for every name that the program has not registered.
"""

from __future__ import annotations

from rallypoint.base import defaults
from rallypoint.errors import UsageError
from rallypoint.rendezvous.handler import (
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousParameters,
    rendezvous_handler_registry,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["available", "check_backend", "find_creator", "get_rendezvous_handler", "is_ours"]


def _create_static(params: RendezvousParameters) -> RendezvousHandler:
    from rallypoint.rendezvous import one_node

    return one_node.create_rdzv_handler(params)


def _create_c10d(params: RendezvousParameters) -> RendezvousHandler:
    """A job that can never have more than one node needs no store and no port."""
    if params.max_nodes == 1:
        from rallypoint.rendezvous import one_node

        return one_node.create_handler(params)
    from rallypoint.rendezvous import embedded

    return embedded.create_handler(params)


def _create_etcd(params: RendezvousParameters) -> RendezvousHandler:
    from rallypoint.rendezvous import etcd

    return etcd.create_handler(params)


BUILT_IN: dict[str, RendezvousHandlerCreator] = {
    defaults.BACKEND_CLI: _create_static,
    defaults.BACKEND_ELASTIC: _create_c10d,
    defaults.BACKEND_ETCD: _create_etcd,
    defaults.BACKEND_ETCD_V2: _create_etcd,
    defaults.BACKEND_PLUGIN: _create_c10d,
    defaults.BACKEND_PLUGIN_ETCD: _create_etcd,
}


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The handler for `params.backend`.

    >>> from rallypoint.rendezvous import RendezvousParameters, get_rendezvous_handler
    >>> handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "my-job", 1, 1))
    >>> handler.get_run_id()
    'my-job'
    """
    return rendezvous_handler_registry.create_handler(params)


def check_backend(name: str) -> None:
    """Refuse a back end that nobody knows, before anything is started."""
    if name not in rendezvous_handler_registry and name not in BUILT_IN and name not in _plug_ins():
        raise _unknown(name)


def is_ours(name: str) -> bool:
    """Whether a back end of rallypoint's own answers to this name in this process."""
    return name in BUILT_IN and name not in rendezvous_handler_registry


def available() -> list[str]:
    """Every back end that can be named: built in, registered by the program, or installed as a plug-in."""
    return sorted({*BUILT_IN, *rendezvous_handler_registry.names(), *_plug_ins()})


def find_creator(name: str) -> RendezvousHandlerCreator:
    """The creator of a back end that the program has not registered: a built-in one, else a plug-in's."""
    creator = BUILT_IN.get(name)
    if creator is not None:
        return creator
    plug_in = _plug_ins().get(name)
    if plug_in is None:
        raise _unknown(name)
    return _load(plug_in)


def _plug_ins() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points

    return {plug_in.name: plug_in for plug_in in entry_points(group=defaults.ENTRY_POINTS_RENDEZVOUS)}


def _load(plug_in: EntryPoint) -> RendezvousHandlerCreator:
    """What an entry point names is a function without arguments that gives the creator."""
    try:
        get_creator = plug_in.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"rendezvous backend {plug_in.name!r}: its plug-in {plug_in.value} cannot be loaded: {error}") from error
    creator: RendezvousHandlerCreator = get_creator()
    return creator


def _unknown(name: str) -> UsageError:
    return UsageError(f"there is no rendezvous backend {name!r}; available: {', '.join(available())}")
