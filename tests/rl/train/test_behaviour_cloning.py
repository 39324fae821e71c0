"""Behaviour cloning: a clone is a checkpoint that a run can start from."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tangram.rl.config.rollout_settings import EngineSettings, PolicySettings, TaskSettings
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.environments.registry import tasks_of
from tangram.rl.rollout.assembly import codec_of
from tangram.rl.train.behaviour_cloning import clone_behaviour
from tangram.rl.trajectories.tokenizer import TextCodec


def test_a_clone_of_a_checkpoint_with_a_tokenizer_has_its_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.rl.trajectories.test_tokenizer import folder_of

    from tangram.rl.model.model_folder import save
    from tangram.rl.model.transformer import Transformer, small_config

    checkpoint, clone = tmp_path / "checkpoint", tmp_path / "clone"
    save(Transformer.new(small_config(16, layers=1, width=32, heads=2, context_max=256), 1), checkpoint)
    tokenizer = TextCodec(folder_of(checkpoint, chats=True))

    def settings(folder: Path) -> TrainSettings:
        return TrainSettings(
            policy=PolicySettings(checkpoint=str(folder)),
            engines=(EngineSettings(),),
            tasks=(TaskSettings(name="chain"),),
        )

    asyncio.run(clone_behaviour(settings(checkpoint), clone, steps=0, episodes=0))
    codec = codec_of(settings(clone), tasks_of(settings(clone)))
    assert isinstance(codec, TextCodec) and codec.encode_action("go left") == tokenizer.encode_action("go left")
