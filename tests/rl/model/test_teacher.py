"""Teachers: what they say is a plain forward pass, they share devices, and what they cannot say is never a number."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.fork_servers import Pool, pooled_for_models
from tests.rl.environments.outside import DEADLINE_S, connection

from tangram import Client, Emulated, Service, Status
from tangram.client.models import Inference
from tangram.core.messages import Evicted
from tangram.errors import InvalidAction, InvalidConfig, ManagerError
from tangram.rl.config.rollout_settings import (
    EngineSettings,
    GroupSettings,
    PolicySettings,
    ResourceSettings,
    RewardSettings,
    SamplingSettings,
    TaskSettings,
)
from tangram.rl.config.training_settings import (
    EvaluationSettings,
    ObjectiveSettings,
    TeacherSettings,
    TrainingSettings,
    TrainSettings,
)
from tangram.rl.environments.protocol import ExternalResources
from tangram.rl.environments.registry import words_of
from tangram.rl.rollout import rewards as reward_module
from tangram.rl.rollout.assembly import assembled
from tangram.rl.rollout.rewards import PlayedTrajectory, RewardFailed, Score, TeacherReward, make_reward
from tangram.rl.rollout.rollout import tickets
from tangram.rl.rollout.teachers import DEVICE_BYTES_MIN, merge_needs, needs_of_teachers, require_teachers
from tangram.rl.runs.metrics_lines import RunEnded
from tangram.rl.runs.trajectory_log import TrajectoryLog, read
from tangram.rl.train.behaviour_cloning import clone_behaviour
from tangram.rl.train.pipeline import train
from tangram.rl.trajectories.codec import WordCodec
from tangram.rl.trajectories.trajectory import Ending, Group, Stage, Trajectory, Turn
from tangram.runtime.trace_recorder import open_trace

torch = pytest.importorskip("torch") if os.environ.get("CI") != "true" else __import__("torch")

from tangram.rl.model import teacher as teacher_module  # noqa: E402
from tangram.rl.model.model_folder import load, save  # noqa: E402
from tangram.rl.model.policy import as_policy  # noqa: E402
from tangram.rl.model.teacher import TeacherEngine, answer_payloads  # noqa: E402
from tangram.rl.model.transformer import Transformer, small_config  # noqa: E402

TASKS = ("chain", "frozenlake")
CODEC = WordCodec(words_of(TASKS))
CLOSE = 1e-5


@pytest.fixture(scope="module", autouse=True)
def _fork_servers(fork_server_pool: Pool) -> Iterator[None]:
    with pooled_for_models(fork_server_pool):
        yield


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_module, "BACKOFF_S", 0.001)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two teachers, `one` and `other`; and `strange`, which has five tokens more."""
    folder = tmp_path_factory.mktemp("teachers")
    for seed, (name, more) in enumerate((("one", 0), ("other", 0), ("strange", 5))):
        model = Transformer.new(small_config(CODEC.size + more, width=32, heads=2, context_max=256), seed)
        with torch.no_grad():  # a new one finds all tokens alike
            model.head.mul_(50.0)
        save(model, folder / name)
    return folder


def plain(model: Any, tokens: list[int], at: list[int], temperature: float = 1.0) -> list[float]:
    """From the definition."""
    with torch.inference_mode():
        shares = (model(torch.tensor([tokens]))[0].double() / temperature).log_softmax(1)
    return [float(shares[place - 1, tokens[place]]) for place in at]


