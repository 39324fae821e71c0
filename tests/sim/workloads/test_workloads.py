"""The built-in workloads: as measured, the same for the same seed, and refusing what cannot be meant."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from tangram.core.demand import CPU, GPU, one_of
from tangram.core.speedup import PowerLaw
from tangram.errors import InvalidConfig
from tangram.managers.quotas.manager import Quota, Rate
from tangram.sim.episode import SimStep, Workload
from tangram.sim.workloads import WORKLOADS, build, coding, elastic, search, teachers
from tangram.sim.workloads.fit import LognormalComponent, Mixture, lognormal_by_mean, random_stream

SEEDS = range(4)
BATCH = 512


def digest(workload: Workload) -> str:
    return hashlib.sha256(msgspec.json.encode(workload)).hexdigest()


def all_steps(workload: Workload, kind: str) -> list[SimStep]:
    return [step for e in workload.episodes for turn in e.turns for step in turn.steps if step.kind == kind]


def percentiles(values, *shares):
    return [float(value) for value in np.percentile(values, shares)]


# ---- every workload -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_names_and_seeds_give_equal_episodes_and_other_seeds_other_ones(name):
    assert digest(build(name, batch=24, seed=5)) == digest(build(name, batch=24, seed=5))
    assert build(name, batch=24, seed=5).episodes != build(name, batch=24, seed=6).episodes


def test_episodes_do_not_depend_on_the_hash_seed_of_the_process():
    program = (
        "import hashlib, msgspec; from tangram.sim.workloads import WORKLOADS, build\n"
        "built = b''.join(msgspec.json.encode(build(name, batch=24, seed=5)) for name in WORKLOADS)\n"
        "print(hashlib.sha256(built).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("0", "1")
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("coding", {"spread_s": 60.0}),
        ("search", {"search_per_minute": 100, "search_concurrency": 10, "fetch_concurrency": 10}),
        ("teachers", {}),
        ("teachers", {"multi_turn": True, "spread_s": 60.0}),
        ("teachers", {"production": True}),
        ("elastic", {}),
        ("elastic", {"source": "gpu"}),
    ],
)
def test_an_episode_is_the_same_whatever_the_batch_size(name, chosen):
    small = build(name, batch=13, seed=2, **chosen)
    large = build(name, batch=50, seed=2, **chosen)
    assert small.episodes == large.episodes[:13]
    assert small.services == large.services


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_step_can_run(name):
    workload = build(name, batch=60, seed=1)
    ids = [episode.id for episode in workload.episodes]
    assert len(ids) == 60
    assert len(set(ids)) == len(ids)
    services = {service.name: service for service in workload.services}
    kinds = {CPU, GPU, *(pool.kind for api in workload.apis for pool in api.pools)}
    for episode in workload.episodes:
        assert episode.start_s >= 0.0
        for turn in episode.turns:
            assert turn.think_s >= 0.0
            for step in turn.steps:
                assert 0.0 < step.work_s < math.inf
                assert step.busy >= 0.0
                assert set(step.demand.pools) <= kinds
                if GPU in step.demand.pools:
                    assert all(map(step.demand.pools[GPU].admits, services[step.service].degrees))


def test_a_workload_without_a_batch_has_the_batch_of_the_paper():
    assert len(build("teachers").episodes) == 2048


# ---- what cannot be meant -------------------------------------------------------------------------------------


def test_an_unknown_name_is_refused_with_the_nearest_valid_one():
    with pytest.raises(InvalidConfig, match="nearest: 'coding'"):
        build("codin", batch=8, seed=0)


def test_an_unknown_option_is_refused_with_the_nearest_valid_one():
    with pytest.raises(InvalidConfig, match="nearest: 'reward_cores_max'"):
        build("coding", batch=8, seed=0, reward_core_max=8)


@pytest.mark.parametrize(
    ("name", "chosen", "field"),
    [
        ("coding", {"batch": 0}, "batch"),
        ("coding", {"batch": 2.5}, "batch"),
        ("coding", {"seed": -1}, "seed"),
        ("coding", {"group": 0}, "group"),
        ("coding", {"spread_s": -1.0}, "spread_s"),
        ("coding", {"spread_s": math.nan}, "spread_s"),
        ("coding", {"memory": -1}, "memory"),
        ("coding", {"run": ""}, "run"),
        ("search", {"search_concurrency": 0}, "search_concurrency"),
        ("teachers", {"services": 0}, "services"),
        ("teachers", {"degrees": ()}, "degrees"),
        ("teachers", {"production": "yes"}, "production"),
        ("teachers", {"restore_s": math.inf}, "restore_s"),
        ("mixed", {"phases": "sometimes"}, "phases"),
        ("mixed", {"spread_s": 60.0}, "spread_s"),
        ("mixed", {"batch": 2}, "batch"),
        ("elastic", {"load": 0}, "load"),
        ("elastic", {"exponent": 1.5}, "exponent"),
        ("elastic", {"source": "rewards"}, "source"),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused_by_name(name, chosen, field):
    with pytest.raises(InvalidConfig) as refused:
        build(name, **{"batch": 8, "seed": 0, **chosen})
    assert refused.value.field == field


# ---- mixtures -------------------------------------------------------------------------------------------------


def test_a_mixture_has_the_moments_and_quantiles_of_its_draws():
    mixture = Mixture((LognormalComponent(0.7, 1.0, 0.5), LognormalComponent(0.3, 20.0, 0.8, 60.0)))
    drawn = mixture.draw(random_stream("test"), 200_000)
    assert drawn.mean() == pytest.approx(mixture.mean(), rel=0.02)
    assert drawn.std() / drawn.mean() == pytest.approx(mixture.cv(), rel=0.02)
    for share in (0.1, 0.5, 0.9):
        assert np.quantile(drawn, share) == pytest.approx(mixture.quantile(share), rel=0.03)
    assert drawn.max() == 60.0


def test_a_lognormal_by_its_mean_has_that_mean_and_spread():
    mixture = lognormal_by_mean(28.7, 0.73)
    assert mixture.mean() == pytest.approx(28.7)
    assert mixture.cv() == pytest.approx(0.73)


# ---- coding ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def coding_batches() -> list[Workload]:
    return [build("coding", batch=BATCH, seed=seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def coding_calls(coding_batches) -> list[list[tuple[float, SimStep]]]:
    """Per trajectory of all seeds: the think seconds and the step of each tool call."""
    return [
        [(turn.think_s, turn.steps[0]) for turn in episode.turns[1:-1]]
        for workload in coding_batches
        for episode in workload.episodes
    ]


@pytest.fixture(scope="module")
def coding_seconds(coding_calls) -> np.ndarray:
    return np.array([step.work_s for calls in coding_calls for _, step in calls])


def test_coding_trajectories_have_as_many_calls_as_measured(coding_calls):
    counts = [len(calls) for calls in coding_calls]
    assert 29 <= np.mean(counts) <= 59
    assert 60 <= np.percentile(counts, 95) <= 118


def test_coding_think_times_are_as_measured(coding_calls):
    p50, p95 = percentiles([think for calls in coding_calls for think, _ in calls], 50, 95)
    assert 1.8 <= p50 <= 3.7
    assert 6 <= p95 <= 17


def test_coding_call_durations_are_as_measured(coding_seconds):
    p50, p90, p95, p99 = percentiles(coding_seconds, 50, 90, 95, 99)
    assert 0.06 <= p50 <= 0.12
    assert 1.8 <= p90 <= 2.3
    assert 4.0 <= p95 <= 5.5
    assert 73 <= p99 <= 120
    assert coding_seconds.max() == 360.0
    assert 2.7 <= coding_seconds.mean() <= 3.1
    assert 5 <= coding_seconds.std() / coding_seconds.mean() <= 6


def test_coding_test_commands_are_as_measured(coding_calls):
    shell = [step for calls in coding_calls for _, step in calls if step.key.startswith("bash:")]
    tests = [step.work_s for step in shell if step.key == "bash:pytest"]
    p50, p95, p99 = percentiles(tests, 50, 95, 99)
    assert 1.2 <= p50 <= 2.1
    assert 20 <= p95 <= 29
    assert 110 <= p99 <= 120
    assert 0.65 <= sum(tests) / sum(step.work_s for step in shell) <= 0.75


def test_coding_cpu_use_is_as_measured(coding_calls):
    steps = [step for calls in coding_calls for _, step in calls]
    mean = sum(step.work_s * step.busy for step in steps) / sum(step.work_s for step in steps)
    peaks = [max(step.busy for _, step in calls) for calls in coding_calls]
    assert 0.14 <= mean <= 0.43
    assert np.median(peaks) == pytest.approx(1.0, abs=0.1)
    assert 8 <= max(peaks) <= 12
    assert np.median([step.busy for step in steps]) <= 0.3


def test_coding_longer_calls_tend_to_use_more_cpu(coding_calls):
    short = [step.busy for calls in coding_calls for _, step in calls if step.work_s < 0.5]
    long = [step.busy for calls in coding_calls for _, step in calls if step.work_s >= 10]
    assert np.mean(long) > 1.5 * np.mean(short)


def test_coding_tools_are_busy_for_the_measured_share_of_the_span(coding_calls):
    busy = [sum(step.work_s for _, step in calls) for calls in coding_calls]
    spans = [sum(think + step.work_s for think, step in calls) for calls in coding_calls]
    assert 0.36 <= sum(busy) / sum(spans) <= 0.52
    assert 165 <= np.mean(spans) <= 468


def test_coding_class_medians_predict_calls_as_well_as_measured(coding_calls):
    seconds_by_key = defaultdict(list)
    for calls in coding_calls:
        for _, step in calls:
            seconds_by_key[step.key].append(step.work_s)
    near = total = 0
    for seconds in map(np.array, seconds_by_key.values()):
        median = np.median(seconds)
        near += ((seconds >= median / 2) & (seconds <= median * 2)).sum()
        total += len(seconds)
    assert 0.65 <= near / total <= 0.77


def test_coding_container_starts_are_as_measured():
    assert coding.START_S.quantile(0.5) == pytest.approx(0.45, rel=0.05)
    assert coding.START_S.quantile(0.9) == pytest.approx(2.1, rel=0.05)
    assert coding.START_S.quantile(0.99) == pytest.approx(5.3, rel=0.05)


def test_coding_rewards_are_as_measured():
    assert coding.REWARD_S.quantile(0.5) == pytest.approx(5.7, rel=0.03)
    assert coding.REWARD_S.quantile(0.95) == pytest.approx(63, rel=0.03)
    assert coding.REWARD_S.quantile(0.99) == pytest.approx(120, rel=0.03)
    assert coding.REWARD_S.mean() == pytest.approx(17, rel=0.03)
    assert coding.REWARD_S.cv() == pytest.approx(2.1, rel=0.03)


def test_coding_rewards_follow_their_distribution():
    """With groups of one, every episode has an item of its own; with larger ones a batch has few and varies a lot."""
    rewards = [step.work_s for step in all_steps(build("coding", batch=3000, seed=1, group=1), "reward")]
    for share in (0.25, 0.5, 0.75, 0.95):
        assert np.quantile(rewards, share) == pytest.approx(coding.REWARD_S.quantile(share), rel=0.12)


def test_coding_siblings_share_their_item_and_what_depends_on_it(coding_batches):
    logs, counts = [], []
    for workload in coding_batches:
        for first in range(0, BATCH, 8):
            siblings = workload.episodes[first : first + 8]
            rewards = [episode.turns[-1].steps[0] for episode in siblings]
            assert len({episode.group for episode in siblings}) == 1
            assert len({(reward.task, reward.speedup) for reward in rewards}) == 1
            logs.append([math.log(reward.work_s) for reward in rewards if reward.work_s < 120.0])
            counts.append([len(episode.turns) for episode in siblings])
    within = math.sqrt(np.mean([np.var(group, ddof=1) for group in logs if len(group) == 8]))
    assert within == pytest.approx(0.5, abs=0.05)
    assert np.var([np.mean(group) for group in counts]) > 2 * np.mean([np.var(group) for group in counts]) / 8


def test_coding_episodes_start_their_container_first_and_end_with_an_elastic_reward(coding_batches):
    for episode in coding_batches[0].episodes:
        first, last = episode.turns[0], episode.turns[-1]
        assert (first.think_s, first.steps[0].kind, first.steps[0].key) == (0.0, "create", "container")
        assert (last.steps[0].kind, last.steps[0].key) == ("reward", "tests")
        assert last.steps[0].demand.elastic == CPU
        assert last.steps[0].demand.pools[CPU].max == 16_000
        assert 0.6 <= last.steps[0].speedup.exponent <= 0.85
        assert (episode.start_s, episode.memory, episode.run) == (0.0, 256, "coding")
        assert not any(turn.steps[0].demand.elastic for turn in episode.turns[:-1])


def test_coding_starts_are_staggered_on_request():
    starts = [episode.start_s for episode in build("coding", batch=64, seed=0, spread_s=100.0).episodes]
    assert 0.0 <= min(starts) < 20.0
    assert 80.0 < max(starts) <= 100.0


# ---- search ---------------------------------------------------------------------------------------------------


def test_search_turns_and_calls_are_as_measured():
    workload = build("search", batch=256, seed=0)
    assert {len(episode.turns) - 1 for episode in workload.episodes} == set(range(16, 21))
    widths = {len(turn.steps) for episode in workload.episodes for turn in episode.turns[:-1]}
    assert widths == {1, 2, 3, 4, 5}
    p50, p95, p99 = percentiles([step.work_s for step in all_steps(workload, "search")], 50, 95, 99)
    assert p50 == pytest.approx(0.5, rel=0.05)
    assert p95 == pytest.approx(0.9, rel=0.05)
    assert p99 == pytest.approx(1.1, rel=0.07)
    pages = [step.work_s for step in all_steps(workload, "fetch")]
    assert 7.5 <= np.mean(pages) <= 12
    assert np.std(pages) / np.mean(pages) == pytest.approx(0.4, abs=0.03)


def test_search_episodes_end_with_one_call_of_the_judge():
    workload = build("search", batch=32, seed=0)
    assert [service.name for service in workload.services] == ["judge"]
    for episode in workload.episodes:
        assert [step.service for step in episode.turns[-1].steps] == ["judge"]
    assert search.JUDGE.quantile(0.5) == pytest.approx(1.3, rel=0.05)
    assert search.JUDGE.quantile(0.95) == pytest.approx(9.0, rel=0.05)
    assert search.JUDGE.quantile(0.99) == pytest.approx(19.5, rel=0.05)


def test_search_calls_demand_every_quota_of_their_api():
    workload = build("search", batch=32, seed=0, search_concurrency=7, search_per_minute=90)
    assert {pool.kind: pool.total for pool in workload.apis[0].pools} == {"search": 7, "search/requests": 90}
    assert {tuple(step.demand.pools) for step in all_steps(workload, "search")} == {("search", "search/requests")}
    assert {tuple(step.demand.pools) for step in all_steps(workload, "fetch")} == {("fetch",)}


def test_search_calls_demand_tokens_where_they_are_counted():
    counted = build("search", batch=32, seed=0, search_tokens_per_minute=50_000)
    assert [(pool.kind, pool.total) for pool in counted.apis[0].pools][2:] == [("search/tokens", 50_000)]
    assert {step.demand.pools["search/tokens"].min for step in all_steps(counted, "search")} == {search.SEARCH_TOKENS}
    plain = build("search", batch=32, seed=0)
    works = [[step.work_s for step in all_steps(workload, "search")] for workload in (counted, plain)]
    assert works[0] == works[1], "the calls are the same"
    with pytest.raises(InvalidConfig, match="search_tokens_per_minute"):
        build("search", batch=32, seed=0, search_tokens_per_minute=search.SEARCH_TOKENS - 1)


def test_the_apis_have_their_own_windows_and_the_scheduler_the_pools_of_a_live_quota():
    apis = [build(name, batch=32, seed=seed).apis for name in ("search", "mixed") for seed in range(8)]
    assert len({api[0].limits[1].phase_s for api in apis}) == 8, "one for each seed"
    for search_api, fetch_api in apis:
        (concurrent, requests), (fetches,) = search_api.pools, fetch_api.pools
        quota = Quota("search", concurrent=concurrent.total, requests=Rate(requests.total, 60.0))
        assert search_api.pools == quota.pools()
        assert fetch_api.pools == Quota("fetch", concurrent=fetches.total).pools()


def test_search_quotas_that_are_not_given_suffice_over_time_but_not_for_the_first_burst():
    workload = build("search", batch=512, seed=0)
    concurrent, requests = workload.apis[0].pools
    spans = [sum(t.think_s + max(s.work_s for s in t.steps) for t in e.turns) for e in workload.episodes]
    per_minute = 60 * len(workload.episodes) * len(all_steps(workload, "search")) / sum(spans)
    assert 1.1 <= requests.total / per_minute <= 1.5
    first = [e.turns[0] for e in workload.episodes if e.turns[0].steps[0].kind == "search"]
    events = sorted(
        (turn.think_s + end, 1 - 2 * bool(end)) for turn in first for s in turn.steps for end in (0, s.work_s)
    )
    assert max(np.cumsum([change for _, change in events])) > concurrent.total


# ---- teachers -------------------------------------------------------------------------------------------------


def test_teachers_are_called_by_skewed_popularity():
    assert teachers.popularity(10)[0] == pytest.approx(0.31)
    assert teachers.popularity(10)[:5].sum() == pytest.approx(0.70)
    assert teachers.popularity(86)[:5].sum() == pytest.approx(0.70)
    calls = Counter(step.service for step in all_steps(build("teachers", batch=4096, seed=0, group=1), "teacher"))
    assert calls.most_common(1)[0][1] / calls.total() == pytest.approx(0.31, abs=0.03)


def test_teachers_execute_in_six_tenths_of_a_second_on_four_devices():
    steps = all_steps(build("teachers", batch=2048, seed=0), "teacher")
    seconds = [step.work_s / step.speedup.at(4) for step in steps]
    assert np.mean(seconds) == pytest.approx(0.6, rel=0.05)
    assert np.std(seconds) / np.mean(seconds) == pytest.approx(0.7, abs=0.07)


def test_teachers_fit_two_to_four_on_a_chunk_of_four_devices_at_every_degree_they_offer():
    workload = build("teachers", batch=64, seed=0)
    assert len(workload.services) == 10
    for service in workload.services:
        assert 2 <= 4 * teachers.DEVICE_GIB // service.memory_gib <= 4
        assert service.memory_gib / service.degrees[0] <= teachers.DEVICE_GIB
        assert 0.2 <= service.restore_s <= 0.5
    assert {service.degrees for service in workload.services} == {(1, 2, 4, 8), (2, 4, 8)}
    exponents = {step.speedup.exponent for step in all_steps(build("teachers", batch=2048, seed=0, group=1), "teacher")}
    assert (min(exponents), max(exponents)) == pytest.approx((0.18, 0.82))


def test_teachers_are_called_one_to_four_times_at_the_end_or_along_the_way():
    at_end = build("teachers", batch=256, seed=0)
    along = build("teachers", batch=256, seed=0, multi_turn=True)
    assert all(len(episode.turns) == 1 for episode in at_end.episodes)
    assert {len(episode.turns[0].steps) for episode in at_end.episodes} == {1, 2, 3, 4}
    assert {len(episode.turns) for episode in along.episodes} == {1, 2, 3, 4}
    for one, other in zip(at_end.episodes, along.episodes, strict=True):
        assert sum(turn.think_s for turn in other.turns) == pytest.approx(one.turns[0].think_s)


def test_teachers_calls_peak_while_the_rollout_ends():
    ends = [episode.turns[0].think_s for episode in build("teachers", batch=2048, seed=0).episodes]
    p5, p95 = percentiles(ends, 5, 95)
    assert 60 < p5 < p95 < 1200
    assert np.bincount(np.array(ends, dtype=int) // 10).max() > 2 * len(ends) / (max(ends) / 10)


def test_production_mix_is_as_measured():
    workload = build("teachers", batch=13_000, seed=0, production=True)
    assert len(workload.services) == 86
    assert {service.restore_s for service in workload.services} == {22.0}
    steps = all_steps(workload, "teacher")
    seconds = [step.work_s for step in steps]
    assert np.mean(seconds) == pytest.approx(28.7, rel=0.03)
    assert np.std(seconds) / np.mean(seconds) == pytest.approx(0.73, abs=0.04)
    changes = np.mean([before.service != after.service for before, after in pairwise(steps)])
    assert changes == pytest.approx(0.75, abs=0.02)
    counts = [count for _, count in Counter(step.service for step in steps).most_common(5)]
    assert counts[0] / len(steps) == pytest.approx(0.31, abs=0.02)
    assert sum(counts) / len(steps) == pytest.approx(0.70, abs=0.02)


def test_production_requests_come_in_bursts_as_high_as_measured():
    ratios = []
    for seed in SEEDS:
        starts = [e.start_s for e in build("teachers", batch=13_000, seed=seed, production=True).episodes]
        assert starts == sorted(starts)
        counts = np.bincount((np.array(starts) // 600).astype(int))
        ratios.append(counts.max() / counts.mean())
    assert np.mean(ratios) == pytest.approx(15.5, rel=0.2)


def test_services_restore_and_run_as_configured():
    workload = build("teachers", batch=8, seed=0, services=3, restore_s=1.5, degrees=(8, 4))
    assert [(service.restore_s, service.degrees) for service in workload.services] == [(1.5, (4, 8))] * 3
    assert all(step.demand.pools[GPU] == one_of(4, 8) for step in all_steps(workload, "teacher"))


# ---- mixed ----------------------------------------------------------------------------------------------------


def test_mixed_runs_all_three_at_once_with_their_services_and_apis():
    workload = build("mixed", batch=32, seed=0)
    assert Counter(episode.run for episode in workload.episodes) == {"coding": 11, "search": 11, "teachers": 10}
    assert len(workload.services) == 11
    assert [api.name for api in workload.apis] == ["search", "fetch"]


def test_mixed_starts_together_when_synchronous_and_spread_out_when_not():
    together = build("mixed", batch=96, seed=0)
    spread = build("mixed", batch=96, seed=0, phases="asynchronous", spread_s=50.0)
    assert {episode.start_s for episode in together.episodes} == {0.0}
    for run in ("coding", "search", "teachers"):
        starts = [episode.start_s for episode in spread.episodes if episode.run == run]
        assert 25.0 < max(starts) <= 50.0
        assert len(set(starts)) == 32


# ---- elastic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", elastic.SOURCES)
@pytest.mark.parametrize("load", [0.3, 0.9])
def test_elastic_arrivals_bring_the_configured_load(source, load):
    workload = build("elastic", batch=20_000, seed=0, load=load, units=32, source=source)
    work = sum(step.work_s for step in all_steps(workload, "reward"))
    assert work / workload.episodes[-1].start_s / 32 == pytest.approx(load, rel=0.06)


def test_elastic_gaps_are_exponential():
    starts = [episode.start_s for episode in build("elastic", batch=20_000, seed=0).episodes]
    gaps = np.diff(starts)
    assert gaps.min() >= 0.0
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.05)


def test_elastic_actions_declare_their_speedup_and_by_default_take_up_to_half_of_the_units():
    for step in all_steps(build("elastic", batch=20, seed=0, units=8, exponent=0.5), "reward"):
        assert step.demand.speedup == step.speedup == PowerLaw(0.5)
        assert step.demand.pools[CPU].max == 4_000
        assert step.busy == 1.0
    whole = build("elastic", batch=1, seed=0, units=8, cores_max=8)
    assert all(step.demand.pools[CPU].max == 8_000 for step in all_steps(whole, "reward"))
