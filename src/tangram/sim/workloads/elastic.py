"""The `elastic` workload: independent elastic actions with open arrivals, for comparing schedulers.

Owns open arrivals at a stated load. Every episode is one action with a known speed-up. Arrivals are Poisson with
arrivals per second x mean work / units = load, where the work is the time on one unit: at load 1 the units just suffice
if no action is sped up. Action k is the same for every batch size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tangram.core.demand import CPU, Demand, cores
from tangram.core.speedup import PowerLaw
from tangram.sim.episode import SimEpisode, SimStep, SimTurn, Workload
from tangram.sim.workloads import options
from tangram.sim.workloads.coding import REWARD_S
from tangram.sim.workloads.fit import lognormal_by_mean, random_stream

GPU_REQUEST = lognormal_by_mean(28.7, 0.73)
"""Execution of one request of a production mix of models."""

SOURCES = {"reward": REWARD_S, "gpu": GPU_REQUEST}
"""Sources of work: test suites (mean 17 s, CV 2.1) or model requests (mean 28.7 s, CV 0.73)."""


def build(
    *,
    batch: int = 2000,
    seed: int = 0,
    run: str = "elastic",
    load: float = 0.7,
    units: int = 32,
    exponent: float = 0.75,
    cores_max: int | None = None,
    source: str = "reward",
) -> Workload:
    """Build the workload. `cores_max` limits one action; default: half of the units."""
    options.check_choice("source", source, SOURCES)
    seconds = SOURCES[source]
    work = seconds.draw(random_stream("elastic", seed, "work", source), batch)
    episodes = arrivals(
        work.tolist(),
        [""] * batch,
        mean_s=seconds.mean(),
        seed=seed,
        run=run,
        load=load,
        units=units,
        exponent=exponent,
        cores_max=cores_max,
    )
    return Workload(name="elastic", seed=seed, episodes=episodes)


def arrivals(
    work: Sequence[float],
    tasks: Sequence[str],
    *,
    mean_s: float,
    seed: int,
    run: str,
    load: float,
    units: int,
    exponent: float,
    cores_max: int | None = None,
) -> tuple[SimEpisode, ...]:
    """Return one episode per entry of `work`, whose expectation is `mean_s`, arriving as a Poisson process."""
    options.check_name("run", run)
    options.check_positive("load", load)
    options.check_integer("units", units)
    options.check_number("exponent", exponent, most=1.0)
    law = PowerLaw(exponent)
    if cores_max is not None:
        options.check_integer("cores_max", cores_max)
    demand = Demand({CPU: cores(1, cores_max or max(1, units // 2))}, speedup=law)
    gaps = random_stream("elastic", seed, "arrivals").exponential(mean_s / (load * units), len(work))
    return tuple(
        SimEpisode(
            id=f"{run}/{k}",
            run=run,
            task="elastic",
            start_s=start,
            turns=(
                SimTurn(
                    think_s=0.0,
                    steps=(SimStep(kind="reward", key="tests", demand=demand, work_s=seconds, speedup=law, task=task),),
                ),
            ),
        )
        for k, (start, seconds, task) in enumerate(zip(np.cumsum(gaps).tolist(), work, tasks, strict=True))
    )
