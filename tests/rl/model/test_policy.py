"""Policies: log-probabilities as they were sampled, of our models and of those of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.extras import LazyExtra
from tests.rl.played import played, trajectory, turn

from tangram.errors import InvalidConfig, InvalidInput, ManagerError
from tangram.rl.inference.engines.protocol import Sampling
from tangram.rl.trajectories.training_batch import Demonstration

torch = pytest.importorskip("torch", reason="PyTorch is an extra, which is not installed")
transformers = LazyExtra("transformers")

from tangram.rl.model import model_folder  # noqa: E402
from tangram.rl.model.policy import HuggingFacePolicy, TransformerPolicy, as_policy, load, score  # noqa: E402
from tangram.rl.model.sample_batches import PackedSamples  # noqa: E402
from tangram.rl.model.sampling import draw  # noqa: E402
from tangram.rl.model.transformer import Transformer, TransformerConfig, small_config  # noqa: E402
from tangram.rl.model.weight_store import pull  # noqa: E402

VOCABULARY = 23


def ours(dtype: Any = torch.float32) -> Transformer:
    config = TransformerConfig(
        vocabulary=VOCABULARY, width=16, layers=2, heads=4, kv_heads=2, head_width=4, inner=24, context_max=96
    )
    model = Transformer.new(config, 3, dtype)
    with torch.no_grad():
        model.head.mul_(20.0)  # or all tokens would be almost as likely
    return model


def gpt2() -> Any:
    torch.manual_seed(5)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=96, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    return transformers.GPT2LMHeadModel(config)


def of(samples: PackedSamples, policy: Any, rows_max: int = 64, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and entropies of all action tokens."""
    logprobs, entropies = np.zeros((2, len(samples.targets)))
    for microbatch in samples.microbatches(np.arange(len(samples)), rows_max, policy.vocabulary):
        scored = score(policy, microbatch, entropy=True, **options)
        logprobs[microbatch.action_indices] = scored.logprobs.detach().numpy()
        entropies[microbatch.action_indices] = scored.entropy.detach().numpy()
    return logprobs, entropies


def members(seed: int = 0, **options: Any) -> list[Any]:
    return [each for group in played(seed, vocabulary=VOCABULARY, **options).groups for each in group.members]


@pytest.fixture(params=["ours", "gpt2"])
def policy(request: pytest.FixtureRequest) -> Any:
    return as_policy(ours() if request.param == "ours" else gpt2())


def test_each_token_has_the_log_probability_that_the_whole_model_gives_it(policy: Any) -> None:
    trajectories = members()
    scored, entropies = of(PackedSamples.from_trajectories(trajectories), policy)
    expected: list[float] = []
    spread: list[float] = []
    for each in trajectories:
        tokens = torch.tensor([each.tokens])
        made = policy.module(tokens) if isinstance(policy, TransformerPolicy) else policy.module(tokens).logits
        logs = made.log_softmax(-1)[0]
        places = [number for number, mine in enumerate(each.action_mask) if mine]
        expected += [logs[place - 1, each.tokens[place]].item() for place in places]
        spread += [-(logs[place - 1].exp() * logs[place - 1]).sum().item() for place in places]
    np.testing.assert_allclose(scored, expected, atol=1e-5)
    np.testing.assert_allclose(entropies, spread, atol=1e-5)


@pytest.mark.parametrize("rows_max", [1, 3])
def test_it_does_not_matter_how_texts_are_put_together(policy: Any, rows_max: int) -> None:
    samples = PackedSamples.from_trajectories(members(1))
    np.testing.assert_allclose(of(samples, policy, rows_max)[0], of(samples, policy)[0], atol=1e-5)


