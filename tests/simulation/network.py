"""The network between one machine and the store: connections as TCP gives them, over a way that can be slow, cut or reset.

Each direction of a connection keeps its order. What is sent into a cut waits and arrives after it. A reset may be noticed by both
ends, each in its own time, or by one alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint.coordination.embedded import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tests.simulation import client
    from tests.simulation.engine import Engine
    from tests.simulation.world import World

    from rallypoint.coordination.embedded.handshake import Welcome
    from rallypoint.coordination.embedded.service import Session

    Message = bytes | tuple[object, ...] | Welcome  # most of them as they are written down for the real network
    Testimony = tuple[tuple[str, object], ...]  # what a warden sends

__all__ = ["FIN", "HELLO", "Connection", "Link", "vouch"]

FIN = ("fin",)
HELLO = ("hello",)
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
        "client", "client_open", "down_free", "engine", "held_down", "held_up", "link", "loses_reply_about",
        "loses_request_about", "server_open", "session", "up_free", "watch_free", "world",
    )  # fmt: skip

    def __init__(self, world: World, link: Link, client: client.Link | None, engine: Engine) -> None:
        self.world, self.link, self.client, self.engine = world, link, client, engine
        self.client_open, self.server_open = client is not None, True
        self.up_free = self.down_free = self.watch_free = 0.0
        self.held_up: list[Message] = []
        self.held_down: list[Message] = []
        self.session: Session | None = None
        self.loses_reply_about: str | None = None
        self.loses_request_about: str | None = None
        link.connections.append(self)
        engine.connect(self)

    # From the client to the server.

    def send_up(self, message: Message) -> None:
        if self.loses_request_about is not None and _is_about(message, self.loses_request_about):
            self.world.note(self.client.name, "loses a request", message)
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

    def _arrive_up(self, message: Message) -> None:
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

    def send_down(self, message: Message, request: Message = FIN) -> None:
        """`request` is what this answers."""
        if self.loses_reply_about is not None and _is_about(request, self.loses_reply_about):
            self.world.note(self.client.name, "loses a reply", request)
            self.world.tally["replies lost"] += 1
            self.reset()
            return
        if self.link.cut_down:
            self.held_down.append(message)
            return
        world = self.world
        time = world.now + self.link.latency_s(world)
        if self.engine.is_replicated and _is_of_watch(message):  # changes come on a way of their own
            time = self.watch_free = max(time, self.watch_free)
        else:
            time = self.down_free = time if time > self.down_free else self.down_free
        world.at(time, self._arrive_down, message)

    def _arrive_down(self, message: Message) -> None:
        if self.client_open:
            if message is FIN:
                self.break_client("closed by the store")
            else:
                self.client.receive(message)

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
            self.client.be_broken(why)

    def break_server(self) -> None:
        if self.server_open:
            self.engine.receive(self, FIN)

    def flush(self) -> None:
        held, self.held_up = self.held_up, []
        for message in held:
            self.send_up(message)
        held, self.held_down = self.held_down, []
        for message in held:
            self.send_down(message)


def vouch(world: World, link: Link, engine: Engine, testimony: Testimony) -> None:
    """A warden says over a connection of its own that nothing is left of its node."""
    connection = Connection(world, link, None, engine)
    for message in testimony:
        connection.send_up(message)


def _is_about(request: Message, prefix: str) -> bool:
    """Whether a request touches a key that begins so."""
    if not isinstance(request, bytes):
        return False
    _, what, *arguments = wire.decode(request)
    if what != "transact":
        return what in ("read", "watch") and not prefix
    keys = [operation[1] for operation in (*arguments[1], *arguments[2]) if operation[0] != "end"]
    return any(key.startswith(prefix) for key in keys)


def _is_of_watch(message: Message) -> bool:
    return isinstance(message, bytes) and (
        message.startswith(b"[0,") or message.endswith(b',"watching"]') or b',"error","compacted",' in message
    )
