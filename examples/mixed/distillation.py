"""The distillation run: students write tokens, and the teacher of their domain returns the log-probability of each.

Owns the behaviour of each student, drawn from a seed. The answers are real forward passes; those of all runs are
checked against the reference after the step.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics

import msgspec
from sides import START_S, Side
from teachers import VOCABULARY

RUN = "distillation"
TOKENS = 256
"""Per rollout: a forward pass of about ten milliseconds on one core."""
WRITE_S = (0.2, 1.0)
"""Time of a student for one rollout: minimum and maximum."""


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory."""

    name: str
    start_s: float
    teacher: str
    rollouts: tuple[tuple[float, tuple[int, ...]], ...]
    """Generation seconds and tokens of each rollout."""

    @property
    def actions(self) -> int:
        return len(self.rollouts)


def draw(number: int, seed: int, *, rollouts: int, teachers: tuple[str, ...]) -> Script:
    rng = random.Random(f"{RUN}-{seed}-{number}")
    return Script(
        name=f"{RUN}/{number}",
        start_s=rng.uniform(0.0, START_S),
        teacher=teachers[number % len(teachers)],
        rollouts=tuple(
            (rng.uniform(*WRITE_S), tuple(rng.randrange(VOCABULARY) for _ in range(TOKENS))) for _ in range(rollouts)
        ),
    )


async def play(side: Side, script: Script) -> float:
    """Play the trajectory and return the reward: nats per token by which the teacher's log-probability of the rollouts
    exceeds that of a uniform distribution."""
    await asyncio.sleep(script.start_s)
    better: list[float] = []
    for write_s, tokens in script.rollouts:
        await asyncio.sleep(write_s)
        logprobs = await side.ask(script.teacher, tokens, RUN, script.name)
        better += [logprob + math.log(VOCABULARY) for logprob in logprobs]
    return statistics.fmean(better)
