"""chain: a long answer to a short question.

One turn, a few words to read and two dozen to write: writing is what it costs. `chain step +3 start 5` asks for the
values 8 1 4 7 ..., each 3 more than the one before, the tens left out. The reward is the share of the values that are
right, counted to the first that is wrong or missing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import ClassVar

from tangram.errors import InvalidConfig
from tangram.rl.environments.protocol import Environment, MakeAgent, Outside, Step

LENGTH = 24
LENGTH_MAX = 1024
"""Of an answer, in values: some thousand tokens are all that a small policy can hold."""
DIGITS = tuple("0123456789")
STEPS = tuple(f"+{number}" for number in range(1, 10))
"""Words of their own: a policy that reads a step cannot take it for a value."""


class Chain:
    """One question. The teacher gets 0.19 of it; a policy that was taught is ready to learn the rest at 0.12."""

    acts_outside: ClassVar[bool] = False
    words: ClassVar[tuple[str, ...]] = ("chain", "step", "start", "over", *STEPS, *DIGITS)
    turns_max: ClassVar[int] = 1
    tokens_max: int = LENGTH + 1
    """The values, and the end."""
    agents: ClassVar[Mapping[str, MakeAgent]] = {
        "random": lambda chance: Blind(chance),
        "teacher": lambda chance: Teacher(chance),
        "expert": lambda chance: Expert(chance),
    }

    def __init__(self, outside: Outside, *, length: int = LENGTH) -> None:
        """Raises InvalidConfig."""
        if type(length) is not int or not 1 <= length <= LENGTH_MAX:
            raise InvalidConfig("length", length, f"a whole number from 1 to {LENGTH_MAX}")
        self.length = length
        self.tokens_max = length + 1
        self._values: list[str] | None = None
        """The right answer, while one is awaited."""

    async def reset(self, seed: int) -> str:
        chance = random.Random(f"chain {seed}")
        observation = f"chain step {chance.choice(STEPS)} start {chance.choice(DIGITS)}"
        self._values = values_of(observation, self.length)
        return observation

    async def step(self, action: str) -> Step:
        if self._values is None:
            raise ValueError("chain: expected a reset before this step, for the episode is over or never began")
        right, self._values = self._values, None
        # One more than are wanted, so that an answer that is too long costs no more to read.
        written = action.split(maxsplit=len(right))[: len(right)]
        correct = 0
        for value, wanted in zip(written, right, strict=False):
            if value != wanted:
                break
            correct += 1
        metrics = {"correct": float(correct), "written": float(len(written))}
        return Step(observation="over", reward=correct / len(right), done=True, metrics=metrics)

    async def close(self) -> None:
        self._values = None


class _Writer:
    """An agent that knows how long an answer is wanted."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._length = LENGTH

    def see(self, environment: Environment) -> None:
        assert isinstance(environment, Chain), "it knows this task only"
        self._length = environment.length


class Blind(_Writer):
    """Any values."""

    def act(self, observation: str) -> str:
        return " ".join(self._chance.choices(DIGITS, k=self._length))


class Teacher(_Writer):
    """Right values, of which it writes only the first few: it knows how to count, and not how far."""

    def act(self, observation: str) -> str:
        return " ".join(values_of(observation, self._chance.randint(1, taught_max(self._length))))


class Expert(_Writer):
    """All values, and they are right."""

    def act(self, observation: str) -> str:
        return " ".join(values_of(observation, self._length))


def taught_max(length: int) -> int:
    """Values after which the teacher stops at the latest: a third."""
    return max(1, length // 3)


def values_of(question: str, count: int) -> list[str]:
    """The right answer."""
    words = question.split()
    by, start = int(words[words.index("step") + 1]), int(words[words.index("start") + 1])
    return [str((start + by * (number + 1)) % 10) for number in range(count)]
