"""The learner: a policy, its optimiser, and its gradient steps.

Owns the weights in training, the optimiser, the reference policy and the version. Never samples, publishes or waits.
Promises:

- the same weights, optimiser, version, settings and batch give the same step, to the last bit (on one thread);
- `restore` of what `save` wrote gives the same next step, to the last bit;
- a step that raises has changed nothing;
- no sample exceeds the staleness bound of the mode, and no stale sample is trained on without a correction.

    before the first step   imitate, imitate, ...   supervised, with its own optimiser; version 0
    then                    step, step, ...         each makes a version, with a new optimiser
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from tangram.errors import InvalidConfig, InvalidInput, ManagerError
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.inference.engines.protocol import Sampling
from tangram.rl.model import objective
from tangram.rl.model.gradient_step import GradientStep, PolicyOptimizer, step_seed
from tangram.rl.model.policy import Policy, as_policy, score
from tangram.rl.model.sample_batches import Floats, PackedSamples
from tangram.rl.trajectories.training_batch import Demonstration, TrainingBatch

STATE, REFERENCE = "learner.pt", "reference"
"""Further files in a checkpoint: optimiser and version; a folder with the reference policy."""
FINAL_RATE_SHARE = 0.1
"""Share of the learning rate that remains at the last step."""


class Learner:
    def __init__(
        self,
        settings: TrainSettings,
        model: Any,
        *,
        reward_low: Mapping[str, float],
        tokens_longest: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model`: a Transformer, a causal language model of transformers, or a Policy. `reward_low`: the lowest reward
        of each task. `tokens_longest`: the most action tokens of a trajectory, the divisor of `normalise = "constant"`.
        Raises InvalidConfig."""
        Sampling(**msgspec.structs.asdict(settings.sampling)).require_trainable()
        if tokens_longest < 1:
            raise InvalidConfig("tokens_longest", tokens_longest, "at least 1")
        self.policy: Policy = as_policy(model)
        self.version = 0
        """Number of gradient steps made."""
        self._settings, self._objective = settings, settings.objective
        self._advantage = objective.advantage_named(self._objective.advantage)
        self._loss = objective.loss_named(self._objective.loss)
        self._reward_low, self._tokens_longest, self._now = dict(reward_low), tokens_longest, now
        self._policy_optimizer = self._new_optimizer()
        self._imitation_optimizer: PolicyOptimizer | None = None
        """The optimiser of the warm start, while it runs."""
        self._reference: Policy | None = None
        """Made at the first step, if the objective has a KL penalty."""

    def _new_optimizer(self) -> PolicyOptimizer:
        return PolicyOptimizer(
            self.policy,
            learning_rate=self._objective.learning_rate,
            weight_decay=self._objective.weight_decay,
            norm_max=self._objective.gradient_norm_max,
        )

    # ---- behaviour cloning ----

    def imitate(self, demonstrations: Sequence[Demonstration]) -> float:
        """Makes one supervised step of behaviour cloning. Returns the mean loss of the action tokens before it. Keeps
        the version. Raises InvalidInput for bad demonstrations and once a gradient step was made, and NotFinite."""
        if self.version:
            raise InvalidInput("version", self.version, "0: a warm start comes before the first step")
        samples = PackedSamples.from_demonstrations(demonstrations)
        samples.require_readable(self.policy.vocabulary, self.policy.context_max)
        if not len(samples):
            raise InvalidInput("demonstrations", len(demonstrations), "at least one with an action")
        if self._imitation_optimizer is None:
            rate, norm_max = self._settings.warm_start.learning_rate, self._objective.gradient_norm_max
            self._imitation_optimizer = PolicyOptimizer(
                self.policy, learning_rate=rate, weight_decay=0.0, norm_max=norm_max
            )
        loss, _ = self._imitation_optimizer.update(self._imitation_losses(samples))
        return loss

    def _imitation_losses(self, samples: PackedSamples) -> Iterator[Tensor]:
        indices = np.arange(len(samples))
        for microbatch in samples.microbatches(
            indices, self._objective.microbatch, self.policy.vocabulary, self.policy.device
        ):
            yield -score(self.policy, microbatch).logprobs.sum() / len(samples.targets)

    # ---- gradient steps ----

    def step(self, batch: TrainingBatch) -> dict[str, float]:
        """Makes the next version and returns its metrics, see METRIC_DESCRIPTIONS; a mean over no trajectories is left
        out. If the selection leaves no trajectory, `trajectories` is 0 and the weights stay the same. Raises
        InvalidInput for a batch that cannot be trained on, and NotFinite."""
        began_at = self._now()
        self._require_trainable_batch(batch)
        chosen, metrics = objective.select_trajectories(
            batch.groups, self._objective, self._advantage, self._reward_low
        )
        distills = self._objective.kind == "distill"
        samples = PackedSamples.from_trajectories([each.trajectory for each in chosen], with_teacher=distills)
        samples.require_readable(self.policy.vocabulary, self.policy.context_max)
        if self._objective.kl and self._reference is None:
            self._reference = self.policy.frozen()
        rate = learning_rate(self.version, self._settings)
        if len(samples):
            self._policy_optimizer.set_learning_rate(rate)
            metrics |= self._step(samples, np.array([each.advantage for each in chosen])).run()
        else:
            metrics |= {"loss": 0.0, "gradient_norm": 0.0}
        self.version += 1
        self._imitation_optimizer = None
        tokens = len(samples.targets)
        return metrics | {
            "learning_rate": rate,
            "trajectories": float(len(samples)),
            "tokens": float(tokens),
            "tokens_per_s": tokens * self._objective.epochs / max(self._now() - began_at, 1e-9),
        }

    def _step(self, samples: PackedSamples, advantages: Floats) -> GradientStep:
        return GradientStep(
            self._policy_optimizer,
            self._reference,
            samples,
            advantages,
            settings=self._objective,
            loss=self._loss,
            temperature=self._settings.sampling.temperature,
            tokens_longest=self._tokens_longest,
            seed=step_seed(self._settings.seed, self.version),
        )

    def _require_trainable_batch(self, batch: TrainingBatch) -> None:
        """Enforces the staleness bound of the mode before a gradient step."""
        if batch.version != self.version:
            raise InvalidInput("batch.version", batch.version, f"{self.version}, from which the step starts")
        training = self._settings.training
        oldest = max(0, self.version - training.staleness_bound) if training.enforces_staleness else 0
        reason = f"in mode {training.mode} with α = {training.staleness_bound}"
        if self._objective.correction == "none":  # independent of the schedule
            oldest, reason = self.version, 'as objective.correction = "none" trains on nothing older'
        for group in batch.groups:
            for member in group.members:
                if member.version_first is not None and not oldest <= member.version_first <= self.version:
                    raise InvalidInput(
                        f"{member.id}: version of the first token",
                        member.version_first,
                        f"from {oldest} to {self.version} {reason}",
                    )

    # ---- checkpoints ----

    def save(self, folder: Path | str) -> None:
        """Writes into an existing folder, which may have other files: the weights in the Hugging Face layout, so that
        it also serves as `policy.checkpoint`, and all other state of the next step. Random decisions are a function of
        seed and version and need no state. The optimiser of a warm start is not kept. The owner of the folder makes it
        atomic and durable: an error may leave some of the files. Raises ManagerError."""
        folder = Path(folder)
        reference = self._reference or (self.policy if self._objective.kl else None)
        try:
            self.policy.save(folder)
            if reference is not None:
                (folder / REFERENCE).mkdir()
                reference.save(folder / REFERENCE)
            (folder / STATE).write_bytes(self._state())
        except OSError as error:
            raise ManagerError(f"{folder} cannot be written: {error.strerror or error}") from error

    def _state(self) -> memoryview:
        """Serialised in memory first: for a full disk PyTorch only raises a RuntimeError without a reason."""
        content = io.BytesIO()
        torch.save({"version": self.version, "optimizer": self._policy_optimizer.state()}, content)
        return content.getbuffer()

    def restore(self, folder: Path | str) -> None:
        """Restores what `save` wrote. Raises ManagerError and InvalidConfig, and has changed nothing then."""
        folder = Path(folder)
        version, state = read_state(folder / STATE, self.policy.device)
        optimizer = self._new_optimizer()
        reference = None
        try:
            optimizer.restore(state)
        except (KeyError, TypeError, ValueError) as error:
            raise ManagerError(f"{folder / STATE}: not the optimiser of this policy: {error}", retry=False) from error
        if self._objective.kl:
            if not (folder / REFERENCE).is_dir():
                raise InvalidConfig("objective.kl", self._objective.kl, f"0, as {folder} has no reference")
            reference = self.policy.frozen()
            reference.restore(folder / REFERENCE)
        self.policy.restore(folder)
        self._policy_optimizer, self._reference, self._imitation_optimizer, self.version = (
            optimizer,
            reference,
            None,
            version,
        )


def read_state(path: Path, device: torch.device) -> tuple[int, dict[str, Any]]:
    """Returns version and optimiser state. Raises ManagerError."""
    try:
        state = torch.load(path, weights_only=True, map_location=device)
        return int(state["version"]), dict(state["optimizer"])
    except OSError as error:
        raise ManagerError(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # PyTorch raises anything for a file that it cannot read
        raise ManagerError(f"{path}: not the state of a learner: {error}", retry=False) from error


def learning_rate(version: int, settings: TrainSettings) -> float:
    """The learning rate of the step from `version`: rises over the first `rate_warmup_steps`, then falls, with `decay`,
    to a tenth at the last step of the run."""
    schedule = settings.objective
    warmup, step = schedule.rate_warmup_steps, version + 1
    if step <= warmup:
        return schedule.learning_rate * step / warmup
    progress = min(1.0, (step - warmup) / max(settings.training.steps - warmup, 1))
    match schedule.decay:
        case "none":
            remaining = 1.0
        case "linear":
            remaining = 1.0 - progress
        case "cosine":
            remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.learning_rate * (FINAL_RATE_SHARE + (1.0 - FINAL_RATE_SHARE) * remaining)