def asked(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Questions of different lengths and temperatures."""
    chance = torch.Generator().manual_seed(seed)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        length = 5 + 7 * number
        tokens = torch.randint(CODEC.size, (length,), generator=chance).tolist()
        temperature = (1.0, 0.7, 0.0)[number % 3]
        rows.append({"tokens": tokens, "at": list(range(1 + number % 4, length, 2)), "temperature": temperature})
    return rows


def logprobs_in(payload: bytes) -> list[float]:
    logprobs: list[float] = json.loads(payload)["logprobs"]
    return logprobs


# ---- what it says ----


def test_a_batch_is_answered_as_each_alone_by_a_plain_forward_pass(folder: Path) -> None:
    model, questions = load(folder / "one"), asked(6)
    answers = answer_payloads(as_policy(model), [json.dumps(each).encode() for each in questions])
    for each, answer in zip(questions, answers, strict=True):
        right = plain(model, each["tokens"], each["at"], each["temperature"] or 1.0)
        assert logprobs_in(answer) == pytest.approx(right, abs=CLOSE)


def test_a_batch_that_is_too_large_is_read_in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, payloads = load(folder / "one"), [json.dumps(each).encode() for each in asked(6)]
    teacher = as_policy(model)
    at_once = answer_payloads(teacher, payloads)
    read: list[int] = []
    logits = teacher.logits
    monkeypatch.setattr(teacher, "logits", lambda tokens, at: (read.append(len(tokens)), logits(tokens, at))[1])
    monkeypatch.setattr(teacher_module, "LOGITS_MAX", 2 * 20 * CODEC.size)
    in_parts = answer_payloads(teacher, payloads)
    assert read == [2, 1, 1, 1, 1], "two of twelve tokens at most, nineteen only alone with five and twelve"
    for one, other in zip(at_once, in_parts, strict=True):
        assert logprobs_in(one) == pytest.approx(logprobs_in(other), abs=CLOSE)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokens": [1, CODEC.size, 2]}, f"from 0 to {CODEC.size - 1}"),
        ({"tokens": [1, -1, 2]}, "from 0 to"),
        ({"tokens": [0] * 257}, "at most 256, which the teacher reads, got '257 of them'"),
        ({"at": [0]}, "with others before it"),
        ({"at": [3]}, "from 1 to 2"),
        ({"temperature": -1.0}, "from 0 to 100"),
        ({"vocabulary": CODEC.size + 5}, f"has {CODEC.size} tokens, got 'one of {CODEC.size + 5} tokens'"),
        ({"mask": [1]}, "unknown field `mask`"),
    ],
)
def test_a_question_that_cannot_be_meant_is_refused(folder: Path, change: dict[str, Any], why: str) -> None:
    payload = json.dumps({"tokens": [1, 2, 3], "at": [1], "temperature": 1.0} | change).encode()
    with pytest.raises(InvalidAction, match=why):
        answer_payloads(as_policy(load(folder / "one")), [payload])


def test_a_teacher_with_broken_weights_returns_no_score(folder: Path) -> None:
    model = load(folder / "one")
    with torch.no_grad():
        model.norm[0] = float("nan")
    with pytest.raises(ManagerError, match="weights are broken"):
        answer_payloads(as_policy(model), [json.dumps(asked(1)[0]).encode()])


def test_a_model_of_another_kind_is_read_by_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers") if os.environ.get("CI") != "true" else __import__("transformers")
    torch.manual_seed(3)
    config = transformers.GPT2Config(vocab_size=CODEC.size, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "gpt2")
    built = TeacherEngine(str(tmp_path / "gpt2")).build().eval()
    questions = asked(4)
    for each, answer in zip(
        questions, answer_payloads(as_policy(built), [json.dumps(each).encode() for each in questions]), strict=True
    ):
        right = plain(lambda tokens: model(tokens).logits, each["tokens"], each["at"], each["temperature"] or 1.0)
        assert logprobs_in(answer) == pytest.approx(right, abs=CLOSE)


def test_an_unreadable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mystery", "vocab_size": 3, "hidden_size": 2}')
    with pytest.raises(ManagerError, match=r"config\.json"):
        TeacherEngine(str(tmp_path)).build()


# ---- as services ----


def test_two_teachers_share_a_device_that_has_room_for_one(folder: Path, tmp_path: Path) -> None:
    services = [
        Service(
            name=name, engine="tangram.rl.model.teacher:TeacherEngine", arguments={"checkpoint": str(folder / name)}
        )
        for name in ("one", "other")
    ]
    size = (folder / "one" / "model.safetensors").stat().st_size
    device = Emulated(memory_bytes=int(1.5 * size))
    questions = asked(3)

    async def main() -> None:
        options: dict[str, Any] = {"services": services, "devices": [device], "record": tmp_path / "trace"}
        async with connection(tmp_path, "process", **options) as client:
            for _ in range(2):
                for name in ("one", "other"):
                    model = load(folder / name)
                    results = await asyncio.gather(*(client.infer(name, each) for each in questions))
                    for each, answer in zip(questions, results, strict=True):
                        right = plain(model, each["tokens"], each["at"], each["temperature"] or 1.0)
                        assert answer.json()["logprobs"] == pytest.approx(right, abs=CLOSE)

    asyncio.run(main())
    with open_trace(tmp_path / "trace") as (_, lines):
        evicted = [line.message.service for line in lines if isinstance(line.message, Evicted)]
    assert evicted[:3] == ["one", "other", "one"]


def played(client: Client | None, temperature: float = 1.0) -> PlayedTrajectory:
    turn = Turn(
        observation="a", observation_tokens=(4, 5), action="b", tokens=(6, 7, 1), logprobs=(-0.5, -1.0, -0.25),
        versions=(0, 0, 0),
    )  # fmt: skip
    return PlayedTrajectory(
        id="t/0/0.0", task="t", seed=0, turns=(turn, turn), total=0.75, environment=None, temperature=temperature,  # type: ignore[arg-type]
        resources=ExternalResources(client=client, run="rl", trajectory="t/0/0.0"),
    )  # fmt: skip


def scored(service: Service, tmp_path: Path, retries: int) -> Score:
    async def main() -> Score:
        options: dict[str, Any] = {"services": [service], "devices": [Emulated(memory_bytes=DEVICE_BYTES_MIN)]}
        async with connection(tmp_path, "process", **options) as client:
            settings = RewardSettings(kind="teacher", service="one", retries=retries)
            return await make_reward(settings, client).score(played(client))

    return asyncio.run(main())


def test_a_teacher_that_is_killed_gets_the_request_again(folder: Path, tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    lives.write_text("dies\n")
    arguments = {"checkpoint": str(folder / "one"), "lives": str(lives)}
    score = scored(Service(name="one", engine="tests.rl.dying_teacher:Dying", arguments=arguments), tmp_path, retries=1)
    right = plain(load(folder / "one"), [4, 5, 6, 7, 1] * 2, [2, 3, 4, 7, 8, 9])
    assert score.teacher_logprobs == pytest.approx(right, abs=CLOSE)
    assert not lives.read_text()


def test_of_a_teacher_that_is_killed_each_time_there_is_no_reward(tmp_path: Path) -> None:
    """It has no model: what it would say does not matter, and its processes need no PyTorch."""
    lives = tmp_path / "lives"
    with pytest.raises(RewardFailed, match="service one: no reward after 2 tries: "):
        scored(Service(name="one", engine="tests.rl.doomed:Doomed", arguments={"lives": str(lives)}), tmp_path, 1)
    assert len(lives.read_text().splitlines()) >= 2, "it was asked for each try"


# ---- as a reward ----


class Answers:
    """In the place of a client."""

    def __init__(self, *answers: Any) -> None:
        self._left = list(answers)
        self.asked: list[Any] = []

    async def infer(self, service: str, payload: Any, **_: Any) -> Inference:
        self.asked.append(payload)
        answer = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, Status):
            return Inference(service=service, status=answer, reason="because")
        return Inference(service=service, status=Status.SUCCEEDED, answer=json.dumps(answer).encode())


def reward(client: Any, retries: int = 2) -> TeacherReward:
    return TeacherReward(RewardSettings(kind="teacher", service="one", retries=retries), client, None)


GOOD = {"logprobs": [-1.0, -2.0, -0.5, -1.0, -2.0, -1.0]}


def test_the_score_is_the_reward_of_the_environment_and_the_teacher_scores_each_token() -> None:
    client = Answers(GOOD)
    score = asyncio.run(reward(client).score(played(None, temperature=0.7)))
    assert client.asked == [{"tokens": [4, 5, 6, 7, 1] * 2, "at": [2, 3, 4, 7, 8, 9], "temperature": 0.7}]
    assert score.value == 0.75 and score.teacher_logprobs == tuple(GOOD["logprobs"])
    assert score.metrics == {"teacher_kl": pytest.approx((7.5 - 3.5) / 6)}


def test_a_trajectory_without_tokens_needs_no_teacher() -> None:
    client = Answers(GOOD)
    empty = msgspec.structs.replace(played(None), turns=())
    score = asyncio.run(reward(client).score(empty))
    assert (score.value, score.teacher_logprobs, client.asked) == (0.75, (), [])


def test_what_the_infrastructure_does_is_tried_again_and_then_no_reward() -> None:
    for passing in (Status.LOST, Status.TIMED_OUT, Status.REFUSED, OSError("odd"), ManagerError("gone")):
        assert asyncio.run(reward(Answers(passing, passing, GOOD)).score(played(None))).teacher_logprobs is not None
        client = Answers(passing)
        with pytest.raises(RewardFailed, match="service one: no reward after 3 tries"):
            asyncio.run(reward(client).score(played(None)))
        assert len(client.asked) == 3


@pytest.mark.parametrize(
    "answer",
    [{"logprobs": [-1.0]}, {"logprobs": [-1.0] * 5 + [float("nan")]}, {"logprobs": [-1.0] * 5 + ["x"]}, [], {}, 3.0],
)
def test_what_is_no_log_probability_of_each_token_is_no_reward(answer: Any) -> None:
    with pytest.raises(RewardFailed, match="service one: expected"):
        asyncio.run(reward(Answers(answer)).score(played(None)))


def test_a_question_that_the_teacher_cannot_take_is_not_repeated() -> None:
    client = Answers(InvalidAction("tokens", 9, "fewer"))
    with pytest.raises(RewardFailed, match="service one: tokens: expected fewer, got 9"):
        asyncio.run(reward(client).score(played(None)))
    assert len(client.asked) == 1


# ---- as settings ----


def settings_of(folder: Path, *names: str, by_task: tuple[str, ...] = ("one", "other"), **keys: Any) -> TrainSettings:
    return TrainSettings(
        **{
            "tasks": tuple(
                TaskSettings(name=task, reward=RewardSettings(kind="teacher", service=name))
                for task, name in zip(TASKS, by_task, strict=True)
            ),
            "teachers": tuple(TeacherSettings(name=name, checkpoint=str(folder / name)) for name in names),
            "groups": GroupSettings(size=2),
            "engines": (EngineSettings(slots=8),),
            "resources": ResourceSettings(backend="process", cores=2.0),
            **keys,
        }
    )


def test_teachers_in_use_are_services(folder: Path) -> None:
    needs = needs_of_teachers(settings_of(folder, "one", "other"), CODEC)
    assert [each.name for each in needs["services"]] == ["one", "other"]
    assert needs_of_teachers(settings_of(folder, tasks=(TaskSettings(name="chain"),)), CODEC) == {}


def test_devices_are_joined_with_those_of_tasks() -> None:
    one, other = Service(name="a", engine="m:n"), Service(name="b", engine="m:n")
    tasks = {"services": [one], "devices": [Emulated(memory_bytes=10, bandwidth=1e9)], "quotas": [1]}
    both = merge_needs(tasks, {"services": [other], "devices": [Emulated(memory_bytes=30)]})
    assert both["services"] == [one, other] and both["quotas"] == [1]
    assert both["devices"] == [Emulated(memory_bytes=30, bandwidth=1e9), Emulated(memory_bytes=30)]
    assert merge_needs(tasks, {}) is tasks


@pytest.mark.parametrize(
    ("names", "by_task", "why"),
    [
        (
            ("one", "strange"),
            ("one", "strange"),
            f"policy, which has {CODEC.size} tokens.*with {CODEC.size + 5} tokens",
        ),
        (("one",), ("one", "other"), "reward.service: expected one of the teachers \\(one\\), got 'other'"),
        ((), ("one", "one"), "there are none"),
        (("one", "missing"), ("one", "missing"), "teacher missing: checkpoint: expected a folder with config.json"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused_before_anything_is_played(
    folder: Path, names: tuple[str, ...], by_task: tuple[str, ...], why: str
) -> None:
    async def main() -> None:
        async with assembled(settings_of(folder, *names, by_task=by_task)):
            raise AssertionError("it was assembled")

    with pytest.raises(InvalidConfig, match=why):
        asyncio.run(main())


def test_a_teacher_with_other_words_or_that_reads_less_is_refused(folder: Path, tmp_path: Path) -> None:
    save(load(folder / "one"), tmp_path / "one")
    (tmp_path / "one" / "words.json").write_bytes(msgspec.json.encode([f"w{n}" for n in range(CODEC.size - 3)]))
    with pytest.raises(InvalidConfig, match="the words of the policy, in the same order"):
        needs_of_teachers(settings_of(tmp_path, "one", by_task=("one", "one")), CODEC)
    (tmp_path / "one" / "words.json").write_bytes(msgspec.json.encode(CODEC.words))
    needs_of_teachers(settings_of(tmp_path, "one", by_task=("one", "one")), CODEC)
    long = settings_of(tmp_path, "one", by_task=("one", "one"), engines=(EngineSettings(context_max=512),))
    with pytest.raises(InvalidConfig, match=r"at least 512, the context_max of the engines, got .*reads 256 tokens"):
        needs_of_teachers(long, CODEC)


def test_the_vocabulary_of_an_external_teacher_is_fetched(folder: Path, tmp_path: Path) -> None:
    arguments = {"checkpoint": str(folder / "strange")}
    service = Service(name="one", engine="tangram.rl.model.teacher:TeacherEngine", arguments=arguments)

    async def main() -> None:
        options: dict[str, Any] = {"services": [service], "devices": [Emulated(memory_bytes=DEVICE_BYTES_MIN)]}
        async with connection(tmp_path, "process", **options) as client:
            elsewhere = ResourceSettings(url="http://127.0.0.1:1")
            settings = settings_of(folder, by_task=("one", "one"), resources=elsewhere)
            sizes = f"has {CODEC.size + 5} tokens, got 'one of {CODEC.size} tokens'"
            with pytest.raises(InvalidConfig, match=f"teacher one: vocabulary: .*{sizes}"):
                await require_teachers(client, settings, CODEC.size)
            await require_teachers(client, settings, CODEC.size + 5)
            other = settings_of(folder, by_task=("other", "one"), resources=elsewhere)
            with pytest.raises(InvalidConfig, match="teacher other: service"):
                await require_teachers(client, other, CODEC.size)

    asyncio.run(main())


# ---- whole ----


def test_trajectories_of_a_rollout_have_the_log_probabilities_of_their_teachers(folder: Path, tmp_path: Path) -> None:
    settings = settings_of(folder, "one", "other", sampling=SamplingSettings(temperature=0.8))
    path = tmp_path / "trajectories.jsonl"

    async def main() -> list[Trajectory]:
        async with asyncio.timeout(DEADLINE_S):
            with TrajectoryLog(path) as log:
                async with assembled(settings, on_end=log.append) as made:
                    batch = await made.rollout.collect(tickets(settings), 4)
        return [member for group in batch.groups for member in group.members]

    result = asyncio.run(main())
    models = {task: load(folder / name) for task, name in zip(TASKS, ("one", "other"), strict=True)}
    assert {each.task for each in result} == set(TASKS)
    for each in result:
        assert each.ending.is_rewarded and each.teacher_logprobs is not None
        at = [place for place, mine in enumerate(each.action_mask) if mine]
        right = plain(models[each.task], list(each.tokens), at, 0.8)
        assert len(each.teacher_logprobs) == len(each.logprobs) == len(at)
        assert each.teacher_logprobs == pytest.approx(right, abs=CLOSE)
        apart = sum(each.logprobs) - sum(each.teacher_logprobs)
        assert each.metrics["teacher_kl"] == pytest.approx(apart / len(at))
    kept = {each.id: each for each in read(path).trajectories()}
    for each in result:  # which waited for its group since it was logged
        assert msgspec.structs.replace(each, spans=kept[each.id].spans) == kept[each.id], "the log keeps every number"
    assert all(each.ending is not Ending.REWARD_FAILED for each in kept.values())


class Distance:
    """How far student and teacher are apart, of every group."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_begin(self, trajectory: str, task: str) -> None: ...

    def on_stage(self, trajectory: str, stage: Stage) -> None: ...

    def on_end(self, trajectory: Trajectory) -> None: ...

    def on_group(self, group: Group) -> None:
        self.found.append(statistics.fmean(each.metrics["teacher_kl"] for each in group.members))


def test_a_student_approaches_its_teacher_by_the_scores_of_the_teacher_alone(tmp_path: Path) -> None:
    lake = {"size": 3, "turns": 4}
    settings = TrainSettings(
        policy=PolicySettings(width=32, heads=2, layers=1),
        groups=GroupSettings(size=8),
        engines=(EngineSettings(slots=48, chunk=512),),
        resources=ResourceSettings(backend="process", cores=2.0),
        tasks=(TaskSettings(name="frozenlake", options=lake, reward=RewardSettings(kind="teacher", service="walker")),),
        teachers=(TeacherSettings(name="walker", checkpoint=str(tmp_path / "walker")),),
        training=TrainingSettings(mode="sync+", steps=10, batch=6),
        objective=ObjectiveSettings(kind="distill", learning_rate=5e-3, epochs=4, minibatch=24),
        evaluation=EvaluationSettings(every=0),
    )
    distance, lines = Distance(), list[Any]()

    async def main() -> RunEnded:
        async with asyncio.timeout(DEADLINE_S):
            await clone_behaviour(settings, tmp_path / "walker", agent="expert", episodes=96, steps=40)
            return await train(settings, tmp_path / "run", on_line=lines.append, observer=distance)

    assert asyncio.run(main()).step == 10
    first, last = statistics.fmean(distance.found[:6]), statistics.fmean(distance.found[-6:])
    assert last < 0.5 * first, f"from {first:.2f} to {last:.2f} nats a token"
    assert (tmp_path / "walker" / "words.json").is_file()
