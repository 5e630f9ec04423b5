"""What goes wrong, and when: drawn from the seed, aimed at whoever is there when it happens."""

from __future__ import annotations

from tests.simulation.agent import Agent

from rallypoint.protocol.agent_machine import Draining

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

__all__ = ["Faults"]

ECHO = "Connection reset by peer"
LOST = ("", "", "down/generation", "seats/", "down/signal/", "down/leader", "up/done/", "up/nodes/", "down/closed")
SCENES = ("generation", "signal", "leader", "done", "gone", "ready", "seat", "seats", "started", "expelled")


class Faults:
    """Plans all faults of a run, and does them.

    Most come at any time; some follow another closely, often at the same agent; and some lie in *ambush* until the store shows
    something of interest, and strike then, which is when a protocol is most easily hurt.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.world, self.setup = cluster, cluster.world, cluster.setup
        kinds = [
            (self.fail_workers, 4), (self.kill, 2), (self.crash, 1), (self.stop, 2), (self.cut, 4), (self.reset, 2),
            (self.slow, 1),
            (self.pause_store, 1), (self.terminate, 1), (self.join, 2), (self.lose_reply, 3), (self.lose_request, 3),
            (self.cut_many, 1), (self.reset_many, 1), (self.be_stubborn, 2), (self.depose, 1),
            (self.kill_with_warden, 2), (self.stick_main, 3), (self.stick_driver, 2), (self.stop_warden, 2),
            (self.reset_one_side, 3), (self.join_sick, 1), (self.go_far_away, 1), (self.terminate_twice, 1),
        ]  # fmt: skip
        self._kinds = [kind for kind, weight in kinds for _ in range(weight)]
        self._ambushes: list[str] = []
        self._victim: Agent | None = None
        self._plan()

    def _plan(self) -> None:
        world, setup = self.world, self.setup
        for _ in range(setup.faults):
            at = world.between(0.5, setup.work_until)
            world.at(at, self._strike)
            if world.chance(0.3):
                world.at(at + world.log_between(0.001, 1.0), self._strike, True)
        for _ in range(setup.ambushes):
            world.at(world.between(0.5, setup.work_until), self._lie_in_ambush)
        for _ in range(setup.late_faults):
            world.at(world.between(setup.work_until, setup.heal_at), self._strike)
        self._ambushes += ["done"] * setup.ambushes_at_end
        if setup.loses_host:
            world.at(world.between(2.0, setup.heal_at), self.lose_host)
        for _ in range(setup.host_losses):
            world.at(world.aside.uniform(2.0, setup.heal_at), self.lose_host_for_a_while)
        if setup.is_closed:
            world.at(world.between(20.0, setup.heal_at), self.close_job)

    def _strike(self, is_sequel: bool = False) -> None:
        if not is_sequel or self.world.chance(0.4):
            self._victim = None
        kind = self.world.choice(self._kinds)
        self.world.tally["faults"] += 1
        self.world.tally[f"fault: {kind.__name__}"] += 1
        kind()

    def _lie_in_ambush(self) -> None:
        self._ambushes.append(self.world.choice(SCENES))

    def notice(self, scene: str) -> None:
        """The store shows this; whoever waited for it strikes now, or very soon."""
        if scene in self._ambushes and self.world.now < self.setup.heal_at - 1.0:
            self._ambushes.remove(scene)
            delay_s = self.world.log_between(1e-4, 0.3)
            if scene == "gone" and self.world.chance(0.5):  # a failure elsewhere, while the leader is about to tell of the loss
                self.world.after(self.world.log_between(1e-4, 0.02), self.fail_workers)
                return
            if self.world.chance(0.3):
                self.world.after(delay_s, self.lose_done if scene == "done" else self.depose)
                return
            if scene == "done" and self.world.chance(0.3):  # what ends the job does not get to the store
                self._lose_the_end()
                return
            if self.world.chance(0.5):
                self._victim = self._leader()
            self.world.after(delay_s, self._strike, True)

    def _someone(self) -> Agent | None:
        """A living agent other than the store's host, the leader more often than chance would have it."""
        if self._victim is not None and self._victim.is_alive:
            return self._victim
        living = [one for one in self.cluster.agents if one.is_alive and not one.is_host]
        self._victim = self._leader() if self.world.chance(0.3) else None
        if self._victim is None and living:
            self._victim = self.world.choice(living)
        return self._victim

    def _leader(self) -> Agent | None:
        for one in self.cluster.agents:
            participant = one.participant
            if one.is_alive and not one.is_host and participant is not None and participant.leader is not None:
                return one
        return None

    # Programs.

    def fail_workers(self) -> None:
        running = [one for one in self.cluster.agents if one.runs]
        if not running:
            return
        first = self._victim if self._victim in running else self.world.choice(running)
        code = self.world.choice((1, 1, 7, -9, -11, 42 if self.world.chance(0.1) else 1))
        first.fail(first.group, code, "ValueError: bad luck")
        self._hurt_peers(first)

    def _hurt_peers(self, first: Agent) -> None:
        """Workers elsewhere notice that a peer is gone, and fail for that."""
        if self.world.chance(0.5):
            for other in self.cluster.agents:
                if other is not first and other.runs and self.world.chance(0.6):
                    self.world.after(self.world.between(0.0, 1.5), other.fail, other.group, 1, ECHO)

    def be_stubborn(self) -> None:
        """When they are told to stop the next time, the workers of this agent take longer than anybody waits."""
        if (agent := self._someone()) is not None:
            agent.is_stubborn = True

    # Processes and machines.

    def kill(self) -> None:
        """A warden that is stopped cannot end the workers of an agent that is killed: then both are."""
        if (agent := self._someone()) is not None:
            agent.die(with_warden=agent.warden_is_stopped)
            self._hurt_peers(agent)
            self.cluster.start_again(agent, self.world.between(0.1, 6.0))

    def kill_with_warden(self) -> None:
        if (agent := self._someone()) is not None:
            agent.die(with_warden=True)
            self._hurt_peers(agent)
            self.cluster.start_again(agent, self.world.between(0.1, 6.0))

    def crash(self) -> None:
        if (agent := self._someone()) is not None:
            agent.die(with_machine=True)
            self._hurt_peers(agent)
            self.cluster.start_again(agent, self.world.between(0.5, 8.0))

    def lose_done(self) -> None:
        """One that is done, and waits for the others, is lost; often the leader too."""
        done = [one for one in self.cluster.agents if one.is_alive and not one.is_host and isinstance(one.state, Draining)]
        if done:
            self.world.choice(done).die(with_machine=self.world.chance(0.2))
        if self.world.chance(0.6):
            self.depose()

    def stop(self) -> None:
        """SIGSTOP, and SIGCONT later; the store's host takes the store with it."""
        living = [one for one in self.cluster.agents if one.is_alive]
        if not living:
            return
        agent, seconds = self._victim or self.world.choice(living), self.world.log_between(0.1, 20.0)
        if not agent.is_alive or agent.stuck or agent.warden_is_stopped:
            return
        self.world.note(agent.name, "is stopped", round(seconds, 3))
        agent.stick("main", "driver")
        if agent.is_host:
            self.cluster.engine.pause(seconds)
        self.world.after(seconds, agent.go_on, "main", "driver")

    def stick_main(self) -> None:
        """The thread that stops workers hangs, in a console that nobody reads or a dead file system; the other one goes on."""
        agent = self._someone()
        if agent is not None and not agent.stuck:
            seconds = self.world.log_between(0.3, 60.0)
            self.world.note(agent.name, "main thread hangs", round(seconds, 3))
            agent.stick("main")
            self.world.after(seconds, agent.go_on, "main")
            if self.world.chance(0.3):
                self.world.after(self.world.log_between(0.001, 1.0), self._cut, agent, self.world.log_between(1.0, 10.0))
            if self.world.chance(0.4):
                self.world.after(self.world.log_between(0.01, 2.0), self.fail_workers)

    def stick_driver(self) -> None:
        """The thread that talks to the store hangs; nobody renews the licence of the workers."""
        agent = self._someone()
        if agent is not None and not agent.stuck and not agent.warden_is_stopped:
            seconds = self.world.log_between(0.3, 20.0)
            self.world.note(agent.name, "driver hangs", round(seconds, 3))
            agent.stick("driver")
            self.world.after(seconds, agent.go_on, "driver")

    def stop_warden(self) -> None:
        """SIGSTOP of the warden, often with the node cut off; its agent is well, or nobody could end the workers."""
        agent = self._someone()
        if agent is not None and "driver" not in agent.stuck and not agent.warden_is_stopped:
            seconds = self.world.log_between(0.3, 20.0)
            self.world.note(agent.name, "warden is stopped", round(seconds, 3))
            agent.stop_warden()
            self.world.after(seconds, agent.continue_warden)
            if self.world.chance(0.5):
                self._cut(agent, self.world.log_between(1.0, 10.0))

    def terminate_twice(self) -> None:
        if (agent := self._someone()) is not None:
            agent.terminate()
            self.world.after(self.world.log_between(1e-4, 1.0), agent.terminate)
            self.cluster.start_again(agent, self.world.between(2.0, 9.0))

    def terminate(self) -> None:
        if (agent := self._someone()) is not None:
            agent.terminate()
            self.cluster.start_again(agent, self.world.between(2.0, 9.0))

    def join(self) -> None:
        if sum(one.is_alive for one in self.cluster.agents) < self.setup.nodes + 3:
            is_stranger = bool(self.cluster.oracle.number) and self.world.chance(0.1)  # the first one decides what the job is
            self.cluster.start_new(is_stranger)

    def join_sick(self) -> None:
        """A newcomer that gets a seat, and cannot start a worker."""
        if sum(one.is_alive for one in self.cluster.agents) < self.setup.nodes + 3:
            self.cluster.start_new(is_stranger=False, is_sick=True)

    def close_job(self) -> None:
        if (agent := self._someone()) is not None:
            agent.close_job()

    def lose_host(self) -> None:
        host = next((one for one in self.cluster.agents if one.is_host and one.is_alive), None)
        if host is None:
            return
        how = self.world.choice(("kill", "crash", "terminate"))
        self.world.tally[f"host lost: {how}"] += 1
        if how == "terminate":
            host.terminate()
        else:
            self._kill_host(host, how == "crash")

    def lose_host_for_a_while(self) -> None:
        host = next((one for one in self.cluster.agents if one.is_host and one.is_alive), None)
        if host is not None:
            how = self.world.aside.choice(("kill", "kill", "crash"))
            self.world.tally[f"host lost: {how}"] += 1
            self._kill_host(host, how == "crash")

    def _kill_host(self, host: Agent, with_machine: bool) -> None:
        """It comes back, mostly, sooner or later than its members' fences are over, and too late now and then."""
        aside = self.world.aside
        host.die(with_machine=with_machine)
        self.cluster.engine.die(silently=with_machine)
        if aside.random() < self.setup.host_returns:
            delay_s = 0.05 * 400 ** aside.random()
            self.cluster.start_host_again(delay_s)

    # The network and the store.

    def cut(self) -> None:
        agent, seconds = self._someone(), self.world.log_between(0.1, 8.0) if self.world.chance(0.95) else 40.0
        if self.setup.is_replicated and self.world.chance(0.3):  # it comes back at the last moment, or a little too late
            seconds = self.setup.fence_s + self.world.between(-4.0, 1.0)
        if agent is not None:
            self._cut(agent, seconds)

    def depose(self) -> None:
        """The leader is cut off for just long enough to be replaced; what it sent last arrives after that."""
        if (leader := self._leader()) is not None:
            self.world.note(leader.name, "is deposed")
            leader.link.cut(up=True, down=self.world.chance(0.5))
            self.world.after(self.setup.ttl_s * self.world.between(0.7, 1.5), self._mend, leader)

    def cut_many(self) -> None:
        seconds = self.world.log_between(0.1, 8.0)
        for agent in self.cluster.agents:
            if agent.is_alive and not agent.is_host and self.world.chance(0.7):
                self._cut(agent, seconds)

    def _cut(self, agent: Agent, seconds: float) -> None:
        up, down = self.world.choice(((True, True), (True, False), (False, True)))
        self.world.note(agent.name, "is cut off", (up, down, round(seconds, 3)))
        agent.link.cut(up, down)
        self._hurt_workers(agent)
        self.world.after(seconds, self._mend, agent)

    def _mend(self, agent: Agent) -> None:
        agent.link.heal(self.world.now)

    def reset(self) -> None:
        agent = self._someone()
        if agent is not None and agent.connection is not None:
            self.world.note(agent.name, "gets a reset")
            agent.connection.reset()
            self._hurt_workers(agent)

    def reset_many(self) -> None:
        for agent in self.cluster.agents:
            if agent.is_alive and not agent.is_host and agent.connection is not None and self.world.chance(0.5):
                agent.connection.reset()

    def reset_one_side(self) -> None:
        """What the store sends is answered by a reset; the node hears nothing, and thinks that all is well."""
        agent = self._someone()
        if agent is not None and agent.connection is not None and not agent.is_host:
            self.world.note(agent.name, "is reset towards the store")
            agent.link.cut(up=False, down=True)
            agent.connection.break_server()
            self.world.after(self.world.log_between(0.5, 8.0), self._mend, agent)

    def go_far_away(self) -> None:
        """Round trips of 300 ms and more, for a while."""
        agent = self._someone()
        if agent is not None and not agent.is_host:
            agent.link.base_s = self.world.between(0.12, 0.3)

    def _hurt_workers(self, agent: Agent) -> None:
        """What hits the network hits the workers too, often enough."""
        if self.world.chance(0.5):
            self.world.after(self.world.log_between(0.001, 0.5), agent.fail, agent.group, 1, ECHO)

    def lose_reply(self) -> None:
        """The store does what it is asked next, or what it is asked next about these keys; but the answer does not come."""
        agent = self._someone()
        if agent is not None and agent.connection is not None:
            agent.connection.loses_reply_about = self.world.choice(LOST)

    def lose_request(self) -> None:
        """What this agent, mostly the leader, asks next, or next about these keys, never gets to the store."""
        agent = (self._leader() if self.world.chance(0.6) else None) or self._someone()
        if agent is not None and agent.connection is not None:
            agent.connection.loses_request_about = self.world.choice(LOST)

    def _lose_the_end(self) -> None:
        leader = self._leader()
        if leader is not None and leader.connection is not None:
            leader.connection.loses_request_about = "down/closed"

    def slow(self) -> None:
        if (agent := self._someone()) is not None:
            agent.link.slow_s = self.world.log_between(0.1, 3.0)
            self.world.after(self.world.between(1.0, 6.0), self._speed_up, agent)
            if self.world.chance(0.4):
                self.world.after(self.world.between(0.5, 4.0), self._silence, agent)

    def _silence(self, agent: Agent) -> None:
        """What it says is not heard any more, while it may still hear late answers."""
        agent.link.cut(up=True, down=self.world.chance(0.3))
        self.world.after(6.0, self._mend, agent)

    def _speed_up(self, agent: Agent) -> None:
        agent.link.slow_s = 0.0

    def pause_store(self) -> None:
        self.cluster.engine.pause(self.world.log_between(0.1, 15.0 if self.setup.is_replicated else 5.0))

    def heal(self) -> None:
        """From here on nothing goes wrong any more."""
        self.world.note("world", "heals")
        self.cluster.engine.back()
        for agent in self.cluster.agents:
            agent.link.slow_s = 0.0
            agent.link.heal(self.world.now)
            if agent.connection is not None:
                agent.connection.loses_reply_about = agent.connection.loses_request_about = None
            agent.continue_warden()
            agent.go_on("main", "driver")
