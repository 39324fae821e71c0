"""Teachers of a training run: which ones its tasks use, and what the connection needs for them.

Owns the checks before anything is played: a teacher that is missing, has another vocabulary than the policy, or a
smaller context. Never loads a model: rl/model/teacher.py serves them, rl/rollout/rewards.py calls them.

Teachers share devices: the CUDA devices of the machine, or an emulated one with memory for the largest teacher. An idle
teacher is evicted when another one needs the memory, and restored on its next call.
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
from tangram.rl.trajectories.codec import WORDS_FILE, Codec, WordCodec

ENGINE = "tangram.rl.model.teacher:TeacherEngine"
DEVICE_BYTES_MIN = 64 << 20
"""Memory of an emulated device: all small teachers fit into it together."""
FLOAT32_GROWTH = 2
"""Weights are computed with in float32: those of a half precision checkpoint grow by this factor."""
SPARE_BYTES = 1 << 20
"""Memory for gaps between weights."""
ANSWER_S_MAX = 60.0
"""Time limit of the first call of a loaded teacher."""
CONFIG = "config.json"


class _CheckpointConfig(msgspec.Struct, frozen=True):
    vocab_size: int
    max_position_embeddings: int | None = None


def teacher_services(settings: RolloutSettings) -> tuple[str, ...]:
    """The distinct services that tasks name as their teachers."""
    return tuple(dict.fromkeys(task.reward.service for task in settings.tasks if task.reward.kind == "teacher"))


def vocabulary_of(settings: RolloutSettings, codec: Codec) -> int:
    """Vocabulary size of the policy. That of a checkpoint may exceed the number of its words."""
    checkpoint = settings.policy.checkpoint
    return _read_checkpoint_config("policy.checkpoint", checkpoint).vocab_size if checkpoint else codec.size


def needs_of_teachers(settings: RolloutSettings, codec: Codec) -> dict[str, Any]:
    """Returns what a connection needs for the teachers, as arguments of `tangram.connect`; empty if there are none.
    Raises InvalidConfig for one that cannot teach this policy."""
    names = teacher_services(settings)
    if not names:
        return {}
    available = {teacher.name: teacher for teacher in settings.teachers} if isinstance(settings, TrainSettings) else {}
    for name in names:
        if name not in available:
            expected = f"one of the teachers ({', '.join(available) or 'there are none: [[teachers]] with a name'})"
            raise InvalidConfig("reward.service", name, expected)
    chosen = [available[name] for name in names]
    for teacher in chosen:
        _require_compatible(teacher, settings, codec)
    services = [
        Service(name=teacher.name, engine=ENGINE, arguments={"checkpoint": str(Path(teacher.checkpoint).absolute())})
        for teacher in chosen
    ]
    return {"services": services, "devices": _devices(max(_bytes_of(teacher) for teacher in chosen))}


def merge_needs(needs: dict[str, Any], teachers: dict[str, Any]) -> dict[str, Any]:
    """Merges the needs of tasks and teachers. Any service may get any device, so all emulated devices have the memory
    of the largest; with real devices, nothing is emulated."""
    if not teachers:
        return needs
    devices: list[DeviceSpec] = [*needs.get("devices", ()), *teachers["devices"]]
    emulated = [device for device in devices if isinstance(device, Emulated)]
    if len(emulated) < len(devices):
        devices = [device for device in devices if not isinstance(device, Emulated)]
    else:
        largest = max(device.memory_bytes for device in emulated)
        devices = [msgspec.structs.replace(device, memory_bytes=largest) for device in emulated]
    return {**needs, "services": [*needs.get("services", ()), *teachers["services"]], "devices": devices}


async def require_teachers(client: Client, settings: RolloutSettings, vocabulary: int) -> None:
    """Calls each teacher once, to load it and to check its vocabulary, wherever it is served. Raises InvalidConfig and
    ManagerError."""
    for name in teacher_services(settings):
        question = {"tokens": [0, 0], "at": [1], "temperature": 1.0, "vocabulary": vocabulary}
        try:
            result = await client.infer(name, question, run=settings.run, timeout_s=ANSWER_S_MAX)
        except InvalidInput as error:
            raise InvalidConfig(f"teacher {name}: {error.field}", error.value, error.expected) from error
        if not result.ok:
            raise ManagerError(f"teacher {name} does not respond: {result.status.value}: {result.reason}", retry=False)


# ---- checkpoints ----


def _require_compatible(teacher: TeacherSettings, settings: RolloutSettings, codec: Codec) -> None:
    field = f"teacher {teacher.name}: checkpoint"
    described, vocabulary = _read_checkpoint_config(field, teacher.checkpoint), vocabulary_of(settings, codec)
    if described.vocab_size != vocabulary:
        expected = f"the vocabulary of the policy, which has {vocabulary} tokens"
        raise InvalidConfig(field, f"{teacher.checkpoint} with {described.vocab_size} tokens", expected)
    words = Path(teacher.checkpoint) / WORDS_FILE
    if isinstance(codec, WordCodec) and words.is_file():
        teacher_words = msgspec.json.decode(words.read_bytes(), type=tuple[str, ...])
        # A vocabulary file may have the marker tokens or not.
        if WordCodec(teacher_words).words != codec.words:
            raise InvalidConfig(field, str(words), "the words of the policy, in the same order")
    context_max = min(engine.context_max for engine in settings.engines)
    reads = described.max_position_embeddings
    if reads is not None and reads < context_max:
        expected = f"at least {context_max}, the context_max of the engines"
        raise InvalidConfig(field, f"{teacher.checkpoint}, which reads {reads} tokens", expected)


def _read_checkpoint_config(field: str, checkpoint: str) -> _CheckpointConfig:
    path = Path(checkpoint) / CONFIG
    try:
        return msgspec.json.decode(path.read_bytes(), type=_CheckpointConfig)
    except OSError as error:
        raise InvalidConfig(field, checkpoint, f"a folder with {CONFIG} ({error.strerror})") from None
    except msgspec.MsgspecError as error:
        raise InvalidConfig(field, checkpoint, f"a folder with the {CONFIG} of a model ({error})") from None


def _bytes_of(teacher: TeacherSettings) -> int:
    files = [*Path(teacher.checkpoint).glob("*.safetensors"), *Path(teacher.checkpoint).glob("*.bin")]
    return FLOAT32_GROWTH * sum(path.stat().st_size for path in files) + SPARE_BYTES


def _devices(largest_bytes: int) -> list[DeviceSpec]:
    import torch

    if torch.cuda.is_available():
        return list(discover())
    return [Emulated(memory_bytes=max(DEVICE_BYTES_MIN, largest_bytes))]
