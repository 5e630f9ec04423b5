"""The health endpoint of an agent: whether it is alive and ready, and its numbers for Prometheus."""

from __future__ import annotations

from rallypoint import _lazily

TYPE_CHECKING = bool()  # see rallypoint
if TYPE_CHECKING:
    from rallypoint.health.server import HealthCheckServer, create_healthcheck_server

__all__ = [
    "HealthCheckServer",
    "create_healthcheck_server",
]

_HOMES = {
    "HealthCheckServer": "health.server",
    "create_healthcheck_server": "health.server",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazily(__name__, _HOMES)
