"""What agents tell each other so that each can compute its workers' ranks."""

from __future__ import annotations

from collections.abc import Sequence

__all__: list[str] = []


class _RoleInstanceInfo:
    """The role and the number of workers of the agent with this rank. The name is kept because code elsewhere imports it."""

    __slots__ = ["local_world_size", "rank", "role"]

    def __init__(self, role: str, rank: int, local_world_size: int) -> None:
        self.role = role
        self.rank = rank
        self.local_world_size = local_world_size

    def serialize(self) -> bytes:
        import json

        return json.dumps({"role": self.role, "rank": self.rank, "local_world_size": self.local_world_size}).encode()

    @staticmethod
    def deserialize(data: bytes) -> _RoleInstanceInfo:
        import json

        fields = json.loads(data)
        return _RoleInstanceInfo(fields["role"], fields["rank"], fields["local_world_size"])

    @staticmethod
    def compare(obj1: _RoleInstanceInfo, obj2: _RoleInstanceInfo) -> int:
        """Order by role, then by rank, in the manner of a comparison function."""
        first, second = (obj1.role, obj1.rank), (obj2.role, obj2.rank)
        return (first > second) - (first < second)

    @staticmethod
    def find_role_boundaries(roles_infos: Sequence[_RoleInstanceInfo], role: str) -> tuple[int, int]:
        """The first and the last place of this role in an ordered list; (-1, -1) where it is not in it."""
        places = [place for place, info in enumerate(roles_infos) if info.role == role]
        return (places[0], places[-1]) if places else (-1, -1)
