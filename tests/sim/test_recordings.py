"""Recordings: what a simulation wrote is played again as a workload, and replays to the same effects."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tangram.core.action import Action, Outcome, Status, Usage
from tangram.core.demand import CPU, GPU, Demand, cores, fixed, learned
from tangram.core.limits import Limits
from tangram.core.messages import (
    Finished,
    Grant,
    Pool,
    PoolChanged,
    Reserve,
    Resized,
    Settle,
    Share,
    Start,
    Started,
    Submit,
    Window,
    cpu_node,
)
from tangram.core.speedup import PowerLaw
from tangram.core.trace import Header, Recorder
from tangram.errors import InvalidConfig, InvalidTrace
from tangram.managers.quotas.manager import Quota, Rate
from tangram.runtime.trace_recorder import record_trace
from tangram.sim import traces
from tangram.sim.compare import Setup, Source, compare
from tangram.sim.episode import Counting, ServiceModel, SimEpisode, SimStep, SimTurn, Workload, api_model
from tangram.sim.recordings import load_recording, recorded_size
from tangram.sim.simulate import simulate
from tangram.sim.size import Size, default_size
from tangram.sim.trace_summary import replay, summarize
from tangram.sim.workloads import build


def recorded(path: Path, workload: str, policy: str, batch: int, **changes):
    """Simulate, record, and return the summary of what was recorded."""
    source = Source(workload=workload, batch=batch)
    size = default_size(source.build(0))
    setup = Setup(source=source, size=size, policies=(policy,), seeds=(0,), **changes)
    return compare([setup], workers=1, record_to=path)[0].rows[0].summary


def played(path: Path, policy: str, **changes):
    source = Source(traces=(str(path),))
    setup = Setup(source=source, size=recorded_size(path), policies=(policy,), seeds=(0,), **changes)
    return compare([setup], workers=1)[0].rows[0].summary


# ---- round trips ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "policy", "batch"),
    [
        ("coding", "adaptive", 24),
        ("coding", "paper", 16),
        ("coding", "pods:0.5", 24),
        ("search", "adaptive", 24),
        ("teachers", "adaptive", 80),
        ("mixed", "adaptive", 36),
        ("elastic", "adaptive", 150),
        ("elastic", "fixed:4", 100),
    ],
)
def test_a_recording_played_again_under_its_policy_takes_as_long(
    workload: str, policy: str, batch: int, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    before, after = recorded(path, workload, policy, batch), played(path, policy)
    assert after["actions"] == before["actions"]
    assert after["act_mean_s"] == pytest.approx(before["act_mean_s"], rel=0.03)
    assert after["act_p95_s"] == pytest.approx(before["act_p95_s"], rel=0.05)


def test_a_recording_of_one_policy_predicts_another(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path, "coding", "adaptive", 24)
    truth = compare(
        [Setup(source=Source(workload="coding", batch=24), size=recorded_size(path), policies=("fcfs",), seeds=(0,))],
        workers=1,
    )[0]
    assert played(path, "fcfs")["act_mean_s"] == pytest.approx(truth.mean("fcfs", "act_mean_s"), rel=0.1)


def test_the_recorded_size_is_that_of_the_simulation(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    source = Source(workload="mixed", batch=12)
    size = Size(cores=6, nodes=2, memory_per_core_gib=4.0, devices=48)
    compare([Setup(source=source, size=size, policies=("fcfs",), seeds=(0,))], workers=1, record_to=path)
    assert recorded_size(path) == size


def test_trajectories_of_a_recording_are_drawn_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path, "coding", "adaptive", 10)
    once = traces.load(path)
    turns = {len(episode.turns) for episode in once.episodes}
    drawn = traces.load(path, batch=30, seed=4)
    assert len(drawn.episodes) == 30 and len({episode.id for episode in drawn.episodes}) == 30
    assert {len(episode.turns) for episode in drawn.episodes} <= turns
    assert drawn == traces.load(path, batch=30, seed=4)


def test_several_traces_are_played_side_by_side_as_separate_runs(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    recorded(first, "coding", "adaptive", 6)
    recorded(second, "coding", "fcfs", 6)
    both = traces.load_all([first, second])
    assert len(both.episodes) == len({episode.id for episode in both.episodes}) == 12
    assert {episode.run for episode in both.episodes} == {"0-a/coding", "1-b/coding"}


# ---- what lines are taken to mean -----------------------------------------------------------------------------


def write(path: Path, lines: list, pools: tuple[Pool, ...] = ()) -> Path:
    """A trace by hand: (time, event, effects) in order."""
    recorder = Recorder()
    text = recorder.header(Header(policy="fcfs", pools=pools))
    path.write_bytes(text + b"".join(recorder.lines(*line) for line in lines))
    return path


def life(action: Action, submitted: float, started: float, ended: float, *, width: int = 1000, **usage) -> list:
    """All messages of one action that ran on CPU, granted at once."""
    grant = Grant(action.id, "n0", (Share("cpu@n0", width, width),), width)
    outcome = Outcome(
        action=action.id,
        status=Status.SUCCEEDED,
        waiting_s=started - submitted,
        execution_s=ended - started,
        usage=Usage(**usage),
    )
    return [
        (submitted, Submit(action=action), []),
        (started, Started(action=action.id), []),
        (started, Reserve(sandbox=f"by {action.id}", memory=1), [Start(action=action, grant=grant)]),
        (ended, Finished(action=action.id, usage=Usage(**usage)), [Settle(outcome=outcome)]),
    ]


def in_order(*lives: list) -> list:
    return sorted((line for each in lives for line in each), key=lambda line: line[0])


def tool(number: int, **changes) -> Action:
    fields = {"id": f"a{number}", "demand": Demand({CPU: learned()}), "trajectory": "t", "sandbox": "box", "key": "ls"}
    return Action(**(fields | changes))


def test_thinking_is_the_gap_after_a_turn_and_what_overlaps_is_one_turn(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        in_order(
            [(1.0, Reserve(sandbox="box", memory=300), [])],
            life(tool(1), 3.0, 3.5, 5.0, cpu_s=0.75),
            life(tool(2), 9.0, 9.0, 10.0),
            life(tool(3), 9.0, 9.0, 12.0),
            life(tool(4), 11.0, 11.0, 11.5),
            life(tool(5), 20.0, 20.0, 21.0),
        ),
    )
    (episode,) = load_recording(path).episodes
    assert (episode.start_s, episode.memory) == (1.0, 300)
    assert [(turn.think_s, len(turn.steps)) for turn in episode.turns] == [(2.0, 1), (4.0, 3), (8.0, 1)]
    first = episode.turns[0].steps[0]
    assert (first.work_s, first.busy) == (pytest.approx(1.5), pytest.approx(0.5))


def test_steal_time_is_not_work(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", life(tool(1), 0.0, 0.0, 10.0, cpu_s=4.0, throttled_s=6.0, starved_s=6.0))
    step = load_recording(path).episodes[0].turns[0].steps[0]
    assert (step.work_s, step.busy) == (pytest.approx(4.0), pytest.approx(1.0))


def test_overhead_is_played_again_and_uses_as_much_cpu_as_the_execution(tmp_path: Path) -> None:
    lines = life(tool(1), 0.0, 1.0, 4.0, cpu_s=2.0)
    settle = lines[-1][2][0]
    outcome = msgspec.structs.replace(settle.outcome, waiting_s=0.0, overhead_s=1.0)
    lines[-1] = (*lines[-1][:2], [Settle(outcome=outcome)])
    workload = load_recording(write(tmp_path / "t.jsonl", lines))
    step = workload.episodes[0].turns[0].steps[0]
    assert (step.work_s, step.overhead_s, step.busy) == (pytest.approx(3.0), 1.0, pytest.approx(0.5))
    (row,) = simulate(workload, "adaptive", cpu_node("n0", 1)).rows
    assert (row.overhead_s, row.execution_s, row.act_s) == (1.0, pytest.approx(3.0), pytest.approx(4.0))
    assert row.cpu_s == pytest.approx(2.0)


def test_an_action_that_was_not_held_to_its_limit_takes_as_long_again(tmp_path: Path) -> None:
    action = tool(1, demand=Demand({CPU: cores(0.2)}), kind="open")
    path = write(tmp_path / "t.jsonl", life(action, 0.0, 0.0, 3.0, width=200, cpu_s=2.4))
    (row,) = simulate(load_recording(path), "adaptive", cpu_node("n0", 1)).rows
    assert row.execution_s == pytest.approx(3.0)


def test_work_on_several_cores_is_brought_to_one_by_the_declared_speedup(tmp_path: Path) -> None:
    action = tool(1, demand=Demand({CPU: cores(1, 16)}, speedup=PowerLaw(0.5)), kind="reward", key="tests")
    lines = life(action, 0.0, 0.0, 10.0, width=16_000, cpu_s=80.0)
    lines.insert(-1, (4.0, Resized(action="a1", limit=4000), []))
    step = load_recording(write(tmp_path / "t.jsonl", lines)).episodes[0].turns[0].steps[0]
    assert step.work_s == pytest.approx(4.0 * 4.0 + 6.0 * 2.0)
    assert step.busy == pytest.approx(80.0 / (4.0 * 16.0 + 6.0 * 4.0))
    assert step.speedup == PowerLaw(0.5)


def test_actions_without_a_trajectory_are_separate_episodes(tmp_path: Path) -> None:
    lives = [life(tool(k, trajectory="", sandbox=""), k, k, k + 0.5) for k in (1, 2)]
    workload = load_recording(write(tmp_path / "t.jsonl", in_order(*lives)))
    assert [(episode.id, episode.start_s) for episode in workload.episodes] == [("a1", 1.0), ("a2", 2.0)]


def test_actions_that_were_lost_or_never_settled_are_left_out(tmp_path: Path) -> None:
    lost = Settle(outcome=Outcome(action="a2", status=Status.LOST, reason="node down"))
    lines = [
        *life(tool(1), 0.0, 0.0, 1.0),
        (2.0, Submit(action=tool(2)), []),
        (3.0, Finished(action="a2", lost="node down"), [lost]),
        (4.0, Submit(action=tool(3)), []),
    ]
    (episode,) = load_recording(write(tmp_path / "t.jsonl", lines)).episodes
    assert len(episode.turns) == 1


def test_quotas_are_those_of_the_header_and_each_window_is_played_as_what_it_was(tmp_path: Path) -> None:
    quota = Quota("judge", concurrent=2, tokens=Rate(500, 60.0))
    quotas = (
        Pool(kind="search", total=5),
        Pool(kind="search/min", total=90, window=Window(seconds=60.0)),
        Pool(kind="search/day", total=900, window=Window(seconds=86_400.0)),
        Pool(kind="tokens", total=1000, window=Window(seconds=1.0, bucket=True)),
        *quota.pools(),
    )
    call = tool(1, demand=Demand({"tokens": fixed(3)}), sandbox="", kind="llm")
    pools = (Pool(kind="cpu", node="n0", total=4000), *quotas)
    workload = load_recording(write(tmp_path / "t.jsonl", life(call, 0.0, 0.0, 1.0), pools))
    assert [api.name for api in workload.apis] == ["search", "tokens", "judge"]
    assert Size(cores=4).pools(workload) == quotas
    counting = {limit.pool.kind: limit.counting for api in workload.apis for limit in api.limits if limit.pool.window}
    assert counting == {
        "search/min": Counting.FIXED,
        "search/day": Counting.FIXED,
        "tokens": Counting.BUCKET,
        "judge/tokens": Counting.SLIDING,
    }


def test_a_quota_that_was_added_or_raised_later_is_known_and_one_that_was_cut_is_whole(tmp_path: Path) -> None:
    small, large = (Quota("search", requests=Rate(units, 60.0)).pools() for units in (10, 50))
    added = Quota("judge", concurrent=2).pools()
    changes = [PoolChanged(pool=pool) for pool in (*large, *small, *added, Quota("judge", concurrent=1).closed())]
    lines = [(float(at), change, []) for at, change in enumerate(changes)]
    call = tool(1, demand=Demand({"judge": fixed(1)}), sandbox="", kind="llm")
    workload = load_recording(write(tmp_path / "t.jsonl", [*lines, *life(call, 9.0, 9.0, 10.0)], small))
    assert Size().pools(workload) == (*large, *added)


def test_estimates_of_tokens_are_corrected_again_as_recorded(tmp_path: Path) -> None:
    quota = Quota("judge", tokens=Rate(1000, 60.0))
    fields = {"demand": Demand(quota.demand(tokens=600)), "sandbox": "", "kind": "llm"}
    lives = [life(tool(k, **fields), k, k, k + 1.0, spent={"judge/tokens": 100}) for k in range(1, 6)]
    workload = load_recording(write(tmp_path / "t.jsonl", in_order(*lives), quota.pools()))
    result = simulate(workload, "adaptive", Size().pools(workload))
    assert result.makespan_s == pytest.approx(5.0), "six hundred each would take minutes"


@pytest.mark.parametrize(("at_once", "ended_at"), [(True, 71.0), (False, 80.0)])
def test_quota_use_at_any_time_counts_from_its_end_again(at_once: bool, ended_at: float, tmp_path: Path) -> None:
    quota = Quota("search", requests=Rate(1, 60.0))
    fields = {"demand": Demand(quota.demand()), "sandbox": "", "trajectory": "", "at_once": at_once}
    lives = [life(tool(k, **fields), 0.0, 0.0, 10.0) for k in (1, 2)]
    workload = load_recording(write(tmp_path / "t.jsonl", in_order(*lives), quota.pools()))
    result = simulate(workload, "fcfs", Size().pools(workload))
    assert [row.ended_at for row in result.rows] == pytest.approx([10.0, ended_at])


def test_calls_recorded_with_a_live_quota_start_at_the_same_times_again(tmp_path: Path) -> None:
    path, quota = tmp_path / "run.jsonl", Quota("search", concurrent=3, requests=Rate(5, 10.0))
    ask = SimStep(kind="search", demand=Demand(quota.demand()), work_s=0.7)
    episodes = tuple(
        SimEpisode(id=f"e{k}", run="r", task="", start_s=0.1 * k, turns=(SimTurn(think_s=0.0, steps=(ask,)),))
        for k in range(40)
    )
    work = Workload(name="calls", seed=0, episodes=episodes, apis=(api_model(quota, phase_s=3.0),))
    with record_trace(path, policy="adaptive", pools=quota.pools(), limits=Limits()) as observer:
        before = simulate(work, "adaptive", quota.pools(), observer=observer)
    again = load_recording(path)
    after = simulate(again, "adaptive", Size().pools(again))
    assert [row.ended_at for row in after.rows] == pytest.approx([row.ended_at for row in before.rows])


def test_an_api_in_several_traces_counts_all_that_any_of_them_counts(tmp_path: Path) -> None:
    quotas = {"a": Quota("search", concurrent=2), "b": Quota("search", requests=Rate(9, 60.0))}
    paths = []
    for name, quota in quotas.items():
        call = tool(1, demand=Demand(quota.demand()), sandbox="", kind="search")
        paths.append(write(tmp_path / f"{name}.jsonl", life(call, 0.0, 0.0, 1.0), quota.pools()))
    both = traces.load_all(paths)
    assert Size().pools(both) == (*quotas["a"].pools(), *quotas["b"].pools())


# ---- files ----------------------------------------------------------------------------------------------------


def test_a_recording_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def interrupted() -> None:
        with record_trace(path, policy="fcfs", pools=(), limits=Limits()) as observer:
            observer(0.0, Submit(action=tool(1)), [])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_or_malformed_recording_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [])
    with pytest.raises(InvalidTrace, match="at least one action that ran"):
        traces.load(path)
    path.write_bytes(path.read_bytes() + b'{"t": 1}\n')
    with pytest.raises(InvalidTrace, match=r"t\.jsonl:2"):
        traces.load(path)
    with pytest.raises(InvalidConfig, match="No such file"):
        traces.load(tmp_path / "none.jsonl")


# ---- replay and survey ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["adaptive", "paper", "fixed:4"])
@pytest.mark.parametrize("faults", [0, 4])
def test_a_replay_brings_the_same_effects(policy: str, faults: int, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path, "mixed", policy, 18, faults=faults)
    result = replay(path)
    assert result.difference is None
    assert result.events + result.effects == sum(summarize(path).messages.values())


def test_hints_are_part_of_a_recording_and_of_its_replay(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path, "coding", "adaptive", 10, knowledge="hints", ageing_s=5.0)
    assert replay(path).difference is None


@pytest.mark.parametrize("limits", [Limits(queue_max=3), Limits(sandboxes_max=5), Limits(run_queue_max=2)])
def test_a_replay_is_under_the_limits_of_the_recording(limits: Limits, tmp_path: Path) -> None:
    path, pools = tmp_path / "run.jsonl", cpu_node("n0", 1, 9.4)
    with record_trace(path, policy="adaptive", pools=pools, limits=limits) as observer:
        simulate(build("coding", batch=8, seed=0), "adaptive", pools, limits=limits, observer=observer)
    assert summarize(path).messages["Refuse"], "otherwise it would show nothing"
    assert replay(path).difference is None


def test_a_replay_shows_the_first_difference(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path, "coding", "fcfs", 8)
    lines = path.read_text().splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if '"type":"Start"' in line and i > 40)
    line = msgspec.json.decode(lines[place])
    line["message"]["grant"]["width"] += 1
    lines[place] = msgspec.json.encode(line).decode() + "\n"
    path.write_text("".join(lines))
    difference = replay(path).difference
    assert difference is not None and difference.at_seq == line["cause"]
    assert len(difference.recorded) == len(difference.replayed)
    assert difference.recorded != difference.replayed


def test_a_recording_of_a_baseline_cannot_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path, "coding", "pods:0.5", 4)
    with pytest.raises(InvalidConfig, match=r"not of pods:0\.5"):
        replay(path)


def test_a_survey_shows_where_the_time_went(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    summary = recorded(path, "mixed", "adaptive", 18)
    survey = summarize(path)
    assert sorted(run.run for run in survey.runs) == ["coding", "search", "teachers"]
    assert sum(run.actions for run in survey.runs) == summary["actions"]
    assert sum(run.execution_s for run in survey.runs) == pytest.approx(
        summary["execution_mean_s"] * summary["actions"]
    )
    assert survey.unsettled == 0
    kinds = {kind for run in survey.runs for kind in run.waiting_s}
    assert kinds == {"cpu", "gpu", "search + search/requests", "fetch"}


def test_thinking_is_counted_between_turns(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", in_order(life(tool(1), 0.0, 0.5, 2.0), life(tool(2), 5.0, 5.0, 6.0)))
    (run,) = summarize(path).runs
    assert (run.thinking_s, run.execution_s, run.waiting_s) == (3.0, 2.5, {"cpu": 0.5})


def test_batches_played_again_take_as_long(tmp_path: Path) -> None:
    ask = SimStep(kind="ask", demand=Demand({GPU: fixed(1)}), service="judge", work_s=1.0)
    episodes = tuple(
        SimEpisode(id=f"e{n}", run="r", task="", start_s=0.01 * n, turns=(SimTurn(think_s=0.0, steps=(ask,)),))
        for n in range(9)
    )
    judge = ServiceModel(name="judge", memory_gib=60.0, restore_s=0.5, batch_max=4)
    work = Workload(name="test", seed=0, episodes=episodes, services=(judge,))
    pools = (Pool(kind=GPU, node="g0", total=1),)
    path = tmp_path / "run.jsonl"
    with record_trace(path, policy="adaptive", pools=pools, limits=Limits()) as observer:
        first = simulate(work, "adaptive", pools, observer=observer)
    loaded = load_recording(path)
    assert loaded.services[0].batch_max == 4
    assert [turn.steps[0].work_s for e in loaded.episodes for turn in e.turns] == pytest.approx([1.0] * 9)
    again = simulate(loaded, "adaptive", pools)
    assert again.makespan_s == pytest.approx(first.makespan_s)
