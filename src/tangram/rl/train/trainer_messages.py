"""Messages between a trainer process and its supervisor, over a socket pair.

Owns the records; processes/framing.py encodes them. Every command except the first and the last has a number, which its
one reply repeats; replies come in the order of the commands, with heartbeats between them.
"""

from __future__ import annotations

import msgspec

from tangram.processes.framing import FrameDecoder
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.inference.engines.protocol import PolicyWeights
from tangram.rl.train.trainer import TrainStepResult
from tangram.rl.trajectories.training_batch import Demonstration, TrainingBatch

# ---- commands ----


class TrainerCommand(msgspec.Struct, frozen=True, kw_only=True, tag=False):
    request_id: int
    """Repeated in the reply."""


class TrainerHello(TrainerCommand, frozen=True, kw_only=True, tag="Hello"):
    """The first command. Its reply is TrainerReady once the trainer has published its weights, or TrainerNotReady or
    TrainerRefused."""

    settings: TrainSettings
    vocabulary: int
    """Vocabulary size of a new policy."""
    folder: str
    """Where weights are published."""
    keep: int
    """Number of published versions to keep."""
    checkpoint: str | None
    learner: str
    """`module:name` of the learner class."""
    reward_low: dict[str, float]
    tokens_longest: int
    beat_s: float
    """Interval between heartbeats."""


class CloningStep(TrainerCommand, frozen=True, kw_only=True, tag="Imitate"):
    """Its reply is CloningStepDone."""

    episodes: tuple[Demonstration, ...]


class PublishWeights(TrainerCommand, frozen=True, kw_only=True, tag="Publish"):
    """Its reply is WeightsPublished."""

    version: int


class TrainStep(TrainerCommand, frozen=True, kw_only=True, tag="Step"):
    """Its reply is TrainStepDone."""

    batch: TrainingBatch


class SaveCheckpoint(TrainerCommand, frozen=True, kw_only=True, tag="Save"):
    """Its reply is CheckpointSaved."""

    folder: str


class CloseTrainer(TrainerCommand, frozen=True, kw_only=True, tag="Close"):
    """It has no reply; the process ends."""


# ---- replies ----


class TrainerReply(msgspec.Struct, frozen=True, kw_only=True, tag=False):
    request_id: int


class TrainerReady(TrainerReply, frozen=True, kw_only=True, tag="Ready"):
    weights: PolicyWeights


class TrainerNotReady(TrainerReply, frozen=True, kw_only=True, tag="NotReady"):
    reason: str
    retry: bool


class CloningStepDone(TrainerReply, frozen=True, kw_only=True, tag="Imitated"):
    loss: float


class WeightsPublished(TrainerReply, frozen=True, kw_only=True, tag="Published"):
    weights: PolicyWeights


class TrainStepDone(TrainerReply, frozen=True, kw_only=True, tag="Done"):
    stepped: TrainStepResult


class CheckpointSaved(TrainerReply, frozen=True, kw_only=True, tag="Saved"):
    pass


class TrainerRefused(TrainerReply, frozen=True, kw_only=True, tag="Refused"):
    """The command cannot be executed and nothing has changed. The fields are those of InvalidInput."""

    field: str
    value: str
    expected: str


class TrainerFailed(TrainerReply, frozen=True, kw_only=True, tag="Failed"):
    """The environment of the process failed, for example a full disk."""

    reason: str
    retry: bool


class TrainerHeartbeat(TrainerReply, frozen=True, kw_only=True, tag="Beat"):
    """The trainer works and has used CPU time since the last heartbeat. `request_id` is that of its current command."""


AnyTrainerCommand = TrainerHello | CloningStep | PublishWeights | TrainStep | SaveCheckpoint | CloseTrainer
AnyTrainerReply = (
    TrainerReady
    | TrainerNotReady
    | CloningStepDone
    | WeightsPublished
    | TrainStepDone
    | CheckpointSaved
    | TrainerRefused
    | TrainerFailed
    | TrainerHeartbeat
)


def command_frames() -> FrameDecoder[AnyTrainerCommand]:
    return FrameDecoder(AnyTrainerCommand)


def reply_frames() -> FrameDecoder[AnyTrainerReply]:
    return FrameDecoder(AnyTrainerReply)
