"""Which event spends which budget, and whether the job goes on: one purse for the whole job, and in it a budget for each cause.

A generation ends because a worker failed, a node was lost, left or was taken away, or somebody joined; often several of these at
once, because each causes others. It is judged once, when the next generation is formed and it is known who is gone: a lost
node, then one that left, explains the failures around it, so only failures with no such explanation are paid as failures.
One generation pays at most once, from one purse, however many nodes or workers were part of it.

A node that had notice to leave is nobody's fault, and on spot machines it is what happens all day. It is counted, and no limit
but its own (`max_preemptions`) counts it: one on nodes that are lost, leave or join is there to end a job that is in trouble.

What was spent is a `Purse`. It travels in the generation record, so it is one for all nodes and outlives any leader. It holds
ages instead of times, because no two hosts share a clock: whoever judges next adds how long the purse has lain there, on its
own clock. A leader that saw it late adds too little, which forgives later, never sooner.

What cannot succeed is not tried again, whatever is left. The program may have said so: by an exit code that was listed, or by
`rallypoint.worker.fail`. Or it is plain: all workers raised the same ImportError before the first step, or the same
one ended attempt after attempt (`_why_hopeless`). Only what no other attempt can change counts as plain: whatever the network, a
disk, a device or another worker may be to blame for is tried again, also if it strikes all workers at once.

In between are errors such as a ValueError (`DOUBTFUL_ERRORS`): a wrong argument raises one in all workers, and so does a
configuration that a server in trouble has sent. To give up too late costs a start, to give up too early costs the job. So the
same one, at the same place and in all workers, is believed only the second time, and only if it has been there for
`LASTING_S`: a program that fails within a second is cheap to start again until then, and one that takes minutes to fail, on a
thousand machines, is started twice. An error whose words name somebody else, or None, which is what an answer that never came
is, and those that libraries raise for whatever the machine does (RuntimeError, OSError and all of their own) are left alone.

Invariants: within any window, or ever when there is none, at most `max_restarts` failures are paid; nothing that was spent is
given back except by the window, or by an attempt that ran for `healthy_after_s`; every answer says why.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from rallypoint.base import defaults
from rallypoint.base.records import Value
from rallypoint.base.text import listed, many, plural, without_numbers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    Membership = Literal["loss", "departure", "preemption", "join"]
    Kind = Literal["failure", "none"] | Membership

__all__ = [
    "AGES_MAX",
    "CAUSES",
    "DOUBTFUL_ERRORS",
    "EXCLUDE_NODE",
    "HOPELESS_ERRORS",
    "HOPELESS_IN_A_ROW",
    "LASTING_S",
    "NO_RETRY",
    "WISHES",
    "Again",
    "Ended",
    "Failure",
    "GiveUp",
    "Purse",
    "RestartPolicy",
    "ended_text",
    "judge",
    "looks_doubtful",
    "looks_hopeless",
    "matters_if_shared",
]  # fmt: skip

# Who pays for which end: the cause, its counter in the purse, and the setting or flag that bounds it. Best explanation first.
CAUSES: tuple[tuple[str, str, str], ...] = (
    ("a node was lost", "losses", "max_node_losses"),
    ("a node left", "departures", "max_departures"),
    ("a worker had its node left out", "departures", "max_departures"),
    ("a node left after notice", "preemptions", "max_preemptions"),
    ("a worker hung", "hangs", "max_hangs"),
    ("a worker failed", "failures", "max_restarts"),
    ("a node joined", "joins", "max_joins"),
)
# The changes of members among them: their counter, their limit, and what one of them is called.
_MEMBERSHIP: dict[Membership, tuple[str, str, str]] = {
    "loss": ("losses", "max_node_losses", "node loss"),
    "departure": ("departures", "max_departures", "departure"),
    "preemption": ("preemptions", "max_preemptions", "preemption"),
    "join": ("joins", "max_joins", "join"),
}

# --- what cannot succeed ---------------------------------------------------------------------------------------------------

NO_RETRY, EXCLUDE_NODE = WISHES = ("no_retry", "exclude_node")  # what a worker that fails can ask for

# Errors of the program text itself, which the next attempt reads again.
HOPELESS_ERRORS = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError", "NameError")
# Errors about values that the program has in hand, which may have come from somewhere: believed when they repeat themselves.
DOUBTFUL_ERRORS = (
    "AssertionError", "AttributeError", "IndexError", "KeyError", "NotImplementedError", "TypeError", "UnboundLocalError",
    "ValueError", "ZeroDivisionError",
)  # fmt: skip
LASTING_S = 30.0  # from the first such attempt to the last: what passes by itself has mostly passed
HOPELESS_IN_A_ROW = 3  # attempts that one of those errors has ended; a node that alone has it is left out before that
_USAGE_EXIT_CODE = 2  # argparse's, whose last line names the program and the error
_COMMAND_EXIT_CODES = (126, 127)  # a shell's for what it could not find or execute
# What an error says, in lower case, if something outside of the program may be to blame, a file server for example.
_MAY_PASS = (
    "connection", "timed out", "timeout", "temporar", "unreachable", "input/output error", "stale file handle",
    "too many open files", "cannot allocate memory", "no space left", "failed to map segment",
)  # fmt: skip
# The same of an error about a value: whom that may have come from.
_MAY_COME_FROM = (
    "nonetype", "http", "url", "server", "socket", "remote", "download", "nccl", "gloo", "cuda", "device", "memory",
)  # fmt: skip


def looks_hopeless(exitcode: int, message: str, place: str) -> bool:
    """Whether a worker that ended so would do so again, if it did not stand alone with it."""
    words = "".join(message.lower().split("'")[::2])  # not the names: a module may be called connection
    if any(word in words for word in _MAY_PASS):
        return False
    if exitcode > 0 and _error_name(message) in HOPELESS_ERRORS:
        return True
    if exitcode in _COMMAND_EXIT_CODES:
        return True
    return exitcode == _USAGE_EXIT_CODE and (": error: " in place or place.startswith("Error: "))


def looks_doubtful(exitcode: int, message: str) -> bool:
    """Whether a worker that ended so may do so again, if all do, and if it has lasted."""
    words, is_doubtful = message.lower(), exitcode > 0 and _error_name(message) in DOUBTFUL_ERRORS
    return is_doubtful and not any(word in words for word in (*_MAY_PASS, *_MAY_COME_FROM))


def matters_if_shared(exitcode: int, message: str, place: str, streak_of: str) -> bool:
    """Whether it makes a difference if all workers failed so; `streak_of` is the purse's."""
    if looks_hopeless(exitcode, message, place):
        return True
    return looks_doubtful(exitcode, message) and _whoever(streak_of) == _what(exitcode, message, place)


