"""The learner: a policy, its optimiser, and one gradient step after the other.

Owns the weights while they are trained, the optimiser, the reference and the version. Never samples, never publishes
and never waits. Promises:
- the same weights, optimiser, version, settings and batch give the same step, to the last bit (on one thread);
- `restore` of what `save` wrote gives the same next step, to the last bit;
- a step that raises has changed nothing;
- nothing is trained on that is older than the mode allows, and nothing that is older than the weights without a
  correction for it.

    before the first step   imitate, imitate, ...   supervised, by an optimiser of its own; version 0
    then                    step, step, ...         each makes a version; the optimiser is new
"""

from __future__ import annotations

import io
import math
import os
import tempfile
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
from tangram.rl.model.gradient_step import Optimised, Step, seed_of
from tangram.rl.model.policy import Policy, policy_of, score
from tangram.rl.model.sample_batches import Floats, Samples
from tangram.rl.train.records import Batch, Demonstration

STATE, REFERENCE = "learner.pt", "reference"
"""Beside the weights in a checkpoint: the optimiser and the version, and a folder with the reference."""
DECAYED_TO = 0.1
"""Of the learning rate, what is left of it at the last step."""


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
        of each task. `tokens_longest`: the most action tokens of a trajectory, by which `normalise = "constant"`
        divides. Raises InvalidConfig."""
        Sampling(**msgspec.structs.asdict(settings.sampling)).require_trainable()
        if tokens_longest < 1:
            raise InvalidConfig("tokens_longest", tokens_longest, "at least 1")
        self.policy: Policy = policy_of(model)
        self.version = 0
        """Of the weights: the steps that were made."""
        self._settings, self._objective = settings, settings.objective
        self._advantage = objective.advantage_named(self._objective.advantage)
        self._loss = objective.loss_named(self._objective.loss)
        self._reward_low, self._tokens_longest, self._now = dict(reward_low), tokens_longest, now
        self._optimised = self._new_optimised()
        self._imitation: Optimised | None = None
        """Of the warm start, while there is one."""
        self._reference: Policy | None = None
        """Made at the first step, if there is to be one."""

    def _new_optimised(self) -> Optimised:
        return Optimised(
            self.policy,
            rate=self._objective.learning_rate,
            weight_decay=self._objective.weight_decay,
            norm_max=self._objective.gradient_norm_max,
        )

    # ---- imitation ----

    def imitate(self, demonstrations: Sequence[Demonstration]) -> float:
        """One supervised step; returns the mean loss of the action tokens, as it was before. The version stays. Raises
        InvalidInput, also after the first step, and NotFinite."""
        if self.version:
            raise InvalidInput("version", self.version, "0: a warm start comes before the first step")
        samples = Samples.of_demonstrations(demonstrations)
        samples.require_known(self.policy.vocabulary, self.policy.context_max)
        if not len(samples):
            raise InvalidInput("demonstrations", len(demonstrations), "some in which something is done")
        if self._imitation is None:
            rate, norm_max = self._settings.warm_start.learning_rate, self._objective.gradient_norm_max
            self._imitation = Optimised(self.policy, rate=rate, weight_decay=0.0, norm_max=norm_max)
        loss, _ = self._imitation.update(self._losses(samples))
        return loss

    def _losses(self, samples: Samples) -> Iterator[Tensor]:
        rows = np.arange(len(samples))
        for asked in samples.passes(rows, self._objective.microbatch, self.policy.vocabulary, self.policy.device):
            yield -score(self.policy, asked).logprobs.sum() / len(samples.targets)

    # ---- a step ----

    def step(self, batch: Batch) -> dict[str, float]:
        """Makes the next version; returns METRICS of it. A mean of nothing is left out: if nothing is left to be
        trained on, `trajectories` is 0, and the next version has the same weights. Raises InvalidInput for a batch that
        cannot be trained on, and NotFinite."""
        began_s = self._now()
        self._require(batch)
        chosen, metrics = objective.choose(batch.groups, self._objective, self._advantage, self._reward_low)
        taught = self._objective.kind == "distill"
        samples = Samples.of_trajectories([each.trajectory for each in chosen], taught=taught)
        samples.require_known(self.policy.vocabulary, self.policy.context_max)
        if self._objective.kl and self._reference is None:
            self._reference = self.policy.frozen()
        rate = learning_rate(self.version, self._settings)
        if len(samples):
            self._optimised.set_rate(rate)
            metrics |= self._step(samples, np.array([each.advantage for each in chosen])).run()
        else:
            metrics |= {"loss": 0.0, "gradient_norm": 0.0}
        self.version += 1
        self._imitation = None
        tokens = len(samples.targets)
        return metrics | {
            "learning_rate": rate,
            "trajectories": float(len(samples)),
            "tokens": float(tokens),
            "tokens_per_s": tokens * self._objective.epochs / max(self._now() - began_s, 1e-9),
        }

    def _step(self, samples: Samples, advantages: Floats) -> Step:
        return Step(
            self._optimised,
            self._reference,
            samples,
            advantages,
            settings=self._objective,
            loss=self._loss,
            temperature=self._settings.sampling.temperature,
            tokens_longest=self._tokens_longest,
            seed=seed_of(self._settings.seed, self.version),
        )

    def _require(self, batch: Batch) -> None:
        if batch.version != self.version:
            raise InvalidInput("batch.version", batch.version, f"{self.version}, from which the step starts")
        training = self._settings.training
        oldest = max(0, self.version - training.alpha) if training.bounds_age else 0
        why = f"in mode {training.mode} with α = {training.alpha}"
        if self._objective.correction == "none":  # whatever the schedule allows
            oldest, why = self.version, 'as objective.correction = "none" trains on nothing older'
        for group in batch.groups:
            for each in group.members:
                if each.version_first is not None and not oldest <= each.version_first <= self.version:
                    raise InvalidInput(
                        f"{each.id}: version of the first token",
                        each.version_first,
                        f"from {oldest} to {self.version} {why}",
                    )

    # ---- checkpoints ----

    def save(self, folder: Path | str) -> None:
        """Into a folder that is there, in which other files may be: the weights as Hugging Face lays them out, so that
        it is a checkpoint for `policy.checkpoint` too, and all else that the next step depends on. What chance decides
        in a step is a function of the seed and the version, and needs no place. The optimiser of a warm start is not
        kept. Raises ManagerError."""
        folder = Path(folder)
        reference = self._reference or (self.policy if self._objective.kl else None)
        try:
            with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as unfinished:
                inside = Path(unfinished) / "learner"
                self.policy.save(inside)
                if reference is not None:
                    reference.save(inside / REFERENCE)
                with (inside / STATE).open("wb") as file:
                    file.write(self._state())
                    file.flush()
                    os.fsync(file.fileno())
                for each in inside.iterdir():
                    each.rename(folder / each.name)
        except OSError as error:
            raise ManagerError(f"{folder} cannot be written: {error.strerror or error}") from error

    def _state(self) -> memoryview:
        """Made before it is written: of a disk that is full, PyTorch tells nothing but a RuntimeError of its own."""
        content = io.BytesIO()
        torch.save({"version": self.version, "optimizer": self._optimised.state()}, content)
        return content.getbuffer()

    def restore(self, folder: Path | str) -> None:
        """What `save` wrote. Raises ManagerError and InvalidConfig; then all is as it was."""
        folder = Path(folder)
        version, state = read_state(folder / STATE, self.policy.device)
        optimised = self._new_optimised()
        reference = None
        try:
            optimised.restore(state)
        except (KeyError, TypeError, ValueError) as error:
            raise ManagerError(f"{folder / STATE}: not the optimiser of this policy: {error}", retry=False) from error
        if self._objective.kl:
            if not (folder / REFERENCE).is_dir():
                raise InvalidConfig("objective.kl", self._objective.kl, f"0, as {folder} has no reference")
            reference = self.policy.frozen()
            reference.restore(folder / REFERENCE)
        self.policy.restore(folder)
        self._optimised, self._reference, self._imitation, self.version = optimised, reference, None, version


def read_state(path: Path, device: torch.device) -> tuple[int, dict[str, Any]]:
    """The version and the state of the optimiser. Raises ManagerError."""
    try:
        state = torch.load(path, weights_only=True, map_location=device)
        return int(state["version"]), dict(state["optimizer"])
    except OSError as error:
        raise ManagerError(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # PyTorch raises anything for what it cannot read
        raise ManagerError(f"{path}: not the state of a learner: {error}", retry=False) from error


def learning_rate(version: int, settings: TrainSettings) -> float:
    """Of the step that starts from this version. It rises over the first `rate_warmup_steps`, the last of which has all
    of it, and falls over the others, to a tenth at the last step of the run."""
    found = settings.objective
    warmup, step = found.rate_warmup_steps, version + 1
    if step <= warmup:
        return found.learning_rate * step / warmup
    gone = min(1.0, (step - warmup) / max(settings.training.steps - warmup, 1))
    match found.decay:
        case "none":
            left = 1.0
        case "linear":
            left = 1.0 - gone
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * gone))
    return found.learning_rate * (DECAYED_TO + (1.0 - DECAYED_TO) * left)
