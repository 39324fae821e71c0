"""Engines for Hugging Face models, on tiny ones with random weights: the same answers as the models themselves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.extras import LazyExtra
from tests.fork_servers import Pool, pooled_for_models
from tests.managers.models.conftest import Rig, devices, run

from tangram.errors import InvalidAction
from tangram.managers.models import Service
from tangram.managers.models.devices import Cuda, CudaDevice
from tangram.managers.models.torch_engine import PlacedModule
from tangram.managers.models.transformers_engine import Judge, RewardModel, Teacher, TransformersEngine
from tangram.managers.work import MIB

torch = pytest.importorskip("torch", reason="PyTorch is an extra, which is not installed")
transformers = LazyExtra("transformers")

VOCABULARY, PLACES = 64, 128
ROWS = [[5, 9, 23, 7], [11, 3], [40, 41, 42, 43, 44, 45]]


@pytest.fixture(scope="module", autouse=True)
def _fork_servers(fork_server_pool: Pool) -> Iterator[None]:
    """In the place of that of the folder: transformers imports a kind of model when it is first used."""
    with pooled_for_models(
        fork_server_pool, "transformers.models.qwen2.modeling_qwen2", "transformers.generation.utils"
    ):
        yield


def config(**fields: Any) -> Any:
    return transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=PLACES,
        bos_token_id=1,
        eos_token_id=2,
        **{"tie_word_embeddings": True, **fields},
    )


@pytest.fixture
def causal(tmp_path: Path) -> tuple[str, Any]:
    """The folder of a language model, and the model."""
    torch.manual_seed(1)
    model = transformers.Qwen2ForCausalLM(config()).eval()
    path = str(tmp_path / "causal")
    model.save_pretrained(path)
    return path, model


def asked(tokens: list[int], **fields: Any) -> bytes:
    return json.dumps({"token_ids": tokens, **fields}).encode()


async def together(rig: Rig, name: str, payloads: list[bytes], chunk: tuple[int, ...] = (0,)) -> list[dict[str, Any]]:
    ends = await asyncio.gather(*(rig.call(name, chunk, payload, batch="lead") for payload in payloads))
    assert [ended.lost for ended in ends] == [""] * len(payloads)
    return [json.loads(ended.answer) for ended in ends]


@pytest.mark.parametrize("pad", [None, 0])
def test_a_reward_model_scores_sequences_as_it_does_by_itself(tmp_path: Path, pad: int | None) -> None:
    torch.manual_seed(2)
    model = transformers.Qwen2ForSequenceClassification(config(num_labels=1, pad_token_id=pad)).eval()
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        alone = [model(torch.tensor([row])).logits[0].tolist() for row in ROWS]

    async def test(rig: Rig) -> None:
        answers = await together(rig, "reward", [asked(row) for row in ROWS])
        assert [answer["scores"] for answer in answers] == [pytest.approx(scores, abs=1e-5) for scores in alone]
        assert rig.manager.statistics().calls == 1

    run(Rig([Service(name="reward", engine=RewardModel(str(tmp_path)))], devices(1)), test)


def test_a_teacher_gives_the_log_probabilities_of_tokens_at_every_degree(causal: tuple[str, Any]) -> None:
    path, model = causal
    with torch.inference_mode():
        alone = []
        for row in ROWS:
            logprobs = model(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
            alone.append([float(logprobs[index, token]) for index, token in enumerate(row[1:])])

    async def test(rig: Rig) -> None:
        for chunk in ((0,), (0, 1)):
            answers = await together(rig, "teacher", [asked(row) for row in ROWS], chunk)
            assert [answer["token_ids"] for answer in answers] == ROWS
            assert [answer["logprobs"] for answer in answers] == [pytest.approx(row, abs=1e-4) for row in alone]

    run(Rig([Service(name="teacher", engine=Teacher(path), degrees=(1, 2))], devices(2)), test)


def test_a_judge_writes_what_the_model_writes(causal: tuple[str, Any]) -> None:
    path, model = causal
    with torch.inference_mode():
        alone = [
            model.generate(torch.tensor([row]), max_new_tokens=6, do_sample=False)[0, len(row) :].tolist()
            for row in ROWS
        ]

    async def test(rig: Rig) -> None:
        payloads = [asked(row, tokens_max=6) for row in ROWS]
        answers = await together(rig, "judge", [*payloads, asked(ROWS[0], tokens_max=2, temperature=0.7)])
        assert [answer["token_ids"] for answer in answers[:3]] == alone
        assert len(answers[3]["token_ids"]) <= 2

    run(Rig([Service(name="judge", engine=Judge(path))], devices(1)), test)


def test_models_are_restored_after_other_models_took_their_place(causal: tuple[str, Any], tmp_path: Path) -> None:
    path, model = causal
    with torch.inference_mode():
        logprobs = model(torch.tensor([ROWS[0]])).logits[0, 0].log_softmax(-1)

    async def test(rig: Rig) -> None:
        for _ in range(3):
            [answer] = await together(rig, "teacher", [asked(ROWS[0])])
            assert answer["logprobs"][0] == pytest.approx(float(logprobs[ROWS[0][1]]), abs=1e-4)
            await together(rig, "judge", [asked(ROWS[0], tokens_max=1)])
        assert rig.manager.statistics().evictions == 5

    services = [Service(name="teacher", engine=Teacher(path)), Service(name="judge", engine=Judge(path))]
    services = [Service(name=s.name, engine=s.engine, memory_bytes=MIB) for s in services]
    run(Rig(services, devices(1, memory_bytes=MIB)), test)


def put(engine: TransformersEngine) -> PlacedModule:
    return engine.load(engine.prepare(), [CudaDevice(0, Cuda(place="cpu", memory_bytes=MIB))])


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (b"no json", 'JSON with "text" or "token_ids"'),
        (b"[]", 'JSON with "text" or "token_ids"'),
        (b"null", 'JSON with "text" or "token_ids"'),
        (b"{}", 'JSON with "text" or "token_ids"'),
        (asked([1], text="both"), 'JSON with "text" or "token_ids"'),
        (b'{"text": null}', "a string"),
        (b'{"token_ids": null}', "at least one token"),
        (asked([]), "at least one token"),
        (asked([VOCABULARY]), "each from 0 to 63"),
        (asked([-1]), "each from 0 to 63"),
        (asked([1], max_tokens=4), "only text, token_ids, tokens_max, temperature, got .*max_tokens"),
        (asked([1] * (PLACES + 1)), f"at most {PLACES}, the positions of the model, got '{PLACES + 1} tokens'"),
        (asked([1] * PLACES), "to leave room for an answer"),
        (asked([1, 2], tokens_max=PLACES - 1), f"tokens_max: expected at most {PLACES - 2}"),
        (asked([1], tokens_max=10**9), f"tokens_max: expected at most {PLACES - 1}"),
        (asked([1], tokens_max=0), "tokens_max: expected a positive whole number"),
        (asked([1], tokens_max=None), "tokens_max: expected a positive whole number"),
        (asked([1], tokens_max=1.5), "tokens_max: expected a positive whole number"),
        (asked([1], temperature=1e-300), r"temperature: expected 0, or a number from 0\.01 to 100"),
        (asked([1], temperature=101), "temperature: expected 0"),
        (asked([1], temperature=-1), "temperature: expected 0"),
        (asked([1], temperature=None), "temperature: expected 0"),
        (asked([1], temperature=float("nan")), "temperature: expected 0"),
    ],
)
def test_an_invalid_payload_is_the_fault_of_its_caller(causal: tuple[str, Any], payload: bytes, complaint: str) -> None:
    engine = Judge(causal[0])
    with pytest.raises(InvalidAction, match=complaint):
        engine.call(put(engine), [payload])


def test_a_judge_without_a_limit_writes_as_much_as_the_model_has_room_for(causal: tuple[str, Any]) -> None:
    engine = Judge(causal[0])
    placed = put(engine)
    for temperature in (0.01, 100):
        [answer] = engine.call(placed, [asked([5] * (PLACES - 3), temperature=temperature)])
        assert len(json.loads(answer)["token_ids"]) <= 3


@pytest.mark.parametrize("kind", [Teacher, RewardModel])
def test_a_model_takes_as_many_tokens_as_it_has_positions(tmp_path: Path, kind: type[TransformersEngine]) -> None:
    """The positions of this model are a table with an end."""
    made = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=1, n_head=2, num_labels=1, pad_token_id=0
    )
    model = transformers.GPT2LMHeadModel if kind is Teacher else transformers.GPT2ForSequenceClassification
    model(made).save_pretrained(tmp_path)
    engine = kind(str(tmp_path))
    placed = put(engine)
    assert json.loads(engine.call(placed, [asked([5] * 32)])[0])
    with pytest.raises(InvalidAction, match="at most 32, the positions of the model, got '33 tokens'"):
        engine.call(placed, [asked([5] * 33)])
    with pytest.raises(InvalidAction, match="only text, token_ids"):
        engine.call(placed, [asked([5], tokens_max=1)])