def _error_name(message: str) -> str:
    return message.partition(":")[0].strip()


def _what(exitcode: int, message: str, place: str) -> str:
    """Equal for failures that are the same."""
    return f"{f'{exitcode} {without_numbers(message)}'[:_SIGNATURE_CHARS_MAX]} {place[:_PLACE_CHARS_MAX]}"


def _whoever(signature: str) -> str:
    """Without whose failure it was."""
    return signature.partition(": ")[2] if signature.startswith("rank ") else signature


# --- budgets ---------------------------------------------------------------------------------------------------------------

AGES_MAX = 64  # the purse is part of a small record; so a window holds at most so many restarts, even where more were asked for
_DOUBLINGS_MAX = 62  # any back-off has reached its cap long before
_NAMES_MAX = 4
_NAME_CHARS_MAX = 64
_FAILURE_CHARS_MAX = 500
_SIGNATURE_CHARS_MAX = _PLACE_CHARS_MAX = 60  # in the same small record


class RestartPolicy(Value):
    max_restarts: int
    no_retry_exit_codes: tuple[int, ...] = ()  # they can never succeed; -N: ended by signal N
    backoff_s: float = defaults.RESTART_BACKOFF_S  # before the second restart for a failure, then doubled each time; 0: none
    max_backoff_s: float = defaults.RESTART_BACKOFF_MAX_S
    window_s: float = defaults.RESTART_WINDOW_S  # failures older than this are forgiven; 0: never
    max_membership_changes: int | None = None  # joins, losses and departures together, but no preemptions; None: no limit
    max_hangs: int | None = None  # None: a hang is paid for as any failure
    healthy_after_s: float = defaults.HEALTHY_AFTER_S  # an attempt that ran so long gives back what was spent; 0: none does
    max_no_progress: int | None = None  # attempts in a row that came no further than one before, by the workers' steps
    max_same_failures: int | None = None  # in a row, of the same rank at the same place, early in each attempt
    retry_hopeless: bool = False
    # Each with its own limit, beside the one on all of them; None: no limit.
    max_node_losses: int | None = None
    max_departures: int | None = None
    max_preemptions: int | None = None
    max_joins: int | None = None
    early_s: float = defaults.EARLY_FAILURE_S  # of an attempt; what fails later may have another reason than the program


