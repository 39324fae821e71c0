"""What affinity by task, and prefill apart from decoding, would bring on hardware that is not here: two predictions.

Owns the two published settings and the comparison with what was published of them. The hardware model was fitted to
another figure (`serving_fit`); neither setting was used for it. Promises the same numbers for the same seed. Every
number is **simulated**, none is measured.

Published beside it: how many times faster the mix is than either class alone at equal cost, and how many times faster
the same nodes are with prefill on H800 and decoding on H20 than with both phases on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from tangram.errors import InvalidConfig
from tangram.sim.serving_fit import CALIBRATED
from tangram.sim.serving_fleet import NODE_DEVICES, Pool, Served, Split, serve
from tangram.sim.serving_model import H20, H800, QWEN3_8B, QWEN3_14B, QWEN3_30B_A3B, QWEN3_32B, Efficiency, Model
from tangram.sim.serving_tasks import FROZENLAKE, GEM_GAME, GEM_MATH, SWE, WEBSHOP, Task, draw

DEVICES_EACH = {QWEN3_8B.name: 1, QWEN3_14B.name: 2, QWEN3_32B.name: 4, QWEN3_30B_A3B.name: 4}
"""Devices of an engine. Published for the first three."""

# The mix against one class.

SCALE = 2
"""The fleets and the trajectories in flight are the published ones divided by this, to be done in seconds."""
IN_FLIGHT = 512 // SCALE
"""One batch of the publication."""
WARM_UP, ENDED = 1024, 3072
"""Trajectories after whose end the rate is taken, and until whose end. Twelve times those in flight, because those of
`swe` live long, and the rate settles only when as many of them end as begin."""

PUBLISHED_VS_COMPUTE, PUBLISHED_VS_BANDWIDTH = (1.12, 1.37), (1.30, 1.68)


class Fleets(msgspec.Struct, frozen=True):
    """Three fleets of about the same cost."""

    mix: tuple[Pool, ...]
    bandwidth: tuple[Pool, ...]
    compute: tuple[Pool, ...]


FLEETS = {
    # 64 H800 + 24 H20, 208 H20, 72 H800: they cost 206.4, 208 and 205.2.
    "beside": Fleets(
        (Pool(H800, 64 // SCALE), Pool(H20, 24 // SCALE)), (Pool(H20, 208 // SCALE),), (Pool(H800, 72 // SCALE),)
    ),
    # Less 32 H800, or the 91.2 H20 that cost as much; 112 and not 116, to be divisible among engines.
    "inside": Fleets(
        (Pool(H800, 32 // SCALE), Pool(H20, 24 // SCALE)), (Pool(H20, 112 // SCALE),), (Pool(H800, 40 // SCALE),)
    ),
}
"""How to read "32 H800 train, fixed": beside the published counts, or among them. The first is the only reading in
which the fleet of 208 H20 has a place for them, and in which the mix adds up to the 96 H800 of the cluster."""


class Spread(msgspec.Struct, frozen=True):
    """Over the models: geometric mean, lowest and highest."""

    mean: float
    low: float
    high: float


class ModelGain(msgspec.Struct, frozen=True, kw_only=True):
    """How many times more tokens per second the mix yields than either class alone."""

    model: str
    vs_compute: float
    vs_bandwidth: float


class AffinityGains(msgspec.Struct, frozen=True, kw_only=True):
    models: tuple[ModelGain, ...]
    simulated_vs_compute: Spread
    simulated_vs_bandwidth: Spread
    training: str
    seed: int
    label: str = "simulated"

    def lines(self) -> list[str]:
        rows = [(one.model, f"{one.vs_compute:.2f}", f"{one.vs_bandwidth:.2f}") for one in self.models]
        compute, bandwidth = self.simulated_vs_compute, self.simulated_vs_bandwidth
        return [
            f"{self.label}; seed {self.seed}; published fleets and batch divided by {SCALE}; training {self.training}",
            f"{'mix by affinity against':<24}{'H800 alone':>12}{'H20 alone':>12}",
            *(f"{model:<24}{vs_compute:>11}×{vs_bandwidth:>11}×" for model, vs_compute, vs_bandwidth in rows),
            f"{'mean':<24}{compute.mean:>11.2f}×{bandwidth.mean:>11.2f}×",
            f"{'published':<24}{_range(PUBLISHED_VS_COMPUTE):>12}{_range(PUBLISHED_VS_BANDWIDTH):>12}",
        ]


def _range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.2f}-{ends[1]:.2f}×"


def tasks_of(model: Model) -> tuple[Task, ...]:
    """Published: all tasks, but software engineering only with the largest model."""
    small = (FROZENLAKE, WEBSHOP, GEM_MATH, GEM_GAME)
    return (*small, SWE) if model == QWEN3_32B else small


def affinity_gains(
    *,
    models: Sequence[Model] = (QWEN3_8B, QWEN3_14B, QWEN3_32B),
    efficiency: Mapping[str, Efficiency] = CALIBRATED,
    prefers: Mapping[str, str] | None = None,
    training: str = "beside",
    seed: int = 1,
    warm_up: int = WARM_UP,
    ended: int = ENDED,
) -> AffinityGains:
    """The mix by affinity against either class alone, tasks drawn uniformly, a new trajectory for each that ends.

    The gain is that of the rate of tokens in the steady state. `prefers` sends a task elsewhere than the publication
    does; an empty class leaves it to the load. Takes about 15 s."""
    fleets = FLEETS.get(training)
    if fleets is None:
        raise InvalidConfig("training", training, f"one of {', '.join(FLEETS)}")
    found = []
    for model in models:
        trajectories = draw(tasks_of(model), ended + IN_FLIGHT, seed)
        by_task = {task.name: task.prefers for task in tasks_of(model)} | dict(prefers or {})
        mix, compute, bandwidth = (
            serve(
                pools,
                model,
                DEVICES_EACH[model.name],
                efficiency,
                trajectories,
                concurrency=IN_FLIGHT,
                prefers=by_task,
                stop_after=ended,
            ).rate(warm_up, ended)
            for pools in (fleets.mix, fleets.compute, fleets.bandwidth)
        )
        found.append(ModelGain(model=model.name, vs_compute=mix / compute, vs_bandwidth=mix / bandwidth))
    return AffinityGains(
        models=tuple(found),
        simulated_vs_compute=_spread([one.vs_compute for one in found]),
        simulated_vs_bandwidth=_spread([one.vs_bandwidth for one in found]),
        training=training,
        seed=seed,
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(math.exp(sum(math.log(value) for value in values) / len(values)), min(values), max(values))


# Prefill apart from decoding.

NODES = 4
BATCH = 128
SPLIT = Split(prefill=H800.name, decode=H20.name)
SPLIT_SEEDS = (1, 2, 3)
PUBLISHED_SPLIT = {
    (QWEN3_32B.name, 1): 1.03,
    (QWEN3_32B.name, 2): 1.05,
    (QWEN3_30B_A3B.name, 1): 1.11,
    (QWEN3_30B_A3B.name, 2): 1.21,
}
"""By model and nodes that prefill. Of 3P1D only that it is the worst with both."""


class SplitPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """Four nodes of 8 devices, H800 and H20: each phase on its own class against both phases everywhere."""

    model: str
    split: str
    """Nodes that prefill (H800) and that decode (H20): 1P3D."""
    together_s: float
    split_s: float
    """Until the last of the batch ends; means over the seeds."""
    simulated: float
    """How many times faster the split is."""
    simulated_without_reuse: float
    """The same if no prompt found its history in a cache: the other end of what a real prefix cache does."""
    published: float | None
    sent_gb: float
    """Keys and values sent between nodes."""
    label: str = "simulated"


def split_predictions(
    *, efficiency: Mapping[str, Efficiency] = CALIBRATED, seeds: Sequence[int] = SPLIT_SEEDS, batch: int = BATCH
) -> list[SplitPrediction]:
    """1P3D, 2P2D and 3P1D for the dense model and the mixture of experts, on the published batch. Takes about 10 s."""
    return [
        _predict(model, nodes, efficiency, seeds, batch)
        for model in (QWEN3_32B, QWEN3_30B_A3B)
        for nodes in range(1, NODES)
    ]


def _predict(
    model: Model, nodes: int, efficiency: Mapping[str, Efficiency], seeds: Sequence[int], batch: int
) -> SplitPrediction:
    pools = (Pool(H800, nodes * NODE_DEVICES), Pool(H20, (NODES - nodes) * NODE_DEVICES))

    def both(task: Task) -> list[tuple[Served, Served]]:
        """Together and split, by seed. What is evicted stays with the host on both sides: one node that prefills could
        not keep the histories of the whole batch otherwise."""
        return [
            (
                serve(pools, model, DEVICES_EACH[model.name], efficiency, trajectories, host=True),
                serve(pools, model, DEVICES_EACH[model.name], efficiency, trajectories, host=True, split=SPLIT),
            )
            for trajectories in (draw((task,), batch, seed) for seed in seeds)
        ]

    runs = both(SWE)
    return SplitPrediction(
        model=model.name,
        split=f"{nodes}P{NODES - nodes}D",
        together_s=sum(together.seconds for together, _ in runs) / len(runs),
        split_s=sum(split.seconds for _, split in runs) / len(runs),
        simulated=_gain(runs),
        simulated_without_reuse=_gain(both(msgspec.structs.replace(SWE, anew=True))),
        published=PUBLISHED_SPLIT.get((model.name, nodes)),
        sent_gb=sum(split.sent_bytes for _, split in runs) / len(runs) / 1e9,
    )


def _gain(runs: Sequence[tuple[Served, Served]]) -> float:
    return _spread([together.seconds / split.seconds for together, split in runs]).mean


def split_lines(predictions: Sequence[SplitPrediction]) -> list[str]:
    worst = {model: min(one.simulated for one in predictions if one.model == model) for model in _models(predictions)}
    found = [
        "simulated; software engineering, batch of 128, 32k context; P: node of 8 H800, D: node of 8 H20",
        f"{'model':<15}{'split':<7}{'together':>10}{'apart':>9}{'gain':>8}{'no reuse':>10}{'published':>11}",
    ]
    for one in predictions:
        published = "worst" if one.published is None else f"{one.published:.2f}×"
        mark = "  worst" if one.simulated == worst[one.model] else ""
        found.append(
            f"{one.model:<15}{one.split:<7}{one.together_s:>8.0f} s{one.split_s:>7.0f} s"
            f"{one.simulated:>7.2f}×{one.simulated_without_reuse:>9.2f}×{published:>11}{mark}"
        )
    return found


def _models(predictions: Sequence[SplitPrediction]) -> list[str]:
    return list(dict.fromkeys(one.model for one in predictions))
