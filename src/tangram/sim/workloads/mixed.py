"""The `mixed` workload: coding, search and teachers as three concurrent runs that share all pools.

Owns the combination of the three. Synchronous: all trajectories start at 0, as after a training phase. Asynchronous:
starts are spread, as when trajectories end and are replaced one by one.
"""

from __future__ import annotations

from tangram.errors import InvalidConfig
from tangram.sim.episode import Workload
from tangram.sim.workloads import coding, options, search, teachers

PHASES = ("synchronous", "asynchronous")

SPREAD_S = 300.0
"""Asynchronous starts are spread over about the length of a coding trajectory: the steady state of a rollout."""


def build(*, batch: int = 1536, seed: int = 0, phases: str = "synchronous", spread_s: float | None = None) -> Workload:
    """Build `batch` trajectories in total, a third per run, at least one each. `spread_s` None: 300 s (async)."""
    options.check_choice("phases", phases, PHASES)
    options.check_integer("batch", batch, least=3)
    if spread_s is None:
        spread_s = SPREAD_S if phases == "asynchronous" else 0.0
    elif phases == "synchronous" and spread_s:
        raise InvalidConfig("spread_s", spread_s, "none with synchronous phases; choose phases='asynchronous'")
    third, rest = divmod(batch, 3)
    parts = (
        coding.build(batch=third + (rest > 0), seed=seed, spread_s=spread_s),
        search.build(batch=third + (rest > 1), seed=seed, spread_s=spread_s),
        teachers.build(batch=third, seed=seed, spread_s=spread_s),
    )
    return Workload(
        name="mixed",
        seed=seed,
        episodes=tuple(episode for part in parts for episode in part.episodes),
        services=tuple(service for part in parts for service in part.services),
        apis=tuple(api for part in parts for api in part.apis),
    )