class Purse(Value):
    """What has been spent so far."""

    failures: int = 0  # all that were ever paid, forgiven ones too
    losses: int = 0
    departures: int = 0
    joins: int = 0
    recent_ages_s: tuple[float, ...] = ()  # of the failures inside the window, oldest first, when this purse was written
    forgiven: int = 0  # of all failures
    hangs: int = 0  # that were paid for apart
    streak_of: str = ""  # how the last attempts failed, if it was early and the same each time
    streak: int = 0
    best_step: int = -1  # the furthest that workers have told of
    fruitless: int = 0  # attempts since then that failed before they were as far
    preemptions: int = 0
    repeats: int = 0  # attempts in a row that failed as `streak_of` says, whichever rank it was
    repeats_s: float = 0.0  # from the first of them to the last, at least

    @property
    def membership_changes(self) -> int:
        """Those that `max_membership_changes` bounds."""
        return self.losses + self.departures + self.joins

    def most(self, other: Purse) -> Purse:
        """What was spent by both accounts: the more of each; what else there is, as the other has it."""
        return other.replace(
            failures=max(self.failures, other.failures),
            losses=max(self.losses, other.losses),
            departures=max(self.departures, other.departures),
            joins=max(self.joins, other.joins),
            hangs=max(self.hangs, other.hangs),
            preemptions=max(self.preemptions, other.preemptions),
            recent_ages_s=max(self.recent_ages_s, other.recent_ages_s, key=len),
        )


class Failure(Value):
    """The failure that ended a generation."""

    rank: int
    exitcode: int
    message: str
    place: str = ""  # where in the program, as far as is known
    is_everywhere: bool = False  # all workers of the job failed just so
    is_hang: bool = False

    @property
    def looks_hopeless(self) -> bool:
        return looks_hopeless(self.exitcode, self.message, self.place)

    @property
    def looks_doubtful(self) -> bool:
        return looks_doubtful(self.exitcode, self.message)

    @property
    def signature(self) -> str:
        """Equal for failures that are the same. An error of the program text is the same whoever came to it first."""
        who = "" if self.looks_hopeless else f"rank {self.rank}: "
        return who + _what(self.exitcode, self.message, self.place)


class Ended(Value):
    """How a generation ended."""

    failed_exit_codes: tuple[int, ...] = ()  # of the workers that failed by themselves, the cause first
    failure: str = ""  # the cause, in a sentence
    lost: tuple[str, ...] = ()
    departed: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    ran_s: float = 0.0  # how long ago the purse was written
    excluded: tuple[str, ...] = ()  # nodes of which their own workers have said that they are bad, and that are left out
    cause: Failure | None = None
    after_s: float = 0.0  # how long the workers ran until it failed
    step: int = -1  # how far they came, if they tell
    no_retry: str = ""  # which worker has said that no restart will help, and why
    preempted: tuple[str, ...] = ()  # nodes that are gone after they had notice to leave, whichever way they went


class Again(Value):
    """The next generation may begin after `delay_s`, with this purse in its record."""

    purse: Purse
    delay_s: float
    kind: Kind
    why: str


class GiveUp(Value):
    """There is no other attempt; with `is_hopeless`, because none could succeed, and not because none is left."""

    why: str
    is_hopeless: bool = False


