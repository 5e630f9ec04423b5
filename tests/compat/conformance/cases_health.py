"""The health check server that an agent has."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

from tests.compat.conformance.harness import case, folder, outcome, plain


@case
def the_health_check_server() -> dict[str, Any]:
    from torch.distributed.elastic.agent.server.health_check_server import HealthCheckServer, create_healthcheck_server

    def alive() -> int:
        return int(time.time())

    server = create_healthcheck_server(alive_callback=alive, port=0, timeout=5)
    facts = {
        "kind": isinstance(server, HealthCheckServer),
        "callback": outcome(lambda: server.alive_callback is alive),
        "start": outcome(server.start),
        "stop": outcome(server.stop),
    }
    own = HealthCheckServer(alive, 1, 2)
    facts["made"] = outcome(lambda: own.alive_callback() > 0)
    return facts


@case
def an_agent_with_a_health_check_server() -> dict[str, Any]:
    from tests.compat.conformance.cases_agents import spec_of
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    server = mock.MagicMock()
    with folder() as path:
        result = LocalElasticAgent(spec_of(), DefaultLogsSpecs(str(path)), health_check_server=server).run()
    return {"state": plain(result.state), "calls": sorted({one[0] for one in server.method_calls})}
