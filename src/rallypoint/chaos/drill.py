"""A drill: faults are given to a running job as its plan says, each is told, and what came of it.

The loop wakes for what is due, for what the guardian says, for an agent's end and for whoever wants it to stop. While it is
not known yet what came of a fault, the agents on this machine are asked ten times a second how they stand.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from rallypoint.base import defaults
from rallypoint.base.text import many
from rallypoint.chaos import plan as plans
from rallypoint.chaos.faults import AGENT, CUT, DISK, FILL, KILL, NODE, PREEMPT, RANK, STOP, Fault, read_fault, text_of
from rallypoint.chaos.grip import GoneError, Grip
from rallypoint.chaos.guard import Guard, Word
from rallypoint.chaos.outcome import LOST, Outcome, Standing, Trial, judge, outcome_text, stands
from rallypoint.chaos.plan import Give, Listed, Over, Plan, Progress, Skip, Wait, why_refused
from rallypoint.chaos.scene import Scene, find, what_ends
from rallypoint.chaos.schedule import Entry
from rallypoint.errors import RallypointError, UsageError
from rallypoint.inspection.view import NodeView

__all__ = ["Drill", "Tell", "hurt"]

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
        patience_s: float = defaults.DRILL_PATIENCE_S,
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
        scene, due = self._scene(), self._progress
        self._progress, action = plans.step(self._plan, self._progress, scene, self._now_s(), is_settled)
        match action:
            case Give(fault, late_s):
                try:
                    self._give(fault, late_s, scene)
                    self._told_waiting = ""
                except GoneError as error:
                    self._retry(due, fault, str(error))
                except RallypointError as error:
                    self._skip(fault, str(error))
            case Skip(fault, why):
                self._skip(fault, why)
            case Wait(why):
                self._wait(why)
            case Over(why):
                self._over = why

    def _wait(self, why: str) -> None:
        self._retry_s = self._now_s() + RETRY_S
        if why != self._told_waiting:
            self._told_waiting = why
            self._say("waits", why=why, text=f"waiting: {why}")

    def _retry(self, due: Progress, fault: Fault, why: str) -> None:
        """Somebody has ended since the job was looked at, as all workers do at a restart."""
        if plans.is_missed(due, self._now_s()):
            self._skip(fault, why)
        else:
            self._progress = due
            self._wait(why)

    def _scene(self) -> Scene:
        return self._grip.scene([fault for fault, _ in self._held.values()], self._cannot)

    def _skip(self, fault: Fault | None, why: str) -> None:
        self.skipped += 1
        what = text_of(fault) if fault is not None else ""
        self._say("skipped", fault=what, why=why, text=f"{what} is skipped: {why}" if what else f"nothing to do: {why}")

    def _give(self, fault: Fault, late_s: float, scene: Scene) -> None:
        node = find(fault, scene)
        if isinstance(node, str):
            return
        number = self._count = self._count + 1
        self.standing = before = stands(self._grip.look(), self._now_s())
        given_s = self._now_s()
        done = self._do(number, fault, node, scene)
        until_s = self._now_s() + fault.for_s if fault.is_lasting else 0.0
        changes = (fault.takes_restart or fault.takes_node) and node.node_rank is not None and bool(node.workers)
        self._trials[number] = Trial(number, fault, given_s, before, until_s, changes)
        late = f", {late_s:.1f} s late" if late_s > plans.ON_TIME_S else ""
        about = {"fault": text_of(fault), "did": done, "node": node.node, "hostname": node.hostname}
        self._say("fault", number, **about, text=f"{text_of(fault)}{_where(fault, node)}: {done}{late}")

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
            self._keep(number, fault, node, self._guard.hold(number, FILL, fault.for_s, folder=folder, size=fault.size))
            return f"the {fault.what} {f'of {folder}' if folder else 'of this machine'} is being filled"
        seized = self._grip.seize(fault, node)
        try:
            how = (number, fault.kind, fault.for_s, seized.pidfds, seized.pids)
            self._keep(number, fault, node, words := self._guard.hold(*how, percent=fault.percent))
        finally:
            seized.close()
        if fault.kind == CUT:
            return f"{many(int(words[-1].text), 'connection')} of {seized.text} hear nothing more"
        if fault.kind == STOP:
            return f"SIGSTOP to {seized.text}"
        return f"SIGSTOP and SIGCONT in turn to {seized.text}, to run {fault.percent}% of the time"

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

    @property
    def unjudged(self) -> int:
        """Of how many faults it was not known yet what came of them."""
        return len(self._trials)

    def _say(self, event: str, number: int = 0, **about: object) -> None:
        told: dict[str, object] = {"event": event, "at_s": round(self._now_s(), 3), "time": time.time()}
        self._tell({**told, **({"number": number} if number else {}), **about})


def _where(fault: Fault, node: NodeView) -> str:
    """What the fault itself does not say."""
    if fault.what != RANK:
        return f" ({node.node})"
    return f" on {node.node}" if node.node_rank is None else f" on node {node.node_rank} ({node.node})"


def hurt(text: str, job: str, patience_s: float) -> Outcome:
    """Give one fault to a job now, and wait for what comes of it."""
    try:
        fault = read_fault(text)
    except ValueError as error:
        raise UsageError(str(error)) from None
    grip = Grip(job)
    try:
        plan = Listed((Entry(0.0, fault),))
        if why := why_refused(plan, grip.first_scene()):
            raise UsageError("; ".join(why.values()))
        said: list[dict[str, object]] = []
        with Guard() as guard:
            drill = Drill(grip, guard, plan, said.append, patience_s)
            drill.run()
    finally:
        grip.close()
    if not drill.outcomes:
        raise RallypointError(str(said[-1]["text"]))
    return drill.outcomes[0]
