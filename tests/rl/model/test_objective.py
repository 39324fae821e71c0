"""The objective: advantages, what is left of a batch, and losses whose gradients can be computed by hand.

The toy is a bandit: one token is chosen of three, by a softmax of three numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rl.played import group, trajectory, turn

from tangram.errors import InvalidConfig, InvalidInput
from tangram.rl.config.training_settings import ObjectiveSettings
from tangram.rl.trajectories.trajectory import Ending

torch = pytest.importorskip("torch", reason="PyTorch is an extra, which is not installed")

from tangram.rl.model import objective  # noqa: E402

START = (0.5, 0.3, 0.2)
SAMPLER = (0.2, 0.3, 0.5)
ADVANTAGE = (1.0, -0.5, 2.0)
rewards_of_groups = st.lists(st.floats(-10.0, 10.0), min_size=2, max_size=12)


def logs(probabilities: Any) -> Any:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def bandit(theta: Any, settings: ObjectiveSettings, **fields: Any) -> objective.LossInputs:
    """Each of the three arms, chosen once."""
    start, sampler = logs(START), logs(SAMPLER)
    inputs = dict(
        logprobs=theta.log_softmax(0),
        old_logprobs=start,
        rollout_logprobs=sampler,
        importance_weight=objective.importance_weights(start, sampler, settings),
        advantage=torch.tensor(ADVANTAGE, dtype=torch.float64),
        loss_weight=torch.full((3,), 1 / 3, dtype=torch.float64),
        trajectory=torch.arange(3),
        entropy=None,
        ref_logprobs=None,
    )
    return objective.LossInputs(**(inputs | fields))


def gradient(settings: ObjectiveSettings, at: Any = None, **fields: Any) -> list[float]:
    theta = (logs(START) if at is None else at).clone().requires_grad_()
    loss, _ = objective.total_loss(bandit(theta, settings, **fields), settings, objective.grpo_clipped_loss)
    loss.backward()
    return theta.grad.tolist()


# ---- the off-policy correction ------------------------------------------------------------------------------------


def test_the_gradient_of_a_bandit_is_that_of_the_truncated_weights() -> None:
    # Weights min(π/μ, 2): 0.5/0.2 = 2.5 is cut to 2, 0.3/0.3 = 1, 0.2/0.5 = 0.4. Times the advantages: 2, -0.5, 0.8,
    # together 2.3. The gradient of log π(a) is e_a - π; so that of the loss is -(2 - 2.3 * 0.5, ...) / 3.
    settings = ObjectiveSettings(correction="truncated", correction_max=2.0)
    assert objective.importance_weights(logs(START), logs(SAMPLER), settings).tolist() == pytest.approx([2.0, 1.0, 0.4])
    assert gradient(settings) == pytest.approx([-0.85 / 3, 1.19 / 3, -0.34 / 3])
    assert objective.truncated_mask(logs(START), logs(SAMPLER), settings).tolist() == [1.0, 0.0, 0.0]


def test_without_truncation_the_mean_over_the_sampler_is_the_gradient_on_policy() -> None:
    settings = ObjectiveSettings(correction="truncated", correction_max=100.0)
    off = gradient(settings, loss_weight=torch.tensor(SAMPLER, dtype=torch.float64))
    mean = sum(p * a for p, a in zip(START, ADVANTAGE, strict=True))
    assert off == pytest.approx([-p * (a - mean) for p, a in zip(START, ADVANTAGE, strict=True)])


def test_without_a_correction_the_sampler_does_not_count() -> None:
    settings = ObjectiveSettings(correction="none")
    assert objective.importance_weights(logs(START), logs(SAMPLER), settings).tolist() == [1.0, 1.0, 1.0]
    total = sum(ADVANTAGE)
    expected = [-(a - total * p) / 3 for p, a in zip(START, ADVANTAGE, strict=True)]
    assert gradient(settings) == pytest.approx(expected)


def test_against_the_sampler_the_ratio_itself_is_clipped() -> None:
    # Ratios 2.5, 1, 0.4. The first is above 1.28 and good: clipped. The last is below 0.8, but good: it may rise.
    settings = ObjectiveSettings(correction="behaviour", clip_low=0.2, clip_high=0.28)
    terms = (0.0, 1.0 * -0.5, 0.4 * 2.0)
    expected = [-(term - sum(terms) * p) / 3 for p, term in zip(START, terms, strict=True)]
    assert gradient(settings) == pytest.approx(expected)


@pytest.mark.parametrize("correction", ["truncated", "behaviour", "none"])
def test_gradients_are_those_of_finite_differences(correction: Any) -> None:
    settings = ObjectiveSettings(correction=correction, kl=0.3, entropy=0.2, correction_max=1.5)
    theta = torch.tensor([0.3, -0.4, 0.15], dtype=torch.float64)
    reference = logs((0.6, 0.3, 0.1))

    def loss(at: Any) -> Any:
        spread = -(at.softmax(0) * at.log_softmax(0)).sum().expand(3)
        tokens = bandit(at, settings, ref_logprobs=reference, entropy=spread)
        return objective.total_loss(tokens, settings, objective.grpo_clipped_loss)[0]

    assert torch.autograd.gradcheck(loss, (theta.requires_grad_(),))


def test_nothing_is_learned_through_the_weight() -> None:
    start = logs(START).requires_grad_()
    assert not objective.importance_weights(start, logs(SAMPLER), ObjectiveSettings()).requires_grad
    assert not objective.distillation_advantage(logs(SAMPLER), start).requires_grad


# ---- the clip -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.0, 1.0, False),
        (1.27, 1.0, False),
        (1.29, 1.0, True),
        (0.5, 1.0, False),
        (0.81, -1.0, False),
        (0.79, -1.0, True),
        (3.0, -1.0, False),
    ],
)
def test_the_clip_bites_only_where_the_step_has_gone_far_enough(ratio: float, advantage: float, clipped: bool) -> None:
    settings = ObjectiveSettings(clip_low=0.2, clip_high=0.28)
    one = torch.ones(1, dtype=torch.float64)
    logprobs = (one.log() + math.log(ratio)).requires_grad_()
    zero = one * 0.0
    tokens = objective.LossInputs(logprobs, zero, zero, one, one * advantage, one, zero.long(), None, None)
    loss, metrics = objective.grpo_clipped_loss(tokens, settings)
    loss.backward()
    assert metrics["clip_share"] == float(clipped)
    assert logprobs.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


def test_a_ratio_beyond_all_bounds_is_still_a_number() -> None:
    settings = ObjectiveSettings(correction="behaviour")
    far = torch.tensor([-1e4, 0.0]), torch.tensor([0.0, -1e4])
    assert torch.isfinite(objective.probability_ratio(*far)).all()
    assert torch.isfinite(objective.kl_divergence(*far)).all()
    assert objective.importance_weights(far[1], far[0], settings).tolist() == [1.0, 1.0]


# ---- divergences --------------------------------------------------------------------------------------------------


def test_the_mean_of_the_divergence_is_that_of_kullback_and_leibler() -> None:
    pointwise = objective.kl_divergence(logs(SAMPLER), logs(START))
    exact = sum(m * math.log(m / p) for m, p in zip(SAMPLER, START, strict=True))
    assert sum(m * k for m, k in zip(SAMPLER, pointwise.tolist(), strict=True)) == pytest.approx(exact)
    assert (pointwise >= 0.0).all()


def test_the_reference_pulls_by_one_less_the_ratio() -> None:
    settings = ObjectiveSettings(kl=0.5)
    logprobs, reference = logs(START).requires_grad_(), logs(SAMPLER)
    zero = torch.zeros(3, dtype=torch.float64)
    tokens = objective.LossInputs(
        logprobs, logs(START), logs(START), zero + 1, zero, zero + 1, zero.long(), None, reference
    )
    loss, metrics = objective.total_loss(tokens, settings, objective.grpo_clipped_loss)
    loss.backward()
    expected = [0.5 * (1.0 - m / p) for p, m in zip(START, SAMPLER, strict=True)]
    assert logprobs.grad.tolist() == pytest.approx(expected)
    assert metrics["kl_reference"] == pytest.approx(objective.kl_divergence(logs(START), reference).mean().item())


def test_following_a_teacher_descends_the_divergence_from_it() -> None:
    settings = ObjectiveSettings(kind="distill")
    teacher = logs((0.1, 0.1, 0.8))
    share = torch.tensor(START, dtype=torch.float64)  # as π_start samples them
    advantage = objective.distillation_advantage(teacher, logs(START))
    made = gradient(
        settings, advantage=advantage, loss_weight=share, importance_weight=torch.ones(3, dtype=torch.float64)
    )
    theta = logs(START).requires_grad_()
    (theta.softmax(0) * (theta.log_softmax(0) - teacher)).sum().backward()
    assert made == pytest.approx(theta.grad.tolist())


# ---- advantages ---------------------------------------------------------------------------------------------------


def test_advantages_match_their_definition() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0]
    assert objective.advantage_named("std")(rewards) == pytest.approx([1.0, -1.0, -1.0, 1.0], abs=1e-5)
    assert objective.advantage_named("mean")(rewards) == [0.5, -0.5, -0.5, 0.5]
    assert objective.advantage_named("leave-one-out")(rewards) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert objective.advantage_named("leave-one-out")([3.0]) == [0.0]
    assert objective.advantage_named("std")([3.0]) == [0.0]


@given(rewards_of_groups, st.sampled_from(["std", "mean", "leave-one-out"]))
def test_advantages_of_a_group_cancel_and_keep_the_order(rewards: list[float], name: str) -> None:
    advantages = objective.advantage_named(name)(rewards)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-6)
    best = max(range(len(rewards)), key=rewards.__getitem__)
    assert advantages[best] == max(advantages)


def test_a_custom_advantage_is_loaded_by_its_name() -> None:
    assert objective.advantage_named(f"{__name__}:as_they_are")((0.5, 2.0)) == as_they_are((0.5, 2.0))
    for name in ("nowhere:at_all", f"{__name__}:missing", f"{__name__}:START", "tests.rl.played:"):
        with pytest.raises(InvalidConfig, match=r"objective\.advantage"):
            objective.advantage_named(name)


def as_they_are(rewards: Any) -> Any:
    return rewards


def too_few(rewards: Any) -> Any:
    return rewards[1:]


# ---- what is trained on ---------------------------------------------------------------------------------------------

MOVE = turn([1], [2, 3])
CUT = turn([1], [2, 3], cut=True)


def chosen(*groups: Any, low: float = -1.0, advantage: Any = None, **settings: Any) -> tuple[list[Any], Any]:
    made = ObjectiveSettings(**settings)
    how = advantage or objective.advantage_named(made.advantage)
    selection, metrics = objective.select_trajectories(groups, made, how, {"toy": low})
    return [(each.trajectory.member, round(each.advantage, 4)) for each in selection], metrics


def test_a_group_in_which_all_got_the_same_is_dropped_or_kept() -> None:
    same = group(trajectory(MOVE, reward=0.1 + 0.2), trajectory(MOVE, reward=0.3, member=1), number=0)
    other = group(trajectory(MOVE, reward=0.0, member=2), trajectory(MOVE, reward=1.0, member=3), number=1)
    selection, metrics = chosen(same, other, advantage=objective.centred_advantages)
    assert selection == [(2, -0.5), (3, 0.5)]
    assert metrics["zero_variance_share"] == 0.5
    kept, metrics = chosen(same, other, advantage=objective.centred_advantages, zero_variance="keep")
    assert kept == [(0, 0.0), (1, 0.0), (2, -0.5), (3, 0.5)]
    assert metrics["zero_variance_share"] == 0.5


def test_what_was_cut_off_is_kept_masked_or_punished() -> None:
    truncated = trajectory(MOVE, reward=1.0, member=0, ending=Ending.TRUNCATED)
    of_three = group(truncated, trajectory(MOVE, CUT, reward=0.5, member=1), trajectory(MOVE, reward=0.0, member=2))
    plain = {"advantage": objective.centred_advantages}
    selection, metrics = chosen(of_three, **plain)
    assert selection == [(0, 0.5), (1, 0.0), (2, -0.5)]
    assert metrics["overlong_share"] == pytest.approx(2 / 3)
    assert chosen(of_three, **plain, overlong="mask")[0] == [(2, -0.5)], "the mean is that of all three"
    punished = chosen(of_three, **plain, overlong="punish", low=-1.0)[0]
    assert punished == [(0, -0.3333), (1, -0.3333), (2, 0.6667)]


def test_a_punished_ending_requires_a_lowest_reward() -> None:
    one = group(trajectory(CUT, reward=1.0, task="other"), task="other")
    with pytest.raises(InvalidInput, match="other"):
        chosen(one, overlong="punish")


def test_in_distillation_rewards_count_for_nothing() -> None:
    same = group(trajectory(MOVE, reward=0.0), trajectory(CUT, reward=0.0, member=1))
    assert chosen(same, kind="distill")[0] == [(0, 0.0), (1, 0.0)]
    assert chosen(same, kind="distill", overlong="mask")[0] == [(0, 0.0)]


def test_a_trajectory_without_a_token_counts_in_its_group_alone() -> None:
    selection, _ = chosen(
        group(trajectory(reward=1.0), trajectory(MOVE, member=1)), advantage=objective.centred_advantages
    )
    assert selection == [(1, -0.5)]


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused_by_name(reward: float) -> None:
    with pytest.raises(InvalidInput, match="toy/0/1"):
        chosen(group(trajectory(MOVE), trajectory(MOVE, reward=reward, member=1)))


def test_an_advantage_that_does_not_fit_its_group_is_refused() -> None:
    with pytest.raises(InvalidInput, match="toy/0: advantage"):
        chosen(group(trajectory(MOVE), trajectory(MOVE, reward=1.0, member=1)), advantage=too_few)


# ---- the mean -----------------------------------------------------------------------------------------------------


def test_a_minibatch_is_averaged_over_tokens_or_trajectories_or_by_a_constant() -> None:
    counts = np.array([1, 3])
    assert objective.loss_weights(counts, "tokens", 10).tolist() == [0.25, 0.25]
    assert objective.loss_weights(counts, "sequence", 10).tolist() == pytest.approx([1 / 2, 1 / 6])
    assert objective.loss_weights(counts, "constant", 10).tolist() == [1 / 20, 1 / 20]
