"""Jobs as the planner sees them, made up."""

from __future__ import annotations

from rallypoint.chaos.scene import Scene
from rallypoint.inspection.view import NodeView, WorkerView, job_of


def make_node(rank: int, workers: int = 2, *, first_pid: int = 100, **more: object) -> NodeView:
    own: dict[str, object] = {
        "job": "a-job", "node": f"node-{rank}", "hostname": f"host-{rank}", "pid": first_pid + 10 * rank, "id": f"id-{rank}",
        "phase": "running", "generation": 3, "node_rank": rank, "max_restarts": 3, "log_dir": "/logs", "hosts_store": rank == 0,
        "workers": tuple(
            WorkerView(rank * workers + local, local, first_pid + 10 * rank + local + 1) for local in range(workers)
        ),
    }  # fmt: skip
    return NodeView(**{**own, **more})  # type: ignore[arg-type]


def make_scene(*nodes: NodeView, here: tuple[int, ...] | None = None, **more: object) -> Scene:
    """With all nodes on this machine, or those at these places."""
    places = tuple((node.hostname, node.pid) for at, node in enumerate(nodes) if here is None or at in here)
    return Scene(job_of(nodes), places, **more)  # type: ignore[arg-type]


def make_job(nodes: int, workers: int = 2, **more: object) -> Scene:
    return make_scene(*(make_node(rank, workers, nodes=nodes, **more) for rank in range(nodes)))
