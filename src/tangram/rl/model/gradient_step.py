"""A gradient step: several epochs over a batch of samples, in minibatches.

Owns the order of samples and the log-probabilities of their tokens. Never selects samples. Promises that the same
weights, optimiser, samples, seed and version give the same step to the last bit, on one thread; that the division of a
minibatch into microbatches does not matter, up to rounding; and that a step that raises has changed nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tangram.errors import ManagerError
from tangram.rl.config.training_settings import ObjectiveSettings
from tangram.rl.model import objective
from tangram.rl.model.policy import Policy, TokenScores, score
from tangram.rl.model.sample_batches import Floats, Ints, Microbatch, PackedSamples


class NotFinite(ManagerError):
    """A loss or gradient is not finite. Weights and optimiser are as before the step."""

    def __init__(self, what: str, value: float) -> None:
        super().__init__(
            f"the {what} is {value}, where a finite number was expected, and the step was undone: a smaller "
            "learning_rate may help, or a loss in which nothing can become infinite",
            retry=False,
        )


class PolicyOptimizer:
    """A policy and the optimiser of its weights."""

    def __init__(self, policy: Policy, *, learning_rate: float, weight_decay: float, norm_max: float) -> None:
        self.policy = policy
        self.parameters: list[nn.Parameter] = [
            parameter for parameter in policy.parameters() if parameter.requires_grad
        ]
        self._optimizer = torch.optim.AdamW(self.parameters, lr=learning_rate, weight_decay=weight_decay, fused=True)
        self._weight_decay, self._norm_max = weight_decay, norm_max

    def state(self) -> dict[str, Any]:
        """The state of the optimiser."""
        return self._optimizer.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned, except what the settings determine. Raises KeyError, TypeError or ValueError
        for a foreign state."""
        self._optimizer.load_state_dict(state)
        for each in self._optimizer.param_groups:
            each["weight_decay"] = self._weight_decay

    def set_learning_rate(self, rate: float) -> None:
        for each in self._optimizer.param_groups:
            each["lr"] = rate

    def update(self, losses: Iterator[Tensor]) -> tuple[float, float]:
        """Updates by the sum of the losses. Returns that sum and the gradient norm before clipping. Raises NotFinite;
        on any exception nothing has changed."""
        try:
            loss = 0.0
            for part in losses:
                part.backward()
                loss += part.item()
            norm = nn.utils.clip_grad_norm_(self.parameters, self._norm_max).item()
            for what, value in (("loss", loss), ("norm of the gradient", norm)):
                if not math.isfinite(value):
                    raise NotFinite(what, value)
            self._optimizer.step()
        finally:
            for parameter in self.parameters:
                parameter.grad = None
        return loss, norm

    @contextmanager
    def rollback_on_error(self) -> Iterator[None]:
        """Undoes all updates inside the block if it raises."""
        values = [parameter.detach().clone() for parameter in self.parameters]
        state = copy.deepcopy(self.state())
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for parameter, value in zip(self.parameters, values, strict=True):
                    parameter.copy_(value)
            self.restore(state)
            raise


