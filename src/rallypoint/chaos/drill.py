"""A drill: faults are given to a running job as its plan says, each is told, and what came of it.

The loop wakes for what is due, for what the guardian says, for an agent's end and for whoever wants it to stop. While it is
not known yet what came of a fault, the agents on this machine are asked ten times a second how they stand.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from rallypoint.base.text import many
from rallypoint.chaos import plan as plans
from rallypoint.chaos.faults import AGENT, CUT, DISK, FILL, KILL, NODE, PREEMPT, STOP, Fault, text_of
from rallypoint.chaos.grip import Grip
from rallypoint.chaos.guard import Guard, Word
from rallypoint.chaos.outcome import LOST, Outcome, Standing, Trial, judge, outcome_text, stands
from rallypoint.chaos.plan import Give, Over, Plan, Skip, Wait
from rallypoint.chaos.scene import Scene, find, what_ends
from rallypoint.errors import RallypointError
from rallypoint.inspection.view import NodeView

__all__ = ["PATIENCE_S", "Drill", "Tell"]

PATIENCE_S = 120.0  # for a job to run again
LOOK_S, IDLE_S = 0.1, 1.0
RETRY_S = 0.25  # for whoever is not there to be hurt
UNDONE_WITHIN_S = 5.0
Tell = Callable[[dict[str, object]], None]


class Drill:
    """One drill; `run` is called once. What is told are events, each with its time and a text, as documented.

    It ends when the plan is over, when the job is, or when `is_unwanted` says so, which is asked when `wake_fd` is readable.
    """

    def __init__(
        self,
        grip: Grip,
        guard: Guard,
        plan: Plan,
        tell: Tell,
        patience_s: float = PATIENCE_S,
        wake_fd: int | None = None,
        is_unwanted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._grip, self._guard, self._plan, self._tell = grip, guard, plan, tell
        self._patience_s, self._wake_fd, self._is_unwanted = patience_s, wake_fd, is_unwanted
        self.outcomes: list[Outcome] = []
        self.skipped = 0
        self.standing = Standing(0.0)
        self._began_at = time.monotonic()
        self._progress = plans.open_plan(plan)
        self._cannot = grip.cannot()
        self._trials: dict[int, Trial] = {}
        self._held: dict[int, tuple[Fault, NodeView]] = {}
        self._count = 0
        self._told_waiting = self._over = ""
        self._retry_s = 0.0

    def run(self) -> None:
        """Until the plan is over, the job is, or it is unwanted; what lasts is undone by then."""
        try:
            while not self._is_over():
                self._look()
                if not self._over and self._now_s() >= self._due_s():
                    self._advance()
                self._rest()
        finally:
            self._undo_all()
        self._look()

    def _is_over(self) -> bool:
        if self._is_unwanted():
            self._over = "it was ended"
            return True
        is_lost = any(one.kind == LOST for one in self.outcomes)
        return is_lost or self.standing.end is not None or (bool(self._over) and not self._trials and not self._held)

    # --- what is next ----------------------------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        return time.monotonic() - self._began_at

    def _due_s(self) -> float:
        return max(plans.due_s(self._plan, self._progress), self._retry_s)

    def _advance(self) -> None:
        is_settled = not self._trials
        if isinstance(self._plan, plans.Seeded) and not is_settled:  # so what is seen would not matter
            return
        scene = self._scene()
        self._progress, action = plans.step(self._plan, self._progress, scene, self._now_s(), is_settled)
        match action:
            case Give(fault, late_s):
                self._told_waiting = ""
                self._give(fault, late_s, scene)
            case Skip(fault, why):
                self._skip(fault, why)
            case Wait(why):
                self._retry_s = self._now_s() + RETRY_S
                if why != self._told_waiting:
                    self._told_waiting = why
                    self._say("waits", text=f"waiting: {why}")
            case Over(why):
                self._over = why

    def _scene(self) -> Scene:
        return self._grip.scene([fault for fault, _ in self._held.values()], self._cannot)

    def _skip(self, fault: Fault | None, why: str) -> None:
        self.skipped += 1
        what = text_of(fault) if fault is not None else ""
        self._say(
            "skipped", fault=what, why=why, text=f"{what or 'nothing'} is skipped: {why}" if what else f"nothing to do: {why}"
        )

    def _give(self, fault: Fault, late_s: float, scene: Scene) -> None:
        node = find(fault, scene)
        if isinstance(node, str):
            return
        number = self._count = self._count + 1
        self.standing = before = stands(self._grip.look(), self._now_s())
        given_s = self._now_s()
        try:
            done = self._do(number, fault, node, scene)
        except RallypointError as error:
            self._skip(fault, str(error))
            return
        until_s = self._now_s() + fault.for_s if fault.is_lasting else 0.0
        changes = (fault.takes_restart or fault.takes_node) and node.node_rank is not None and bool(node.workers)
        self._trials[number] = Trial(number, fault, given_s, before, until_s, changes)
        late = f", {late_s:.1f} s late" if late_s > plans.ON_TIME_S else ""
        about = {"fault": text_of(fault), "did": done, "node": node.node, "hostname": node.hostname}
        self._say("fault", number, **about, text=f"{text_of(fault)}: {done} on {_name(node)}{late}")

    def _do(self, number: int, fault: Fault, node: NodeView, scene: Scene) -> str:
        is_end = bool(what_ends(fault, scene))
        if fault.kind == KILL:
            return self._grip.kill(fault, node, is_end)
        if fault.kind == PREEMPT:
            return self._grip.preempt(fault, node, self._plan.is_forced, is_end)
        return self._hold(number, fault, node)

    def _hold(self, number: int, fault: Fault, node: NodeView) -> str:
        if fault.kind == FILL:
            folder = node.log_dir if fault.what == DISK else ""
            self._keep(number, fault, node, self._guard.hold(number, FILL, fault.for_s, (), folder=folder, size=fault.size))
            return f"the {fault.what} {f'of {folder}' if folder else 'of this machine'} is being filled"
        seized = self._grip.seize(fault, node)
        try:
            more = {"pid": node.pid} if fault.kind == CUT else {"percent": fault.percent}
            self._keep(number, fault, node, words := self._guard.hold(number, fault.kind, fault.for_s, seized.pidfds, **more))
        finally:
            seized.close()
        if fault.kind == CUT:
            return f"{many(int(words[-1].text), 'connection')} of {seized.text} hear nothing more"
        return f"{seized.text} {'stand' if fault.kind == STOP else f'run {fault.percent}% of the time'}"

    def _keep(self, number: int, fault: Fault, node: NodeView, words: list[Word]) -> None:
        self._held[number] = (fault, node)
        if fault.kind == STOP and fault.what in (AGENT, NODE):
            self._grip.set_quiet(node, True)
        for word in words[:-1]:
            self._heed(word)

    # --- what comes of it ------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        for word in self._guard.hear():
            self._heed(word)
        nodes = self._grip.look()
        self.standing = stands(nodes, self._now_s(), self._grip.end())
        for number, trial in list(self._trials.items()):
            if number in self._held and self.standing.end is None:
                continue
            outcome = judge(trial, self.standing, self._patience_s)
            if outcome is not None:
                del self._trials[number]
                self.outcomes.append(outcome)
                about = {"fault": text_of(trial.fault), "outcome": outcome.kind, "after_s": round(outcome.after_s, 3)}
                about |= {"generation": self.standing.generation, "restarts": outcome.restarts}
                self._say("outcome", number, **about, text=f"{text_of(trial.fault)}: {outcome_text(outcome)}")

    def _heed(self, word: Word) -> None:
        """What the guardian says."""
        if word.what == "news" and word.number in self._held:
            fault, _ = self._held[word.number]
            self._say("held", word.number, fault=text_of(fault), text=f"{text_of(fault)}: {word.text}")
        if word.what != "off" or word.number not in self._held:
            return
        fault, node = self._held.pop(word.number)
        self._grip.set_quiet(node, False)
        if (trial := self._trials.get(word.number)) is not None:
            self._trials[word.number] = trial.replace(held_until_s=self._now_s())
        why = f" ({word.text})" if word.text else ""
        self._say("undone", word.number, fault=text_of(fault), text=f"{text_of(fault)}: it is undone{why}")

    def _rest(self) -> None:
        """Until something is due, or comes."""
        poll = select.poll()
        for fd in (self._guard.fileno() if not self._guard.is_lost else None, self._wake_fd, *self._grip.filenos()):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        look_s = LOOK_S if any(number not in self._held for number in self._trials) else IDLE_S
        due_s = self._due_s() - self._now_s() if not self._over else look_s
        is_stalled = due_s <= 0  # by what has not been judged yet
        poll.poll(1000 * (LOOK_S if is_stalled else min(look_s, due_s)))

    def _undo_all(self) -> None:
        for number in list(self._held):
            self._guard.release(number)
        ends_at = time.monotonic() + UNDONE_WITHIN_S
        while self._held and (left_s := ends_at - time.monotonic()) > 0:
            for word in self._guard.hear(left_s):
                self._heed(word)

    def _say(self, event: str, number: int = 0, **about: object) -> None:
        told: dict[str, object] = {"event": event, "at_s": round(self._now_s(), 3), "time": time.time()}
        self._tell({**told, **({"number": number} if number else {}), **about})


def _name(node: NodeView) -> str:
    rank = "" if node.node_rank is None else f"node {node.node_rank} "
    return f"{rank}({node.node})"
