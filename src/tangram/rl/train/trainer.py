"""The trainer protocol: makes new weights from batches. rl/train/trainer_process.py has the real one.

A trainer executes one request at a time, in order, and publishes what it makes. After a death its owner restarts it and
chooses the checkpoint, because samples and engines have to go back with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from tangram.errors import ManagerError
from tangram.rl.inference.engines.protocol import PolicyWeights
from tangram.rl.trajectories.training_batch import Demonstration, TrainingBatch

METRIC_DESCRIPTIONS = {
    "loss": "the minimised loss, mean over the minibatches",
    "kl_sampler": "KL divergence of the trainer at the start of the step from the sampler (k3 over action tokens)",
    "kl_reference": "KL divergence from the reference policy (k3), if there is one",
    "kl_teacher": "KL divergence of the trainer at the start of the step from the teacher (k3), if there is one",
    "weight_mean": "mean importance weight of all action tokens",
    "weight_truncated": "share of action tokens whose importance weight was truncated",
    "clip_share": "share of action tokens whose ratio was clipped",
    "entropy": "entropy of the policy at action tokens, in nats",
    "zero_variance_share": "share of groups whose members all have the same reward",
    "gradient_norm": "gradient norm before clipping, mean over the minibatches",
    "learning_rate": "learning rate of the step",
    "trajectories": "trajectories that were trained on",
    "tokens": "action tokens that were trained on",
    "tokens_per_s": "action tokens trained on, all epochs, per second of training",
    "overlong_share": "share of trajectories that were cut off",
}
"""Metrics of a step that a trainer reports, by name."""


class TrainStepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a gradient step."""

    weights: PolicyWeights
    """The new version: one more than that of the batch."""
    metrics: dict[str, float]
    """By name, see METRIC_DESCRIPTIONS."""
    train_s: float
    push_s: float
    """Time to publish the weights."""


class TrainerDied(ManagerError):
    """The trainer ended, hung or failed. Its current request is not done; a version that it published may be
    complete."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"trainer: {reason}")


class Trainer(Protocol):
    async def start(self, checkpoint: Path | None = None) -> PolicyWeights:
        """Starts or restarts the trainer with the weights of a checkpoint as `save` wrote it, or with the first ones,
        version 0. Publishes them, and deletes published later versions. Raises TrainerDied and ManagerError, and
        InvalidConfig for settings that it cannot use."""
        ...

    async def imitate(self, episodes: Sequence[Demonstration]) -> float:
        """Makes one supervised step of behaviour cloning. Returns its loss. Publishes nothing and keeps the version."""
        ...

    async def publish(self, version: int) -> PolicyWeights:
        """Publishes the current weights as this version, replacing it if it exists; for checks during a warm start."""
        ...

    async def step(self, batch: TrainingBatch) -> TrainStepResult:
        """Makes one gradient step. Raises TrainerDied; InvalidInput for a batch that cannot be trained on, which
        changes nothing."""
        ...

    async def save(self, folder: Path) -> None:
        """Writes weights, optimiser and random state into an existing folder, so that the next step from there is the
        same to the last bit. Raises ManagerError if it cannot be written."""
        ...

    async def close(self) -> None: ...
