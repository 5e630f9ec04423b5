"""Which fault is next: by a seed, the same for the same job whatever its processes; by a schedule, as it says."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tests.chaos.jobs import make_job, make_node, make_scene
from tests.chaos.test_faults import schedules

from rallypoint.chaos import plan as plans
from rallypoint.chaos.faults import KINDS, SHAPES, Fault, read_fault, text_of
from rallypoint.chaos.plan import Give, Listed, Over, Seeded, Skip, Wait, foresee, left_out, open_plan, step, why_refused
from rallypoint.chaos.scene import Scene, after, what_ends, what_ends_drill, why_not
from rallypoint.chaos.schedule import Entry, read_schedule, schedule_text

seeds = st.integers(0, (1 << 63) - 1)
kinds = st.lists(st.sampled_from(KINDS), min_size=1, unique=True).map(tuple)
seeded = st.builds(Seeded, seeds, st.floats(5.0, 100.0), st.floats(0.0, 120.0), kinds)
jobs = st.builds(
    make_job, st.integers(1, 4), st.integers(1, 3), max_restarts=st.integers(0, 5), min_nodes=st.integers(1, 3),
    hosts_store=st.booleans(),
)  # fmt: skip


def faults_of(plan: plans.Plan, scene: Scene) -> list[str]:
    return [f"{entry.at_s:g} {text_of(entry.fault)}" for entry in foresee(plan, scene)]


@given(seeded, jobs, st.integers(1000, 100_000))
def test_the_same_seed_does_the_same_to_the_same_job(plan: Seeded, scene: Scene, first_pid: int) -> None:
    """Its ranks and nodes, whatever processes and hosts they are this time."""
    nodes = [
        node.replace(pid=first_pid + at, hostname=f"other-{at}", workers=tuple(one.replace(pid=7) for one in node.workers))
        for at, node in enumerate(scene.job.nodes)
    ]
    assert faults_of(plan, make_scene(*nodes)) == faults_of(plan, scene)


@given(seeded, jobs)
def test_what_is_drawn_is_possible_and_ends_neither_the_job_nor_the_drill(plan: Seeded, scene: Scene) -> None:
    for entry in foresee(plan, scene):
        assert entry.fault.kind in plan.kinds
        assert (why_not(entry.fault, scene), what_ends(entry.fault, scene), what_ends_drill(entry.fault, scene)) == ("", "", "")
        assert read_fault(text_of(entry.fault)) == entry.fault
        scene = after(entry.fault, scene)


@given(seeded, jobs)
def test_faults_come_in_time_about_as_often_as_asked_for(plan: Seeded, scene: Scene) -> None:
    times = [0.0, *(entry.at_s for entry in foresee(plan.replace(kinds=("slow",)), scene))]
    assert times[-1] <= plan.for_s
    rounding_s = 0.051
    for before, now in pairwise(times):
        assert 0.5 * plan.every_s - rounding_s <= now - before <= 1.5 * plan.every_s + rounding_s
    assert plan.for_s - times[-1] <= 1.5 * plan.every_s + rounding_s


@given(seeded, jobs)
def test_what_is_foreseen_can_be_fed_to_the_next_drill(plan: Seeded, scene: Scene) -> None:
    entries = foresee(plan, scene)
    if entries:
        again = read_schedule(schedule_text(entries), "drill")
        assert [entry.fault for entry in again] == [entry.fault for entry in entries]
        assert all(abs(one.at_s - other.at_s) < 0.001 for one, other in zip(again, entries, strict=True))


@given(seeds, st.integers(0, 1000))
def test_no_draw_depends_on_those_before(seed: int, number: int) -> None:
    scene, plan = make_job(3), Seeded(seed, 1.0, 1e9)
    further, action = step(plan, plans.Progress(number, 5.0), scene, 5.0, is_settled=True)
    assert action == Give(plans.choose(plan, number, scene))  # type: ignore[arg-type]
    assert further == plans.Progress(number + 1, plans._due_s(plan, number + 1, 5.0))


def test_everything_that_can_be_hurt_is_hurt_sooner_or_later() -> None:
    scene = make_job(3, max_restarts=10**6)
    drawn = [plans.choose(Seeded(1, 1.0, 1.0, KINDS), number, scene) for number in range(600)]
    assert {(one.kind, one.what) for one in drawn if isinstance(one, Fault)} == {
        (kind, what) for kind in KINDS for what in SHAPES[kind]
    }
    assert {one.whom for one in drawn if isinstance(one, Fault) and one.what == "rank"} == {str(rank) for rank in range(6)}
    assert {one.for_s for one in drawn if isinstance(one, Fault) and one.kind == "stop"} == {float(s) for s in range(1, 11)}
    shares = [sum(isinstance(one, Fault) and one.kind == kind for one in drawn) / len(drawn) for kind in KINDS]
    assert all(0.1 < share < 0.24 for share in shares)


def test_one_fault_at_a_time_and_only_while_all_nodes_run() -> None:
    plan, scene = Seeded(1, 10.0, 100.0), make_job(2)
    progress = open_plan(plan)
    busy = make_scene(make_node(0), make_node(1, phase="stopping"))
    assert step(plan, progress, scene, 12.0, is_settled=False) == (progress, Wait("the job does not run on all nodes yet"))
    assert step(plan, progress, busy, 12.0, is_settled=True) == (progress, Wait("the job does not run on all nodes yet"))
    late, action = step(plan, progress, scene, 60.0, is_settled=True)
    assert isinstance(action, Give)
    assert late.due_s >= 65.0  # those that were held up do not come in a bunch
    assert isinstance(step(plan, progress, scene, 100.1, is_settled=True)[1], Over)


def test_where_nothing_can_be_drawn_it_is_said_why_and_tried_again_later() -> None:
    plan, scene = Seeded(1, 10.0, 100.0, ("kill", "preempt")), make_job(1, max_restarts=0)
    further, action = step(plan, open_plan(plan), scene, 12.0, is_settled=True)
    assert isinstance(action, Skip)
    assert action.why == (
        "kill: a-job would end: it is the only node of its job; preempt: a-job would end: it is the only node of its job"
    )
    assert further.number == 1
    assert why_refused(plan, scene) == dict(left_out(plan, scene))
    assert why_refused(plan.replace(is_forced=True), scene) == {}
    assert why_refused(plan.replace(kinds=("kill", "stop")), scene) == {}


@given(schedules)
def test_a_schedule_is_followed_line_by_line(entries: tuple[Entry, ...]) -> None:
    plan, scene = Listed(entries, is_forced=True), make_job(2)
    progress = open_plan(plan)
    for entry in entries:
        assert plans.due_s(plan, progress) == entry.at_s
        progress, action = step(plan, progress, scene, entry.at_s + plans.MISSED_AFTER_S + 1.0, is_settled=False)
        assert isinstance(action, Give | Skip)
        assert action.fault == entry.fault
        assert isinstance(action, Skip) == bool(why_not(entry.fault, scene))
    assert isinstance(step(plan, progress, scene, 0.0, is_settled=False)[1], Over)


def test_a_fault_of_a_schedule_waits_for_whoever_it_hurts_but_not_for_ever() -> None:
    plan = Listed(read_schedule("+5s kill rank 9\n+5s kill rank 1", "drill"))
    progress = open_plan(plan)
    assert step(plan, progress, make_job(2), 5.0, is_settled=False) == (progress, Wait("there is no rank 9 now"))
    further, action = step(plan, progress, make_job(2), 65.0, is_settled=False)
    assert action == Skip(read_fault("kill rank 9"), "there is no rank 9 now")
    assert step(plan, further, make_job(2), 65.0, is_settled=False)[1] == Give(read_fault("kill rank 1"), 60.0)
    assert step(plan, progress, make_job(5), 7.0, is_settled=False)[1] == Give(read_fault("kill rank 9"), 2.0)


def test_what_ends_the_job_is_done_only_if_that_is_asked_for() -> None:
    plan, scene = Listed(read_schedule("+5s kill rank 1", "drill")), make_job(2, restarts=3)
    skipped = Skip(read_fault("kill rank 1"), "a-job would end: 3 of 3 restarts are spent")
    assert step(plan, open_plan(plan), scene, 5.0, is_settled=True)[1] == skipped
    assert why_refused(plan, scene) == {"line 1": "kill rank 1: a-job would end: 3 of 3 restarts are spent"}
    forced = plan.replace(is_forced=True)
    assert step(forced, open_plan(forced), scene, 5.0, is_settled=True)[1] == Give(read_fault("kill rank 1"))
    assert why_refused(forced, scene) == {}
