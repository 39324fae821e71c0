"""Affinity, and the profiler that recommends one."""

from __future__ import annotations

import msgspec
import pytest

from tangram.errors import InvalidConfig
from tangram.rl.config.rollout_settings import EngineSettings, RolloutSettings, TaskSettings
from tangram.rl.inference.affinity import H20, H800, HARDWARE_BY_CLASS, PlannedEngine, affinity_of, bind, explain
from tangram.rl.inference.engines.protocol import Generation
from tangram.rl.inference.profiler import TRAJECTORIES_MIN, InferenceWork, Profiler, predicted_s
from tangram.rl.trajectories.trajectory import Ending, Trajectory, Turn
from tangram.sim.serving_model import CALIBRATED


def settings(*classes: str, tasks: dict[str, str] | None = None) -> RolloutSettings:
    return RolloutSettings(
        engines=tuple(EngineSettings(name=f"{name}-engine", hardware=name, count=2) for name in classes),
        tasks=tuple(TaskSettings(name=name, affinity=affinity) for name, affinity in (tasks or {}).items()),
    )


# ---- the binding ----


def test_the_published_classes_are_as_published() -> None:
    assert (H800.flops, H800.memory_bytes, H800.bandwidth, H800.cost) == (989.5e12, 80e9, 3.35e12, 2.85)
    assert (H20.flops, H20.memory_bytes, H20.bandwidth, H20.cost) == (148e12, 96e9, 4e12, 1.0)
    assert set(HARDWARE_BY_CLASS) == {"compute", "bandwidth"}


def test_the_binding_is_explained_before_anything_starts() -> None:
    binding = explain(settings("compute", "bandwidth", tasks={"frozenlake": "compute", "chain": ""}))
    lake, chain = binding.task("frozenlake"), binding.task("chain")
    assert (lake.used, lake.engines, lake.falls_back) == ("compute", ("compute-engine-0", "compute-engine-1"), False)
    assert lake.fallback == ("bandwidth",)
    assert (chain.used, chain.why) == ("bandwidth", "the default of generation is bandwidth")
    text = "\n".join(binding.lines())
    assert "frozenlake  compute    its affinity is compute; if it fails: bandwidth" in text
    assert "compute-engine-0, compute-engine-1" in text


def test_without_classes_the_engine_with_the_least_to_do_is_taken() -> None:
    bound = explain(settings("default", tasks={"chain": ""})).task("chain")
    assert (bound.wanted, bound.used, bound.falls_back) == ("", "default", False)
    assert "least loaded" in bound.why


def test_a_class_without_engines_falls_back_with_a_warning() -> None:
    binding = explain(settings("bandwidth", tasks={"frozenlake": "compute"}))
    bound = binding.task("frozenlake")
    assert (bound.falls_back, bound.used) == (True, "bandwidth")
    assert "there is no engine of class compute" in bound.why
    assert "! frozenlake falls back: it prefers compute, bandwidth serves it" in binding.lines()


def test_a_task_on_evaluation_engines_is_not_trained_on() -> None:
    engines = (PlannedEngine("server", "remote", output_is_trainable=False), PlannedEngine("own", "default"))
    binding = bind({"evaluation": "remote"}, ["evaluation", "chain"], engines)
    assert not binding.task("evaluation").output_is_trainable and binding.task("chain").output_is_trainable
    assert "! evaluation: the output of remote cannot be trained on, only evaluated" in binding.lines()


def test_an_unknown_class_is_refused_and_the_nearest_suggested() -> None:
    with pytest.raises(InvalidConfig, match=r"tasks.chain.affinity.*nearest: bandwidth") as error:
        explain(settings("bandwidth", tasks={"chain": "bandwith"}))
    assert error.value.value == "bandwith"


def test_settings_without_engines_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="at least one table"):
        explain(settings(tasks={"chain": ""}))


def test_tables_that_give_two_engines_one_name_are_refused() -> None:
    engines = (EngineSettings(hardware="compute"), EngineSettings(hardware="bandwidth"))
    with pytest.raises(InvalidConfig, match="a name of its own"):
        explain(RolloutSettings(engines=engines))


def test_a_device_stands_for_its_class_unless_engines_are_called_after_it() -> None:
    assert affinity_of(settings("compute", tasks={"a": "H800"}))["a"] == "compute"
    assert affinity_of(settings("H800", "H20", tasks={"a": "H800"}))["a"] == "H800"


# ---- the profiler ----


def a_trajectory(task: str, turns: int, read: int, written: int, again: int = 0) -> Trajectory:
    turn = Turn(
        observation="",
        observation_tokens=(1,) * read,
        action="",
        tokens=(2,) * written,
        logprobs=(-1.0,) * written,
        versions=(1,) * written,
        prefilled=read + again,
        prefill_s=read * 0.001,
        decode_s=written * 0.01,
    )
    return Trajectory(
        id=f"{task}/0/0.0", task=task, group=f"{task}/0", member=0, attempt=0, seed=0, turns=(turn,) * turns,
        ending=Ending.FINISHED, reward=1.0,
    )  # fmt: skip


