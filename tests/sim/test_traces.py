"""Recorded traces as workloads, and the errors of malformed files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tangram.core.demand import CPU, GPU, one_of
from tangram.core.speedup import PowerLaw
from tangram.errors import InvalidConfig, InvalidTrace
from tangram.sim.traces import load, load_coding, load_gpu_requests, load_reward_tests

CODING = """\
trajectory,seq,tool,category,think_s,duration_s,cpu_seconds,cpu_cores_max,mem_mb_max
a,0,Read,Read,2.5,0.1,0.02,0.3,190.5
a,1,Bash,test,3.0,20.0,30.0,4.0,300.1
a,2,Grep,Grep,1.0,0.3,0.02,0.3,200.0
b,0,Bash,git,0.0,2.0,0.0,0.1,120.0
b,1,Bash,python,4.0,5.0,20.0,1.5,256.0
"""

REWARDS = """\
task,runner,duration_s,pytest_s
x,1,10.0,9.0
x,1,11.0,9.5
y,2,100.0,
y,2,110.0,80.0
"""

REQUESTS = """\
day,arrival_s,model,exec_s
0,50.0,M1,20.0
0,40.0,M2,30.0
1,10.0,M1,5.0
1,20.0,,0.0
"""


@pytest.fixture
def coding(tmp_path) -> Path:
    path = tmp_path / "coding_actions.csv"
    path.write_text(CODING)
    return path


@pytest.fixture
def rewards(tmp_path) -> Path:
    path = tmp_path / "other" / "tests.csv"
    path.parent.mkdir()
    path.write_text(REWARDS)
    return path


@pytest.fixture
def requests(tmp_path) -> Path:
    path = tmp_path / "gpu_requests.csv"
    path.write_text(REQUESTS)
    return path


def steps_of(episode):
    return [step for turn in episode.turns for step in turn.steps]


# ---- tool calls -----------------------------------------------------------------------------------------------


def test_each_trajectory_comes_once_and_in_order_when_no_batch_is_given(coding):
    workload = load_coding(coding)
    assert workload.name == "coding_actions"
    assert [[step.key for step in steps_of(episode)] for episode in workload.episodes] == [
        ["read", "bash:test", "grep"],
        ["bash:git", "bash:python"],
    ]
    assert [turn.think_s for turn in workload.episodes[0].turns] == [2.5, 3.0, 1.0]
    assert [step.work_s for step in steps_of(workload.episodes[0])] == [0.1, 20.0, 0.3]


def test_calls_come_in_the_order_of_their_sequence_numbers(tmp_path):
    header, first, second, *_ = CODING.splitlines()
    path = tmp_path / "shuffled.csv"
    path.write_text("\n".join([header, second, first]))
    assert [step.key for step in steps_of(load_coding(path).episodes[0])] == ["read", "bash:test"]


def test_cpu_use_of_long_calls_is_their_own_within_bounds_and_of_short_ones_their_mean(coding):
    first, second = load_coding(coding).episodes
    assert [step.busy for step in steps_of(first)] == pytest.approx([0.1, 1.5, 0.1])
    assert [step.busy for step in steps_of(second)] == pytest.approx([0.01, 1.5])


def test_memory_is_the_recorded_peak_in_steps_or_the_option(coding):
    assert [episode.memory for episode in load_coding(coding).episodes] == [512, 256]
    assert [episode.memory for episode in load_coding(coding, memory=256).episodes] == [256, 256]


def test_a_larger_batch_draws_whole_trajectories(coding):
    recorded = [episode.turns for episode in load_coding(coding).episodes]
    drawn = load_coding(coding, batch=100, seed=3).episodes
    assert len({episode.id for episode in drawn}) == 100
    assert all(episode.turns in recorded for episode in drawn)
    assert 20 < sum(episode.turns == recorded[0] for episode in drawn) < 80


def test_a_draw_is_the_same_for_the_same_seed_and_whatever_the_batch(coding, rewards):
    large = load_coding(coding, batch=100, seed=3, rewards=rewards).episodes
    assert load_coding(coding, batch=40, seed=3, rewards=rewards).episodes == large[:40]
    assert load_coding(coding, batch=100, seed=4, rewards=rewards).episodes != large


# ---- rewards --------------------------------------------------------------------------------------------------


def test_rewards_end_every_episode_and_siblings_share_their_task(coding, rewards):
    seconds_by_task = {"x": {10.0, 11.0}, "y": {100.0, 110.0}}
    drawn = load_coding(coding, batch=80, seed=0, rewards=rewards, group=4, reward_cores_max=8).episodes
    ends = [episode.turns[-1].steps[0] for episode in drawn]
    assert {end.kind for end in ends} == {"reward"}
    assert all(end.work_s in seconds_by_task[end.task] for end in ends)
    assert all(len({end.task for end in ends[k : k + 4]}) == 1 for k in range(0, 80, 4))
    assert {end.task for end in ends} == {"x", "y"}
    assert ends[0].demand.elastic == CPU
    assert ends[0].demand.pools[CPU].max == 8000


def test_rewards_beside_the_trace_are_loaded_and_can_be_left_out(coding):
    assert [len(episode.turns) for episode in load_coding(coding).episodes] == [3, 2]
    (coding.parent / "reward_tests.csv").write_text(REWARDS)
    assert [len(episode.turns) for episode in load_coding(coding).episodes] == [4, 3]
    assert [len(episode.turns) for episode in load_coding(coding, rewards=None).episodes] == [3, 2]


def test_missing_rewards_are_an_error_when_required(coding, tmp_path):
    with pytest.raises(InvalidConfig, match=r"missing\.csv"):
        load_coding(coding, rewards=tmp_path / "missing.csv")


def test_rewards_alone_arrive_at_the_configured_load(rewards):
    workload = load_reward_tests(rewards, batch=5000, seed=0, load=0.5, units=16, exponent=0.6)
    steps = [steps_of(episode)[0] for episode in workload.episodes]
    work = sum(step.work_s for step in steps)
    assert work / workload.episodes[-1].start_s / 16 == pytest.approx(0.5, rel=0.1)
    assert {step.work_s for step in steps} == {10.0, 11.0, 100.0, 110.0}
    assert {step.task for step in steps} == {"x", "y"}
    assert steps[0].demand.speedup == PowerLaw(0.6)


# ---- requests -------------------------------------------------------------------------------------------------


def test_requests_come_at_their_recorded_time_from_the_first_on(requests):
    workload = load_gpu_requests(requests, restore_s=0.5)
    steps = [steps_of(episode)[0] for episode in workload.episodes]
    assert [episode.start_s for episode in workload.episodes] == [0.0, 10.0, 86_400.0 - 30.0]
    assert [(step.service, step.work_s) for step in steps] == [("M2", 30.0), ("M1", 20.0), ("M1", 5.0)]
    assert [(service.name, service.restore_s) for service in workload.services] == [("M2", 0.5), ("M1", 0.5)]


def test_requests_of_one_day_or_the_first_few_can_be_chosen(requests):
    assert [steps_of(e)[0].work_s for e in load_gpu_requests(requests, day=1).episodes] == [5.0]
    assert [steps_of(e)[0].work_s for e in load_gpu_requests(requests, batch=1).episodes] == [30.0]
    with pytest.raises(InvalidConfig, match="0, 1"):
        load_gpu_requests(requests, day=7)


def test_requests_that_failed_before_they_reached_a_model_are_left_out(requests):
    assert len(load_gpu_requests(requests).episodes) == 3


def test_requests_can_be_made_elastic(requests):
    workload = load_gpu_requests(requests, degrees=(4, 1, 2), exponent=0.5)
    step = steps_of(workload.episodes[0])[0]
    assert step.demand.pools[GPU] == one_of(1, 2, 4)
    assert step.speedup == PowerLaw(0.5)
    assert workload.services[0].degrees == (1, 2, 4)


# ---- any file -------------------------------------------------------------------------------------------------


def test_the_kind_of_a_file_is_detected_by_its_header(coding, rewards, requests):
    assert load(coding, batch=5, seed=1) == load_coding(coding, batch=5, seed=1)
    assert load(rewards, batch=5, seed=1, load=0.3) == load_reward_tests(rewards, batch=5, seed=1, load=0.3)
    assert load(str(requests), day=0) == load_gpu_requests(requests, day=0)


def test_a_mark_before_the_header_and_further_columns_do_no_harm(tmp_path):
    path = tmp_path / "requests.csv"
    path.write_text("\ufeffzone,day, arrival_s,model,exec_s\nz,0,1.0,M1,2.0\n\n", encoding="utf-8")
    assert len(load(path).episodes) == 1


def test_a_file_of_an_unknown_kind_is_refused_with_the_known_headers(tmp_path):
    path = tmp_path / "unknown.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidTrace, match=r"unknown\.csv:1.*day,arrival_s,model,exec_s"):
        load(path)


def test_an_option_of_another_kind_of_file_is_refused(coding):
    with pytest.raises(InvalidConfig, match="nearest: 'memory'"):
        load(coding, memory_gib=3)


@pytest.mark.parametrize("batch", [0, -1, 1.5, True])
def test_a_batch_that_cannot_be_meant_is_refused(coding, requests, batch):
    for path in (coding, requests):
        with pytest.raises(InvalidConfig, match="batch"):
            load(path, batch=batch)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidConfig, match="nowhere"):
        load(tmp_path / "nowhere.csv")


@pytest.mark.parametrize("cell", ["", "fast", "-0.1", "nan", "inf", "1e300"])
@pytest.mark.parametrize("column", ["seq", "think_s", "duration_s", "cpu_seconds", "cpu_cores_max", "mem_mb_max"])
def test_an_invalid_number_is_reported_with_its_line(coding, column, cell):
    lines = [line.split(",") for line in CODING.splitlines()]
    lines[2][lines[0].index(column)] = cell
    coding.write_text("\n".join(",".join(line) for line in lines))
    with pytest.raises(InvalidTrace) as refused:
        load(coding)
    assert refused.value.field == f"{coding}:3 {column}"
    assert refused.value.value == cell
    assert "expected a number from 0 to 1e+10" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", ":1"),
        ("day,arrival_s,model,exec_s\n", ":2"),
        ("day,arrival_s,model,exec_s\n0,1.0,M1,2.0\n0,1.0,M1\n", ":3"),
        ("day,arrival_s,model,exec_s\n0,1.0,M1,2.0,7\n", ":2"),
        ("day,arrival_s,model,exec_s\n0.5,1.0,M1,2.0\n", ":2 day"),
        ("day,arrival_s,model,exec_s\n0,1.0,,2.0\n", ":2 model"),
        ("day,arrival_s,model,exec_s\n0,1.0,M\x07,2.0\n", ":2 model"),
        ("day,arrival_s,model,exec_s\n0,1.0," + "M" * 101 + ",2.0\n", ":2 model"),
        ("day,arrival_s,model\n0,1.0,M1\n", ":1"),
    ],
)
def test_a_malformed_file_is_refused_at_its_line(tmp_path, text, where):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(InvalidTrace) as refused:
        load_gpu_requests(path)
    assert refused.value.field == f"{path}{where}"


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "binary.csv"
    path.write_bytes(b"day,arrival_s,model,exec_s\n\xff\xfe\x00,1,2,3\n")
    with pytest.raises(InvalidTrace, match="UTF-8"):
        load(path)


def test_a_call_that_stands_in_the_file_twice_is_refused_with_both_places(coding):
    lines = CODING.splitlines()
    coding.write_text("\n".join([*lines, lines[2]]))
    with pytest.raises(InvalidTrace, match=r"each number once in .*; see .*:3"):
        load(coding)


def test_a_column_that_is_named_twice_is_refused(requests):
    requests.write_text("day,arrival_s,model,exec_s,day\n0,1.0,M1,2.0,1\n")
    with pytest.raises(InvalidTrace, match="names the column 'day' once"):
        load(requests)


def test_draws_among_trajectories_are_even(coding):
    drawn = load_coding(coding, batch=2000, seed=0).episodes
    assert np.mean([len(episode.turns) == 3 for episode in drawn]) == pytest.approx(0.5, abs=0.05)
