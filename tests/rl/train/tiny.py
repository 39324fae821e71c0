"""The smallest run that is real: a policy of some thousand weights, a task of two short turns, one engine.

What a test wants to happen in the middle of something is held there: while the file `hold.NAME` is in the folder that
HOLDS names, an episode that reaches NAME creates the file `in.NAME` and waits.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from tangram.rl.config.rollout_settings import EngineSettings, GroupSettings, PolicySettings, TaskSettings
from tangram.rl.config.training_settings import (
    CheckpointSettings,
    EvaluationSettings,
    ObjectiveSettings,
    TrainingSettings,
    TrainSettings,
    WarmStartSettings,
)
from tangram.rl.environments.protocol import ExternalResources, MakeAgent, Step

HOLDS = "TANGRAM_TEST_HOLDS"
LOOK_S = 0.005


def _held(name: str) -> bool:
    folder = os.environ.get(HOLDS)
    if folder is None or not Path(folder, f"hold.{name}").exists():
        return False
    Path(folder, f"in.{name}").touch()
    return True


def come_to(name: str) -> None:
    """In a process that may stand still."""
    while _held(name):
        time.sleep(LOOK_S)


class Pick:
    """Each turn one of the words `a` and `b` is to be picked; `a` is worth more, and each seed has some chance in it.
    `hangs`: the first of all steps that finds no such file makes it and never ends."""

    needs_client: ClassVar[bool] = False
    words: ClassVar[tuple[str, ...]] = ("a", "b", "pick")
    turns_max: ClassVar[int] = 2
    tokens_max: ClassVar[int] = 3
    agents: ClassVar[Mapping[str, MakeAgent]] = {"teacher": lambda chance: Teacher(chance)}

    def __init__(self, resources: ExternalResources, *, hangs: str = "") -> None:
        self._hangs = Path(hangs) if hangs else None
        self._chance = random.Random()
        self._left = self.turns_max

    async def reset(self, seed: int) -> str:
        self._chance = random.Random(seed)
        return "pick"

    async def step(self, action: str) -> Step:
        while _held("environment"):  # noqa: ASYNC110 - it is a file
            await asyncio.sleep(LOOK_S)
        if self._hangs is not None and not self._hangs.exists():
            self._hangs.touch()
            await asyncio.Event().wait()
        self._left -= 1
        reward = 0.1 * self._chance.random() + 0.1 * len(action.split()) + 0.2 * action.startswith("a")
        return Step(observation="pick", reward=reward, done=self._left == 0)

    async def close(self) -> None:
        pass


class PickInside(Pick):
    """Likewise, by a command in a sandbox that counts the turns in a file."""

    needs_client: ClassVar[bool] = True

    def __init__(self, resources: ExternalResources) -> None:
        super().__init__(resources)
        self._box = resources.require_client("pick").sandbox(memory="64MiB", trajectory=resources.trajectory)

    async def reset(self, seed: int) -> str:
        await self._box.__aenter__()
        return await super().reset(seed)

    async def step(self, action: str) -> Step:
        result = (await self._box.exec("sleep 0.02; echo >> turns; wc -l < turns", cpus=0.5)).check()
        step = await super().step(action)
        assert int(result.stdout) == self.turns_max - self._left, "a turn was played twice, or none"
        return step

    async def close(self) -> None:
        await self._box.close()


class Teacher:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def act(self, observation: str) -> str:
        return self._chance.choice(("a", "b"))


def broken_now_and_then(judged: Any) -> float:
    """A reward that fails for one in three, and is at least a half for others."""
    if random.Random(str(judged)).random() < 1 / 3:
        raise RuntimeError("the judge is ill")
    return 0.5


def settings_of(
    mode: str = "async",
    *,
    alpha: int = 1,
    steps: int = 3,
    learning_rate: float = 1e-3,
    every: int = 1,
    evaluations: int = 0,
    warm_until: float = 0.0,
    objective: Mapping[str, Any] | None = None,
    task: Mapping[str, Any] | None = None,
    **schedule: Any,
) -> TrainSettings:
    own = {"name": "pick", "environment": f"{__name__}:Pick", "warm_until": warm_until, **(task or {})}
    return TrainSettings(
        policy=PolicySettings(layers=1, width=16, heads=2),
        engines=(EngineSettings(context_max=32, slots=8, sessions=32, deterministic=True),),
        groups=GroupSettings(size=2),
        tasks=(TaskSettings(**own),),
        training=TrainingSettings(**{"mode": mode, "staleness": alpha, "steps": steps, "batch": 2, **schedule}),
        objective=ObjectiveSettings(**{"learning_rate": learning_rate, "zero_variance": "keep", **(objective or {})}),
        warm_start=WarmStartSettings(episodes=8, batch=4, steps_max=4, check_every=2, check_episodes=2),
        evaluation=EvaluationSettings(every=evaluations, episodes=2),
        checkpoints=CheckpointSettings(every=every, keep=100),
    )  # fmt: skip