def test_prefill_heavy_tasks_get_compute_and_decode_heavy_ones_bandwidth() -> None:
    profiler = Profiler()
    for _ in range(TRAJECTORIES_MIN):
        profiler.add(a_trajectory("frozenlake", turns=40, read=400, written=8))
        profiler.add(a_trajectory("chain", turns=1, read=100, written=4000))
    lake, chain = profiler.recommend()
    assert (lake.task, lake.hardware, chain.task, chain.hardware) == ("frozenlake", "compute", "chain", "bandwidth")
    assert lake.confident and chain.confident and min(lake.ratio, chain.ratio) > 1.2
    assert lake.agreement == chain.agreement == 1.0
    assert lake.work.prefilled == TRAJECTORIES_MIN * 40 * 400
    assert "frozenlake: compute" in profiler.lines()[0] and "clear" in profiler.lines()[0]


def test_a_few_trajectories_or_a_close_result_are_reported_as_doubtful() -> None:
    profiler = Profiler()
    profiler.add(a_trajectory("chain", turns=1, read=100, written=4000))
    (few,) = profiler.recommend()
    assert not few.confident and f"only 1 of at least {TRAJECTORIES_MIN}" in few.note
    for _ in range(50):
        profiler.add(a_trajectory("mixed", turns=10, read=400, written=8))
        profiler.add(a_trajectory("mixed", turns=1, read=10, written=600))
    mixed = profiler.recommend()[1]
    assert not mixed.confident and mixed.agreement == 0.5


@pytest.mark.parametrize(("ratio", "shown"), [(1.2, "1.20x"), (1.1999, "1.1999x"), (1.234, "1.23x"), (1.194, "1.19x")])
def test_a_ratio_is_shown_with_as_many_digits_as_it_is_judged_by(ratio: float, shown: str) -> None:
    profiler = Profiler()
    profiler.add(a_trajectory("chain", turns=1, read=100, written=4000))
    (advice,) = profiler.recommend()
    assert f", {shown} at equal cost" in msgspec.structs.replace(advice, ratio=ratio).line()


def test_nothing_is_recommended_from_nothing() -> None:
    assert Profiler().recommend() == ()
    assert "no tokens were generated yet" in Profiler().lines()[0]


def test_generations_count_as_turns_do() -> None:
    by_turn, by_trajectory = Profiler(), Profiler()
    generation = Generation(
        tokens=(2,) * 30, logprobs=(-1.0,) * 30, versions=(1,) * 30, finish="length", prefilled=20, prefill_s=0.02,
        decode_s=0.3,
    )  # fmt: skip
    by_turn.add_generation("chain", generation, context=20)
    by_trajectory.add(a_trajectory("chain", turns=1, read=20, written=30))
    assert by_turn.work("chain") == by_trajectory.work("chain")
    assert by_turn.work("chain").context == sum(20 + number for number in range(30))


def test_a_prefix_that_stayed_resident_is_not_read_twice() -> None:
    """Two turns: the second one read only what was new."""
    work = Profiler()
    work.add(a_trajectory("a", turns=2, read=100, written=10))
    assert work.work("a").prefilled == 200
    # Writing looks at all that stands before, resident or not.
    assert work.work("a").context == sum(100 + n for n in range(10)) + sum(210 + n for n in range(10))


def test_repeated_prefill_is_reported_and_does_not_affect_the_recommendation() -> None:
    """That of the cache of an engine: a task that writes much does not become one that reads much by it."""
    profiler = Profiler()
    for _ in range(TRAJECTORIES_MIN):
        profiler.add(a_trajectory("kept", turns=4, read=20, written=200))
        profiler.add(a_trajectory("lost", turns=4, read=20, written=200, again=2000))
    kept, lost = profiler.recommend()
    # The last token of an action is read with the next turn, so one of these is expected in three turns of four.
    assert (kept.work.again, lost.work.again) == (0, TRAJECTORIES_MIN * (4 * 2000 - 3))
    assert lost.work.needed == TRAJECTORIES_MIN * (4 * 20 + 3)
    assert (kept.hardware, lost.hardware) == ("bandwidth", "bandwidth")
    assert lost.seconds_by_class == pytest.approx(kept.seconds_by_class, rel=0.1)
    assert "read again" not in kept.line()
    assert (
        "reads 83 and writes 800" in lost.line()
        and "7997 tokens more per trajectory were prefilled again" in lost.line()
    )


def test_predictions_follow_the_roofline() -> None:
    reading, writing = InferenceWork(prefilled=1000), InferenceWork(decoded=1000)
    ratio = predicted_s(reading, H20) / predicted_s(reading, H800)
    assert ratio == pytest.approx(989.5 * CALIBRATED["H800"].prefill / (148.0 * CALIBRATED["H20"].prefill))
    ratio = predicted_s(writing, H800) / predicted_s(writing, H20)
    assert ratio == pytest.approx(4.0 * CALIBRATED["H20"].decode / (3.35 * CALIBRATED["H800"].decode))
