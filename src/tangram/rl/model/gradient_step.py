"""A gradient step: a batch of samples, several times through the model, in minibatches.

Owns the order in which samples are gone through and what is known of each token meanwhile. Never decides what is
trained on. Promises that the same weights, optimiser, samples, seed and version give the same step to the last bit, on
one thread; that it does not matter into which passes a minibatch is divided, up to rounding; and that a step which
raises has changed nothing.
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
from tangram.rl.model.policy import Policy, Scored, score
from tangram.rl.model.sample_batches import Floats, Ints, Pass, Samples


class NotFinite(ManagerError):
    """A loss or a gradient is no number. The weights and the optimiser are as they were before the step."""

    def __init__(self, what: str, value: float) -> None:
        super().__init__(
            f"the {what} is {value}, where a finite number was expected, and the step was undone: a smaller "
            "learning_rate may help, or a loss in which nothing can become infinite",
            retry=False,
        )


class Optimised:
    """A policy and the optimiser of its weights."""

    def __init__(self, policy: Policy, *, rate: float, weight_decay: float, norm_max: float) -> None:
        self.policy = policy
        self.parameters: list[nn.Parameter] = [each for each in policy.parameters() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(self.parameters, lr=rate, weight_decay=weight_decay, fused=True)
        self._weight_decay, self._norm_max = weight_decay, norm_max

    def state(self) -> dict[str, Any]:
        """Of the optimiser."""
        return self._optimizer.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        """What `state` gave, but for what settings say. Raises KeyError, TypeError or ValueError for another's."""
        self._optimizer.load_state_dict(state)
        for each in self._optimizer.param_groups:
            each["weight_decay"] = self._weight_decay

    def set_rate(self, rate: float) -> None:
        for each in self._optimizer.param_groups:
            each["lr"] = rate

    def update(self, losses: Iterator[Tensor]) -> tuple[float, float]:
        """By the sum of these, one after the other; returns it and the norm of its gradient, before that is cut. Raises
        NotFinite; whatever is raised, nothing has changed."""
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
            for each in self.parameters:
                each.grad = None
        return loss, norm

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Whatever is raised inside undoes all updates that were made inside."""
        values = [each.detach().clone() for each in self.parameters]
        state = copy.deepcopy(self.state())
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for each, value in zip(self.parameters, values, strict=True):
                    each.copy_(value)
            self.restore(state)
            raise


class Step:
    """One, while it is made. All tensors are of action tokens, in the order of the samples."""

    def __init__(
        self,
        optimised: Optimised,
        reference: Policy | None,
        samples: Samples,
        advantages: Floats,
        *,
        settings: ObjectiveSettings,
        loss: objective.Loss,
        temperature: float,
        tokens_longest: int,
        seed: int,
    ) -> None:
        """`advantages`: of each trajectory. `seed`: of all that chance decides."""
        self._optimised, self._policy, self._reference = optimised, optimised.policy, reference
        self._samples, self._settings, self._loss = samples, settings, loss
        self._temperature, self._tokens_longest, self._seed = temperature, tokens_longest, seed
        self._device = self._policy.device
        wide = optimised.parameters[0].dtype == torch.float64
        self._dtype = torch.float64 if wide else torch.float32
        self._owner = torch.from_numpy(samples.owner).to(self._device)
        self._sampler = self._tensor(samples.sampler)
        self._advantage = self._tensor(advantages[samples.owner])
        self._teacher = None if samples.teacher is None else self._tensor(samples.teacher)
        self._start = torch.zeros_like(self._sampler)
        self._entropy = torch.zeros_like(self._sampler)
        self._referred: Tensor | None = None
        """What the reference says."""
        self._sums: dict[str, float] = {}
        """Of the metrics of passes, each times its tokens."""

    def _tensor(self, values: Floats) -> Tensor:
        return torch.from_numpy(values).to(self._device, self._dtype)

    def run(self) -> dict[str, float]:
        """Returns metrics. Raises NotFinite, and what the loss raises."""
        plan = self._plan()
        # One update alone is all or nothing by itself, without a copy of everything.
        several = self._optimised.all_or_nothing() if len(plan) > 1 else nullcontext()
        with several, torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)  # for a loss that draws something
            self._look(plan[0])
            told = [self._optimised.update(self._losses(rows, first=number == 0)) for number, rows in enumerate(plan)]
        return self._metrics(told)

    def _plan(self) -> list[Ints]:
        """The trajectories of each minibatch, of all epochs. They are as equal as can be: a small rest would count as
        much as all others."""
        chance = torch.Generator().manual_seed(self._seed)
        count = len(self._samples)
        parts = -(-count // self._settings.minibatch)
        return [
            part
            for _ in range(self._settings.epochs)
            for part in np.array_split(torch.randperm(count, generator=chance).numpy(), parts)
        ]

    def _look(self, first: Ints) -> None:
        """What π_start says of all tokens but those of the first minibatch, which itself is gone through with π_start;
        and what the reference says of all."""
        everyone = np.arange(len(self._samples))
        with torch.no_grad():
            for asked in self._passes(np.setdiff1d(everyone, first)):
                self._keep(asked, self._scored(self._policy, asked, entropy=True))
            if self._reference is not None:
                self._referred = torch.zeros_like(self._sampler)
                for asked in self._passes(everyone):
                    self._referred[asked.chosen] = self._scored(self._reference, asked).logprobs.to(self._dtype)

    def _passes(self, rows: Ints) -> Iterator[Pass]:
        return self._samples.passes(rows, self._settings.microbatch, self._policy.vocabulary, self._device)

    def _scored(self, policy: Policy, asked: Pass, *, entropy: bool = False) -> Scored:
        learned = self._settings.entropy > 0.0
        return score(policy, asked, temperature=self._temperature, entropy=entropy, entropy_learned=learned)

    def _keep(self, asked: Pass, scored: Scored) -> None:
        assert scored.entropy is not None
        self._start[asked.chosen] = scored.logprobs.detach().to(self._dtype)
        self._entropy[asked.chosen] = scored.entropy.detach().to(self._dtype)

    def _losses(self, rows: Ints, *, first: bool) -> Iterator[Tensor]:
        """Of the passes of a minibatch: their sum is its loss."""
        counts = self._samples.action_counts
        share = np.zeros(len(counts))
        share[rows] = objective.shares(counts[rows], self._settings.normalise, self._tokens_longest)
        shares = self._tensor(share)
        for asked in self._passes(rows):
            scored = self._scored(self._policy, asked, entropy=first or self._settings.entropy > 0.0)
            if first:
                self._keep(asked, scored)
            found, metrics = objective.whole(self._tokens(asked, scored, shares), self._settings, self._loss)
            for name, value in metrics.items():
                self._sums[name] = self._sums.get(name, 0.0) + float(value) * len(asked.chosen)
            yield found

    def _tokens(self, asked: Pass, scored: Scored, shares: Tensor) -> objective.Tokens:
        chosen = torch.from_numpy(asked.chosen).to(self._device)
        start, sampler, owner = self._start[chosen], self._sampler[chosen], self._owner[chosen]
        if self._teacher is None:
            advantage = self._advantage[chosen]
        else:
            advantage = objective.distilled(self._teacher[chosen], start)
        return objective.Tokens(
            logprobs=scored.logprobs,
            start=start,
            sampler=sampler,
            weight=objective.weights(start, sampler, self._settings),
            advantage=advantage,
            share=shares[owner],
            trajectory=owner,
            entropy=scored.entropy if self._settings.entropy > 0.0 else None,
            reference=None if self._referred is None else self._referred[chosen],
        )

    def _metrics(self, told: Sequence[tuple[float, float]]) -> dict[str, float]:
        start, sampler, settings = self._start, self._sampler, self._settings
        means: dict[str, Tensor] = {
            "kl_sampler": objective.divergence(sampler, start),
            "weight_mean": objective.weights(start, sampler, settings),
            "weight_truncated": objective.truncated(start, sampler, settings),
            "entropy": self._entropy,
        }
        if self._teacher is not None:
            means["kl_teacher"] = objective.divergence(start, self._teacher)
        gone_through = len(start) * settings.epochs
        return {
            "loss": math.fsum(loss for loss, _ in told) / len(told),
            "gradient_norm": math.fsum(norm for _, norm in told) / len(told),
            **{name: values.double().mean().item() for name, values in means.items()},
            **{name: total / gone_through for name, total in self._sums.items()},
        }


def seed_of(seed: int, version: int) -> int:
    """Of a step: what chance decides in it is a function of these two, so that nothing of it has to be stored."""
    return int(np.random.SeedSequence([seed, version]).generate_state(1, np.uint64)[0] >> np.uint64(1))
