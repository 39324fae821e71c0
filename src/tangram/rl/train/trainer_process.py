"""The trainer in a child process, from the side of its supervisor.

Owns the requests to the child; processes/child.py owns the process. Promises that each request ends exactly once: with
its result, with InvalidInput or ManagerError, after which the trainer still works, or with TrainerDied and the reason.
A child counts as dead if it sends nothing and computes nothing for `hang_s` while it has work, or computes at one
request for `work_s_max`. Nothing of it remains after `close`. `start` restarts it at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from tangram.errors import InvalidConfig, InvalidInput, ManagerError
from tangram.processes.child import HEARTBEATS_PER_HANG, ChildProcess
from tangram.processes.fork_server import ForkServer
from tangram.processes.framing import FrameTooLong
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.environments.protocol import reward_range
from tangram.rl.environments.registry import tasks_of
from tangram.rl.inference.engines.protocol import PolicyWeights
from tangram.rl.train import trainer_messages as messages
from tangram.rl.train.trainer import TrainerDied, TrainStepResult
from tangram.rl.trajectories.training_batch import Demonstration, TrainingBatch, strip_for_training

PROGRAM = "tangram.rl.train.trainer_child"
LEARNER = "tangram.rl.model.learner:Learner"
HEARTBEAT_S_MAX = 1.0
"""Interval between heartbeats of a busy child; shorter if `hang_s` is small."""
HANG_S = 120.0
"""Time without a heartbeat: far longer than a disk that others use too blocks a write."""
WORK_S_MAX = 1800.0
"""Time limit of one request. A step takes seconds; with a large model on few cores, minutes."""
VERSIONS_KEPT = 3
"""Published versions that are kept: a starting or slow engine may still read the version before the newest."""

_Reply = TypeVar("_Reply", bound=messages.AnyTrainerReply)


class ProcessTrainer:
    """A trainer process; see Trainer. It belongs to the event loop in which it was started."""

    def __init__(
        self,
        settings: TrainSettings,
        codec_size: int,
        folder: Path,
        *,
        keep: int = VERSIONS_KEPT,
        hang_s: float = HANG_S,
        work_s_max: float = WORK_S_MAX,
        learner: str = LEARNER,
        fork_server: ForkServer | None = None,
    ) -> None:
        """Publishes weights in `folder` and keeps the newest `keep` versions. `learner`: `module:name` of the learner
        class. Raises InvalidConfig for unknown tasks."""
        self._settings, self._codec_size, self._folder, self._keep = settings, codec_size, folder, keep
        self._hang_s, self._work_s_max, self._learner = hang_s, work_s_max, learner
        self._reward_low, self._tokens_longest = _task_limits(settings)
        self._fork_server = fork_server
        self._child: _TrainerChild | None = None

    @property
    def pid(self) -> int:
        """The process id of the running child."""
        assert self._child is not None, "the trainer does not run"
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.alive

    async def start(self, checkpoint: Path | None = None) -> PolicyWeights:
        await self.close()
        child = self._child = _TrainerChild(self._hang_s, self._work_s_max)
        hello = messages.TrainerHello(
            request_id=0,
            settings=self._settings,
            vocabulary=self._codec_size,
            folder=str(self._folder),
            keep=self._keep,
            checkpoint=str(checkpoint) if checkpoint is not None else None,
            learner=self._learner,
            reward_low=self._reward_low,
            tokens_longest=self._tokens_longest,
            beat_s=min(HEARTBEAT_S_MAX, self._hang_s / HEARTBEATS_PER_HANG),
        )
        await child.start(PROGRAM, self._settings.training.threads, hello, self._fork_server)
        assert child.initial_weights is not None
        return child.initial_weights

    async def imitate(self, episodes: Sequence[Demonstration]) -> float:
        child = self._require_child()
        reply = await child.call(
            messages.CloningStep(request_id=child.next_number(), episodes=tuple(episodes)), messages.CloningStepDone
        )
        return reply.loss

    async def publish(self, version: int) -> PolicyWeights:
        child = self._require_child()
        reply = await child.call(
            messages.PublishWeights(request_id=child.next_number(), version=version), messages.WeightsPublished
        )
        return reply.weights

    async def step(self, batch: TrainingBatch) -> TrainStepResult:
        """Raises ManagerError, not TrainerDied, if the step was made but could not be published: the trainer has the
        next version then, which can be saved, or published by `publish`."""
        child = self._require_child()
        reply = await child.call(
            messages.TrainStep(request_id=child.next_number(), batch=strip_batch(batch)), messages.TrainStepDone
        )
        return reply.stepped

    async def save(self, folder: Path) -> None:
        child = self._require_child()
        await child.call(
            messages.SaveCheckpoint(request_id=child.next_number(), folder=str(folder)), messages.CheckpointSaved
        )

    async def close(self) -> None:
        if self._child is not None:
            await self._child.close(messages.CloseTrainer(request_id=0))

    def _require_child(self) -> _TrainerChild:
        if self._child is None:
            raise TrainerDied("it was not started")
        return self._child


class _TrainerChild(ChildProcess):
    """One process of a trainer, from its start to its death."""

    def __init__(self, hang_s: float, work_s_max: float) -> None:
        super().__init__("the trainer", messages.reply_frames(), hang_s)
        self.initial_weights: PolicyWeights | None = None
        """Published when it became ready."""
        self._work_s_max = work_s_max
        self._working_since = 0.0

    async def call(self, command: messages.AnyTrainerCommand, kind: type[_Reply]) -> _Reply:
        if not self.has_work:
            self._working_since = self._loop.time()
        try:
            reply: messages.AnyTrainerReply = await self.request(command.request_id, command)
        except FrameTooLong as error:
            raise InvalidInput(str(command.__struct_config__.tag).lower(), "too much at once", str(error)) from error
        match reply:
            case messages.TrainerRefused(field=field, value=value, expected=expected):
                raise InvalidInput(field, value, expected)
            case messages.TrainerFailed(reason=reason, retry=retry):
                raise ManagerError(f"trainer: {reason}", retry=retry)
        assert isinstance(reply, kind), reply
        return reply

    def on_message(self, reply: messages.AnyTrainerReply) -> None:
        match reply:
            case messages.TrainerReady(weights=weights):
                self.initial_weights = weights
                self.mark_ready()
            case messages.TrainerNotReady(reason=reason, retry=retry):
                self.fail_start(ManagerError(reason, retry=retry))
            case messages.TrainerRefused(request_id=0, field=field, value=value, expected=expected):
                self.fail_start(InvalidConfig(field, value, expected))
            case messages.TrainerHeartbeat():
                pass  # its arrival is all that counts
            case _:
                self._working_since = self._loop.time()  # it begins with the next thing
                self.resolve(reply.request_id, reply)

    def death_error(self, reason: str) -> TrainerDied:
        return TrainerDied(reason)

    def hang_reason(self, silent_s: float) -> str:
        worked_s = self._loop.time() - self._working_since
        if self.has_work and worked_s > self._work_s_max:
            return f"it worked at one request for {worked_s:.1f} s without an end"
        return super().hang_reason(silent_s)


def strip_batch(batch: TrainingBatch) -> TrainingBatch:
    """Removes what a trainer does not need."""
    return msgspec.structs.replace(batch, groups=tuple(map(strip_for_training, batch.groups)))


def _task_limits(settings: TrainSettings) -> tuple[dict[str, float], int]:
    """Returns the lowest reward of each task, and the most tokens that a policy may write in one trajectory."""
    reward_low: dict[str, float] = {}
    tokens_longest = 1
    for task, task_settings in zip(tasks_of(settings), settings.tasks, strict=True):
        reward_low[task_settings.name], _ = reward_range(task)
        turns = task_settings.turns_max or task.turns_max
        tokens = task_settings.tokens_max or task.tokens_max
        tokens_longest = max(tokens_longest, turns * tokens)
    return reward_low, tokens_longest
