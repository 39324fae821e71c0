"""The `teachers` workload: trajectories that end with calls to one of several models on GPUs.

Owns two shapes. The default is multi-teacher distillation: a rollout batch over several domains, each with its own
teacher, whose trajectories end over some minutes and then request log-probabilities. With `production=True` it is an
open stream of requests to many models, where consecutive requests rarely use the same model. Episode k is the same for
every batch size.

Measured, and reproduced by the constants below:

    teachers     9-12 services, batch 2048, execution 0.6 s on 4 devices, restore 0.2 s and more
    production   86 models, top-1 31 %, top-5 70 % of the requests; 75 % of consecutive requests change the model;
                 10-minute peak over mean 15.5; execution mean 28.7 s, CV 0.73; load 22 s
    speed-up     tensor-parallel exponents 0.18 (small models) to 0.82 (large ones)
"""

from __future__ import annotations

import math
from itertools import accumulate

import msgspec
import numpy as np

from tangram.core.demand import GPU, Demand, one_of
from tangram.core.speedup import PowerLaw
from tangram.sim.episode import ServiceModel, SimEpisode, SimStep, SimTurn, Workload
from tangram.sim.workloads import options
from tangram.sim.workloads.elastic import GPU_REQUEST
from tangram.sim.workloads.fit import Floats, lognormal, lognormal_by_mean, random_stream

POPULARITY_HEAD = (0.31, 0.11, 0.102, 0.094, 0.084)
"""The five most requested models: top-1 31 %, top-5 70 %. The rest share 30 % in proportion to 1/rank."""
POPULARITY_TAIL = 0.30

EXECUTION = lognormal_by_mean(0.6, 0.7)
EXECUTION_DEGREE = 4
"""The paper's teachers run on four devices each; its 0.6 s apply to these."""

EXPONENTS = (0.18, 0.82)
MEMORY_GIB = (64.0, 140.0)
"""32 and 70 billion parameters in 16 bit: four of the small or two of the large fit four devices of 80 GiB."""
RESTORE_S = (0.2, 0.5)
"""Smallest and largest teacher, from host memory."""
DEVICE_GIB = 72.0
"""Maximum for weights on a device of 80 GiB; the rest is for activations. It determines the smallest degree."""
DEGREES = (1, 2, 4, 8)

ROLLOUT_MEDIANS_S = (120.0, 480.0)
"""Fastest and slowest domain. Each domain's trajectories end together, so the teachers peak one after the other."""
ROLLOUT = lognormal(1.0, 0.4)
"""A trajectory's length over the median of its domain."""

PRODUCTION_SERVICES = 86
PRODUCTION_RESTORE_S = 22.0
PRODUCTION_MEMORY_GIB = (6.0, 12.0, 24.0, 40.0)
"""Image and video models, measured on one device each."""
PRODUCTION_GAP_S = 72.0
"""Mean seconds between requests: 1,200 a day."""
RATE_SIGMA = 1.2
RATE_MEMORY = 0.985
"""The log of the arrival rate is an autoregressive walk from request to request; this spread and memory reproduce the
measured peaks."""
REPEAT = 0.13
"""Probability that a request uses the model of its predecessor, independent of popularity: independent draws would
change the model 86 % of the time, and 75 % were measured."""


class _Teacher(msgspec.Struct, frozen=True):
    service: ServiceModel
    demand: Demand
    speedup: PowerLaw
    rollout_s: float
    """Median seconds from the start of a trajectory of its domain to its end."""


def popularity(count: int) -> Floats:
    """Return the share of each of `count` models, the most popular first."""
    ranks = range(len(POPULARITY_HEAD) + 1, count + 1)
    total = sum(1.0 / rank for rank in ranks)
    shares = [*POPULARITY_HEAD, *(POPULARITY_TAIL / rank / total for rank in ranks)][:count]
    return np.array(shares) / sum(shares)


def build(
    *,
    batch: int = 2048,
    seed: int = 0,
    run: str = "teachers",
    services: int | None = None,
    group: int = 8,
    calls_max: int = 4,
    multi_turn: bool = False,
    production: bool = False,
    restore_s: float | None = None,
    degrees: tuple[int, ...] | None = None,
    spread_s: float = 0.0,
) -> Workload:
    """Build the workload: 1 to `calls_max` calls per trajectory, concurrent at its end or, with `multi_turn`, one after
    each part.

    `restore_s` None: 0.2-0.5 s by size, 22 s in production. `degrees` None: 1, 2, 4, 8 where the weights fit; 1 in
    production, where `group`, `calls_max`, `multi_turn` and `spread_s` have no meaning.
    """
    options.check_name("run", run)
    count = (PRODUCTION_SERVICES if production else 10) if services is None else services
    options.check_integer("services", count)
    options.check_integer("group", group)
    options.check_integer("calls_max", calls_max)
    options.check_number("spread_s", spread_s)
    if restore_s is not None:
        options.check_number("restore_s", restore_s)
    options.check_flag("multi_turn", multi_turn)
    options.check_flag("production", production)
    if degrees is None:
        degrees = (1,) if production else DEGREES
    degrees = options.check_degrees(degrees)
    if production:
        restore_s = PRODUCTION_RESTORE_S if restore_s is None else restore_s
        teachers = _teachers(seed, count, PRODUCTION_MEMORY_GIB, restore_s, degrees)
        episodes = _production_episodes(batch, seed, run, teachers)
    else:
        teachers = _teachers(seed, count, MEMORY_GIB, restore_s, degrees)
        episodes = _rollout_episodes(batch, seed, run, teachers, group, calls_max, multi_turn, spread_s)
    return Workload(name="teachers", seed=seed, episodes=episodes, services=tuple(t.service for t in teachers))