class GradientStep:
    """One step while it is made. All tensors are of action tokens, in the order of the samples."""

    def __init__(
        self,
        optimizer: PolicyOptimizer,
        reference: Policy | None,
        samples: PackedSamples,
        advantages: Floats,
        *,
        settings: ObjectiveSettings,
        loss: objective.Loss,
        temperature: float,
        tokens_longest: int,
        seed: int,
    ) -> None:
        """`advantages`: of each trajectory. `seed`: of all random decisions."""
        self._policy_optimizer, self._policy, self._reference = optimizer, optimizer.policy, reference
        self._samples, self._settings, self._loss = samples, settings, loss
        self._temperature, self._tokens_longest, self._seed = temperature, tokens_longest, seed
        self._device = self._policy.device
        wide = optimizer.parameters[0].dtype == torch.float64
        self._dtype = torch.float64 if wide else torch.float32
        self._trajectory_index = torch.from_numpy(samples.trajectory_index).to(self._device)
        self._rollout_logprobs = self._tensor(samples.sampler_logprobs)
        self._advantages = self._tensor(advantages[samples.trajectory_index])
        self._teacher_logprobs = None if samples.teacher_logprobs is None else self._tensor(samples.teacher_logprobs)
        self._old_logprobs = torch.zeros_like(self._rollout_logprobs)
        self._entropy = torch.zeros_like(self._rollout_logprobs)
        self._ref_logprobs: Tensor | None = None
        """Under the reference policy."""
        self._metric_sums: dict[str, float] = {}
        """Sums over microbatches of each metric times its number of tokens."""

    def _tensor(self, values: Floats) -> Tensor:
        return torch.from_numpy(values).to(self._device, self._dtype)

    def run(self) -> dict[str, float]:
        """Returns metrics. Raises NotFinite, and what the loss raises."""
        plan = self._plan()
        # A single update is atomic itself, without a copy of all weights.
        several = self._policy_optimizer.rollback_on_error() if len(plan) > 1 else nullcontext()
        with several, torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)  # for a loss that uses random numbers
            self._score_before_updates(plan[0])
            results = [
                self._policy_optimizer.update(self._losses(rows, first=number == 0)) for number, rows in enumerate(plan)
            ]
        return self._metrics(results)

    def _plan(self) -> list[Ints]:
        """Returns the trajectories of each minibatch, of all epochs. Sizes of minibatches differ by at most one,
        because a small remainder would count as much as each of the others."""
        rng = torch.Generator().manual_seed(self._seed)
        count = len(self._samples)
        parts = -(-count // self._settings.minibatch)
        return [
            part
            for _ in range(self._settings.epochs)
            for part in np.array_split(torch.randperm(count, generator=rng).numpy(), parts)
        ]

    def _score_before_updates(self, first: Ints) -> None:
        """Computes π_start for all tokens except those of the first minibatch, whose own pass is at π_start; and the
        reference log-probabilities for all."""
        all_samples = np.arange(len(self._samples))
        with torch.no_grad():
            for microbatch in self._microbatches(np.setdiff1d(all_samples, first)):
                self._store_old(microbatch, self._score(self._policy, microbatch, entropy=True))
            if self._reference is not None:
                self._ref_logprobs = torch.zeros_like(self._rollout_logprobs)
                for microbatch in self._microbatches(all_samples):
                    self._ref_logprobs[microbatch.action_indices] = self._score(
                        self._reference, microbatch
                    ).logprobs.to(self._dtype)

    def _microbatches(self, rows: Ints) -> Iterator[Microbatch]:
        return self._samples.microbatches(rows, self._settings.microbatch, self._policy.vocabulary, self._device)

    def _score(self, policy: Policy, microbatch: Microbatch, *, entropy: bool = False) -> TokenScores:
        learned = self._settings.entropy > 0.0
        return score(policy, microbatch, temperature=self._temperature, entropy=entropy, entropy_gradient=learned)

    def _store_old(self, microbatch: Microbatch, scored: TokenScores) -> None:
        assert scored.entropy is not None
        self._old_logprobs[microbatch.action_indices] = scored.logprobs.detach().to(self._dtype)
        self._entropy[microbatch.action_indices] = scored.entropy.detach().to(self._dtype)

    def _losses(self, rows: Ints, *, first: bool) -> Iterator[Tensor]:
        """Yields the losses of the microbatches of a minibatch; their sum is its loss."""
        counts = self._samples.action_counts
        weights = np.zeros(len(counts))
        weights[rows] = objective.loss_weights(counts[rows], self._settings.normalise, self._tokens_longest)
        loss_weights = self._tensor(weights)
        for microbatch in self._microbatches(rows):
            scored = self._score(self._policy, microbatch, entropy=first or self._settings.entropy > 0.0)
            if first:
                self._store_old(microbatch, scored)
            inputs = self._loss_inputs(microbatch, scored, loss_weights)
            loss, metrics = objective.total_loss(inputs, self._settings, self._loss)
            for name, value in metrics.items():
                self._metric_sums[name] = self._metric_sums.get(name, 0.0) + float(value) * len(
                    microbatch.action_indices
                )
            yield loss

    def _loss_inputs(self, microbatch: Microbatch, scored: TokenScores, loss_weights: Tensor) -> objective.LossInputs:
        chosen = torch.from_numpy(microbatch.action_indices).to(self._device)
        old_logprobs, rollout_logprobs = self._old_logprobs[chosen], self._rollout_logprobs[chosen]
        trajectory = self._trajectory_index[chosen]
        if self._teacher_logprobs is None:
            advantage = self._advantages[chosen]
        else:
            advantage = objective.distillation_advantage(self._teacher_logprobs[chosen], old_logprobs)
        return objective.LossInputs(
            logprobs=scored.logprobs,
            old_logprobs=old_logprobs,
            rollout_logprobs=rollout_logprobs,
            importance_weight=objective.importance_weights(old_logprobs, rollout_logprobs, self._settings),
            advantage=advantage,
            loss_weight=loss_weights[trajectory],
            trajectory=trajectory,
            entropy=scored.entropy if self._settings.entropy > 0.0 else None,
            ref_logprobs=None if self._ref_logprobs is None else self._ref_logprobs[chosen],
        )

    def _metrics(self, results: Sequence[tuple[float, float]]) -> dict[str, float]:
        old_logprobs, rollout_logprobs, settings = self._old_logprobs, self._rollout_logprobs, self._settings
        means: dict[str, Tensor] = {
            "kl_sampler": objective.kl_divergence(rollout_logprobs, old_logprobs),
            "weight_mean": objective.importance_weights(old_logprobs, rollout_logprobs, settings),
            "weight_truncated": objective.truncated_mask(old_logprobs, rollout_logprobs, settings),
            "entropy": self._entropy,
        }
        if self._teacher_logprobs is not None:
            # Of the trained policy; `teacher_kl` of a trajectory (rollout/rewards.py) is that of the sampling policy.
            means["kl_teacher"] = objective.kl_divergence(old_logprobs, self._teacher_logprobs)
        token_passes = len(old_logprobs) * settings.epochs
        return {
            "loss": math.fsum(loss for loss, _ in results) / len(results),
            "gradient_norm": math.fsum(norm for _, norm in results) / len(results),
            **{name: values.double().mean().item() for name, values in means.items()},
            **{name: total / token_passes for name, total in self._metric_sums.items()},
        }


def step_seed(seed: int, version: int) -> int:
    """Seed of a step: a function of run seed and version, so that no random state has to be stored."""
    return int(np.random.SeedSequence([seed, version]).generate_state(1, np.uint64)[0] >> np.uint64(1))
