"""Trajectories, groups and batches made by hand, for the tests of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tangram.rl.config.training_settings import ObjectiveSettings, TrainingSettings, TrainSettings
from tangram.rl.trajectories.training_batch import TrainingBatch
from tangram.rl.trajectories.trajectory import Ending, Group, Trajectory, Turn

TASK = "toy"


def turn(
    observation: Sequence[int],
    action: Sequence[int],
    logprobs: Sequence[float] | None = None,
    *,
    version: int = 0,
    kept: Sequence[Sequence[int]] | None = None,
    cut: bool = False,
) -> Turn:
    return Turn(
        observation="",
        observation_tokens=tuple(observation),
        action="",
        tokens=tuple(action),
        logprobs=tuple(logprobs) if logprobs is not None else (-1.0,) * len(action),
        versions=(version,) * len(action),
        candidate_token_ids=None if kept is None else tuple(tuple(ids) for ids in kept),
        truncated=cut,
    )


def trajectory(
    *turns: Turn, reward: float = 0.0, group: str = "0", member: int = 0, task: str = TASK, **fields: Any
) -> Trajectory:
    return Trajectory(
        id=f"{task}/{group}/{member}.0",
        task=task,
        group=f"{task}/{group}",
        member=member,
        attempt=0,
        seed=0,
        turns=turns,
        reward=reward,
        **({"ending": Ending.FINISHED} | fields),
    )


def group(*members: Trajectory, number: int = 0, task: str = TASK) -> Group:
    return Group(id=f"{task}/{number}", task=task, seed=0, members=members, wanted=len(members))


def batch(*groups: Group, version: int = 0) -> TrainingBatch:
    return TrainingBatch(version=version, groups=groups)


def settings(
    objective: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **fields: Any
) -> TrainSettings:
    return TrainSettings(
        objective=ObjectiveSettings(**(objective or {})), training=TrainingSettings(**(training or {})), **fields
    )


def played(
    seed: int,
    *,
    groups: int = 4,
    members: int = 4,
    vocabulary: int = 23,
    turns_max: int = 4,
    longest: int = 8,
    version: int = 0,
    taught: bool = False,
) -> TrainingBatch:
    """Synthetic samples: any tokens with any log-probabilities and rewards."""
    chance = np.random.default_rng(seed)

    def some(least: int) -> list[int]:
        return [int(token) for token in chance.integers(0, vocabulary, chance.integers(least, longest + 1))]

    made = []
    for number in range(groups):
        siblings = []
        for member in range(members):
            turns = []
            for _ in range(chance.integers(1, turns_max + 1)):
                observation, action = some(1), some(1)
                turns.append(turn(observation, action, (-3.0 + chance.normal(0.0, 0.3, len(action))).tolist()))
            count = sum(len(each.tokens) for each in turns)
            siblings.append(
                trajectory(
                    *turns,
                    reward=float(chance.random()),
                    group=str(number),
                    member=member,
                    teacher_logprobs=tuple(chance.normal(-2.0, 0.5, count).tolist()) if taught else None,
                )
            )
        made.append(group(*siblings, number=number))
    return batch(*made, version=version)
