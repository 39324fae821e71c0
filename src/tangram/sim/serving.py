"""Predicted gains of hardware affinity, and of disaggregated prefill and decoding, on published GPUs.

Owns the two published settings and their comparison with the published results. The efficiencies of the hardware
(`serving_model.CALIBRATED`) were fitted to another figure, not to these results. Same seed, same numbers. Every number
is **simulated**, none is measured.

`affinity_gains` compares a mix of two GPU classes with either class alone at equal cost.
`disaggregation_predictions` compares prefill on H800 and decoding on H20 with both phases on all of the same nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from tangram.reports.terminal import text_table
from tangram.sim.serving_fleet import NODE_DEVICES, DevicePool, Disaggregation, ServingResult, serve
from tangram.sim.serving_model import (
    CALIBRATED,
    H20,
    H800,
    QWEN3_8B,
    QWEN3_14B,
    QWEN3_30B_A3B,
    QWEN3_32B,
    Model,
)
from tangram.sim.serving_tasks import FROZENLAKE, GEM_GAME, GEM_MATH, SWE, WEBSHOP, ServingTask, draw_trajectories

DEVICES_EACH = {QWEN3_8B.name: 1, QWEN3_14B.name: 2, QWEN3_32B.name: 4, QWEN3_30B_A3B.name: 4}
"""Devices per engine. Published for the first three."""

# The mix against one class.

SCALE = 2
"""Divisor of the published fleets and trajectories in flight, to finish in seconds."""
IN_FLIGHT = 512 // SCALE
"""One batch in the publication."""
AFFINITY_SEED = 1
WARM_UP, ENDED = 1024, 3072
"""The rate is measured between the ends of these two trajectories. The window is long because `swe` trajectories are
long and the rate settles only when as many end as begin."""

PUBLISHED_VS_COMPUTE, PUBLISHED_VS_BANDWIDTH = (1.12, 1.37), (1.30, 1.68)


# 64 H800 + 24 H20, 208 H20, 72 H800 cost 206.4, 208 and 205.2. "32 H800 train, fixed" is read as in addition to these
# counts: only then does the mix add up to the 96 H800 of the cluster.
MIX = (DevicePool(H800, 64 // SCALE), DevicePool(H20, 24 // SCALE))
BANDWIDTH_ONLY = (DevicePool(H20, 208 // SCALE),)
COMPUTE_ONLY = (DevicePool(H800, 72 // SCALE),)


class GainSpread(msgspec.Struct, frozen=True):
    """Geometric mean, minimum and maximum over the models."""

    mean: float
    low: float
    high: float


class ModelGain(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second of the mix over those of either class alone."""

    model: str
    vs_compute: float
    vs_bandwidth: float


class AffinityGains(msgspec.Struct, frozen=True, kw_only=True):
    models: tuple[ModelGain, ...]
    simulated_vs_compute: GainSpread
    simulated_vs_bandwidth: GainSpread
    seed: int
    label: str = "simulated"

    def lines(self) -> list[str]:
        compute, bandwidth = self.simulated_vs_compute, self.simulated_vs_bandwidth
        rows = [
            ("mix by affinity against", "H800 alone", "H20 alone"),
            *((gain.model, f"{gain.vs_compute:.2f}×", f"{gain.vs_bandwidth:.2f}×") for gain in self.models),
            ("mean", f"{compute.mean:.2f}×", f"{bandwidth.mean:.2f}×"),
            ("published", _range(PUBLISHED_VS_COMPUTE), _range(PUBLISHED_VS_BANDWIDTH)),
        ]
        return [
            f"{self.label}; seed {self.seed}; published fleets and batch divided by {SCALE}",
            *text_table(rows, right=(1, 2)),
        ]


def _range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.2f}-{ends[1]:.2f}×"


def tasks_of(model: Model) -> tuple[ServingTask, ...]:
    """Published: all tasks, but software engineering only with the largest model."""
    small = (FROZENLAKE, WEBSHOP, GEM_MATH, GEM_GAME)
    return (*small, SWE) if model == QWEN3_32B else small


def affinity_gains(
    *,
    models: Sequence[Model] = (QWEN3_8B, QWEN3_14B, QWEN3_32B),
    warm_up: int = WARM_UP,
    ended: int = ENDED,
) -> AffinityGains:
    """Compare the mix by affinity with either class alone. Tasks are drawn uniformly; each ended trajectory is
    replaced.

    The gain is the ratio of the steady-state token rates. Takes about 15 s.
    """
    gains = []
    for model in models:
        trajectories = draw_trajectories(tasks_of(model), ended + IN_FLIGHT, AFFINITY_SEED)
        by_task = {task.name: task.prefers for task in tasks_of(model)}
        mix, compute, bandwidth = (
            serve(
                pools,
                model,
                DEVICES_EACH[model.name],
                CALIBRATED,
                trajectories,
                concurrency=IN_FLIGHT,
                prefers=by_task,
                stop_after=ended,
            ).rate(warm_up, ended)
            for pools in (MIX, COMPUTE_ONLY, BANDWIDTH_ONLY)
        )
        gains.append(ModelGain(model=model.name, vs_compute=mix / compute, vs_bandwidth=mix / bandwidth))
    return AffinityGains(
        models=tuple(gains),
        simulated_vs_compute=_spread([gain.vs_compute for gain in gains]),
        simulated_vs_bandwidth=_spread([gain.vs_bandwidth for gain in gains]),
        seed=AFFINITY_SEED,
    )


