"""chain: a long answer to a short question.

One turn with a few words to read and two dozen to write, so decode dominates. `chain step +3 start 5` demands the
values 8 1 4 7 ..., each 3 more than the one before, modulo 10. The reward is the share of correct values before the
first wrong or missing one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import ClassVar

from tangram.errors import InvalidConfig
from tangram.rl.environments.protocol import Environment, ExternalResources, MakeAgent, Step

LENGTH = 24
LENGTH_MAX = 1024
"""Length of an answer, in values: some thousand tokens are the limit of a small policy."""
DIGITS = tuple("0123456789")
STEPS = tuple(f"+{number}" for number in range(1, 10))
"""Separate words: a policy that reads a step cannot confuse it with a value."""


class Chain:
    """One question. The teacher gets a reward of 0.19; a cloned policy can learn the rest from 0.12 on."""

    needs_client: ClassVar[bool] = False
    words: ClassVar[tuple[str, ...]] = ("chain", "step", "start", "over", *STEPS, *DIGITS)
    turns_max: ClassVar[int] = 1
    tokens_max: int = LENGTH + 1
    """The values, and the stop token."""
    agents: ClassVar[Mapping[str, MakeAgent]] = {
        "random": lambda rng: ChainRandomAgent(rng),
        "teacher": lambda rng: ChainTeacher(rng),
        "expert": lambda rng: ChainExpert(rng),
    }

    def __init__(self, resources: ExternalResources, *, length: int = LENGTH) -> None:
        """Raises InvalidConfig."""
        if type(length) is not int or not 1 <= length <= LENGTH_MAX:
            raise InvalidConfig("length", length, f"a whole number from 1 to {LENGTH_MAX}")
        self.length = length
        self.tokens_max = length + 1
        self._values: list[str] | None = None
        """The correct answer while one is due."""

    async def reset(self, seed: int) -> str:
        rng = random.Random(f"chain {seed}")
        observation = f"chain step {rng.choice(STEPS)} start {rng.choice(DIGITS)}"
        self._values = values_of(observation, self.length)
        return observation

    async def step(self, action: str) -> Step:
        if self._values is None:
            raise ValueError("chain: expected a reset before this step, for the episode is over or never began")
        right, self._values = self._values, None
        # One more than required, so that an answer that is too long is not parsed to its end.
        written = action.split(maxsplit=len(right))[: len(right)]
        correct = 0
        for value, expected in zip(written, right, strict=False):
            if value != expected:
                break
            correct += 1
        metrics = {"correct": float(correct), "written": float(len(written))}
        return Step(observation="over", reward=correct / len(right), done=True, metrics=metrics)

    async def close(self) -> None:
        self._values = None


class _ChainAgent:
    """An agent that sees the required length."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._length = LENGTH

    def see(self, environment: Environment) -> None:
        assert isinstance(environment, Chain), "it knows this task only"
        self._length = environment.length


class ChainRandomAgent(_ChainAgent):
    """Random values."""

    def act(self, observation: str) -> str:
        return " ".join(self._rng.choices(DIGITS, k=self._length))


class ChainTeacher(_ChainAgent):
    """Correct values, but only the first few: it can count, but not to the end."""

    def act(self, observation: str) -> str:
        return " ".join(values_of(observation, self._rng.randint(1, teacher_values_max(self._length))))


class ChainExpert(_ChainAgent):
    """All values, correct."""

    def act(self, observation: str) -> str:
        return " ".join(values_of(observation, self._length))


def teacher_values_max(length: int) -> int:
    """Number of values after which the teacher stops: at most a third."""
    return max(1, length // 3)


def values_of(question: str, count: int) -> list[str]:
    """Returns the correct answer."""
    words = question.split()
    by, start = int(words[words.index("step") + 1]), int(words[words.index("start") + 1])
    return [str((start + by * (number + 1)) % 10) for number in range(count)]
