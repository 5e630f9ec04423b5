"""A launcher of somebody's own, as others write them: torch's LocalElasticAgent with its hooks overridden.

It runs a job of two workers, of which one fails in the first attempt, and tells which hooks were called and what came of it.
"""

import json
import os
import sys

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler


class Agent(LocalElasticAgent):
    """Notes what is done, and looks at what it is given."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    def _invoke_run(self, role=""):
        self.calls.append("invoke_run")
        return super()._invoke_run(role)

    def _rendezvous(self, worker_group):
        super()._rendezvous(worker_group)
        self.calls.append(f"rendezvous {worker_group.group_rank} of {worker_group.group_world_size}")

    def _initialize_workers(self, worker_group):
        self.calls.append("initialize")
        super()._initialize_workers(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        ranks = [worker.global_rank for worker in worker_group.workers]
        self.calls.append(f"start {ranks}, {self._remaining_restarts} restarts left")
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state != WorkerState.HEALTHY:
            self.calls.append(f"monitor: {result.state.name}, failed: {sorted(result.failures)}")
        return result

    def _restart_workers(self, worker_group):
        self.calls.append("restart")
        super()._restart_workers(worker_group)

    def _shutdown(self, *args, **kwargs):
        self.calls.append("shutdown")
        super()._shutdown(*args, **kwargs)


@record
def work(start: int) -> float:
    import torch
    import torch.distributed as dist

    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        raise ValueError("this one fails once")
    dist.init_process_group("gloo")
    total = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def main() -> None:
    meeting = RendezvousParameters("c10d", sys.argv[1], "own-agent", 1, 1)
    logs = DefaultLogsSpecs(log_dir=sys.argv[2])
    handler = get_rendezvous_handler(meeting)
    spec = WorkerSpec("trainer", 2, handler, entrypoint=work, args=(10,), max_restarts=1, monitor_interval=0.1)
    agent = Agent(spec, logs, start_method="spawn")
    result = agent.run()
    handler.shutdown()
    told = {"calls": agent.calls, "state": result.state.name, "returned": result.return_values}
    print("TOLD", json.dumps({**told, "code": type(handler).__module__.partition(".")[0]}))


if __name__ == "__main__":
    main()
