"""The network between one machine and the store: connections as TCP gives them, over a way that can be slow, cut or reset.

Each direction of a connection keeps its order. What is sent into a cut waits and arrives after it. A reset may be noticed by both
ends, each in its own time, or by one alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint.coordination.model import EndLease, Request, Transaction

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tests.simulation.driver import Driver
    from tests.simulation.engine import Engine
    from tests.simulation.world import World

    from rallypoint.coordination.embedded.service import Session

__all__ = ["FIN", "Connection", "Link"]

FIN = ("fin",)
NOTICE_S = 0.5
SPIKE = 0.998  # one message in 500 is late by seconds


class Link:
    """How one machine reaches the store."""

    __slots__ = ("base_s", "connections", "cut_down", "cut_up", "healed_at", "is_dead", "is_local", "slow_s")

    def __init__(self, base_s: float, is_local: bool = False) -> None:
        self.base_s = base_s
        self.is_local = is_local
        self.cut_up = self.cut_down = False
        self.is_dead = False  # the machine has crashed: nothing comes from it any more
        self.slow_s = self.healed_at = 0.0
        self.connections: list[Connection] = []

    def latency_s(self, world: World) -> float:
        chance = world.random()
        delay_s = self.base_s * (0.5 + chance)
        if self.slow_s:
            return delay_s + self.slow_s * world.random()
        if chance > SPIKE and not self.is_local:
            return delay_s + 2.0 * world.random()
        return delay_s

    def cut(self, up: bool, down: bool) -> None:
        if not self.is_local:
            self.cut_up, self.cut_down = self.cut_up or up, self.cut_down or down

    def heal(self, now: float) -> None:
        self.cut_up = self.cut_down = False
        self.healed_at = now
        waiting, self.connections = self.connections, [one for one in self.connections if one.client_open and one.server_open]
        for connection in waiting:
            connection.flush()


class Connection:
    """Both ends of one connection. `session` is the server's, of whom it serves; `send` and `send_each` are what that says."""

    __slots__ = (
        "client_open", "down_free", "driver", "engine", "held_down", "held_up", "link", "loses_reply_about",
        "loses_request_about", "server_open", "session", "up_free", "watch_free", "world",
    )  # fmt: skip

    def __init__(self, world: World, link: Link, driver: Driver, engine: Engine) -> None:
        self.world, self.link, self.driver, self.engine = world, link, driver, engine
        self.client_open = self.server_open = True
        self.up_free = self.down_free = self.watch_free = 0.0
        self.held_up: list[tuple[object, ...]] = []
        self.held_down: list[tuple[tuple[object, ...], bool]] = []
        self.session: Session | None = None
        self.loses_reply_about: str | None = None
        self.loses_request_about: str | None = None
        link.connections.append(self)

    # From the client to the server.

    def send_up(self, message: tuple[object, ...]) -> None:
        if self.loses_request_about is not None and message[0] == "ask" and _is_about(message[2], self.loses_request_about):
            self.world.note(self.driver.agent.name, "loses a request", message[2])
            self.world.tally["requests lost"] += 1
            self.reset()
            return
        if self.link.cut_up:
            self.held_up.append(message)
            return
        world = self.world
        time = world.now + self.link.latency_s(world)
        time = self.up_free = time if time > self.up_free else self.up_free
        world.at(time, self._arrive_up, message)

    def _arrive_up(self, message: tuple[object, ...]) -> None:
        if self.link.is_dead:
            return
        if self.server_open:
            self.engine.receive(self, message)
        elif self.client_open and not self.link.cut_down and not self.engine.is_silent:
            # The server's kernel says that nobody listens there any more.
            self.world.after(self.link.latency_s(self.world), self.break_client, "reset")

    # From the server to the client.

    def send(self, body: bytes) -> None:
        self.engine.say(self, body)

    def send_each(self, bodies: Iterator[bytes]) -> None:
        for body in bodies:
            self.engine.say(self, body)

    def send_down(self, message: tuple[object, ...], is_event: bool = False) -> None:
        if self.loses_reply_about is not None and message[0] == "reply" and _is_about(message[3], self.loses_reply_about):
            self.world.note(self.driver.agent.name, "loses a reply", message[3])
            self.world.tally["replies lost"] += 1
            self.reset()
            return
        if self.link.cut_down:
            self.held_down.append((message, is_event))
            return
        world = self.world
        time = world.now + self.link.latency_s(world)
        if is_event and self.engine.is_replicated:  # changes come on a way of their own
            time = self.watch_free = max(time, self.watch_free)
        else:
            time = self.down_free = time if time > self.down_free else self.down_free
        world.at(time, self._arrive_down, message)

    def _arrive_down(self, message: tuple[object, ...]) -> None:
        if self.client_open:
            if message is FIN:
                self.break_client("closed by the store")
            else:
                self.driver.receive(self, message)

    # Ends.

    def close(self) -> None:
        """The client closes; what it sent before still goes out, and the end of the connection after it."""
        if self.client_open:
            self.client_open = False
            self.send_up(FIN)

    def reset(self) -> None:
        """Something between the two ends it."""
        self.loses_reply_about = self.loses_request_about = None
        world = self.world
        at_server = world.between(0.0, 1.0) * self.link.base_s + (world.between(0.0, 0.5) if world.chance(0.2) else 0.0)
        at_client = world.between(0.0, at_server + NOTICE_S)
        world.after(at_server, self.break_server)
        if world.chance(0.7):  # else it finds out when it sends something
            world.after(at_client, self.break_client, "reset")

    def break_client(self, why: str) -> None:
        if self.client_open:
            self.client_open = False
            self.driver.on_break(self, why)

    def break_server(self) -> None:
        if self.server_open:
            self.engine.receive(self, FIN)

    def flush(self) -> None:
        held, self.held_up = self.held_up, []
        for message in held:
            self.send_up(message)
        events, self.held_down = self.held_down, []
        for message, is_event in events:
            self.send_down(message, is_event)


def _is_about(request: Request, prefix: str) -> bool:
    """Whether a request touches a key that begins so."""
    if not isinstance(request, Transaction):
        return not prefix
    keys = [one.key for one in (*request.then, *request.otherwise) if not isinstance(one, EndLease)]
    return any(key.startswith(prefix) for key in keys)
