"""Assembly: what a config describes is made whole, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from tests.rl.inference.servers import ModelServer

from tangram.errors import InvalidConfig
from tangram.rl.config.rollout_settings import (
    EngineSettings,
    GroupSettings,
    PolicySettings,
    ResourceSettings,
    RewardSettings,
    RolloutSettings,
    TaskSettings,
)
from tangram.rl.inference.engines.protocol import PolicyWeights
from tangram.rl.inference.router_records import NoEngine
from tangram.rl.inference.weights_folder import PREFIX, SHARED_MEMORY
from tangram.rl.rollout.assembly import TrainedWeights, assembled, first_model, require_playable, require_servable
from tangram.rl.rollout.rollout import CollectedBatch, tickets

if os.environ.get("CI") != "true":
    pytest.importorskip("torch")

RESOURCES = ResourceSettings(backend="process", cores=2.0)


def half(transcript: dict[str, object]) -> float:
    """A reward for any trajectory."""
    return 0.5


def played(settings: RolloutSettings, groups: int) -> CollectedBatch:
    async def main() -> CollectedBatch:
        async with asyncio.timeout(120), assembled(settings) as made:
            return await made.rollout.collect(tickets(settings), groups)

    return asyncio.run(main())


def settings_of(**keys: object) -> RolloutSettings:
    groups, engines = GroupSettings(size=2), (EngineSettings(slots=8),)
    return RolloutSettings(groups=groups, resources=RESOURCES, engines=engines, **keys)  # type: ignore[arg-type]


def test_a_reward_that_runs_outside_gets_a_connection_though_the_task_needs_none() -> None:
    reward = RewardSettings(kind="function", function="tests.rl.rollout.test_assembly:half")
    batch = played(settings_of(tasks=(TaskSettings(name="chain", reward=reward),)), 2)
    assert [member.reward for group in batch.groups for member in group.members] == [0.5] * 4


def test_a_task_that_acts_outside_is_played_by_plain_processes_too() -> None:
    batch = played(settings_of(tasks=(TaskSettings(name="codefix"),)), 1)
    assert batch.groups[0].is_complete


def test_nothing_is_left() -> None:
    folders: list[Path] = []

    async def main() -> None:
        async with assembled(settings_of(tasks=(TaskSettings(name="chain"),))) as made:
            assert made.folder in set(SHARED_MEMORY.glob(f"{PREFIX}*"))
            folders.append(made.folder)
            raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(main())
    assert not folders[0].exists()


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"tasks": ()}, "at least one task"),
        ({"tasks": (TaskSettings(name="chian"),)}, "chain"),
        ({"tasks": (TaskSettings(name="chain"),), "policy": PolicySettings(checkpoint="/nowhere")}, "checkpoint"),
    ],
)
def test_an_impossible_assembly_is_reported(wrong: dict[str, object], expected: str) -> None:
    with pytest.raises(InvalidConfig, match=expected):
        played(settings_of(**wrong), 1)


@pytest.mark.parametrize("control", [True, False])
def test_external_servers_are_trained_on_with_the_weights_of_the_trainer_or_not_at_all(
    tmp_path: Path, control: bool
) -> None:
    folder = tmp_path / "first"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()

    async def first() -> PolicyWeights:
        return PolicyWeights(version=0, folder=str(folder))

    async def main() -> None:
        async with asyncio.timeout(60), ModelServer("vllm", control=control) as server:
            server.vocabulary = 20
            engines = (EngineSettings(name="theirs", kind="openai", url=server.url),)
            settings = msgspec.structs.replace(settings_of(tasks=(TaskSettings(name="chain"),)), engines=engines)
            async with assembled(settings) as made:
                assert server.weights == "none", "a rollout takes a server as it is"
                assert made.weights.version == 0
            warnings: list[str] = []
            async with assembled(
                settings, trained=TrainedWeights(folder, first), progress=lambda share, words: warnings.append(words)
            ):
                assert server.weights == str(folder)
            assert warnings == ["the trainer starts", "engines start: theirs"]

    if control:
        asyncio.run(main())
    else:
        with pytest.raises(InvalidConfig, match=r"engine theirs: .*it takes no weights"):
            asyncio.run(main())


def test_a_server_of_another_model_than_the_policy_is_detected_without_a_checkpoint() -> None:
    async def main() -> None:
        async with asyncio.timeout(60), ModelServer("vllm") as server:
            engines = (EngineSettings(name="theirs", kind="openai", url=server.url),)
            settings = msgspec.structs.replace(settings_of(tasks=(TaskSettings(name="chain"),)), engines=engines)
            async with assembled(settings):
                raise AssertionError("it was assembled")

    with pytest.raises(
        NoEngine, match=r"token 26, and the vocabulary has \d+: policy\.checkpoint has to be the folder"
    ):
        asyncio.run(main())


@pytest.mark.parametrize("content", [b"", b'["a", ', b'{"a": 1}', b'["a b"]', b'["\xff"]', b"[1]"])
def test_invalid_words_of_a_checkpoint_are_reported_with_its_folder(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "words.json").write_bytes(content)
    wrong = settings_of(tasks=(TaskSettings(name="chain"),), policy=PolicySettings(checkpoint=str(tmp_path)))
    with pytest.raises(InvalidConfig, match=r"policy\.checkpoint: expected a folder whose words\.json is a list"):
        require_playable(wrong)


def test_a_model_that_does_not_fit_is_reported_before_it_is_created() -> None:
    wrong = settings_of(tasks=(TaskSettings(name="chain"),), policy=PolicySettings(width=1_000_000, layers=100))
    with pytest.raises(InvalidConfig, match=r"policy\.width: .*1,300,0\d\d,\d{3},\d{3},\d{3} parameters, [\d,]+ GiB"):
        first_model(wrong, 30)


def test_our_engines_are_refused_for_a_policy_that_they_cannot_load(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 30}')
    (tmp_path / "words.json").write_text('["a", "b"]')
    wrong = settings_of(tasks=(TaskSettings(name="chain"),), policy=PolicySettings(checkpoint=str(tmp_path)))
    warnings: list[str] = []

    async def main() -> None:
        async with assembled(wrong, progress=lambda share, words: warnings.append(words)):
            raise AssertionError("it was assembled")

    with pytest.raises(InvalidConfig, match=r'engines\[0\].kind: expected "openai".*Llama and Qwen2 kinds only'):
        asyncio.run(main())
    assert not warnings, "nothing was started"
    theirs = (EngineSettings(kind="openai", url="http://127.0.0.1:1"),)
    require_servable(msgspec.structs.replace(wrong, engines=theirs))


def test_a_checkpoint_brings_its_words(tmp_path: Path) -> None:
    from tangram.rl.environments.registry import words_of
    from tangram.rl.model.model_folder import save
    from tangram.rl.model.transformer import Transformer, small_config
    from tangram.rl.trajectories.codec import WordCodec

    words = WordCodec((*words_of(["chain"]), "more"))
    save(Transformer.new(small_config(words.size, width=32, heads=2), 1), tmp_path / "policy")
    (tmp_path / "policy" / "words.json").write_bytes(msgspec.json.encode(words.words))
    policy = PolicySettings(checkpoint=str(tmp_path / "policy"))
    usual = settings_of(tasks=(TaskSettings(name="chain"),), policy=policy)
    batch = played(usual, 1)
    assert batch.groups[0].is_complete
    with pytest.raises(
        InvalidConfig, match=r"engines\[0\].context_max: expected at most 256, the context of .*, got 257"
    ):
        require_servable(msgspec.structs.replace(usual, engines=(EngineSettings(context_max=257),)))
