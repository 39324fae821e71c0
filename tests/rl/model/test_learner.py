"""The learner: steps that depend on nothing but what they are given, and that learn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.rl.played import batch, group, played, settings, trajectory, turn

from tangram.errors import InvalidConfig, InvalidInput, ManagerError
from tangram.rl.config.rollout_settings import SamplingSettings
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.model.learner import REFERENCE
from tangram.rl.train.trainer import METRIC_DESCRIPTIONS
from tangram.rl.trajectories.training_batch import Demonstration, TrainingBatch

torch = pytest.importorskip("torch", reason="PyTorch is an extra, which is not installed")

from tangram.rl.model import model_folder  # noqa: E402
from tangram.rl.model.gradient_step import NotFinite  # noqa: E402
from tangram.rl.model.learner import Learner, learning_rate  # noqa: E402
from tangram.rl.model.transformer import Transformer, small_config  # noqa: E402

VOCABULARY = 23
LOW = {"toy": -1.0}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model(dtype: Any = torch.float32, seed: int = 3) -> Transformer:
    return Transformer.new(small_config(VOCABULARY, width=16, heads=2, context_max=96), seed, dtype)


def learner(train_settings: TrainSettings | None = None, of: Any = None, **objective: Any) -> Learner:
    train_settings = train_settings or settings(objective)
    return Learner(train_settings, model() if of is None else of, reward_low=LOW, tokens_longest=32)


def weights(of: Learner) -> list[Any]:
    return [each.detach().clone() for each in of.policy.parameters()]


def same(some: list[Any], others: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def far(some: list[Any], others: list[Any]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))


def silent(version: int = 0) -> TrainingBatch:
    """A batch in which every group got the same."""
    return batch(group(trajectory(turn([1], [2])), trajectory(turn([1], [3]), member=1)), version=version)


# ---- losses of one's own ----


def broken_later(inputs: Any, given: Any) -> Any:
    """No number, but for the first minibatch."""
    loss = -(inputs.loss_weight * inputs.advantage * inputs.logprobs).sum()
    return (loss if torch.equal(inputs.logprobs, inputs.old_logprobs) else loss * math.nan), {}


def broken_gradient(inputs: Any, given: Any) -> Any:
    """A number without a gradient."""
    return (inputs.logprobs - inputs.logprobs.detach()).sqrt().sum(), {}


def by_chance(inputs: Any, given: Any) -> Any:
    noise = torch.rand(len(inputs.logprobs))
    return -(inputs.loss_weight * noise * inputs.logprobs).sum(), {"noise": noise.mean()}


FAULT: list[str] = []
"""Given: the loss that takes the place of `faulty`."""


def faulty(inputs: Any, given: Any) -> Any:
    if FAULT:
        return globals()[FAULT[0]](inputs, given)
    return -(inputs.loss_weight * inputs.advantage * inputs.logprobs).sum(), {}


OWN = {name: f"{__name__}:{name}" for name in ("broken_later", "broken_gradient", "by_chance", "faulty")}


# ---- what a step is -----------------------------------------------------------------------------------------------


def test_a_step_makes_a_version_and_reports_every_metric() -> None:
    one = learner(kl=0.1)
    before = weights(one)
    metrics = one.step(played(0))
    assert one.version == 1
    assert far(weights(one), before) > 0.0
    assert set(metrics) == set(METRIC_DESCRIPTIONS) - {"kl_teacher"}
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["trajectories"] == 16
    assert metrics["tokens"] == sum(len(each.logprobs) for group in played(0).groups for each in group.members)
    assert metrics["entropy"] == pytest.approx(math.log(VOCABULARY), rel=0.01)
    assert metrics["learning_rate"] == 7e-4
    assert metrics["gradient_norm"] > 0.0 and metrics["kl_sampler"] > 0.0
    assert "kl_reference" not in learner().step(played(0))


def test_metrics_of_the_sampler_are_those_of_the_formulas() -> None:
    # What was sampled with the log-probabilities of the policy less 1 has the ratio e, which is truncated at 2.
    one = learner(correction_max=2.0)
    logits = one.policy.module(torch.tensor([[1, 2, 3, 4]])).log_softmax(-1)[0]
    exact = [logits[1, 3].item(), logits[2, 4].item()]
    shifted = batch(
        group(*(trajectory(turn([1, 2], [3, 4], [v - 1 for v in exact]), reward=r, member=r) for r in (0, 1)))
    )
    metrics = one.step(shifted)
    assert metrics["weight_mean"] == pytest.approx(2.0)
    assert metrics["weight_truncated"] == 1.0
    assert metrics["kl_sampler"] == pytest.approx(math.e - 2.0, rel=1e-4)
    assert metrics["clip_share"] == pytest.approx(0.0)


def test_the_same_batch_gives_the_same_step_to_the_last_bit() -> None:
    first, second = learner(minibatch=5), learner(minibatch=5)
    metrics, told_again = (each.step(played(0)) for each in (first, second))
    assert same(weights(first), weights(second))
    assert {**metrics, "tokens_per_s": 0.0} == {**told_again, "tokens_per_s": 0.0}


def test_the_seed_decides_the_minibatches() -> None:
    first, second = (learner(settings({"minibatch": 5}, seed=seed)) for seed in (0, 1))
    first.step(played(0))
    second.step(played(0))
    assert not same(weights(first), weights(second))


@pytest.mark.parametrize("normalise", ["tokens", "sequence", "constant"])
@pytest.mark.parametrize("microbatch", [1, 3])
def test_accumulated_gradients_are_those_of_the_undivided_minibatch(normalise: Any, microbatch: int) -> None:
    options = dict(normalise=normalise, minibatch=8, kl=0.2, entropy=0.1, epochs=2)
    undivided, divided = (learner(of=model(torch.float64), microbatch=rows, **options) for rows in (64, microbatch))
    metrics, told_divided = undivided.step(played(1)), divided.step(played(1))
    assert far(weights(undivided), weights(divided)) < 1e-9
    for name in set(METRIC_DESCRIPTIONS) - {"tokens_per_s", "kl_teacher"}:
        assert metrics[name] == pytest.approx(told_divided[name], abs=1e-9), name


def test_the_first_update_does_not_depend_on_what_is_clipped() -> None:
    # With one minibatch and one epoch the ratio to the start of the step is 1, for any probabilities of the sampler.
    narrow, wide = (learner(epochs=1, clip_low=clip, clip_high=clip) for clip in (0.01, 0.9))
    assert narrow.step(played(2))["clip_share"] == 0.0 == wide.step(played(2))["clip_share"]
    assert same(weights(narrow), weights(wide))


def test_old_samples_get_the_weight_of_the_correction() -> None:
    corrected, bare = (
        learner(settings({"correction": name, "epochs": 1}, {"mode": "sync"})) for name in ("truncated", "none")
    )
    assert corrected.step(played(3))["weight_mean"] != 1.0
    assert bare.step(played(3))["weight_mean"] == 1.0
    assert not same(weights(corrected), weights(bare))


def test_modes_do_not_change_what_a_batch_teaches() -> None:
    metrics = []
    for mode in ("sync", "sync+", "one-off", "start-bound", "async"):
        one = learner(settings({"minibatch": 5}, {"mode": mode}))
        one.step(played(0))
        metrics.append(weights(one))
    assert all(same(each, metrics[0]) for each in metrics)


def test_lengthier_gradients_are_cut() -> None:
    one, other = learner(gradient_norm_max=1e-12, epochs=1), learner(epochs=1)
    norms = [each.step(played(0))["gradient_norm"] for each in (one, other)]
    assert norms[0] == pytest.approx(norms[1]), "the norm is reported as it was before"
    assert far(weights(one), weights(learner())) < 1e-6 < far(weights(other), weights(learner()))


# ---- nothing to learn, nothing allowed ----------------------------------------------------------------------------


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_a_batch_without_variance_makes_a_version_with_the_same_weights(kl: float) -> None:
    one = learner(kl=kl)
    before = weights(one)
    metrics = one.step(silent())
    assert one.version == 1
    assert same(weights(one), before)
    assert metrics["trajectories"] == 0 == metrics["tokens"]
    assert metrics["zero_variance_share"] == 1.0
    assert "entropy" not in metrics, "a mean of nothing"


def test_groups_without_variance_count_where_they_are_kept() -> None:
    mixed = batch(*silent().groups, *played(0, groups=1).groups)
    assert learner().step(mixed)["trajectories"] == 4
    assert learner(zero_variance="keep").step(mixed)["trajectories"] == 6


def test_what_was_cut_off_can_be_left_out() -> None:
    cut = trajectory(turn([1], [2, 3], cut=True), reward=1.0, member=1)
    mixed = batch(group(trajectory(turn([1], [2])), cut))
    metrics = learner(overlong="mask").step(mixed)
    assert (metrics["trajectories"], metrics["tokens"], metrics["overlong_share"]) == (1, 1, 0.5)


def written_by(first: int, *, version: int) -> TrainingBatch:
    """A batch for the step from `version`, written by `first`."""
    members = (trajectory(turn([1], [2], version=first), reward=reward, member=reward) for reward in (0, 1))
    return batch(group(*members), version=version)


@pytest.mark.parametrize(
    ("mode", "alpha", "first", "fine"),
    [
        ("async", 1, 1, True),
        ("async", 1, 0, False),
        ("async", 1, 3, False),
        ("async", 0, 1, False),
        ("start-bound", 1, 0, True),
        ("start-bound", 0, 1, False),
        ("start-bound", 0, 2, True),
        ("one-off", 1, 0, False),
        ("sync", 1, 1, False),
        ("sync+", 1, 2, True),
    ],
)
def test_no_trajectory_is_older_than_the_mode_allows(mode: Any, alpha: int, first: int, fine: bool) -> None:
    one = learner(settings(training={"mode": mode, "staleness": alpha}))
    one.version = 2
    old = written_by(first, version=2)
    before = weights(one)
    if fine:
        one.step(old)
        assert one.version == 3
    else:
        with pytest.raises(InvalidInput, match=r"toy/0/0.0: version of the first token: expected from \d to 2"):
            one.step(old)
        assert one.version == 2
        assert same(weights(one), before)


@pytest.mark.parametrize("mode", ["sync", "sync+", "start-bound", "async"])
def test_without_a_correction_nothing_is_trained_on_that_is_older_than_the_weights(mode: Any) -> None:
    one = learner(settings({"correction": "none"}, {"mode": mode, "staleness": 0}))
    one.version = 2
    before = weights(one)
    with pytest.raises(InvalidInput, match=r"expected from 2 to 2 as objective.correction = \"none\".*, got 1"):
        one.step(written_by(1, version=2))
    assert one.version == 2 and same(weights(one), before)
    one.step(written_by(2, version=2))
    assert one.version == 3


def test_a_batch_of_another_version_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"batch\.version"):
        learner().step(played(0, version=1))


@pytest.mark.parametrize(
    "sampling", [SamplingSettings(temperature=0.0), SamplingSettings(top_k=3), SamplingSettings(top_p=0.5)]
)
def test_what_cannot_be_trained_on_is_refused_at_once(sampling: SamplingSettings) -> None:
    with pytest.raises(InvalidConfig):
        learner(settings(sampling=sampling))
    learner(settings(sampling=SamplingSettings(top_k=3, keep_ids=True)))


def test_a_loss_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(InvalidConfig, match=r"objective\.loss"):
        learner(loss="tests.rl.played:nothing")


def test_a_loss_that_raises_is_reported_with_its_place_and_changes_nothing() -> None:
    one = learner(loss="tests.rl.model.test_learner:raising")
    before = weights(one)
    with pytest.raises(InvalidInput, match=r"objective\.loss: .*KeyError: 'mean'.*test_learner\.py:\d+"):
        one.step(played(0))
    assert one.version == 0
    assert same(weights(one), before)


@pytest.mark.parametrize(
    ("loss", "returned"),
    [
        ("vector", r"a tensor of shape \[\d+\] as the loss"),
        ("alone", r"a tensor of shape \[\]"),
        ("nothing", "a NoneType"),
        ("constant", "a number without a gradient"),
        ("metric", r"a tensor of shape \[\d+\] as metric each"),
    ],
)
def test_an_invalid_return_value_of_a_loss_is_reported_with_its_place_and_changes_nothing(
    loss: str, returned: str
) -> None:
    one = learner(loss=f"{__name__}:{loss}")
    before = weights(one)
    line = globals()[loss].__code__.co_firstlineno
    error = rf"objective\.loss: expected .* \(it returned {returned}, .*test_learner\.py:{line}\), got '.*:{loss}'"
    with pytest.raises(InvalidInput, match=error):
        one.step(played(0))
    assert one.version == 0
    assert same(weights(one), before)


def vector(inputs: Any, settings: Any) -> Any:
    return -inputs.loss_weight * inputs.advantage * inputs.logprobs, {}


def alone(inputs: Any, settings: Any) -> Any:
    return inputs.logprobs.sum()


def nothing(inputs: Any, settings: Any) -> Any:
    return None


def constant(inputs: Any, settings: Any) -> Any:
    return inputs.logprobs.detach().sum(), {}


def metric(inputs: Any, settings: Any) -> Any:
    return inputs.logprobs.sum(), {"each": inputs.logprobs}


def raising(inputs: Any, settings: Any) -> Any:
    return {}["mean"]


@pytest.mark.parametrize("loss", ["broken_later", "broken_gradient"])
def test_what_is_no_number_changes_nothing(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (learner(minibatch=4, loss=OWN["faulty"]) for _ in range(2))
    for each in (one, other):
        each.step(played(0))
    monkeypatch.setitem(globals(), "FAULT", [loss])
    with pytest.raises(NotFinite, match="undone") as raised:
        one.step(played(1, version=1))
    monkeypatch.undo()
    assert not raised.value.retry
    assert one.version == 1
    assert same(weights(one), weights(other))
    one.step(played(1, version=1))
    other.step(played(1, version=1))
    assert same(weights(one), weights(other)), "the optimiser was undone too"


def test_a_first_step_that_is_undone_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (learner(minibatch=4, loss=OWN["faulty"]) for _ in range(2))
    monkeypatch.setitem(globals(), "FAULT", ["broken_later"])
    with pytest.raises(NotFinite):
        one.step(played(0))
    monkeypatch.undo()
    one.step(played(0))
    other.step(played(0))
    assert same(weights(one), weights(other))


def test_a_batch_with_one_wrong_trajectory_changes_nothing() -> None:
    one = learner()
    before = weights(one)
    wrong = batch(group(trajectory(turn([1], [99]), reward=1.0), trajectory(turn([1], [2]), member=1)))
    with pytest.raises(InvalidInput, match="ids from 0 to 22"):
        one.step(wrong)
    assert one.version == 0 and same(weights(one), before)


# ---- distillation -------------------------------------------------------------------------------------------------


def test_a_policy_is_drawn_to_its_teacher() -> None:
    # The teacher finds 2 likely after 1, and nothing else.
    one = learner(kind="distill", learning_rate=1e-2)
    chance = np.random.default_rng(0)
    teacher = np.log(np.where(np.arange(VOCABULARY) == 2, 0.9, 0.1 / (VOCABULARY - 1)))
    apart = []
    for version in range(25):
        logs = one.policy.module(torch.tensor([[1]])).log_softmax(-1)[0, 0].detach().double().numpy()
        drawn = chance.choice(VOCABULARY, 64, p=np.exp(logs) / np.exp(logs).sum())
        stepped = one.step(
            batch(
                group(
                    *(
                        trajectory(
                            turn([1], [int(token)], [float(logs[token])], version=version),
                            member=number,
                            teacher_logprobs=(float(teacher[token]),),
                        )
                        for number, token in enumerate(drawn)
                    )
                ),
                version=version,
            )
        )
        apart.append(stepped["kl_teacher"])
    assert one.policy.module(torch.tensor([[1]])).softmax(-1)[0, 0, 2].item() == pytest.approx(0.9, abs=0.09)
    assert apart[0] > 1.0 > 0.1 > apart[-1]


def test_without_a_teacher_nothing_is_distilled() -> None:
    with pytest.raises(InvalidInput, match="teacher_logprobs"):
        learner(kind="distill").step(played(0))
    assert learner(kind="distill").step(played(0, taught=True))["trajectories"] == 16


# ---- imitation ----------------------------------------------------------------------------------------------------


def shown(seed: int, count: int = 16) -> list[Demonstration]:
    """Each token is the one before plus 1."""
    chance = np.random.default_rng(seed)
    firsts = chance.integers(0, VOCABULARY, count)
    lengths = chance.integers(3, 12, count)
    return [
        Demonstration(
            task="toy",
            tokens=tuple(int(first + k) % VOCABULARY for k in range(length)),
            is_action=(False,) + (True,) * (length - 1),
        )
        for first, length in zip(firsts, lengths, strict=True)
    ]


def test_what_is_shown_is_learned() -> None:
    one = learner()
    losses = [one.imitate(shown(number)) for number in range(80)]
    assert losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.05)
    assert losses[-1] < 0.3 * losses[0]
    assert one.version == 0


def test_the_loss_of_imitation_is_the_mean_over_action_tokens() -> None:
    one = learner(of=model(torch.float64), microbatch=3)
    total, count = 0.0, 0
    for each in shown(0):
        logs = one.policy.module(torch.tensor([each.tokens])).log_softmax(-1)[0]
        for place, mine in enumerate(each.is_action):
            if mine:
                total, count = total - logs[place - 1, each.tokens[place]].item(), count + 1
    assert one.imitate(shown(0)) == pytest.approx(total / count)


def test_after_a_warm_start_the_optimiser_is_new() -> None:
    warmed = learner(minibatch=4)
    for number in range(3):
        warmed.imitate(shown(number))
    copied = model()
    copied.load_state_dict(warmed.policy.module.state_dict())
    fresh = learner(of=copied, minibatch=4)
    warmed.step(played(0))
    fresh.step(played(0))
    assert same(weights(warmed), weights(fresh))


def test_a_warm_start_comes_first_and_shows_something() -> None:
    one = learner()
    with pytest.raises(InvalidInput, match="at least one with an action"):
        one.imitate([Demonstration(task="toy", tokens=(1, 2), is_action=(False, False))])
    one.step(played(0))
    with pytest.raises(InvalidInput, match="before the first step"):
        one.imitate(shown(0))


# ---- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"kl": 0.1, "entropy": 0.01, "decay": "cosine"}, {"loss": OWN["by_chance"], "epochs": 1}],
    ids=["plain", "reference", "chance"],
)
def test_after_restoring_the_next_steps_are_the_same_to_the_last_bit(tmp_path: Path, options: Any) -> None:
    train_settings = settings({"minibatch": 5, **options}, {"mode": "start-bound"}, seed=7)
    one = learner(train_settings)
    one.imitate(shown(0))
    for version in range(3):
        one.step(played(version, version=version))
    (tmp_path / "buffer").write_text("foreign content")
    one.save(tmp_path)
    other = learner(train_settings, of=model(seed=99))
    other.imitate(shown(1))
    other.restore(tmp_path)
    assert other.version == 3
    assert same(weights(one), weights(other))
    for version in range(3, 5):
        metrics = one.step(played(version, version=version))
        torch.rand(3)  # what others draw meanwhile does not matter
        told_again = other.step(played(version, version=version))
        assert {**metrics, "tokens_per_s": 0.0} == {**told_again, "tokens_per_s": 0.0}
        assert same(weights(one), weights(other))
    assert (tmp_path / "buffer").read_text() == "foreign content"
    assert not list(tmp_path.glob(".*")), "nothing unfinished is left"


def test_a_checkpoint_loads_without_the_learner(tmp_path: Path) -> None:
    one = learner()
    one.step(played(0))
    one.save(tmp_path)
    loaded = model_folder.load(tmp_path)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in one.policy.module.state_dict().items())


def test_settings_that_changed_count_after_restoring(tmp_path: Path) -> None:
    one = learner()
    one.step(silent())
    one.save(tmp_path)
    ends = []
    for options in ({}, {"weight_decay": 0.5}, {"learning_rate": 1e-5}):
        other = learner(**options)
        other.restore(tmp_path)
        other.step(played(0, version=1))
        ends.append(weights(other))
    assert not same(ends[0], ends[1]) and not same(ends[0], ends[2])


def test_the_reference_is_the_policy_before_the_first_step(tmp_path: Path) -> None:
    train_settings = settings({"kl": 0.1}, {"mode": "start-bound"})
    one = learner(train_settings)
    one.save(tmp_path)  # before the first step
    first = weights(one)
    one.step(played(0))
    assert far(weights(one), first) > 0.0
    other = learner(train_settings, of=model(seed=99))
    other.restore(tmp_path)
    other.step(played(0))
    assert same(weights(one), weights(other))
    (tmp_path / "later").mkdir()
    other.save(tmp_path / "later")
    written = [path / REFERENCE / "model.safetensors" for path in (tmp_path, tmp_path / "later")]
    assert written[0].read_bytes() == written[1].read_bytes()


def test_what_cannot_be_restored_changes_nothing(tmp_path: Path) -> None:
    plain = learner()
    plain.step(played(0))
    plain.save(tmp_path)
    one = learner(kl=0.1)
    before = weights(one)
    with pytest.raises(InvalidConfig, match=r"objective\.kl"):
        one.restore(tmp_path)
    (tmp_path / "learner.pt").write_bytes(b"not this")
    with pytest.raises(ManagerError, match=r"learner\.pt: not the state of a learner"):
        one.restore(tmp_path)
    with pytest.raises(ManagerError, match=r"learner\.pt: No such file"):
        one.restore(tmp_path / "nowhere")
    assert same(weights(one), before) and one.version == 0


def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ManagerError, match="cannot be written"):
        learner().save(tmp_path / "not there")


# ---- the learning rate --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"rate_warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0, 1.0]),
        ({"decay": "linear"}, [0.775, 0.55, 0.325, 0.1, 0.1]),
        ({"decay": "linear", "rate_warmup_steps": 2}, [0.5, 1.0, 0.55, 0.1, 0.1]),
        ({"decay": "cosine", "rate_warmup_steps": 2}, [0.5, 1.0, 0.55, 0.1, 0.1]),
        ({"rate_warmup_steps": 8, "decay": "linear"}, [0.125, 0.25, 0.375, 0.5, 0.625]),
    ],
)
def test_the_learning_rate_rises_and_falls(options: dict[str, Any], rates: list[float]) -> None:
    train_settings = settings({"learning_rate": 1.0, **options}, {"steps": 4})
    assert [learning_rate(version, train_settings) for version in range(5)] == pytest.approx(rates)


# ---- external models ----------------------------------------------------------------------------------------------


def test_ours_and_the_same_weights_in_transformers_make_the_same_step(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is an extra, which is not installed")
    model_folder.save(model(), tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    options: dict[str, Any] = dict(minibatch=8, kl=0.1, entropy=0.01)
    one, other = learner(**options), learner(of=theirs, **options)
    assert one.imitate(shown(0)) == pytest.approx(other.imitate(shown(0)), abs=1e-5)
    metrics, told_there = one.step(played(0)), other.step(played(0))
    for name in set(METRIC_DESCRIPTIONS) - {"tokens_per_s", "kl_teacher"}:
        assert metrics[name] == pytest.approx(told_there[name], abs=1e-5), name
    other.save(tmp_path)
    there = model_folder.load(tmp_path)
    assert far(weights(one), list(there.parameters())) < 1e-5


def test_a_model_of_another_kind_trains_and_is_restored(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is an extra, which is not installed")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=96, n_embd=16, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None
    )
    train_settings = settings({"minibatch": 5, "kl": 0.1}, {"mode": "start-bound"})
    torch.manual_seed(0)
    one, other = (learner(train_settings, of=transformers.GPT2LMHeadModel(config)) for _ in range(2))
    before = one.imitate(shown(0))
    for _ in range(30):
        after = one.imitate(shown(0))
    assert after < 0.8 * before
    one.step(played(0))
    one.save(tmp_path)
    other.restore(tmp_path)
    assert same(weights(one), weights(other))
    metrics, told_again = (each.step(played(1, version=1)) for each in (one, other))
    assert {**metrics, "tokens_per_s": 0.0} == {**told_again, "tokens_per_s": 0.0}
    assert same(weights(one), weights(other))


# ---- and it learns ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1], ids=["fresh", "a-version-old"])
def test_the_reward_rises(lag: int) -> None:
    """The expected action is one token: the observation plus 5. The samples are `lag` versions old."""
    one = learner(learning_rate=5e-3, minibatch=32)
    chance = np.random.default_rng(0)
    tokens = list(range(8))
    rewards: list[float] = []
    known: list[np.ndarray] = []
    for version in range(60):
        with torch.no_grad():
            logprobs = one.policy.module(torch.tensor([[each] for each in tokens])).log_softmax(-1)[:, 0]
        known.append(logprobs.double().numpy())
        first = max(0, version - lag)
        logs = known[first]
        groups = []
        for number, each in enumerate(tokens):
            shares = np.exp(logs[each])
            drawn = chance.choice(VOCABULARY, 12, p=shares / shares.sum())
            groups.append(
                group(
                    *(
                        trajectory(
                            turn([each], [int(token)], [float(logs[each, token])], version=first),
                            reward=float(token == each + 5),
                            member=member,
                        )
                        for member, token in enumerate(drawn)
                    ),
                    number=number,
                )
            )
        made = batch(*groups, version=version)
        rewards.append(float(np.mean([each.reward for some in made.groups for each in some.members])))
        one.step(made)
    assert np.mean(rewards[:5]) < 0.2
    assert np.mean(rewards[-5:]) > 0.8