def test_texts_of_different_lengths_are_read_apart() -> None:
    short = [trajectory(turn([1], [2]), member=number) for number in range(20)]
    long = [trajectory(turn([1] * 40, [2] * 9), member=number) for number in range(20)]
    samples = PackedSamples.from_trajectories([each for pair in zip(short, long, strict=True) for each in pair])
    shapes = [tuple(microbatch.tokens.shape) for microbatch in samples.microbatches(np.arange(40), 64, VOCABULARY)]
    assert shapes == [(20, 1), (20, 48)]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7),
        Sampling(temperature=1.6, top_k=5, keep_ids=True),
        Sampling(top_p=0.6, keep_ids=True),
        Sampling(temperature=0.5, top_k=9, top_p=0.8, keep_ids=True),
    ],
)
def test_temperature_and_what_was_left_are_as_in_sampling(policy: Any, sampling: Sampling) -> None:
    chance = np.random.default_rng(1)
    trajectories, entropies = [], []
    for number in range(6):
        text = chance.integers(0, VOCABULARY, 3 + number).tolist()
        turns = []
        for _ in range(2):
            observation, tokens, logprobs, kept = text if not turns else [1, 2], [], [], []
            prefix = [token for each in turns for token in (*each.observation_tokens, *each.tokens)] + observation
            for _ in range(4):
                given = torch.tensor([prefix + tokens])
                made = policy.module(given) if isinstance(policy, TransformerPolicy) else policy.module(given).logits
                drawn = draw(made[:, -1], [sampling], chance.random(1))
                tokens.append(drawn.tokens[0])
                logprobs.append(drawn.logprobs[0])
                kept.append(drawn.kept_ids[0])
                among = list(drawn.kept_ids[0] or range(VOCABULARY))
                shares = (made[0, -1, among].double() / sampling.temperature).softmax(0)
                entropies.append(-(shares * shares.log()).sum().item())
            turns.append(turn(observation, tokens, logprobs, kept=None if kept[0] is None else kept))
        trajectories.append(trajectory(*turns, member=number))
    samples = PackedSamples.from_trajectories(trajectories)
    scored, spread = of(samples, policy, temperature=sampling.temperature)
    np.testing.assert_allclose(scored, samples.sampler_logprobs, atol=1e-5)
    np.testing.assert_allclose(spread, entropies, atol=1e-5)


def test_gradients_are_numbers_where_ids_were_left_out(policy: Any) -> None:
    samples = PackedSamples.from_trajectories([trajectory(turn([1], [2, 3], kept=[[2], [3, 4]]), turn([5], [6]))])
    (batches,) = samples.microbatches(np.arange(1), 8, VOCABULARY)
    scored = score(policy, batches, entropy=True, entropy_gradient=True)
    assert scored.logprobs[0] == 0.0 == scored.entropy[0]
    (scored.logprobs.sum() + scored.entropy.sum()).backward()
    assert all(torch.isfinite(each.grad).all() for each in policy.parameters() if each.grad is not None)
    assert any((each.grad != 0).any() for each in policy.parameters() if each.grad is not None)


