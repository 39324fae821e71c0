"""Teachers of a training run: which ones its tasks ask, and what a connection must have for them.

Owns what is refused before anything is played: a teacher that is not there, that has another vocabulary than the
policy, or reads less than the policy writes. Never loads a model: rl/model/teacher.py serves them,
rl/rollout/rewards.py asks.

Teachers share devices: the CUDA devices of the machine, or else an emulated one that has room for the largest of them.
One that is not asked for a while goes when another needs the room, and comes back when it is asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tangram.client.client import Client
from tangram.errors import InvalidConfig, InvalidInput, ManagerError
from tangram.managers.models.devices import DeviceSpec, Emulated, discover
from tangram.managers.models.service import Service
from tangram.rl.config.rollout_settings import RolloutSettings
from tangram.rl.config.training_settings import TeacherSettings, TrainSettings
from tangram.rl.rollout.codec import Codec, Words

ENGINE = "tangram.rl.model.teacher:TeacherEngine"
DEVICE_BYTES_MIN = 64 << 20
"""Of an emulated device: all small teachers fit into it together."""
GROWN = 2
"""Weights are computed with in float32: those of a checkpoint in half precision grow by so much."""
SPARE_BYTES = 1 << 20
"""Of gaps between weights."""
ANSWER_S_MAX = 60.0
"""Of the first answer of a teacher, once it is loaded."""
CONFIG, WORDS = "config.json", "words.json"


class _Described(msgspec.Struct, frozen=True):
    vocab_size: int
    max_position_embeddings: int | None = None


def asked(settings: RolloutSettings) -> tuple[str, ...]:
    """The services that tasks name as their teachers, each once."""
    return tuple(dict.fromkeys(task.reward.service for task in settings.tasks if task.reward.kind == "teacher"))


def vocabulary_of(settings: RolloutSettings, codec: Codec) -> int:
    """Of the policy. That of a checkpoint may have more tokens than its words."""
    checkpoint = settings.policy.checkpoint
    return _described("policy.checkpoint", checkpoint).vocab_size if checkpoint else codec.size


def needs_of_teachers(settings: RolloutSettings, codec: Codec) -> dict[str, Any]:
    """What a connection must be given for them, as `tangram.connect` names it; nothing, if none is asked. Raises
    InvalidConfig for one that cannot teach this policy."""
    names = asked(settings)
    if not names:
        return {}
    there = {each.name: each for each in settings.teachers} if isinstance(settings, TrainSettings) else {}
    for name in names:
        if name not in there:
            expected = f"one of the teachers ({', '.join(there) or 'there are none: [[teachers]] with a name'})"
            raise InvalidConfig("reward.service", name, expected)
    chosen = [there[name] for name in names]
    for teacher in chosen:
        _require_alike(teacher, settings, codec)
    services = [
        Service(name=each.name, engine=ENGINE, arguments={"checkpoint": str(Path(each.checkpoint).absolute())})
        for each in chosen
    ]
    return {"services": services, "devices": _devices(max(_bytes_of(each) for each in chosen))}


def joined(needs: dict[str, Any], teachers: dict[str, Any]) -> dict[str, Any]:
    """What tasks need, and what teachers do. Every service may be given any device, so that all have the memory of the
    largest; where there are real devices, nothing is emulated."""
    if not teachers:
        return needs
    devices: list[DeviceSpec] = [*needs.get("devices", ()), *teachers["devices"]]
    emulated = [each for each in devices if isinstance(each, Emulated)]
    if len(emulated) < len(devices):
        devices = [each for each in devices if not isinstance(each, Emulated)]
    else:
        largest = max(each.memory_bytes for each in emulated)
        devices = [msgspec.structs.replace(each, memory_bytes=largest) for each in emulated]
    return {**needs, "services": [*needs.get("services", ()), *teachers["services"]], "devices": devices}


async def hear_teachers(client: Client, settings: RolloutSettings, vocabulary: int) -> None:
    """Ask each something, so that it is loaded and has the vocabulary of the policy, wherever it is served. Raises
    InvalidConfig and ManagerError."""
    for name in asked(settings):
        question = {"tokens": [0, 0], "at": [1], "temperature": 1.0, "vocabulary": vocabulary}
        try:
            said = await client.infer(name, question, run=settings.run, timeout_s=ANSWER_S_MAX)
        except InvalidInput as error:
            raise InvalidConfig(f"teacher {name}: {error.field}", error.value, error.expected) from error
        if not said.ok:
            raise ManagerError(f"teacher {name} does not answer: {said.status.value}: {said.reason}", retry=False)


# ---- checkpoints ------------------------------------------------------------------------------------------------


def _require_alike(teacher: TeacherSettings, settings: RolloutSettings, codec: Codec) -> None:
    field = f"teacher {teacher.name}: checkpoint"
    described, vocabulary = _described(field, teacher.checkpoint), vocabulary_of(settings, codec)
    if described.vocab_size != vocabulary:
        expected = f"the vocabulary of the policy, which has {vocabulary} tokens"
        raise InvalidConfig(field, f"{teacher.checkpoint} with {described.vocab_size} tokens", expected)
    words = Path(teacher.checkpoint) / WORDS
    if isinstance(codec, Words) and words.is_file():
        theirs = msgspec.json.decode(words.read_bytes(), type=tuple[str, ...])
        # Those of a file come with its marks or without.
        if Words(theirs).words != codec.words:
            raise InvalidConfig(field, str(words), "the words of the policy, in the same order")
    context_max = min(engine.context_max for engine in settings.engines)
    reads = described.max_position_embeddings
    if reads is not None and reads < context_max:
        expected = f"at least {context_max}, the context_max of the engines"
        raise InvalidConfig(field, f"{teacher.checkpoint}, which reads {reads} tokens", expected)


def _described(field: str, checkpoint: str) -> _Described:
    path = Path(checkpoint) / CONFIG
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Described)
    except OSError as error:
        raise InvalidConfig(field, checkpoint, f"a folder with {CONFIG} ({error.strerror})") from None
    except msgspec.MsgspecError as error:
        raise InvalidConfig(field, checkpoint, f"a folder with the {CONFIG} of a model ({error})") from None


def _bytes_of(teacher: TeacherSettings) -> int:
    files = [*Path(teacher.checkpoint).glob("*.safetensors"), *Path(teacher.checkpoint).glob("*.bin")]
    return GROWN * sum(path.stat().st_size for path in files) + SPARE_BYTES


def _devices(largest_bytes: int) -> list[DeviceSpec]:
    import torch

    if torch.cuda.is_available():
        return list(discover())
    return [Emulated(memory_bytes=max(DEVICE_BYTES_MIN, largest_bytes))]
