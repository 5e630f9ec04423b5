"""One node of a job: from a configuration to workers, and from their ends to a result."""

from __future__ import annotations

from rallypoint import _lazily

TYPE_CHECKING = bool()  # see rallypoint
if TYPE_CHECKING:
    from rallypoint.agent.agent import ElasticAgent, SimpleElasticAgent
    from rallypoint.agent.config import LaunchConfig
    from rallypoint.agent.launch import elastic_launch, launch_agent
    from rallypoint.agent.local_agent import LocalElasticAgent
    from rallypoint.agent.workers import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState

__all__ = [
    "ElasticAgent",
    "LaunchConfig",
    "LocalElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
    "elastic_launch",
    "launch_agent",
]

_HOMES = {
    "ElasticAgent": "agent.agent",
    "LaunchConfig": "agent.config",
    "LocalElasticAgent": "agent.local_agent",
    "RunResult": "agent.workers",
    "SimpleElasticAgent": "agent.agent",
    "Worker": "agent.workers",
    "WorkerGroup": "agent.workers",
    "WorkerSpec": "agent.workers",
    "WorkerState": "agent.workers",
    "elastic_launch": "agent.launch",
    "launch_agent": "agent.launch",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazily(__name__, _HOMES)
