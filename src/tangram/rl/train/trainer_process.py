"""The trainer in a process of its own, seen from the process that uses it.

Owns what is asked of the child; child.py owns its process. Promises that whoever asks is answered exactly once: by what
was asked for, by InvalidInput or ManagerError, after which it goes on, or by TrainerDied with the reason. A child that
neither says nor computes anything for `hang_s` while it has work counts as dead, and so does one that computes at one
thing for `work_s_max`. Nothing of it is left after `close`; `start` begins anew, after a death or at any time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from tangram.errors import InvalidConfig, InvalidInput, ManagerError
from tangram.processes.child import BEATS_PER_HANG, ChildLife
from tangram.processes.fork_server import Nursery
from tangram.processes.framing import FrameTooLong
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.inference.engines.protocol import Weights
from tangram.rl.rollout.assembly import tasks_of
from tangram.rl.rollout.records import Group, Trajectory
from tangram.rl.train import trainer_messages as messages
from tangram.rl.train.records import Batch, Demonstration, Stepped
from tangram.rl.train.trainer import TrainerDied
from tangram.rl.train.trainer_messages import (
    AnyAnswer,
    AnyCommand,
    Beat,
    Close,
    Done,
    Failed,
    Hello,
    Imitate,
    Imitated,
    NotReady,
    Publish,
    Published,
    Ready,
    Refused,
    Save,
    Saved,
    Step,
)

PROGRAM = "tangram.rl.model.trainer_child"
LEARNER = "tangram.rl.model.learner:Learner"
BEAT_S_MAX = 1.0
"""Between two words of a child that works; less if `hang_s` is small."""
HANG_S = 120.0
"""Without a word and without computing: far longer than a disk takes that others use as well."""
WORK_S_MAX = 1800.0
"""At one thing. A step takes seconds; one of a large model on few cores takes minutes."""
KEEP = 3
"""Published versions that stay: an engine that starts, or that is slow, may still read the one before the newest."""

_Answer = TypeVar("_Answer", bound=AnyAnswer)


class ProcessTrainer:
    """One trainer; see Trainer. It belongs to the event loop in which it was started."""

    def __init__(
        self,
        settings: TrainSettings,
        codec_size: int,
        folder: Path,
        *,
        keep: int = KEEP,
        hang_s: float = HANG_S,
        work_s_max: float = WORK_S_MAX,
        learner: str = LEARNER,
        nursery: Nursery | None = None,
    ) -> None:
        """Weights are published in `folder`, the newest `keep` versions of them. `learner`: `module:name` of the class
        that learns. Raises InvalidConfig for tasks that cannot be found."""
        self._settings, self._codec_size, self._folder, self._keep = settings, codec_size, folder, keep
        self._hang_s, self._work_s_max, self._learner = hang_s, work_s_max, learner
        self._reward_low, self._tokens_longest = _limits_of(settings)
        self._nursery = nursery
        self._child: _Child | None = None

    @property
    def pid(self) -> int:
        """Of the child that runs."""
        assert self._child is not None, "the trainer does not run"
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.alive

    async def start(self, checkpoint: Path | None = None) -> Weights:
        await self.close()
        child = self._child = _Child(self._hang_s, self._work_s_max)
        hello = Hello(
            ask=0,
            settings=self._settings,
            vocabulary=self._codec_size,
            folder=str(self._folder),
            keep=self._keep,
            checkpoint=str(checkpoint) if checkpoint is not None else None,
            learner=self._learner,
            reward_low=self._reward_low,
            tokens_longest=self._tokens_longest,
            beat_s=min(BEAT_S_MAX, self._hang_s / BEATS_PER_HANG),
        )
        await child.start(PROGRAM, self._settings.training.threads, hello, self._nursery)
        assert child.first is not None
        return child.first

    async def imitate(self, episodes: Sequence[Demonstration]) -> float:
        child = self._running()
        answer = await child.done(Imitate(ask=child.number(), episodes=tuple(episodes)), Imitated)
        return answer.loss

    async def publish(self, version: int) -> Weights:
        child = self._running()
        return (await child.done(Publish(ask=child.number(), version=version), Published)).weights

    async def step(self, batch: Batch) -> Stepped:
        """Raises ManagerError, and not TrainerDied, if the step was made and could not be published: the trainer has
        the next version then, which can be saved, and be published by `publish`."""
        child = self._running()
        return (await child.done(Step(ask=child.number(), batch=stripped(batch)), Done)).stepped

    async def save(self, folder: Path) -> None:
        child = self._running()
        await child.done(Save(ask=child.number(), folder=str(folder)), Saved)

    async def close(self) -> None:
        if self._child is not None:
            await self._child.close(Close(ask=0))

    def _running(self) -> _Child:
        if self._child is None:
            raise TrainerDied("it was not started")
        return self._child


class _Child(ChildLife):
    """One life of a trainer."""

    def __init__(self, hang_s: float, work_s_max: float) -> None:
        super().__init__("the trainer", messages.answers(), hang_s)
        self.first: Weights | None = None
        """With which it got ready."""
        self._work_s_max = work_s_max
        self._working_since_s = 0.0
        self._numbers = itertools.count(1)

    def number(self) -> int:
        return next(self._numbers)

    async def done(self, command: AnyCommand, kind: type[_Answer]) -> _Answer:
        if not self.has_work:
            self._working_since_s = self._loop.time()
        try:
            answer: AnyAnswer = await self.ask(command.ask, command)
        except FrameTooLong as error:
            raise InvalidInput(str(command.__struct_config__.tag).lower(), "too much at once", str(error)) from error
        match answer:
            case Refused(field=field, value=value, expected=expected):
                raise InvalidInput(field, value, expected)
            case Failed(reason=reason, retry=retry):
                raise ManagerError(f"trainer: {reason}", retry=retry)
        assert isinstance(answer, kind), answer
        return answer

    def take(self, answer: AnyAnswer) -> None:
        match answer:
            case Ready(weights=weights):
                self.first = weights
                self.now_ready()
            case NotReady(reason=reason, retry=retry):
                self.refused(ManagerError(reason, retry=retry))
            case Refused(ask=0, field=field, value=value, expected=expected):
                self.refused(InvalidConfig(field, value, expected))
            case Beat():
                pass  # to have been heard is all
            case _:
                self._working_since_s = self._loop.time()  # it begins with the next thing
                self.answered(answer.ask, answer)

    def died(self, reason: str) -> TrainerDied:
        return TrainerDied(reason)

    def complaint(self, silent_s: float) -> str:
        worked_s = self._loop.time() - self._working_since_s
        if self.has_work and worked_s > self._work_s_max:
            return f"it worked at one thing for {worked_s:.1f} s without an end"
        return super().complaint(silent_s)


def stripped(batch: Batch) -> Batch:
    """What a trainer does not need is not sent: texts, times, and trajectories that are not trained on."""
    return msgspec.structs.replace(batch, groups=tuple(map(_group, batch.groups)))


def _group(group: Group) -> Group:
    return msgspec.structs.replace(group, members=tuple(map(_trajectory, group.members)), left_out=())


def _trajectory(trajectory: Trajectory) -> Trajectory:
    turns = tuple(msgspec.structs.replace(turn, observation="", action="") for turn in trajectory.turns)
    return msgspec.structs.replace(trajectory, turns=turns, observation="", spans=())


def _limits_of(settings: TrainSettings) -> tuple[dict[str, float], int]:
    """By task the lowest reward that there is; and the most tokens that a policy may write in one trajectory."""
    reward_low: dict[str, float] = {}
    tokens_longest = 1
    for task, own in zip(tasks_of(settings), settings.tasks, strict=True):
        reward_low[own.name] = float(getattr(task, "reward_range", (0.0, 1.0))[0])
        turns, tokens = own.turns_max or task.turns_max, own.tokens_max or task.tokens_max
        tokens_longest = max(tokens_longest, turns * tokens)
    return reward_low, tokens_longest
