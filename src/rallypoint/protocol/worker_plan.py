"""Each worker's ranks, from who takes part, and from them its environment, arguments and console prefix.

Every node computes the same ranks from the same list, so none has to be sent. Nodes stand in the order of their group ranks.
Global ranks count workers over all nodes in that order, role ranks over the nodes of the same role only. Nodes may have different
roles and different numbers of workers.

The environment is the contract with the training program: the names are torchrun's, so that a program written for it runs
unchanged. A plan only adds to what the worker inherits.

Invariants: global ranks are 0..world-1, each once; role ranks are 0..role world-1, each once within the role; the ranks of one
node are contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rallypoint.base import defaults as names
from rallypoint.base.records import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Group", "Member", "WorkerPlan", "WorkerRanks", "assign_ranks", "plan_worker", "substitute"]


class Member(Value):
    """What ranks depend on at one node; its group rank is its place in the list."""

    role: str
    local_world_size: int


class WorkerRanks(Value):
    local_rank: int
    global_rank: int
    role_rank: int
    world_size: int
    role_world_size: int


def assign_ranks(members: Sequence[Member], group_rank: int) -> tuple[WorkerRanks, ...]:
    """The ranks of the workers of the node at `group_rank`."""
    me = members[group_rank]
    first_global = _count(members[:group_rank])
    first_in_role = _count(members[:group_rank], me.role)
    world_size, role_world_size = _count(members), _count(members, me.role)
    return tuple(
        WorkerRanks(local, first_global + local, first_in_role + local, world_size, role_world_size)
        for local in range(me.local_world_size)
    )


def _count(members: Sequence[Member], role: str | None = None) -> int:
    return sum(member.local_world_size for member in members if role is None or member.role == role)


class Group(Value):
    """What all workers of one node share in one generation."""

    role: str
    group_rank: int
    group_world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    restart_count: int
    generation: int
    max_restarts: int
    run_id: str
    use_agent_store: bool
    signals_to_handle: str
    hostname: str
    prefix_template: str | None
    virtual_local_rank: bool
    visible_devices: str | None  # the agent's own choice among the devices, as in CUDA_VISIBLE_DEVICES
    extra_env: Mapping[str, str]
    inherited: Mapping[str, str]
    mask_variables: tuple[str, ...] = (names.ENV_CUDA_VISIBLE_DEVICES,)  # what leaves a worker one device on this machine


class WorkerPlan(Value):
    local_rank: int
    env: dict[str, str]
    args: tuple[Any, ...]
    prefix: str | None


def plan_worker(group: Group, ranks: WorkerRanks, args: Sequence[Any]) -> WorkerPlan:
    """Everything that distinguishes one worker from its neighbours."""
    return WorkerPlan(
        ranks.local_rank,
        _environment(group, ranks),
        tuple(substitute(args, ranks.local_rank)),
        _prefix(group, ranks),
    )


def substitute(args: Sequence[Any], local_rank: int | str) -> list[Any]:
    """The script's arguments with ``${local_rank}`` replaced; what is not text is left as it is."""
    return [arg.replace("${local_rank}", str(local_rank)) if isinstance(arg, str) else arg for arg in args]


def _environment(group: Group, ranks: WorkerRanks) -> dict[str, str]:
    env = {
        names.ENV_LOCAL_RANK: ranks.local_rank,
        names.ENV_RANK: ranks.global_rank,
        names.ENV_GROUP_RANK: group.group_rank,
        names.ENV_ROLE_RANK: ranks.role_rank,
        names.ENV_ROLE_NAME: group.role,
        names.ENV_LOCAL_WORLD_SIZE: group.local_world_size,
        names.ENV_WORLD_SIZE: ranks.world_size,
        names.ENV_GROUP_WORLD_SIZE: group.group_world_size,
        names.ENV_ROLE_WORLD_SIZE: ranks.role_world_size,
        names.ENV_MASTER_ADDR: group.master_addr,
        names.ENV_MASTER_PORT: group.master_port,
        names.ENV_RESTART_COUNT: group.restart_count,
        names.ENV_GENERATION: group.generation,
        names.ENV_MAX_RESTARTS: group.max_restarts,
        names.ENV_RUN_ID: group.run_id,
        names.ENV_USE_AGENT_STORE: group.use_agent_store,
        names.ENV_SIGNALS_TO_HANDLE: group.signals_to_handle,
        names.ENV_NCCL_ASYNC_ERROR_HANDLING: group.inherited.get(names.ENV_NCCL_ASYNC_ERROR_HANDLING, "1"),
    }
    own = {name: str(value) for name, value in env.items()}
    return {**own, **_device_environment(group, ranks.local_rank), **_control_socket(group, ranks.local_rank), **group.extra_env}


def _device_environment(group: Group, local_rank: int) -> dict[str, str]:
    """With virtual local ranks, each worker believes to be the first, and sees one device only."""
    if not group.virtual_local_rank:
        return {}
    visible = [device for device in (group.visible_devices or "").split(",") if device]
    device = visible[local_rank] if local_rank < len(visible) else str(local_rank)
    return {names.ENV_LOCAL_RANK: "0", **dict.fromkeys(group.mask_variables, device)}


def _control_socket(group: Group, local_rank: int) -> dict[str, str]:
    """Workers cannot share a socket: of the path that was given for all, each gets its own."""
    path = group.inherited.get(names.ENV_CONTROL_SOCKET)
    return {names.ENV_CONTROL_SOCKET: f"{path}.{local_rank}"} if path and group.local_world_size > 1 else {}


def _prefix(group: Group, ranks: WorkerRanks) -> str | None:
    if group.prefix_template is None:
        return None
    from string import Template

    return Template(group.prefix_template).safe_substitute(
        role_name=group.role, rank=ranks.global_rank, local_rank=ranks.local_rank, hostname=group.hostname
    )