def judge(policy: RestartPolicy, purse: Purse, ended: Ended) -> Again | GiveUp:
    """Whether there is another generation, and who pays for it.

    It changes nothing, so a leader can ask beforehand: joiners that no budget would pay for are better kept waiting than let in.
    """
    hopeless = [code for code in ended.failed_exit_codes if code in policy.no_retry_exit_codes]
    if hopeless:
        why = f"a worker {ended_text(hopeless[0])}, which no restart can help (no-retry exit codes)"
        return GiveUp(_with_failure(ended, why), is_hopeless=True)
    if ended.no_retry:
        return GiveUp(_with_failure(ended, f"{ended.no_retry[:_FAILURE_CHARS_MAX]}: no restart can help"), is_hopeless=True)
    purse = _given_back(policy, purse.replace(recent_ages_s=_grown_older(policy, purse, ended.ran_s)), ended)
    if ended.lost:
        return _change_members(policy, purse, "loss", f"lost {_nodes(ended.lost)}")
    if ended.departed:
        return _change_members(policy, purse, "departure", f"{_nodes(ended.departed)} left")
    if ended.excluded:
        what = f"{_nodes(ended.excluded)} is left out: {ended.cause.message if ended.cause else ended.failure}"
        return _change_members(policy, purse, "departure", what[:_FAILURE_CHARS_MAX])
    if ended.preempted:
        return _change_members(policy, purse, "preemption", f"{_nodes(ended.preempted)} left after notice")
    if ended.failed_exit_codes:
        return _pay_for_failure(policy, purse, ended)
    if ended.joined:
        return _change_members(policy, purse, "join", f"{_nodes(ended.joined)} joined")
    return Again(purse, 0.0, "none", ended.failure or "nobody failed, left or joined")


def _grown_older(policy: RestartPolicy, purse: Purse, ran_s: float) -> tuple[float, ...]:
    """The failures that are still inside the window, as old as they are now; none are kept where there is no window."""
    ages_s = [age_s + max(ran_s, 0.0) for age_s in purse.recent_ages_s[-AGES_MAX:]]
    return tuple(age_s for age_s in ages_s if policy.window_s > 0 and age_s <= policy.window_s)


def _given_back(policy: RestartPolicy, purse: Purse, ended: Ended) -> Purse:
    """After a healthy attempt all is as if nothing had been spent before it, whatever has ended it; workers go on counting."""
    if not 0 < policy.healthy_after_s <= ended.after_s:
        return purse
    return purse.replace(forgiven=purse.failures, hangs=0, recent_ages_s=(), losses=0, departures=0, preemptions=0, joins=0)


def _pay_for_failure(policy: RestartPolicy, purse: Purse, ended: Ended) -> Again | GiveUp:
    limit = min(policy.max_restarts, AGES_MAX) if policy.window_s > 0 else policy.max_restarts
    purse = _remember(policy, purse, ended)
    if ended.cause is not None and ended.cause.is_hang and policy.max_hangs is not None:
        return _pay_for_hang(policy.max_hangs, purse, ended)
    if limit <= 0:
        return GiveUp(_with_failure(ended, "no restarts were asked for (--max-restarts)"))
    if why := _why_hopeless(policy, purse, ended):
        return GiveUp(_with_failure(ended, why), is_hopeless=True)
    number = 1 + (len(purse.recent_ages_s) if policy.window_s > 0 else purse.failures - purse.forgiven)
    within = f" within {policy.window_s:g} s" if policy.window_s > 0 else ""
    if number > limit:
        return GiveUp(_with_failure(ended, _used_up(limit, "restart", within)))
    delay_s = _backoff_s(policy, number)
    after = f", after {delay_s:g} s" if delay_s else ""
    ages_s = (*purse.recent_ages_s, 0.0) if policy.window_s > 0 else ()
    paid = purse.replace(failures=purse.failures + 1, recent_ages_s=ages_s)
    return Again(paid, delay_s, "failure", _with_failure(ended, f"restart {number} of {limit}{within}{after}"))


def _pay_for_hang(limit: int, purse: Purse, ended: Ended) -> Again | GiveUp:
    number = purse.hangs + 1
    if number > limit:
        none_left = _used_up(limit, "restart", " after a hang") if limit else "a hang is not retried (max_hangs)"
        return GiveUp(_with_failure(ended, none_left))
    return Again(purse.replace(hangs=number), 0.0, "failure", _with_failure(ended, f"restart {number} of {limit} after a hang"))


def _remember(policy: RestartPolicy, purse: Purse, ended: Ended) -> Purse:
    """What this failure has in common with those before."""
    if ended.step > purse.best_step:
        purse = purse.replace(best_step=ended.step, fruitless=0)
    elif purse.best_step >= 0:
        purse = purse.replace(fruitless=purse.fruitless + 1)
    if ended.cause is None or ended.after_s > policy.early_s or ended.step >= 0:
        return purse.replace(streak_of="", streak=0, repeats=0, repeats_s=0.0)
    signature = ended.cause.signature
    is_repeated = purse.repeats > 0 and _whoever(signature) == _whoever(purse.streak_of)
    return purse.replace(
        streak_of=signature,
        streak=purse.streak + 1 if signature == purse.streak_of else 1,
        repeats=purse.repeats + 1 if is_repeated else 1,
        repeats_s=purse.repeats_s + max(ended.ran_s, 0.0) if is_repeated else 0.0,
    )


