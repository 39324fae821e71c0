"""The rollout context and the task context: what all episodes of a rollout, and all of one task, share.

Owns the slots of a task. The rollout creates everything else here; it is only read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tangram.clock import Clock
from tangram.rl.config.rollout_settings import TaskSettings
from tangram.rl.environments.protocol import ExternalResources, Task
from tangram.rl.inference.engines.protocol import Generation, GenerationRequest, Sampling
from tangram.rl.rollout.environment_closer import EnvironmentCloser
from tangram.rl.rollout.rewards import Reward
from tangram.rl.rollout.turn_barrier import TurnBarrier
from tangram.rl.trajectories.codec import Codec
from tangram.rl.trajectories.trajectory import Trajectory

if TYPE_CHECKING:
    from tangram.rl.rollout.episode import Episode


class TokenGenerator(Protocol):
    """Generates turns: the router, or a single engine."""

    async def generate(self, request: GenerationRequest) -> Generation: ...


class EpisodeSlots:
    """Bounds the open episodes of a task: those that have reset or may, and those that play turns."""

    def __init__(self, concurrency: int, ahead: int) -> None:
        self.reset_slots = asyncio.Semaphore(concurrency + ahead)
        self.play_slots = asyncio.Semaphore(concurrency)


class TaskContext(NamedTuple):
    """What all episodes of a task share."""

    settings: TaskSettings
    task: Task
    resources: ExternalResources
    sampling: Sampling
    reward: Reward
    slots: EpisodeSlots


class RolloutContext(NamedTuple):
    """What all episodes of a rollout share."""

    generator: TokenGenerator
    codec: Codec
    context_max: int
    clock: Clock
    began_at_s: float
    closer: EnvironmentCloser
    barrier: TurnBarrier | None
    stop_if_stale: Callable[[Episode], bool]
    """Called before each turn and after each generation: stops a stale episode. Returns True if it stopped the
    episode."""
    on_stage_change: Callable[[Episode, str], None]
    """Called when an episode changes its stage, with the previous stage; empty for the first."""
    on_end: Callable[[Trajectory], None]
