"""The objective: advantages, importance weights and the clipped GRPO loss, as functions of numbers and tensors.

Owns advantages, the treatment of overlong trajectories and of groups without variance, the loss and its off-policy
correction. Never runs a model and has no state. Promises that the losses of the parts of a minibatch sum to the loss of
the whole, so that the division into microbatches does not matter.

    π          the policy that is being trained, per token, after temperature, top-k and top-p
    π_start    the policy at the start of the step
    π_sampler  the policy that sampled the token, of any version

In the literature, the correction `truncated` is decoupled PPO (π_start is the proximal policy, π_sampler the behaviour
policy) with truncated importance sampling (TIS), and `clip_high` above `clip_low` is clip-higher, as in DAPO.

A custom loss is `loss = "module:name"`: a function `(inputs: LossInputs, settings: ObjectiveSettings) -> (loss,
metrics)` that returns a tensor with one number and replaces `grpo_clipped_loss`. A custom advantage is `advantage =
"module:name"`: a function from the rewards of a group to as many advantages.
"""

from __future__ import annotations

import functools
import inspect
import math
import pkgutil
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tangram.errors import InvalidConfig, InvalidInput
from tangram.rl.config.training_settings import Normalise, ObjectiveSettings
from tangram.rl.trajectories.trajectory import Ending, Group, Trajectory

STD_EPSILON = 1e-6
"""Added to the standard deviation of a group before dividing: almost equal rewards do not get large advantages."""
REWARD_TOLERANCE = 1e-9
"""Rewards this close count as equal: the difference is rounding."""
LOG_RATIO_MAX = 20.0
"""Upper bound of the logarithm of a probability ratio, so that its exponential stays finite."""

Advantage = Callable[[Sequence[float]], Sequence[float]]


class LossInputs(NamedTuple):
    """The action tokens of one microbatch, as a loss gets them: tensors [N], in the order of their trajectories."""

    logprobs: Tensor
    """Under π. The only tensor with a gradient, except `entropy`."""
    old_logprobs: Tensor
    """Under π_start."""
    rollout_logprobs: Tensor
    """Under π_sampler."""
    importance_weight: Tensor
    """min(π_start / π_sampler, correction_max) if the correction is `truncated`, else 1."""
    advantage: Tensor
    loss_weight: Tensor
    """Weight in the mean over the minibatch. A loss is Σ loss_weight * term, so losses of microbatches add up."""
    trajectory: Tensor
    """Index of the trajectory within the batch, int64."""
    entropy: Tensor | None
    """The entropy of π at the token, in nats; None if `settings.entropy` is 0."""
    ref_logprobs: Tensor | None
    """Log-probabilities under the reference policy; None if `settings.kl` is 0."""


Metrics = Mapping[str, Tensor | float]
"""Metrics by name; each is a mean over the tokens of the microbatch."""
Loss = Callable[[LossInputs, ObjectiveSettings], tuple[Tensor, Metrics]]


# ---- groups ----


class SelectedTrajectory(NamedTuple):
    """A trajectory that is trained on."""

    trajectory: Trajectory
    advantage: float
    """The advantage of all its tokens; 0 in distillation, where each token has its own advantage."""


def select_trajectories(
    groups: Sequence[Group], settings: ObjectiveSettings, advantage: Advantage, reward_low: Mapping[str, float]
) -> tuple[list[SelectedTrajectory], dict[str, float]]:
    """Returns what is trained on, in order, and metrics of the selection. `reward_low`: the lowest reward of each task,
    for `overlong = "punish"`. A masked trajectory still counts in the mean of its group, because the same policy played
    it. Distillation ignores rewards. Raises InvalidInput."""
    chosen: list[SelectedTrajectory] = []
    zero_variance = overlong = count = 0
    for group in groups:
        rewards = [effective_reward(member, settings, reward_low) for member in group.members]
        same = not rewards or max(rewards) - min(rewards) <= REWARD_TOLERANCE
        zero_variance += same
        overlong += sum(is_overlong(member) for member in group.members)
        count += len(group.members)
        if settings.kind == "distill":
            values: Sequence[float] = [0.0] * len(rewards)
        elif same and settings.zero_variance == "drop":
            continue
        else:
            values = checked_advantages(advantage(rewards), group)
        for member, value in zip(group.members, values, strict=True):
            if member.version_first is not None and not (settings.overlong == "mask" and is_overlong(member)):
                chosen.append(SelectedTrajectory(member, value))
    return chosen, {
        "zero_variance_share": zero_variance / max(len(groups), 1),
        "overlong_share": overlong / max(count, 1),
    }


