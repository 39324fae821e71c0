"""The tasks of the published evaluation as work for a language model: turns, tokens, waits for the environment.

Owns the distributions and the drawing of trajectories. Never serves them. Promises that the same seed gives the same
trajectories, and that none outgrows its context.

Turn counts and the context are published. Tokens per turn are not: they are assumed, so that a task is what the
publication says of it: many turns that repeat a long context, or few turns with long thoughts. `swe` follows from its
published step with an 8B model, which spends 53 s on resets (here the slowest of 128), 31 s in the environment and
197 s on generation, 281 s together; simulated, the batch takes 257-301 s.

Games are played as the open sibling of the published system plays them step by step: every prompt is rendered anew,
with the history inside one message. If their prompts only grew, prefix caching would leave little to prefill, and
FrozenLake would be slower on the class with more compute, not faster as published.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

CONTEXT_TOKENS = 32_768
"""Of all published runs."""
SPREAD = 0.75
"""Standard deviation of the logarithm of an answer's length. The longest of 512 answers is then about 6 times the mean;
published: 5-9."""


class Turn(msgspec.Struct, frozen=True):
    """One exchange: what the environment says, what the model answers, how long the environment then works."""

    observation_tokens: int
    answer_tokens: int
    environment_s: float


class Trajectory(msgspec.Struct, frozen=True):
    """One episode."""

    task: str
    reset_s: float
    turns: tuple[Turn, ...]
    anew: bool = False
    """See `Task`."""

    def reusable(self, context: int) -> int:
        """Of a prompt of so many tokens, those that may be in a cache since earlier turns."""
        return self.turns[0].observation_tokens if self.anew else context

    @property
    def prompt_tokens(self) -> int:
        return sum(turn.observation_tokens for turn in self.turns)

    @property
    def answer_tokens(self) -> int:
        return sum(turn.answer_tokens for turn in self.turns)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A task domain. Lengths and waits are means of log-normal distributions, turns are uniform between the two."""

    name: str
    prefers: str
    """The class of hardware that affinity sends it to."""
    turns: tuple[int, int]
    prompt_tokens: int
    """The first observation, rules included."""
    observation_tokens: int
    answer_tokens: int
    environment_s: float
    reset_s: float
    spread: float = SPREAD
    anew: bool = False
    """Every turn renders its prompt, history included, anew: of the last one only the first observation is a prefix of
    it. Otherwise prompts only grow, and all of the history may be found in the cache."""


FROZENLAKE = Task(
    name="frozenlake", prefers="H800", turns=(20, 100), prompt_tokens=600, observation_tokens=100, answer_tokens=50,
    environment_s=0.02, reset_s=0.1, spread=0.3, anew=True,
)  # fmt: skip
WEBSHOP = Task(
    name="webshop", prefers="H800", turns=(5, 30), prompt_tokens=800, observation_tokens=500, answer_tokens=80,
    environment_s=0.5, reset_s=1.0, spread=0.5, anew=True,
)  # fmt: skip
SWE = Task(
    name="swe", prefers="H800", turns=(30, 50), prompt_tokens=2500, observation_tokens=350, answer_tokens=350,
    environment_s=0.75, reset_s=10.0,
)  # fmt: skip
GEM_MATH = Task(
    name="gem-math", prefers="H20", turns=(1, 4), prompt_tokens=300, observation_tokens=100, answer_tokens=3000,
    environment_s=0.1, reset_s=0.1,
)  # fmt: skip
GEM_GAME = Task(
    name="gem-game", prefers="H20", turns=(1, 1), prompt_tokens=500, observation_tokens=500, answer_tokens=3000,
    environment_s=0.1, reset_s=0.1,
)  # fmt: skip
TASKS = {task.name: task for task in (FROZENLAKE, WEBSHOP, SWE, GEM_MATH, GEM_GAME)}


def draw(tasks: Sequence[Task], count: int, seed: int) -> tuple[Trajectory, ...]:
    """So many trajectories, the task of each uniform among these."""
    random = np.random.default_rng(seed)
    return tuple(_trajectory(tasks[int(random.integers(len(tasks)))], random) for _ in range(count))


def _trajectory(task: Task, random: np.random.Generator) -> Trajectory:
    turns, context = [], 0
    for index in range(int(random.integers(task.turns[0], task.turns[1] + 1))):
        asked = task.observation_tokens if index else task.prompt_tokens
        observation = min(_length(asked, task.spread, random), CONTEXT_TOKENS // 2)
        answer = _length(task.answer_tokens, task.spread, random)
        wait_s = _about(task.environment_s, task.spread, random)
        if context + observation + answer > CONTEXT_TOKENS:
            # The context is full: the turn is cut short if it can still answer, and is the last one.
            answer = CONTEXT_TOKENS - context - observation
            if answer >= 1:
                turns.append(Turn(observation, answer, wait_s))
            break
        turns.append(Turn(observation, answer, wait_s))
        context += observation + answer
    return Trajectory(task.name, _about(task.reset_s, task.spread, random), tuple(turns), task.anew)


def _about(mean: float, spread: float, random: np.random.Generator) -> float:
    """Log-normal with this mean."""
    return mean * math.exp(spread * float(random.standard_normal()) - spread * spread / 2.0)


def _length(mean: int, spread: float, random: np.random.Generator) -> int:
    return max(1, round(_about(mean, spread, random)))
