"""How nodes meet: the interface, the registry of back ends, and the back ends themselves."""

from __future__ import annotations

from rallypoint import _lazily

TYPE_CHECKING = bool()  # see rallypoint
if TYPE_CHECKING:
    from rallypoint.errors import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousError,
        RendezvousGracefulExitError,
        RendezvousStateError,
        RendezvousTimeoutError,
    )
    from rallypoint.rendezvous.coordinated import CoordinatedHandler, Introduction
    from rallypoint.rendezvous.dynamic_handler import (
        DynamicRendezvousHandler,
        RendezvousBackend,
        RendezvousSettings,
        RendezvousTimeout,
    )
    from rallypoint.rendezvous.handler import (
        RendezvousHandler,
        RendezvousHandlerCreator,
        RendezvousHandlerRegistry,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStoreInfo,
        WakingHandler,
        rendezvous_handler_registry,
    )
    from rallypoint.rendezvous.registry import get_rendezvous_handler

__all__ = [
    "CoordinatedHandler",
    "DynamicRendezvousHandler",
    "Introduction",
    "RendezvousBackend",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousSettings",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeout",
    "RendezvousTimeoutError",
    "WakingHandler",
    "get_rendezvous_handler",
    "rendezvous_handler_registry",
]

_HOMES = {
    "CoordinatedHandler": "rendezvous.coordinated",
    "DynamicRendezvousHandler": "rendezvous.dynamic_handler",
    "Introduction": "rendezvous.coordinated",
    "RendezvousBackend": "rendezvous.dynamic_handler",
    "RendezvousClosedError": "errors",
    "RendezvousConnectionError": "errors",
    "RendezvousError": "errors",
    "RendezvousGracefulExitError": "errors",
    "RendezvousHandler": "rendezvous.handler",
    "RendezvousHandlerCreator": "rendezvous.handler",
    "RendezvousHandlerRegistry": "rendezvous.handler",
    "RendezvousInfo": "rendezvous.handler",
    "RendezvousParameters": "rendezvous.handler",
    "RendezvousSettings": "rendezvous.dynamic_handler",
    "RendezvousStateError": "errors",
    "RendezvousStoreInfo": "rendezvous.handler",
    "RendezvousTimeout": "rendezvous.dynamic_handler",
    "RendezvousTimeoutError": "errors",
    "WakingHandler": "rendezvous.handler",
    "get_rendezvous_handler": "rendezvous.registry",
    "rendezvous_handler_registry": "rendezvous.handler",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazily(__name__, _HOMES)