def _why_hopeless(policy: RestartPolicy, purse: Purse, ended: Ended) -> str:
    """Why another attempt would end as this one did; empty where it may not."""
    most = policy.max_no_progress
    if most is not None and purse.fruitless > 0 and purse.fruitless >= most:
        attempts = "the last attempt has" if purse.fruitless == 1 else f"the last {purse.fruitless} attempts have"
        return f"{attempts} not come past step {purse.best_step} (--max-no-progress {most})"
    most = policy.max_same_failures
    if most is not None and purse.streak > 0 and purse.streak >= most:
        return f"{many(purse.streak, 'attempt')} in a row ended so (max_same_failures={most})"
    cause = ended.cause
    if policy.retry_hopeless or cause is None or not purse.streak:
        return ""
    return _why_program(purse, ended, cause)


def _why_program(purse: Purse, ended: Ended, cause: Failure) -> str:
    """Why an early failure lies in the program itself."""
    if not cause.looks_hopeless:
        if cause.is_everywhere and purse.repeats > 1 and purse.repeats_s >= LASTING_S and cause.looks_doubtful:
            in_a_row = f"{purse.repeats} attempts in a row, over {purse.repeats_s:.0f} s, ended so at their start"
            return f"{in_a_row}, this one in all workers: no restart can help (--retry-hopeless tries)"
        return ""
    if cause.is_everywhere:
        return f"all workers failed so, {ended.after_s:.1f} s after their start: no restart can help (--retry-hopeless tries)"
    if purse.streak >= HOPELESS_IN_A_ROW:
        return f"{purse.streak} attempts in a row ended so at their start: no restart can help (--retry-hopeless tries)"
    return ""


def _used_up(count: int, what: str, within: str = "") -> str:
    return f"the one {what}{within} is used up" if count == 1 else f"all {count} {_several(what)}{within} are used up"


def _several(what: str) -> str:
    return f"{what}es" if what.endswith("s") else f"{what}s"


def _backoff_s(policy: RestartPolicy, number: int) -> float:
    """None before the first restart: most failures happen once, and then waiting only costs."""
    if number < 2 or policy.backoff_s <= 0:
        return 0.0
    return max(min(policy.backoff_s * 2.0 ** min(number - 2, _DOUBLINGS_MAX), policy.max_backoff_s), 0.0)


def _change_members(policy: RestartPolicy, purse: Purse, kind: Membership, what: str) -> Again | GiveUp:
    """A change of members is not the program's fault: it costs no restart and no waiting, only budgets of its own, if any."""
    counter, setting, named = _MEMBERSHIP[kind]
    number, most = 1 + getattr(purse, counter), getattr(policy, setting)
    if most is not None and number > most:
        return GiveUp(f"{what}; {_none_left(most, named)} ({setting})")
    paid = purse.replace(**{counter: number})
    own = f"{named} {number}" + ("" if most is None else f" of {most}")
    if kind == "preemption":
        return Again(paid, 0.0, kind, f"{what}; {own}")
    together, most_together = paid.membership_changes, policy.max_membership_changes
    if most_together is not None and together > most_together:
        return GiveUp(f"{what}; {_none_left(most_together, 'membership change')}")
    told = f"membership change {together}" + ("" if most_together is None else f" of {most_together}")
    return Again(paid, 0.0, kind, f"{what}; {told}" + ("" if most is None else f", {own}"))


def _none_left(most: int, what: str) -> str:
    return _used_up(most, what) if most else f"no {_several(what)} are allowed"


def _with_failure(ended: Ended, outcome: str) -> str:
    return f"{ended.failure[:_FAILURE_CHARS_MAX]}; {outcome}" if ended.failure else outcome


def ended_text(exit_code: int) -> str:
    """How a process ended, for a sentence about it."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was ended by signal {-exit_code}"


def _nodes(names: Sequence[str]) -> str:
    """A rack that goes at once is not listed in full."""
    return f"{plural(len(names), 'node')} {listed([name[:_NAME_CHARS_MAX] for name in names], _NAMES_MAX)}"
