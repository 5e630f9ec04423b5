"""What a seed's job is like: how many nodes, which policy, which engine, how long it runs. All of it is drawn here."""

from __future__ import annotations

from random import Random

from tests.simulation.world import Clock, World

from rallypoint.protocol.generation import Policy
from rallypoint.protocol.job_records import NOT_READY, NodeRecord
from rallypoint.protocol.participant import Participant
from rallypoint.protocol.restarts import RestartPolicy

__all__ = ["Setup"]

LIMITS_SOURCE = 17
TTL_S = 3.0
REPLICATED_FENCE_S = 30.0


class Setup:
    """Everything that is fixed before the job begins."""

    def __init__(self, world: World) -> None:
        self.is_replicated = world.chance(0.35)
        self.ttl_s = TTL_S
        self.fence_s = REPLICATED_FENCE_S if self.is_replicated else TTL_S
        self.drift = world.choice((1e-4, 1e-3, 5e-3))
        self.turn_s = world.choice((0.0, 0.0, 0.002, 0.01))
        self.grace_s = world.log_between(0.1, 5.0)
        self.nodes = 5 + world.below(3)
        self.spread_s = world.choice((0.3, 5.0, 10.0))
        self.history = world.choice((20_000, 20_000, 20_000, 12))
        self.seats_at_once = world.choice((1, 2, 100))
        self.work_until = world.between(60.0, 66.0)
        self.heal_at = self.work_until + self.spread_s
        self.faults = 10 + world.below(5)
        self.ambushes = world.below(6)
        self.ambushes_at_end = world.choice((0, 1, 2))
        self.late_faults = world.below(4)
        self.loses_host = not self.is_replicated and world.chance(0.06)
        self.is_closed = world.chance(0.04)
        self.exit_barrier_s = world.choice((300.0, 300.0, 2.0))  # for how long whoever is done waits for the others
        self.hints = world.choice(("none", "none", "none", "found", "explicit"))
        self.roles = world.choice((("default",), ("default",), ("trainer", "reader")))
        self.is_uneven = world.chance(0.3)
        self.policy = self._draw_policy(world)
        self.restarts = self._draw_restarts(world)
        self.settings: dict[str, object] = {"protocol": 1, "min": self.policy.min_nodes}
        self.participant_class = Participant
        self._draw_host(world)

    def _draw_host(self, world: World) -> None:
        """How long its members wait for a host that is lost, how often that happens, and whether it comes back."""
        aside = world.aside
        is_embedded = not self.is_replicated
        self.host_timeout_s = aside.choice((0.0, 15.0, 15.0, 30.0)) if is_embedded else 0.0
        self.host_losses = aside.choice((1, 1, 2, 3)) if self.host_timeout_s and aside.random() < 0.15 else 0
        self.host_returns = 0.8 if self.host_timeout_s else 0.0  # how likely that is, each time

    def _draw_policy(self, world: World) -> Policy:
        least = 1 + world.below(self.nodes - (0 if world.chance(0.2) else 2))
        unit = world.choice((1, 1, 1, 2))
        most = max(least, self.nodes + world.choice((-2, -1, 0, 0, 0, 2)), unit)
        return Policy(
            min_nodes=least,
            max_nodes=most,
            node_unit=unit,
            join_timeout_s=world.between(20.0, 50.0),
            last_call_s=world.between(0.2, 2.0),
            scale_up_window_s=0.3,
            after_expiry_s=self.fence_s - self.ttl_s,
            ready_timeout_s=self.grace_s + 5.0,
        )

    def _draw_restarts(self, world: World) -> RestartPolicy:
        return RestartPolicy(
            max_restarts=world.choice((1, 3, 10, 100, 100)),
            no_retry_exit_codes=(42,),
            backoff_s=world.choice((0.0, 0.2, 1.0)),
            max_backoff_s=3.0,
            window_s=world.choice((0.0, 0.0, 20.0)),
            max_membership_changes=world.choice((None, None, None, 3, 8)),
        )

    def draw_limits(self, seed: int | str) -> None:
        """In one of ten runs, those on single kinds of changes; by a chance of their own, which changes no other run."""
        chance = Random(f"{LIMITS_SOURCE} limits {seed}")
        if chance.random() < 0.1:
            names = ("max_node_losses", "max_departures", "max_preemptions", "max_joins")
            self.restarts = self.restarts.replace(**{name: chance.choice((None, None, 0, 2, 5)) for name in names})

    @staticmethod
    def mismatch(ours: dict[str, object], theirs: dict[str, object]) -> str | None:
        return None if ours == theirs else "its settings differ"

    def record(self, world: World, name: str, index: int) -> NodeRecord:
        """Who the node of that name says it is."""
        workers = 1 + world.below(8) if self.is_uneven else 4
        has_hint = self.hints != "none"
        return NodeRecord(
            name, f"10.0.0.{index}", 0, world.choice(self.roles), workers, NOT_READY,
            index if has_hint else -1, self.hints == "explicit",
        )  # fmt: skip

    def clock(self, world: World) -> Clock:
        return Clock(world.between(0.0, 1e5), 1.0 + self.drift * world.choice((-1.0, 1.0, world.between(-1.0, 1.0))))

    def work_s(self, world: World) -> float:
        """How long the workers of one node run if nothing happens to them."""
        return max(world.between(0.3, 3.0), self.work_until + self.spread_s * world.random() - world.now)