def is_overlong(trajectory: Trajectory) -> bool:
    """Whether it was cut off: it, or one of its actions, reached a limit before its end."""
    return trajectory.ending is Ending.TRUNCATED or any(turn.truncated for turn in trajectory.turns)


def effective_reward(trajectory: Trajectory, settings: ObjectiveSettings, reward_low: Mapping[str, float]) -> float:
    reward = trajectory.reward
    if reward is None or not math.isfinite(reward):
        raise InvalidInput(f"{trajectory.id}: reward", reward, "a finite number")
    if settings.overlong != "punish" or not is_overlong(trajectory):
        return reward
    low = reward_low.get(trajectory.task)
    if low is None:
        raise InvalidInput(
            "reward_low", trajectory.task, f"the lowest reward of one of the tasks {', '.join(reward_low)}"
        )
    return low


def checked_advantages(values: Sequence[float], group: Group) -> Sequence[float]:
    try:
        advantages = [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{group.id}: advantage", values, f"{len(group.members)} numbers ({error})") from error
    if len(advantages) != len(group.members) or not all(map(math.isfinite, advantages)):
        raise InvalidInput(f"{group.id}: advantage", advantages, f"{len(group.members)} finite numbers")
    return advantages


# ---- advantages ----


def standardised_advantages(rewards: Sequence[float]) -> list[float]:
    centred = centred_advantages(rewards)
    spread = math.sqrt(math.fsum(value * value for value in centred) / len(centred)) + STD_EPSILON
    return [value / spread for value in centred]


def centred_advantages(rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out_advantages(rewards: Sequence[float]) -> list[float]:
    """A single member has no baseline, so its advantage is 0."""
    others = len(rewards) - 1
    if not others:
        return [0.0]
    total = math.fsum(rewards)
    return [reward - (total - reward) / others for reward in rewards]


ADVANTAGES: dict[str, Advantage] = {
    "std": standardised_advantages,
    "mean": centred_advantages,
    "leave-one-out": leave_one_out_advantages,
}


def advantage_named(name: str) -> Advantage:
    """Raises InvalidConfig."""
    return ADVANTAGES.get(name) or _import_function("objective.advantage", name)


def loss_named(name: str) -> Loss:
    """Raises InvalidConfig."""
    return grpo_clipped_loss if name == "clipped" else _import_function("objective.loss", name)


def _import_function(key: str, path: str) -> Any:
    """Wraps a custom function: its exceptions become InvalidInput, since it would raise them again for the same
    samples."""
    try:
        target: Any = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidConfig(key, path, f"`module:name` of a function ({error})") from None
    if not callable(target):
        raise InvalidConfig(key, path, "`module:name` of a function")

    @functools.wraps(target)
    def checked(*arguments: Any) -> Any:
        try:
            return target(*arguments)
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"{type(error).__name__}: {error}, {at.filename}:{at.lineno}"
            raise InvalidInput(key, path, f"a function that does not raise for these samples ({problem})") from error

    return checked


# ---- tokens ----


def loss_weights(counts: NDArray[np.int64], normalise: Normalise, tokens_longest: int) -> NDArray[np.float64]:
    """Returns for each trajectory the weight of each of its tokens in the mean over a minibatch. `counts`: tokens of
    each trajectory."""
    if normalise == "tokens":
        return np.full(len(counts), 1.0 / counts.sum())
    if normalise == "sequence":
        return 1.0 / (counts * len(counts))
    return np.full(len(counts), 1.0 / (len(counts) * tokens_longest))


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, settings: ObjectiveSettings) -> Tensor:
    """The off-policy correction of each token. No gradient flows through it."""
    if settings.correction != "truncated":
        return torch.ones_like(old_logprobs)
    return probability_ratio(old_logprobs, rollout_logprobs).clamp(max=settings.correction_max).detach()


def truncated_mask(old_logprobs: Tensor, rollout_logprobs: Tensor, settings: ObjectiveSettings) -> Tensor:
    """1 for each token whose importance weight was truncated, else 0."""
    if settings.correction != "truncated":
        return torch.zeros_like(old_logprobs)
    return (probability_ratio(old_logprobs, rollout_logprobs) > settings.correction_max).to(old_logprobs.dtype)


def distillation_advantage(teacher_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """The advantage of each token in distillation: how much more likely the teacher finds it than π_start. Its mean
    over samples of π_start is -KL(π_start ‖ teacher), so the policy gradient descends that divergence. π_start has the
    sampling temperature, the teacher has its own distribution. No gradient flows through it."""
    return (teacher_logprobs - old_logprobs).detach()


def probability_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """Returns the ratio of two probabilities that are given as logarithms."""
    return (numerator_logprobs - denominator_logprobs).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def kl_divergence(sampled: Tensor, other: Tensor) -> Tensor:
    """KL(sampled ‖ other) at tokens of `sampled`, by the k3 estimator: unbiased, never negative, and of lower variance
    than the log ratio."""
    difference = (other - sampled).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    return difference.exp() - difference - 1.0


# ---- losses ----


def grpo_clipped_loss(inputs: LossInputs, settings: ObjectiveSettings) -> tuple[Tensor, Metrics]:
    """The clipped GRPO loss: that of PPO, with separate lower and upper clip ranges.

      - Σ loss_weight * importance_weight * min(ratio * advantage, clip(ratio, 1 - clip_low, 1 + clip_high) * advantage)

    The ratio is π / π_start, and the importance weight corrects for the sampler (TIS); with `correction = "behaviour"`
    the ratio is π / π_sampler and the importance weight is 1. A clipped ratio has no gradient, because the token has
    reached the limit of one step. It is not clipped in the other direction, so that a mistake can be undone."""
    old_logprobs = inputs.rollout_logprobs if settings.correction == "behaviour" else inputs.old_logprobs
    ratios = probability_ratio(inputs.logprobs, old_logprobs)
    clipped_ratios = ratios.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    surrogate, clipped_surrogate = ratios * inputs.advantage, clipped_ratios * inputs.advantage
    loss = -(inputs.loss_weight * inputs.importance_weight * torch.minimum(surrogate, clipped_surrogate)).sum()
    return loss, {"clip_share": (clipped_surrogate < surrogate).detach().double().mean()}


def total_loss(inputs: LossInputs, settings: ObjectiveSettings, loss: Loss) -> tuple[Tensor, dict[str, Tensor | float]]:
    """Adds the KL penalty and the entropy bonus to any loss."""
    total, metrics = _checked_loss_result(loss(inputs, settings), settings, loss)
    if inputs.ref_logprobs is not None:
        divergence = kl_divergence(inputs.logprobs, inputs.ref_logprobs)
        total = total + settings.kl * (inputs.loss_weight * divergence).sum()
        metrics["kl_reference"] = divergence.detach().double().mean()
    if inputs.entropy is not None and settings.entropy:
        total = total - settings.entropy * (inputs.loss_weight * inputs.entropy).sum()
    if inputs.logprobs.requires_grad and not total.requires_grad:
        raise _invalid_loss("a number without a gradient", settings, loss)
    return total, metrics


def _checked_loss_result(
    result: Any, settings: ObjectiveSettings, loss: Loss
) -> tuple[Tensor, dict[str, Tensor | float]]:
    """Checks the result of a loss. Raises InvalidInput: it would return the same again."""
    match result:
        case (Tensor() as loss_value, Mapping() as metrics):
            pass
        case _:
            raise _invalid_loss(_describe(result), settings, loss)
    if loss_value.numel() != 1:
        raise _invalid_loss(f"{_describe(loss_value)} as the loss", settings, loss)
    for name, value in metrics.items():
        if not isinstance(value, int | float) and not (isinstance(value, Tensor) and value.numel() == 1):
            raise _invalid_loss(f"{_describe(value)} as metric {name}", settings, loss)
    return loss_value, dict(metrics)


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _invalid_loss(returned: str, settings: ObjectiveSettings, loss: Loss) -> InvalidInput:
    code = getattr(inspect.unwrap(loss), "__code__", None)
    where = f", {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    expected = "a function that returns (loss, metrics): a tensor with one number and a gradient, and numbers by name"
    return InvalidInput("objective.loss", settings.loss, f"{expected} (it returned {returned}{where})")
