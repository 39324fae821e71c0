"""The tasks of the published evaluation as LLM work: turns, tokens, environment latency.

Owns the distributions and the drawing of trajectories. Same seed, same trajectories. No trajectory exceeds its context.

Turn counts and the context are published. Tokens per turn are assumed so that each task has its published character:
many turns that repeat a long context, or few turns with long thoughts. `swe` follows from its published step with an 8B
model, which spends 53 s on resets (here the slowest of 128), 31 s in the environment and 197 s on generation, 281 s in
total; the simulated batch takes 257-301 s.

Games follow the open-source sibling of the published system: every turn renders a new prompt with the history inside
one message. If prompts only grew, prefix caching would leave little to prefill, and FrozenLake would be slower on the
class with more compute, not faster as published.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

CONTEXT_TOKENS = 32_768
"""The context of all published runs."""
SPREAD = 0.75
"""Standard deviation of the logarithm of an answer's length. The longest of 512 answers is then about 6 times the mean;
published: 5-9."""


class ServingTurn(msgspec.Struct, frozen=True):
    """One exchange: observation, answer, then environment latency."""

    observation_tokens: int
    answer_tokens: int
    environment_s: float


class ServingTrajectory(msgspec.Struct, frozen=True):
    """One episode."""

    task: str
    reset_s: float
    turns: tuple[ServingTurn, ...]
    rerenders_prompt: bool = False
    """See `ServingTask`."""

    def reusable(self, context: int) -> int:
        """Return the part of a prompt of `context` tokens that can be cached from earlier turns."""
        return self.turns[0].observation_tokens if self.rerenders_prompt else context

    @property
    def prompt_tokens(self) -> int:
        return sum(turn.observation_tokens for turn in self.turns)

    @property
    def answer_tokens(self) -> int:
        return sum(turn.answer_tokens for turn in self.turns)


class ServingTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task domain. Lengths and latencies are means of log-normal distributions; turn counts are uniform."""

    name: str
    prefers: str
    """The class of hardware that affinity selects."""
    turns: tuple[int, int]
    prompt_tokens: int
    """The first observation, including the rules."""
    observation_tokens: int
    answer_tokens: int
    environment_s: float
    reset_s: float
    spread: float = SPREAD
    rerenders_prompt: bool = False
    """Every turn renders a new prompt with the history in it, so only the first observation is a common prefix.
    Otherwise prompts only grow, and the whole history can be cached."""


FROZENLAKE = ServingTask(
    name="frozenlake", prefers="H800", turns=(20, 100), prompt_tokens=600, observation_tokens=100, answer_tokens=50,
    environment_s=0.02, reset_s=0.1, spread=0.3, rerenders_prompt=True,
)  # fmt: skip
WEBSHOP = ServingTask(
    name="webshop", prefers="H800", turns=(5, 30), prompt_tokens=800, observation_tokens=500, answer_tokens=80,
    environment_s=0.5, reset_s=1.0, spread=0.5, rerenders_prompt=True,
)  # fmt: skip
SWE = ServingTask(
    name="swe", prefers="H800", turns=(30, 50), prompt_tokens=2500, observation_tokens=350, answer_tokens=350,
    environment_s=0.75, reset_s=10.0,
)  # fmt: skip
GEM_MATH = ServingTask(
    name="gem-math", prefers="H20", turns=(1, 4), prompt_tokens=300, observation_tokens=100, answer_tokens=3000,
    environment_s=0.1, reset_s=0.1,
)  # fmt: skip
GEM_GAME = ServingTask(
    name="gem-game", prefers="H20", turns=(1, 1), prompt_tokens=500, observation_tokens=500, answer_tokens=3000,
    environment_s=0.1, reset_s=0.1,
)  # fmt: skip


def draw_trajectories(tasks: Sequence[ServingTask], count: int, seed: int) -> tuple[ServingTrajectory, ...]:
    """Draw `count` trajectories; the task of each is uniform among `tasks`."""
    random = np.random.default_rng(seed)
    return tuple(_trajectory(tasks[int(random.integers(len(tasks)))], random) for _ in range(count))


def _trajectory(task: ServingTask, random: np.random.Generator) -> ServingTrajectory:
    turns, context = [], 0
    for index in range(int(random.integers(task.turns[0], task.turns[1] + 1))):
        mean_tokens = task.observation_tokens if index else task.prompt_tokens
        observation = min(_lognormal_tokens(mean_tokens, task.spread, random), CONTEXT_TOKENS // 2)
        answer_tokens = _lognormal_tokens(task.answer_tokens, task.spread, random)
        wait_s = _lognormal(task.environment_s, task.spread, random)
        if context + observation + answer_tokens > CONTEXT_TOKENS:
            # The context is full: the turn is truncated, or dropped if no answer fits, and is the last one.
            answer_tokens = CONTEXT_TOKENS - context - observation
            if answer_tokens >= 1:
                turns.append(ServingTurn(observation, answer_tokens, wait_s))
            break
        turns.append(ServingTurn(observation, answer_tokens, wait_s))
        context += observation + answer_tokens
    return ServingTrajectory(
        task.name, _lognormal(task.reset_s, task.spread, random), tuple(turns), task.rerenders_prompt
    )


def _lognormal(mean: float, spread: float, random: np.random.Generator) -> float:
    """Draw from the log-normal distribution with this mean."""
    return mean * math.exp(spread * float(random.standard_normal()) - spread * spread / 2.0)


def _lognormal_tokens(mean: int, spread: float, random: np.random.Generator) -> int:
    return max(1, round(_lognormal(mean, spread, random)))
