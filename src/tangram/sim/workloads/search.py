"""The `search` workload: deep search agents that call web APIs under quotas and are rewarded by a judge model.

Owns the shape of such trajectories: 16-20 turns that search or read pages with 1-5 concurrent queries,
then one call of the judge. Episode k is the same for every batch size.

Measured, and reproduced by the distributions below:

    search API (fast provider)  p50 0.35-0.7, p95 0.5-1.1, p99 0.7-1.2 s     0.5, 0.88, 1.12
    page fetch                  mean 7.5-12 s, CV 0.4                        9.5, 0.4
    judge                       p50 1.3, p95 9, p99 19.5 s                   1.3, 8.9, 19.8
"""

from __future__ import annotations

import math

import numpy as np

from tangram.core.demand import GPU, Demand, fixed
from tangram.managers.quotas.manager import Quota, Rate
from tangram.sim.episode import ServiceModel, SimEpisode, SimStep, SimTurn, Workload, api_model
from tangram.sim.workloads import options
from tangram.sim.workloads.fit import lognormal, lognormal_by_mean, random_stream

TURNS = (16, 20)
QUERIES = (1, 5)
SEARCH_SHARE = 0.6
"""Share of the turns that search; in the others the agent fetches pages."""

THINK_S = lognormal(3.0, 0.8)
"""Latency of the policy model, as for coding agents."""
SEARCH = lognormal(0.5, 0.345, 60.0)
FETCH = lognormal_by_mean(9.5, 0.4, 120.0)
JUDGE = lognormal(1.3, 1.17, 60.0)

JUDGE_SERVICE = ServiceModel(name="judge", memory_gib=240.0, restore_s=0.5, degrees=(8,))
"""One large model over eight devices, as in the paper; its durations are measured at that degree."""
JUDGE_DEMAND = Demand({GPU: fixed(JUDGE_SERVICE.degrees[0])})

SEARCH_RATE = 0.19
FETCH_RATE = 0.13
"""Calls per second of one trajectory without waiting: 3 queries per turn of 9.4 s, split by SEARCH_SHARE."""
HEADROOM = 1.25
"""Default quotas exceed the mean need by this factor: enough over time, too little for the bursts."""

WINDOW_S = 60.0
SEARCH_TOKENS = 1000
"""Tokens per search, where tokens are counted: ten results with snippets. An order of magnitude, not measured."""


def build(
    *,
    batch: int = 2048,
    seed: int = 0,
    run: str = "search",
    group: int = 8,
    spread_s: float = 0.0,
    search_concurrency: int | None = None,
    search_per_minute: int | None = None,
    search_tokens_per_minute: int | None = None,
    fetch_concurrency: int | None = None,
) -> Workload:
    """Build the workload. The APIs enforce the quotas; None sizes them to the batch. Tokens are counted only if given.

    The APIs count in fixed windows of one minute, whose phase depends on the seed.
    """
    options.check_name("run", run)
    options.check_integer("group", group)
    options.check_number("spread_s", spread_s)
    per_minute = _units("search_per_minute", search_per_minute, batch * SEARCH_RATE * WINDOW_S)
    search = Quota(
        name="search",
        concurrent=_units("search_concurrency", search_concurrency, batch * SEARCH_RATE * SEARCH.mean()),
        requests=Rate(per_minute, WINDOW_S),
        tokens=_tokens(search_tokens_per_minute),
    )
    fetch = Quota(
        name="fetch",
        concurrent=_units("fetch_concurrency", fetch_concurrency, batch * FETCH_RATE * FETCH.mean()),
    )
    demands = [
        Demand(search.demand(tokens=SEARCH_TOKENS if search.tokens is not None else 0)),
        Demand(fetch.demand()),
    ]
    phase_s = WINDOW_S * float(random_stream("search", seed, "window").random())
    apis = tuple(api_model(quota, phase_s=phase_s) for quota in (search, fetch))
    episodes = []
    for k in range(batch):
        rng = random_stream("search", seed, "episode", k)
        episodes.append(
            SimEpisode(
                id=f"{run}/{k}",
                run=run,
                task="search",
                group=f"{run}/g{k // group}",
                start_s=spread_s * float(rng.random()),
                turns=_turns(rng, demands[0], demands[1]),
            )
        )
    return Workload(name="search", seed=seed, episodes=tuple(episodes), services=(JUDGE_SERVICE,), apis=apis)


def _units(option: str, value: int | None, mean_need: float) -> int:
    if value is None:
        return max(QUERIES[1], math.ceil(HEADROOM * mean_need))
    options.check_integer(option, value)
    return value


def _tokens(value: int | None) -> Rate | None:
    if value is None:
        return None
    options.check_integer("search_tokens_per_minute", value, least=SEARCH_TOKENS)
    return Rate(value, WINDOW_S)


def _turns(rng: np.random.Generator, search: Demand, fetch: Demand) -> tuple[SimTurn, ...]:
    count = int(rng.integers(TURNS[0], TURNS[1] + 1))
    widths = rng.integers(QUERIES[0], QUERIES[1] + 1, size=count).tolist()
    searches = (rng.random(count) < SEARCH_SHARE).tolist()
    thinking_s = THINK_S.draw(rng, count + 1).tolist()
    search_s = iter(SEARCH.draw(rng, count * QUERIES[1]).tolist())
    fetch_s = iter(FETCH.draw(rng, count * QUERIES[1]).tolist())
    turns = []
    for width, searching, think in zip(widths, searches, thinking_s, strict=False):
        kind, demand, seconds = ("search", search, search_s) if searching else ("fetch", fetch, fetch_s)
        steps = tuple(SimStep(kind=kind, key=kind, demand=demand, work_s=next(seconds), busy=0.0) for _ in range(width))
        turns.append(SimTurn(think_s=think, steps=steps))
    judge = SimStep(
        kind="judge",
        key="judge",
        demand=JUDGE_DEMAND,
        service=JUDGE_SERVICE.name,
        work_s=float(JUDGE.draw(rng, 1)[0]),
    )
    return (*turns, SimTurn(think_s=thinking_s[-1], steps=(judge,)))
