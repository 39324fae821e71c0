"""The objective: advantages, importance weights and the clipped GRPO loss, as functions of numbers and tensors.

Owns advantages, what becomes of trajectories that were cut off and of groups that say nothing, the loss and its
off-policy correction. Never runs a model, keeps nothing and changes nothing. Promises that the losses of the parts of a
minibatch sum to the loss of the whole, so that it does not matter how it is divided.

    π          the policy that is being trained, token by token, after temperature and what top-k and top-p left
    π_start    the same at the start of the step
    π_sampler  what each token was sampled with, by whichever version that was

A loss of your own is `loss = "module:name"`: a function `(tokens: Tokens, settings: ObjectiveSettings) -> (loss,
metrics)`, the loss a tensor with one number, which takes the place of `clipped` below. An advantage of your own is
`advantage = "module:name"`: a function from the rewards of a group to as many advantages.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tangram.errors import InvalidConfig, InvalidInput
from tangram.rl.config.training_settings import Normalise, ObjectiveSettings
from tangram.rl.rollout.records import Ending, Group, Trajectory

SPREAD_EPSILON = 1e-6
"""Added to the spread of a group before it divides: rewards that are almost the same do not become large."""
SAME = 1e-9
"""Rewards this close are the same: what is between them is rounding."""
LOG_RATIO_MAX = 20.0
"""Of two probabilities. Beyond it a ratio says no more, and its exponential would be no number at some point."""

Advantage = Callable[[Sequence[float]], Sequence[float]]


class Tokens(NamedTuple):
    """Action tokens of one pass, as a loss is given them: tensors [N], in the order of their trajectories."""

    logprobs: Tensor
    """Under π. The only one with a gradient, besides `entropy`."""
    start: Tensor
    """Under π_start."""
    sampler: Tensor
    """Under π_sampler."""
    weight: Tensor
    """The off-policy correction: min(π_start / π_sampler, correction_max) if it is `truncated`, else 1."""
    advantage: Tensor
    share: Tensor
    """Of the mean over the minibatch. A loss is Σ share * term; the sums of the passes of a minibatch are added."""
    trajectory: Tensor
    """Whose it is: a number within the batch, int64."""
    entropy: Tensor | None
    """Of π where the token was chosen, in nats; None if `settings.entropy` is 0."""
    reference: Tensor | None
    """Log-probabilities under the reference; None if `settings.kl` is 0."""


Metrics = Mapping[str, Tensor | float]
"""By name; each is a mean over the tokens of the pass."""
Loss = Callable[[Tokens, ObjectiveSettings], tuple[Tensor, Metrics]]


# ---- groups -----------------------------------------------------------------------------------------------------


class Chosen(NamedTuple):
    """A trajectory that is trained on."""

    trajectory: Trajectory
    advantage: float
    """Of all of its tokens; 0 in distillation, where each token has its own."""


def choose(
    groups: Sequence[Group], settings: ObjectiveSettings, advantage: Advantage, reward_low: Mapping[str, float]
) -> tuple[list[Chosen], dict[str, float]]:
    """What is trained on, in its order, and the metrics of that. `reward_low`: the lowest reward of each task, for
    `overlong = "punish"`. A trajectory that is masked still counts in the mean of its group: it was played by the same
    policy. In distillation rewards count for nothing. Raises InvalidInput."""
    chosen: list[Chosen] = []
    silent = cut = count = 0
    for group in groups:
        rewards = [rewarded(each, settings, reward_low) for each in group.members]
        same = not rewards or max(rewards) - min(rewards) <= SAME
        silent += same
        cut += sum(overlong(each) for each in group.members)
        count += len(group.members)
        if settings.kind == "distill":
            values: Sequence[float] = [0.0] * len(rewards)
        elif same and settings.zero_variance == "drop":
            continue
        else:
            values = checked(advantage(rewards), group)
        for each, value in zip(group.members, values, strict=True):
            if each.version_first is not None and not (settings.overlong == "mask" and overlong(each)):
                chosen.append(Chosen(each, value))
    return chosen, {"zero_variance_share": silent / max(len(groups), 1), "overlong_share": cut / max(count, 1)}


def overlong(trajectory: Trajectory) -> bool:
    """Whether it was cut off: it, or one of its actions, reached its limit before it ended by itself."""
    return trajectory.ending is Ending.TRUNCATED or any(turn.cut for turn in trajectory.turns)


def rewarded(trajectory: Trajectory, settings: ObjectiveSettings, reward_low: Mapping[str, float]) -> float:
    reward = trajectory.reward
    if reward is None or not math.isfinite(reward):
        raise InvalidInput(f"{trajectory.id}: reward", reward, "a finite number")
    if settings.overlong != "punish" or not overlong(trajectory):
        return reward
    low = reward_low.get(trajectory.task)
    if low is None:
        raise InvalidInput(
            "reward_low", trajectory.task, f"the lowest reward of one of the tasks {', '.join(reward_low)}"
        )
    return low


def checked(values: Sequence[float], group: Group) -> Sequence[float]:
    try:
        found = [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{group.id}: advantage", values, f"{len(group.members)} numbers ({error})") from error
    if len(found) != len(group.members) or not all(map(math.isfinite, found)):
        raise InvalidInput(f"{group.id}: advantage", found, f"{len(group.members)} finite numbers")
    return found


# ---- advantages -------------------------------------------------------------------------------------------------


def standardised(rewards: Sequence[float]) -> list[float]:
    found = centred(rewards)
    spread = math.sqrt(math.fsum(value * value for value in found) / len(found)) + SPREAD_EPSILON
    return [value / spread for value in found]


def centred(rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def left_one_out(rewards: Sequence[float]) -> list[float]:
    """A member without others has nothing to be measured against."""
    others = len(rewards) - 1
    if not others:
        return [0.0]
    total = math.fsum(rewards)
    return [reward - (total - reward) / others for reward in rewards]


ADVANTAGES: dict[str, Advantage] = {"std": standardised, "mean": centred, "leave-one-out": left_one_out}


def advantage_named(name: str) -> Advantage:
    """Raises InvalidConfig."""
    return ADVANTAGES.get(name) or _imported("objective.advantage", name)


def loss_named(name: str) -> Loss:
    """Raises InvalidConfig."""
    return clipped if name == "clipped" else _imported("objective.loss", name)


def _imported(key: str, path: str) -> Any:
    """What it raises when it is called is InvalidInput: it would raise it again for the same samples."""
    module, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidConfig(key, path, f"`module:name` of a function ({error})") from None
    if not callable(found):
        raise InvalidConfig(key, path, "`module:name` of a function")

    @functools.wraps(found)
    def called(*given: Any) -> Any:
        try:
            return found(*given)
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error}, {at.filename}:{at.lineno}"
            raise InvalidInput(key, path, f"a function that does not raise for these samples ({what})") from error

    return called


# ---- tokens -----------------------------------------------------------------------------------------------------


def shares(counts: NDArray[np.int64], normalise: Normalise, tokens_longest: int) -> NDArray[np.float64]:
    """What each token of a trajectory counts in the mean over a minibatch whose trajectories have so many tokens: one
    number for each trajectory."""
    if normalise == "tokens":
        return np.full(len(counts), 1.0 / counts.sum())
    if normalise == "sequence":
        return 1.0 / (counts * len(counts))
    return np.full(len(counts), 1.0 / (len(counts) * tokens_longest))


def weights(start: Tensor, sampler: Tensor, settings: ObjectiveSettings) -> Tensor:
    """The off-policy correction of each token. It is a number: nothing is learned through it."""
    if settings.correction != "truncated":
        return torch.ones_like(start)
    return ratio(start, sampler).clamp(max=settings.correction_max).detach()


def truncated(start: Tensor, sampler: Tensor, settings: ObjectiveSettings) -> Tensor:
    """1 for each token whose weight had to be truncated, else 0."""
    if settings.correction != "truncated":
        return torch.zeros_like(start)
    return (ratio(start, sampler) > settings.correction_max).to(start.dtype)


def distilled(teacher: Tensor, start: Tensor) -> Tensor:
    """The advantage of each token where a teacher is followed: how much more likely the teacher finds it than π_start.
    Its mean over what π_start samples is the negative of the divergence KL(π_start ‖ teacher), token by token, so the
    policy gradient with it descends that divergence. π_start is the policy as it samples, with its temperature; the
    teacher speaks for itself. It is a number: nothing is learned through it."""
    return (teacher - start).detach()


def ratio(above: Tensor, below: Tensor) -> Tensor:
    """Of probabilities, given as logarithms."""
    return (above - below).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def divergence(sampled: Tensor, other: Tensor) -> Tensor:
    """KL(sampled ‖ other) at tokens of `sampled`: the estimator k3, which has the mean of the logarithm of the ratio,
    but is never negative and varies less."""
    difference = (other - sampled).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    return difference.exp() - difference - 1.0


# ---- losses -----------------------------------------------------------------------------------------------------


def clipped(tokens: Tokens, settings: ObjectiveSettings) -> tuple[Tensor, Metrics]:
    """PPO's, with a range that may be wider above than below:
    - Σ share * weight * min(ratio * advantage, clip(ratio, 1 - clip_low, 1 + clip_high) * advantage).

    The ratio is π / π_start, and `weight` corrects for the sampler; with `correction = "behaviour"` it is π / π_sampler
    and no weight is needed. A ratio that is clipped has no gradient: the token is already as much more or less likely
    as one step may make it. On the other side nothing is clipped, so that a mistake can be undone."""
    against = tokens.sampler if settings.correction == "behaviour" else tokens.start
    ratios = ratio(tokens.logprobs, against)
    limited = ratios.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    gains, gains_limited = ratios * tokens.advantage, limited * tokens.advantage
    loss = -(tokens.share * tokens.weight * torch.minimum(gains, gains_limited)).sum()
    return loss, {"clip_share": (gains_limited < gains).detach().double().mean()}


def whole(tokens: Tokens, settings: ObjectiveSettings, loss: Loss) -> tuple[Tensor, dict[str, Tensor | float]]:
    """The loss with the divergence from the reference and the entropy, whatever the loss is."""
    found, told = _answered(loss(tokens, settings), settings, loss)
    if tokens.reference is not None:
        apart = divergence(tokens.logprobs, tokens.reference)
        found = found + settings.kl * (tokens.share * apart).sum()
        told["kl_reference"] = apart.detach().double().mean()
    if tokens.entropy is not None and settings.entropy:
        found = found - settings.entropy * (tokens.share * tokens.entropy).sum()
    if tokens.logprobs.requires_grad and not found.requires_grad:
        raise _no_loss("a number without a gradient", settings, loss)
    return found, told


def _answered(made: Any, settings: ObjectiveSettings, loss: Loss) -> tuple[Tensor, dict[str, Tensor | float]]:
    """What a loss returned. Raises InvalidInput, if it is none: it would return the same again."""
    match made:
        case (Tensor() as found, Mapping() as metrics):
            pass
        case _:
            raise _no_loss(_described(made), settings, loss)
    if found.numel() != 1:
        raise _no_loss(f"{_described(found)} as the loss", settings, loss)
    for name, value in metrics.items():
        if not isinstance(value, int | float) and not (isinstance(value, Tensor) and value.numel() == 1):
            raise _no_loss(f"{_described(value)} as metric {name}", settings, loss)
    return found, dict(metrics)


def _described(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _no_loss(returned: str, settings: ObjectiveSettings, loss: Loss) -> InvalidInput:
    code = getattr(inspect.unwrap(loss), "__code__", None)
    where = f", {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    expected = "a function that returns (loss, metrics): a tensor with one number and a gradient, and numbers by name"
    return InvalidInput("objective.loss", settings.loss, f"{expected} (it returned {returned}{where})")
