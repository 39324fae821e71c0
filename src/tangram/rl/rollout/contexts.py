"""What episodes share: those of one task, and those of one rollout.

Owns the slots of a task. Everything else here is made by the rollout and only looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tangram.clock import Clock
from tangram.rl.config.rollout_settings import TaskSettings
from tangram.rl.environments.protocol import Outside, Task
from tangram.rl.inference.engines.protocol import Generation, Request, Sampling
from tangram.rl.rollout.codec import Codec
from tangram.rl.rollout.environment_closer import Closings
from tangram.rl.rollout.records import Trajectory
from tangram.rl.rollout.rewards import Reward
from tangram.rl.rollout.turn_barrier import TurnBarrier

if TYPE_CHECKING:
    from tangram.rl.rollout.episode import Episode


class Generates(Protocol):
    """What writes the turns: a gateway, or one engine."""

    async def generate(self, request: Request) -> Generation: ...


class Slots:
    """How many episodes of a task are open. `open` are those that may reset, `turns` those of them that may play."""

    def __init__(self, concurrency: int, ahead: int) -> None:
        self.open = asyncio.Semaphore(concurrency + ahead)
        self.turns = asyncio.Semaphore(concurrency)


class Arena(NamedTuple):
    """What all episodes of a task share."""

    settings: TaskSettings
    make: Task
    outside: Outside
    sampling: Sampling
    reward: Reward
    slots: Slots


class House(NamedTuple):
    """What all episodes of a rollout share."""

    generator: Generates
    codec: Codec
    context_max: int
    clock: Clock
    began: float
    closings: Closings
    barrier: TurnBarrier | None
    fresh: Callable[[Episode], bool] | None
    """Whether what was begun so is still wanted: asked before each turn and after each generation."""
    moved: Callable[[Episode, str], None]
    """Told who is in another stage now, and in which he was; empty: none."""
    ended: Callable[[Trajectory], None]
