"""A policy of a kind that only transformers computes, trained in the process of a trainer."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from tests.extras import LazyExtra
from tests.rl.processes import leaving_nothing
from tests.rl.trainers import EPISODE, SETTINGS, SIZE, batch

from tangram.rl.config.rollout_settings import EngineSettings, PolicySettings
from tangram.rl.inference.engines.protocol import PolicyWeights
from tangram.rl.train.trainer_process import ProcessTrainer

torch = pytest.importorskip("torch", reason="PyTorch is an extra, which is not installed")
transformers = LazyExtra("transformers")

from tangram.rl.model.policy import HuggingFacePolicy, as_policy, load  # noqa: E402


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def names(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "published"))


def test_it_is_trained_published_for_external_servers_and_restored_from_a_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(5)
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(vocab_size=SIZE, bos_token_id=None, eos_token_id=None, **sizes)
    as_policy(transformers.GPT2LMHeadModel(config)).save(tmp_path / "gpt2")
    settings = msgspec.structs.replace(
        SETTINGS,
        policy=PolicySettings(checkpoint=str(tmp_path / "gpt2")),
        engines=(EngineSettings(kind="openai", url="http://127.0.0.1:1"),),
    )
    trainer = ProcessTrainer(settings, SIZE, tmp_path / "published", keep=2)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()

    def weights_in(weights: PolicyWeights) -> list[torch.Tensor]:
        policy = load(weights.folder)
        assert isinstance(policy, HuggingFacePolicy)
        return [each.detach().clone() for each in policy.parameters()]

    async def test() -> None:
        first = await trainer.start()
        before = weights_in(first)
        assert await trainer.imitate([EPISODE]) > 0.0
        assert await trainer.publish(0) == first and not same(weights_in(first), before), "it is replaced"
        one = await trainer.step(batch(0))
        assert one.metrics["trajectories"] == 2.0 and one.weights.version == 1
        assert not same(weights_in(one.weights), weights_in(first))
        await trainer.save(checkpoint)
        second = weights_in((await trainer.step(batch(1))).weights)
        assert names(tmp_path) == ["00000001", "00000002"], "the oldest is forgotten"

        back = await trainer.start(checkpoint)
        assert back.version == 1 and names(tmp_path) == ["00000001"], "what came after it is gone"
        assert same(weights_in((await trainer.step(batch(1))).weights), second)

    leaving_nothing(test, trainer.close)