def _teachers(
    seed: int, count: int, memory_gib: tuple[float, ...], restore_s: float | None, degrees: tuple[int, ...]
) -> list[_Teacher]:
    """Return the services by falling popularity. Sizes are evenly spaced; which size is popular, and which domain slow,
    is drawn."""
    rng = random_stream("teachers", seed, "services", count)
    sizes, speeds = rng.permutation(count).tolist(), rng.permutation(count).tolist()
    last = max(1, count - 1)
    return [
        _teacher(k, size / last, speed / last, memory_gib, restore_s, degrees)
        for k, (size, speed) in enumerate(zip(sizes, speeds, strict=True))
    ]


def _teacher(
    number: int,
    size: float,
    slowness: float,
    memory_gib: tuple[float, ...],
    restore_s: float | None,
    degrees: tuple[int, ...],
) -> _Teacher:
    """`size` and `slowness` are from 0 to 1: large models gain most from more devices and take longest to restore."""
    memory = memory_gib[min(int(size * len(memory_gib)), len(memory_gib) - 1)]
    fitting = tuple(degree for degree in degrees if degree * DEVICE_GIB >= memory) or degrees[-1:]
    service = ServiceModel(
        name=f"teacher-{number}",
        memory_gib=memory,
        restore_s=_interpolate(RESTORE_S, size) if restore_s is None else restore_s,
        degrees=fitting,
    )
    return _Teacher(
        service,
        Demand({GPU: one_of(*fitting)}),
        PowerLaw(_interpolate(EXPONENTS, size)),
        _interpolate(ROLLOUT_MEDIANS_S, slowness),
    )


def _interpolate(ends: tuple[float, float], place: float) -> float:
    return ends[0] + (ends[1] - ends[0]) * place


def _call_step(teacher: _Teacher, work_s: float) -> SimStep:
    return SimStep(
        kind="teacher",
        key=teacher.service.name,
        demand=teacher.demand,
        service=teacher.service.name,
        work_s=work_s,
        speedup=teacher.speedup,
    )


def _rollout_episodes(
    batch: int,
    seed: int,
    run: str,
    teachers: list[_Teacher],
    group: int,
    calls_max: int,
    multi_turn: bool,
    spread_s: float,
) -> tuple[SimEpisode, ...]:
    """Draw one random stream per column, not per episode: with few calls each, creating streams would dominate the
    time."""
    edges = np.cumsum(popularity(len(teachers)))[:-1]
    groups = random_stream("teachers", seed, "domain").random(-(-batch // group))
    domains = np.searchsorted(edges, groups, side="right").tolist()
    starts = (spread_s * random_stream("teachers", seed, "start").random(batch)).tolist()
    lengths = ROLLOUT.draw(random_stream("teachers", seed, "rollout"), batch).tolist()
    calls = (1 + np.floor(calls_max * random_stream("teachers", seed, "calls").random(batch))).astype(int).tolist()
    seconds = (
        EXECUTION.draw(random_stream("teachers", seed, "work"), batch * calls_max).reshape(batch, calls_max).tolist()
    )
    episodes = []
    for k, (start, length, count, row) in enumerate(zip(starts, lengths, calls, seconds, strict=True)):
        domain = domains[k // group]
        teacher = teachers[domain]
        scale = teacher.speedup.at(EXECUTION_DEGREE)
        steps = tuple(_call_step(teacher, scale * work) for work in row[:count])
        parts = [(step,) for step in steps] if multi_turn else [steps]
        think = teacher.rollout_s * length / len(parts)
        episodes.append(
            SimEpisode(
                id=f"{run}/{k}",
                run=run,
                task=f"domain-{domain}",
                group=f"{run}/g{k // group}",
                start_s=start,
                turns=tuple(SimTurn(think_s=think, steps=part) for part in parts),
            )
        )
    return tuple(episodes)


def _production_episodes(batch: int, seed: int, run: str, teachers: list[_Teacher]) -> tuple[SimEpisode, ...]:
    """One request per episode."""
    edges = np.cumsum(popularity(len(teachers)))[:-1]
    drawn = np.searchsorted(edges, random_stream("teachers", seed, "models").random(batch), side="right").tolist()
    repeats = (random_stream("teachers", seed, "repeats").random(batch) < REPEAT).tolist()
    models = accumulate(zip(drawn, repeats, strict=True), lambda before, new: (before[0], True) if new[1] else new)
    work = GPU_REQUEST.draw(random_stream("teachers", seed, "work"), batch).tolist()
    starts = _bursty_starts(batch, seed)
    return tuple(
        SimEpisode(
            id=f"{run}/{k}",
            run=run,
            task="production",
            start_s=start,
            turns=(SimTurn(think_s=0.0, steps=(_call_step(teachers[model], seconds),)),),
        )
        for k, (start, (model, _), seconds) in enumerate(zip(starts, models, work, strict=True))
    )


def _bursty_starts(count: int, seed: int) -> list[float]:
    """Return Poisson arrivals whose log rate is an autoregressive walk; the mean gap is PRODUCTION_GAP_S."""
    steps = (
        random_stream("teachers", seed, "rate").standard_normal(count) * RATE_SIGMA * math.sqrt(1.0 - RATE_MEMORY**2)
    )
    steps[0] /= math.sqrt(1.0 - RATE_MEMORY**2)
    log_gaps = np.array(list(accumulate(steps.tolist(), lambda before, step: RATE_MEMORY * before + step)))
    gaps = random_stream("teachers", seed, "gaps").exponential(PRODUCTION_GAP_S, count)
    starts: Floats = np.cumsum(gaps * np.exp(log_gaps - RATE_SIGMA**2 / 2.0))
    return [float(start) for start in starts]
