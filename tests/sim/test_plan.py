"""Plans: the smallest size that reaches a target, found by simulation."""

from __future__ import annotations

import pytest

from tangram.errors import InvalidConfig
from tangram.sim.compare import Setup, Source, compare
from tangram.sim.plan import Plan, PlanRequest, Point, plan, reserved_today
from tangram.sim.size import Size, default_size


def question(workload: str = "coding", batch: int = 16, **changes) -> PlanRequest:
    source = Source(workload=workload, batch=batch)
    fields = {"source": source, "size": default_size(source.build(0)), "seeds": (0, 1)}
    return PlanRequest(**(fields | changes))


@pytest.fixture(scope="module")
def answer() -> Plan:
    return plan(question(), workers=1)


def test_todays_reservation_is_half_a_core_for_every_trajectory(answer: Plan) -> None:
    assert (answer.like, answer.reference.size) == ("pods:0.5", 8)
    assert answer.target_s == answer.reference.act_mean_s


def test_the_smallest_size_reaches_the_target_and_the_next_smaller_one_misses(answer: Plan) -> None:
    sizes = [point.size for point in answer.points]
    assert sizes == sorted(sizes)
    smallest = next(point for point in answer.points if point.size == answer.smallest)
    below = next((point for point in reversed(answer.points) if point.size < answer.smallest), None)
    assert answer.reaches(smallest)
    assert below is not None and not answer.reaches(below)
    assert answer.smallest - below.size == 1


def test_fewer_cores_are_needed_than_are_reserved(answer: Plan) -> None:
    assert 0.0 < answer.saved < 1.0
    assert answer.saved == 1.0 - answer.smallest / 8
    assert f"with {answer.smallest} cores" in answer.sentence()


def test_the_points_are_what_a_comparison_finds(answer: Plan) -> None:
    point = answer.points[0]
    source = Source(workload="coding", batch=16)
    setup = Setup(source=source, size=Size(cores=point.size), policies=("adaptive",), seeds=(0, 1))
    assert compare([setup], workers=1)[0].mean("adaptive", "act_mean_s") == pytest.approx(point.act_mean_s)


def test_the_same_plan_with_one_process_and_with_several() -> None:
    assert plan(question(batch=6), workers=2) == plan(question(batch=6), workers=1)


def test_a_target_in_seconds_takes_the_place_of_todays() -> None:
    generous = plan(question(act_s=100.0, seeds=(0,)), workers=1)
    assert generous.target_s == 100.0
    assert generous.smallest < 8


def test_a_target_that_no_size_reaches_has_no_answer() -> None:
    answer = plan(question(act_s=1e-6, seeds=(0,), batch=6), workers=1)
    assert answer.smallest is None and answer.saved is None
    assert "does not reach" in answer.sentence()


def test_the_search_ends_where_more_cores_change_nothing() -> None:
    """Three trajectories never use more than 16 cores, so of 16, 32, 64, 128 and 256 the last three are not tried."""
    answer = plan(question(act_s=1e-6, seeds=(0,), batch=3, like_size=16), workers=1)
    before, last = answer.points[-2:]
    assert (before.size, last.size) == (16, 32)
    assert last.act_mean_s == pytest.approx(before.act_mean_s, rel=0.001)
    assert f"From {before.size} cores on, more of them change nothing" in answer.sentence()


def test_cores_are_not_sized_for_work_that_uses_none_whatever_it_is_compared_with() -> None:
    with pytest.raises(InvalidConfig, match="search uses no cores"):
        plan(question("search", 6, resource="cores", like="paper", like_size=8, seeds=(0,)), workers=1)


def test_devices_are_sized_against_fixed_devices_for_each_service() -> None:
    answer = plan(question("teachers", 120, resource="devices", target="p95", seeds=(0,)), workers=1)
    assert answer.reference.size == 40
    assert answer.smallest < 40
    assert 0.0 < answer.points[0].use <= 1.0


def test_a_plan_against_a_policy_on_a_given_size() -> None:
    answer = plan(question("elastic", 120, like="paper", like_size=32, seeds=(0,)), workers=1)
    assert answer.like == "paper" and answer.smallest is not None


@pytest.mark.parametrize(
    ("workload", "resource", "like", "words"),
    [
        ("search", "cores", "pods:0.5", "devices: search uses no cores"),
        ("coding", "devices", "pods:0.5", "cores: coding uses no devices"),
        ("elastic", "cores", "pods:0.5", "no sandboxes for pods"),
        ("coding", "cores", "paper", "a size after the name, such as paper@64"),
    ],
)
def test_a_question_without_a_reservation_to_compare_with_is_refused(
    workload: str, resource: str, like: str, words: str
) -> None:
    work = Source(workload=workload, batch=6).build(0)
    with pytest.raises(InvalidConfig, match=words):
        reserved_today(work, resource, like)


@pytest.mark.parametrize("wrong", [{"target": "p50"}, {"resource": "memory"}, {"act_s": 0.0}, {"like_size": -1}])
def test_a_question_that_cannot_be_meant_is_refused(wrong: dict) -> None:
    with pytest.raises(InvalidConfig):
        question(batch=4, **wrong)


def test_progress_never_goes_back_and_ends_at_its_total() -> None:
    progress: list[tuple[float, int]] = []
    plan(question(batch=6, seeds=(0,)), workers=1, progress=lambda done, total: progress.append((done, total)))
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert all(done <= total for done, total in progress)


# ---- the answer in words --------------------------------------------------------------------------------------


def point(size: int, mean_s: float, **changes) -> Point:
    fields = {"act_p95_s": 5.0, "act_p99_s": 100.0, "step_s": 1000.0, "use": 0.5, "failed": 0.0}
    return Point(size=size, act_mean_s=mean_s, **(fields | changes))


def answered(*points: Point, smallest: int | None, reference: Point, target: str = "mean") -> Plan:
    return Plan(
        workload="coding",
        policy="adaptive",
        resource="cores",
        target=target,
        target_s=reference.act_mean_s,
        seeds=(0,),
        like="pods:0.5",
        reference=reference,
        recorded=False,
        points=list(points),
        smallest=smallest,
    )


def test_a_size_that_just_misses_looks_different_from_the_target() -> None:
    answer = answered(point(4, 1.7806), point(8, 1.5), smallest=8, reference=point(16, 1.7784))
    assert not answer.reaches(answer.points[0])
    assert (answer.describe_point(answer.points[0])[0], answer.describe_point(answer.reference)[0]) == (
        "1.781 s",
        "1.778 s",
    )
    assert "a mean ACT of 1.778 s" in answer.sentence()


def test_the_usual_digits_do_where_nothing_is_near_the_target() -> None:
    answer = answered(point(4, 2.5), point(8, 1.5), smallest=8, reference=point(16, 1.7784))
    assert "a mean ACT of 1.78 s" in answer.sentence()


def test_the_answer_lists_what_gets_worse_although_the_target_is_met() -> None:
    reference = point(16, 3.0)
    worse = answered(point(8, 2.9, act_p95_s=9.0, act_p99_s=200.0), smallest=8, reference=reference)
    assert worse.sentence().endswith(
        "But this is worse than today: p95 9.00 s instead of 5.00 s, p99 200 s instead of 100 s."
    )
    assert "worse" not in answered(point(8, 2.9), smallest=8, reference=reference).sentence()


def test_a_size_on_which_trajectories_are_lost_does_not_reach_the_target() -> None:
    answer = answered(point(8, 1.0, failed=2.0, step_s=None), smallest=None, reference=point(16, 3.0))
    assert not answer.reaches(answer.points[0])
    assert "did not complete" in answer.sentence()
