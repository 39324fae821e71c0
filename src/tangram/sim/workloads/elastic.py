"""The `elastic` workload: independent elastic actions that arrive on their own, for comparing schedulers.

Owns open arrivals at a stated load. Every episode is one action with a known speed-up; arrivals are Poisson with
arrivals per second x mean work / units = load, where the work is what one unit would need. So a load of 1 is what
the units can just carry if no action is ever sped up. Promises that action k is the same whatever the batch size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tangram.core.demand import CPU, Demand, cores
from tangram.core.speedup import PowerLaw
from tangram.sim.episode import Episode, Step, Turn, Workload
from tangram.sim.workloads import options
from tangram.sim.workloads.coding import REWARD
from tangram.sim.workloads.fit import lognormal_by_mean, stream

GPU_REQUEST = lognormal_by_mean(28.7, 0.73)
"""Execution of one request of a production mix of models."""

SOURCES = {"reward": REWARD, "gpu": GPU_REQUEST}
"""Where the work comes from: test suites (mean 17 s, CV 2.1) or model requests (mean 28.7 s, CV 0.73)."""


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
    """`cores_max` is what one action may use at most, by default half of the units."""
    options.known("source", source, SOURCES)
    seconds = SOURCES[source]
    work = seconds.draw(stream("elastic", seed, "work", source), batch)
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
) -> tuple[Episode, ...]:
    """One episode per entry of `work`, which has the expectation `mean_s`, arriving as a Poisson process."""
    options.word("run", run)
    options.positive("load", load)
    options.whole("units", units)
    options.number("exponent", exponent, most=1.0)
    law = PowerLaw(exponent)
    if cores_max is not None:
        options.whole("cores_max", cores_max)
    demand = Demand({CPU: cores(1, cores_max or max(1, units // 2))}, speedup=law)
    gaps = stream("elastic", seed, "arrivals").exponential(mean_s / (load * units), len(work))
    return tuple(
        Episode(
            id=f"{run}/{k}",
            run=run,
            task="elastic",
            start_s=start,
            turns=(
                Turn(
                    think_s=0.0,
                    steps=(Step(kind="reward", key="tests", demand=demand, work_s=seconds, speedup=law, task=task),),
                ),
            ),
        )
        for k, (start, seconds, task) in enumerate(zip(np.cumsum(gaps).tolist(), work, tasks, strict=True))
    )