def _spread(values: Sequence[float]) -> GainSpread:
    return GainSpread(math.exp(sum(math.log(value) for value in values) / len(values)), min(values), max(values))


# Disaggregated prefill and decoding.

NODES = 4
BATCH = 128
DISAGGREGATION = Disaggregation(prefill=H800.name, decode=H20.name)
DISAGGREGATION_SEEDS = (1, 2, 3)
PUBLISHED_DISAGGREGATION = {
    (QWEN3_32B.name, 1): 1.03,
    (QWEN3_32B.name, 2): 1.05,
    (QWEN3_30B_A3B.name, 1): 1.11,
    (QWEN3_30B_A3B.name, 2): 1.21,
}
"""By model and number of prefill nodes. For 3P1D only "the worst" is published, for both models."""


class DisaggregationPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """Four nodes of 8 devices, H800 and H20: each phase on its own class against both phases everywhere."""

    model: str
    split: str
    """Number of prefill nodes (H800) and decode nodes (H20): 1P3D."""
    together_s: float
    split_s: float
    """Seconds until the last trajectory of the batch ends; means over the seeds."""
    simulated: float
    """Speed-up of the split."""
    simulated_without_reuse: float
    """The same if no prompt finds its history in a cache: the lower bound of a real prefix cache."""
    published: float | None
    label: str = "simulated"


def disaggregation_predictions(*, seeds: Sequence[int] = DISAGGREGATION_SEEDS) -> list[DisaggregationPrediction]:
    """Predict 1P3D, 2P2D and 3P1D for the dense model and the mixture of experts, on the published batch. Takes about
    10 s."""
    return [_predict(model, nodes, seeds) for model in (QWEN3_32B, QWEN3_30B_A3B) for nodes in range(1, NODES)]


def _predict(model: Model, nodes: int, seeds: Sequence[int]) -> DisaggregationPrediction:
    pools = (DevicePool(H800, nodes * NODE_DEVICES), DevicePool(H20, (NODES - nodes) * NODE_DEVICES))

    def both(task: ServingTask) -> list[tuple[ServingResult, ServingResult]]:
        """Return results together and split, by seed. Evicted KV caches are kept in host memory on both sides;
        otherwise one prefill node could not keep the histories of the whole batch."""
        return [
            (
                serve(pools, model, DEVICES_EACH[model.name], CALIBRATED, trajectories, host=True),
                serve(
                    pools, model, DEVICES_EACH[model.name], CALIBRATED, trajectories, host=True, split=DISAGGREGATION
                ),
            )
            for trajectories in (draw_trajectories((task,), BATCH, seed) for seed in seeds)
        ]

    runs = both(SWE)
    return DisaggregationPrediction(
        model=model.name,
        split=f"{nodes}P{NODES - nodes}D",
        together_s=sum(unified.seconds for unified, _ in runs) / len(runs),
        split_s=sum(split.seconds for _, split in runs) / len(runs),
        simulated=_gain(runs),
        simulated_without_reuse=_gain(both(msgspec.structs.replace(SWE, rerenders_prompt=True))),
        published=PUBLISHED_DISAGGREGATION.get((model.name, nodes)),
    )


def _gain(runs: Sequence[tuple[ServingResult, ServingResult]]) -> float:
    return _spread([unified.seconds / split.seconds for unified, split in runs]).mean


def disaggregation_lines(predictions: Sequence[DisaggregationPrediction]) -> list[str]:
    worst = {
        model: min(prediction.simulated for prediction in predictions if prediction.model == model)
        for model in _models(predictions)
    }
    rows = [("model", "split", "together", "apart", "gain", "no reuse", "published", "")]
    rows += [
        (
            prediction.model,
            prediction.split,
            f"{prediction.together_s:.0f} s",
            f"{prediction.split_s:.0f} s",
            f"{prediction.simulated:.2f}×",
            f"{prediction.simulated_without_reuse:.2f}×",
            "worst" if prediction.published is None else f"{prediction.published:.2f}×",
            "worst" if prediction.simulated == worst[prediction.model] else "",
        )
        for prediction in predictions
    ]
    return [
        "simulated; software engineering, batch of 128, 32k context; P: node of 8 H800, D: node of 8 H20",
        *text_table(rows, right=range(2, 7)),
    ]


def _models(predictions: Sequence[DisaggregationPrediction]) -> list[str]:
    return list(dict.fromkeys(prediction.model for prediction in predictions))