def test_our_transformer_and_that_of_transformers_agree_on_one_checkpoint(tmp_path: Path) -> None:
    model_folder.save(ours(), tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    samples = PackedSamples.from_trajectories(members(2))
    mine = load(tmp_path / "model")
    assert isinstance(mine, TransformerPolicy)
    np.testing.assert_allclose(of(samples, mine)[0], of(samples, HuggingFacePolicy(theirs))[0], atol=1e-5)


def test_a_model_of_another_kind_is_read_by_transformers(tmp_path: Path) -> None:
    policy = as_policy(gpt2())
    policy.save(tmp_path / "model")
    assert len({path.stat().st_mode for path in (tmp_path / "model").iterdir()}) == 1, "for the same readers"
    loaded = load(tmp_path / "model")
    assert isinstance(loaded, HuggingFacePolicy)
    assert (loaded.vocabulary, loaded.context_max) == (VOCABULARY, 96)
    samples = PackedSamples.from_trajectories(members(3))
    np.testing.assert_array_equal(of(samples, loaded)[0], of(samples, policy)[0])


def test_an_unreadable_folder_is_reported_with_both_reasons(tmp_path: Path) -> None:
    with pytest.raises(ManagerError, match=r"cannot be trained.*ours: .*config\.json"):
        load(tmp_path / "nothing")


def test_what_is_published_is_what_engines_pull(tmp_path: Path) -> None:
    model = ours()
    weights = as_policy(model).publish(tmp_path, 4)
    pulled = pull(weights)
    assert all(torch.equal(value, pulled.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_policy_of_an_external_server_is_published_as_a_checkpoint(tmp_path: Path) -> None:
    policy = as_policy(gpt2())
    weights = policy.publish(tmp_path, 4)
    assert weights.version == 4
    assert isinstance(load(weights.folder), HuggingFacePolicy)
    with pytest.raises(ManagerError, match="exists already"):
        policy.publish(tmp_path, 4)
    assert policy.publish(tmp_path, 4, replace=True) == weights
    assert [path.name for path in tmp_path.iterdir()] == ["00000004"]


@pytest.mark.parametrize("kind", ["ours", "gpt2"])
def test_what_cannot_be_published_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    policy: Any = TransformerPolicy(ours(), for_external_servers=True) if kind == "ours" else as_policy(gpt2())
    weights = policy.publish(tmp_path, 4)
    before = (Path(weights.folder) / "model.safetensors").read_bytes()
    with monkeypatch.context() as patched:

        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        patched.setattr("safetensors.torch.save_file", full)
        patched.setattr(type(policy.module), "save_pretrained", full, raising=False)
        with pytest.raises(ManagerError, match="No space left"):
            policy.publish(tmp_path, 4, replace=True)
    assert (Path(weights.folder) / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["00000004"]


def test_our_policies_are_published_as_checkpoints_for_external_servers(tmp_path: Path) -> None:
    model_folder.save(ours(), tmp_path / "model")
    weights = load(tmp_path / "model", for_external_servers=True).publish(tmp_path / "published", 0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(weights.folder)
    assert theirs.config.model_type == "llama"


def test_weights_of_another_size_are_not_restored(tmp_path: Path) -> None:
    model_folder.save(Transformer.new(small_config(VOCABULARY, width=8, heads=2), 0), tmp_path / "other")
    policy = as_policy(ours())
    before = [each.clone() for each in policy.parameters()]
    with pytest.raises(InvalidConfig, match="sizes of the policy"):
        policy.restore(tmp_path / "other")
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_a_copy_for_reference_stays_as_it_is(policy: Any) -> None:
    reference = policy.frozen()
    assert not any(each.requires_grad for each in reference.parameters())
    with torch.no_grad():
        for each in policy.parameters():
            each.add_(1.0)
    assert not any(torch.equal(a, b) for a, b in zip(policy.parameters(), reference.parameters(), strict=True))


# ---- samples that cannot be -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (trajectory(turn([], [1])), "toy/0/0.0.*an observation before it"),
        (trajectory(turn([1], [2], [float("-inf")])), "toy/0/0.0: logprobs.*finite"),
        (trajectory(turn([1], [2], kept=[[3, 4]])), "toy/0/0.0: kept.*the token 2"),
    ],
)
def test_what_cannot_have_been_sampled_is_refused_by_name(wrong: Any, match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        PackedSamples.from_trajectories([wrong])


def test_what_the_model_cannot_read_is_refused() -> None:
    with pytest.raises(InvalidInput, match="ids from 0 to 22"):
        PackedSamples.from_trajectories([trajectory(turn([1], [23]))]).require_readable(VOCABULARY, 96)
    with pytest.raises(InvalidInput, match="ids from 0 to 22"):
        PackedSamples.from_trajectories([trajectory(turn([1], [2], kept=[[2, 99]]))]).require_readable(VOCABULARY, 96)
    fits = PackedSamples.from_trajectories([trajectory(turn([1] * 90, [2] * 7))])
    fits.require_readable(VOCABULARY, 96)  # the last token is never read
    with pytest.raises(InvalidInput, match="at most 97"):
        PackedSamples.from_trajectories([trajectory(turn([1] * 90, [2] * 8))]).require_readable(VOCABULARY, 96)


def test_demonstrations_are_samples_too() -> None:
    shown = Demonstration(task="toy", tokens=(1, 2, 3, 4, 5), is_action=(False, True, False, True, False))
    idle = Demonstration(task="toy", tokens=(1, 2), is_action=(False, False))
    samples = PackedSamples.from_demonstrations([idle, shown])
    assert samples.targets.tolist() == [2, 4]
    (batches,) = samples.microbatches(np.arange(1), 8, VOCABULARY)
    assert batches.tokens.tolist() == [[1, 2, 3]]
    assert batches.positions.tolist() == [0, 2]
