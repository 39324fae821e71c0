"""The requirements of environments, and how each of them is checked.

Owns the checks; `conformance` collects the findings. Promises that every environment that it opens is closed, and that
every call of one has a time limit.
"""

from __future__ import annotations

import asyncio
import math
import random
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from tangram.errors import ManagerError
from tangram.rl.environments import agents
from tangram.rl.environments.agents import AgentEpisode, RandomAgent, ScriptedAgent, short_repr
from tangram.rl.environments.calls import cancel_call, start_call
from tangram.rl.environments.protocol import Agent, Environment, ExternalResources, Step, Task, metrics_of, reward_range
from tangram.rl.environments.registry import missing_of, path_of
from tangram.rl.environments.shared_setup import prepare_tasks

REPEATED_EPISODES = 5
"""Episodes that are replayed, or interleaved."""
EXPERT_MIN, RANDOM_MAX, TEACHER_MAX = 0.95, 0.25, 0.5
"""Shares of the highest reward. If random actions solve a task, or the teacher does, there is nothing to learn; if the
expert does not solve it, it may be unsolvable."""
TICKS = (1, 2, 4)
"""Rounds of the event loop after which a call is cancelled."""
TASK_END_S = 5.0
"""Time for cancelled tasks to end."""
ERROR_MAX = 400
"""Longest error text in a finding."""
INTERNAL_ERRORS = (AttributeError, TypeError, LookupError)
"""Typical exceptions of Python for missing state that the code does not check."""

GARBAGE: Mapping[str, str] = {
    "nothing": "",
    "blanks only": " \t\n ",
    "an unknown word": "zxqj-unknown",
    "control characters": "\x00\x07\x1b[2J\r\x7f",
    "other scripts": "前へ \N{SLIGHTLY SMILING FACE} \u202eevitcerid",
    "quotes and braces": '{"action": ["%s {0} ${HOME} `id`; \\',
    "a word of 100,000 letters": "x" * 100_000,
    "20,000 words": "on " * 20_000,
}


CLOSE_ADVICE = "release in close everything acquired so far, and do nothing if there is nothing"
"""Advice for a close that raises or hangs."""


class CheckFailed(Exception):
    """A requirement is broken: what was expected, what happened, what to do."""

    def __init__(self, expected: str, actual: object, advice: str) -> None:
        super().__init__(expected, str(actual), advice)


class CheckSkipped(Exception):
    """A requirement cannot be checked, with the reason."""


class _LostClient:
    """A client whose every use fails, as when a service is lost."""

    def __getattr__(self, name: str) -> Any:
        raise ManagerError("the service is lost (the conformance check plays that)")


class ConformanceChecker:
    """Collects episodes of a task, and checks it. One method per requirement, which raises CheckFailed."""

    def __init__(
        self,
        task: Task,
        resources: ExternalResources,
        episodes: int,
        seed: int,
        options: Mapping[str, Any],
        timeout_s: float,
    ) -> None:
        self._task = task
        self._resources = resources
        self._seeds = range(seed, seed + episodes)
        self._options = options
        self._timeout_s = timeout_s
        self._environments_made = 0
        self.stack = AsyncExitStack()
        """Open until the end of the check; the caller closes it."""
        self._episodes_by_agent: dict[str, list[AgentEpisode]] = {}
        """By agent."""
        self._garbage_steps: list[tuple[str, Step]] = []
        """Steps in response to garbage, with a description of it."""

    # ---- the task and its episodes ----

    async def declared(self) -> None:
        missing = missing_of(self._task)
        if missing:
            raise CheckFailed("a Task", f"{path_of(self._task)}, which lacks {'; '.join(missing)}", "add what it lacks")
        low, high = reward_range(self._task)
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise CheckFailed(
                "reward_range = (least, most)",
                f"({low}, {high})",
                "declare the range of the rewards of an episode",
            )

    async def plays(self) -> None:
        await self.stack.enter_async_context(prepare_tasks([self._task], self._resources.client))
        for name in self._task.agents or ("chance",):
            self._episodes_by_agent[name] = []
            for seed in self._seeds:
                episode = await self._play(self._agent(name, seed), seed, name)
                self._episodes_by_agent[name].append(episode)

    async def reset_repeats(self) -> None:
        for episode in next(iter(self._episodes_by_agent.values())):
            repeated = await self._first_observation(episode.seed)
            if episode.observation != repeated:
                actual = f"seed {episode.seed}: {short_repr(episode.observation)}, and then {short_repr(repeated)}"
                advice = "draw all randomness from random.Random(seed): no time, no global random, no hash() of text"
                raise CheckFailed("the same observation for the same seed", actual, advice)

    async def steps_repeat(self) -> None:
        for episode in self._some_episodes():
            repeated = await self._play(ScriptedAgent(episode.actions), episode.seed)
            if _trace(episode) != _trace(repeated):
                advice = "derive all randomness from the seed and the turn, and keep no state between episodes"
                raise CheckFailed("the same answers to the same actions", _difference(episode, repeated), advice)

    async def seeds_differ(self) -> None:
        one = next(iter(self._episodes_by_agent.values()))
        actions = one[0].actions
        traces = {_trace(one[0])}
        for episode in one[1:]:
            if episode.observation != one[0].observation:
                return
            # The first observations are equal; the responses may still differ.
            traces.add(_trace(await self._play(ScriptedAgent(actions), episode.seed)))
        if len(traces) == 1:
            start = short_repr(one[0].observation)
            actual = f"{len(self._seeds)} seeds with the same first observation {start} and the same course"
            raise CheckFailed("seeds that give different episodes", actual, "use the seed that reset is given")

    async def instances_apart(self) -> None:
        some = self._some_episodes()
        for one, other in zip(some[: len(some) // 2], reversed(some), strict=False):
            if one.seed == other.seed:
                continue
            interleaved = await self._play_interleaved(one, other)
            for alone, repeated in zip((one, other), interleaved, strict=True):
                if _trace(alone) != _trace(repeated):
                    advice = "keep state in the instance: nothing in the class, the module or the global random"
                    raise CheckFailed(
                        "two concurrent episodes with the same course as alone", _difference(alone, repeated), advice
                    )

    # ---- its observations, actions and rewards ----

    async def garbage(self) -> None:
        good = self._some_episodes()[0].actions[0]
        mixed = " ".join(sorted(self._task.words, key=lambda word: word[::-1]))
        for what, text in {**GARBAGE, "all its words": mixed, "one action many times": f"{good} " * 50}.items():
            async with self._open_environment() as environment:
                await self._reset(environment, self._seeds[0])
                try:
                    step = await self._step(environment, text)
                    self._garbage_steps.append((what, step))
                    if not step.done:
                        self._garbage_steps.append(
                            (f"{what}, and then {short_repr(good)}", await self._step(environment, good))
                        )
                except TimeoutError:
                    raise
                except Exception as error:
                    advice = "return an observation that explains the error, or end the episode"
                    raise CheckFailed("an answer to any action", f"{error_text(error)}, for {what}", advice) from error

    async def words(self) -> None:
        if not self._task.words:
            raise CheckSkipped("it declares no words: it needs a tokenizer of text")
        texts = [(f"agent {episode.agent}", text) for episode in self._all_episodes() for text in episode.actions]
        texts += [("an observation", text) for episode in self._all_episodes() for text in episode.observations]
        texts += [(f"the observation after {what}", step.observation) for what, step in self._garbage_steps]
        known = set(self._task.words)
        for origin, text in texts:
            unknown = [word for word in text.split() if word not in known]
            if unknown:
                advice = "add it to `words`; never repeat text of an agent, which may be arbitrary"
                raise CheckFailed(
                    "words of its vocabulary", f"{short_repr(unknown[0])} in {origin}: {short_repr(text)}", advice
                )

    async def tokens_fit(self) -> None:
        if not self._task.words:
            raise CheckSkipped("the number of tokens of a text is known only for a vocabulary of words")
        async with self._open_environment() as environment:
            limit = getattr(environment, "tokens_max", self._task.tokens_max)
        for episode in self._all_episodes():
            for text in episode.actions:
                count = len(text.split()) + 1
                if count > limit:
                    actual = f"{count} tokens, the end included, of agent {episode.agent}: {short_repr(text)}"
                    raise CheckFailed(
                        f"actions of at most tokens_max = {limit}", actual, "raise tokens_max, or say less"
                    )

    async def rewards(self) -> None:
        low, high = reward_range(self._task)
        for episode in self._all_episodes():
            for turn, taken_step in enumerate(episode.steps):
                if not math.isfinite(taken_step.reward):
                    actual = f"{taken_step.reward} in turn {turn} of seed {episode.seed}, agent {episode.agent}"
                    raise CheckFailed("finite rewards", actual, "divide by nothing that may be 0")
            # Sums of many rewards have rounding errors.
            if not low - 1e-9 <= episode.reward <= high + 1e-9:
                actual = f"{episode.reward:g} for seed {episode.seed}, agent {episode.agent}"
                advice = "scale its rewards, or declare reward_range = (least, most)"
                raise CheckFailed(f"a sum from {low:g} to {high:g} for each episode", actual, advice)
        for what, step in self._garbage_steps:
            if not math.isfinite(step.reward):
                raise CheckFailed("finite rewards", f"{step.reward} after {what}", "divide by nothing that may be 0")

    async def metrics(self) -> None:
        steps = [
            (f"turn {turn} of seed {episode.seed}, agent {episode.agent}", taken_step)
            for episode in self._all_episodes()
            for turn, taken_step in enumerate(episode.steps)
        ]
        for where, step in (*steps, *((f"the answer to {what}", step) for what, step in self._garbage_steps)):
            try:
                metrics_of(step.metrics)
            except TypeError as error:
                advice = "report only numbers, by name; put text into the observation"
                raise CheckFailed("metrics that are numbers", f"{error}, in {where}", advice) from error

    # ---- end, cancellation and close ----

    async def ends(self) -> None:
        if not any(episode.done for episode in self._all_episodes()):
            longest = max(len(episode.steps) for episode in self._all_episodes())
            count = sum(1 for _ in self._all_episodes())
            actual = f"{count} episodes of up to {longest} turns, none of which was done"
            advice = "set done when the goal is reached or lost, within turns_max"
            raise CheckFailed("an end of the episode that some agent reaches within turns_max", actual, advice)

    async def after_done(self) -> None:
        episode = next(episode for episode in self._all_episodes() if episode.done)
        expected = "an error that the episode is over, or done again without a reward"
        advice = "remember the end of the episode, and raise ValueError with a message in step"
        async with self._open_environment() as environment:
            await self._reset(environment, episode.seed)
            for action in episode.actions:
                await self._step(environment, action)
            try:
                step = await self._step(environment, episode.actions[-1])
            except TimeoutError:
                raise
            except Exception as error:
                if isinstance(error, INTERNAL_ERRORS) or not str(error).strip():
                    raise CheckFailed(expected, error_text(error), advice) from error
                return
            if not step.done or step.reward:
                raise CheckFailed(expected, f"done = {step.done}, reward {step.reward:g}", advice)

    async def closes(self) -> None:
        lost = msgspec.structs.replace(self._resources, client=_LostClient())
        for when, resources, resets in (
            ("before any reset", self._resources, False),
            ("a second time", self._resources, True),
            ("after a reset that failed", lost, True),
        ):
            try:
                environment = self._make_environment(resources)
            except Exception:
                continue  # it looks for its client at once: there is nothing to close
            try:
                if resets:
                    await self._reset(environment, self._seeds[0])
                    await agents.close(environment, self._timeout_s)
            except Exception as error:
                if resources is not lost:
                    await agents.close(environment, self._timeout_s)
                    raise error
            try:
                await agents.close(environment, self._timeout_s)
            except Exception as error:
                raise CheckFailed(f"close to work {when}", error_text(error), CLOSE_ADVICE) from error

    async def cancels(self) -> None:
        seed, episode = self._seeds[0], self._some_episodes()[0]
        half_s = 0.5 * episode.seconds / (len(episode.steps) + 2)
        waits: list[Callable[[], Awaitable[None]]] = [lambda ticks=ticks: _yield_to_loop(ticks) for ticks in TICKS]  # type: ignore[misc]
        waits.append(lambda: asyncio.sleep(half_s))
        for wait in waits:
            before = asyncio.all_tasks()
            async with self._open_environment() as environment:
                await self._cancel("reset", start_call(environment.reset, seed), wait)
            await _require_none_left(before, "reset")
            before = asyncio.all_tasks()
            async with self._open_environment() as environment:
                await self._reset(environment, seed)
                await self._cancel("step", start_call(environment.step, episode.actions[0]), wait)
            await _require_none_left(before, "step")

    # ---- its agents ----

    async def random_agent(self) -> None:
        share = self._reward_share("random")
        if share > RANDOM_MAX:
            advice = "make it harder to reach by chance: more turns that must be correct, fewer paths to the goal"
            raise CheckFailed(f"at most {RANDOM_MAX} of the highest reward", f"{share:.2f}", advice)

    async def teacher_agent(self) -> None:
        share = self._reward_share("teacher")
        if share > TEACHER_MAX and not self._reward_share("random") <= share <= self._reward_share("expert"):
            expected = f"at most {TEACHER_MAX}, or between `random` and `expert`"
            raise CheckFailed(expected, f"{share:.2f}", "give the teacher the format, but not the goal")

    async def expert_agent(self) -> None:
        share = self._reward_share("expert")
        if share < EXPERT_MIN:
            advice = (
                "let it see the environment (a method `see`) if what it reads is not enough, and see whether every "
                "seed can be solved; a task that is rewarded from outside says reward_range = (0.0, 0.0)"
            )
            raise CheckFailed(f"at least {EXPERT_MIN} of the highest reward", f"{share:.2f}", advice)

    # ---- helpers of the checks ----

    def _reward_share(self, agent: str) -> float:
        low, high = reward_range(self._task)
        if low == high:
            raise CheckSkipped("it gives no reward itself: its reward comes from outside")
        if agent not in self._episodes_by_agent:
            raise CheckSkipped(f"it has no agent `{agent}`")
        rewards = [episode.reward for episode in self._episodes_by_agent[agent]]
        return (sum(rewards) / len(rewards) - low) / (high - low)

    def _all_episodes(self) -> Iterable[AgentEpisode]:
        return (episode for episodes in self._episodes_by_agent.values() for episode in episodes)

    def _some_episodes(self) -> list[AgentEpisode]:
        """A few non-empty episodes of each agent."""
        some = [
            episode
            for episodes in self._episodes_by_agent.values()
            for episode in episodes[:REPEATED_EPISODES]
            if episode.actions
        ]
        assert some, "turns_max is at least 1"
        return some

    def _agent(self, name: str, seed: int) -> Agent:
        if name in self._task.agents:
            return agents.agent_of(self._task, name, seed)
        return RandomAgent(self._task.words or ("yes", "no", "1", "2"), random.Random(seed))

    def _make_environment(self, resources: ExternalResources) -> Environment:
        self._environments_made += 1
        own = msgspec.structs.replace(resources, trajectory=f"{resources.trajectory}-check-{self._environments_made}")
        return self._task(own, **self._options)

    @asynccontextmanager
    async def _open_environment(self) -> AsyncIterator[Environment]:
        environment = self._make_environment(self._resources)
        try:
            yield environment
        finally:
            await agents.close(environment, self._timeout_s)

    async def _first_observation(self, seed: int) -> str:
        async with self._open_environment() as environment:
            return await self._reset(environment, seed)

    async def _reset(self, environment: Environment, seed: int) -> str:
        return await agents.reset(environment, seed, self._timeout_s)

    async def _step(self, environment: Environment, action: str) -> Step:
        return await agents.step(environment, action, self._timeout_s)

    async def _play(self, agent: Agent, seed: int, name: str = "") -> AgentEpisode:
        environment = self._make_environment(self._resources)
        limit = agents.turns_of(self._task, environment)
        episode = await agents.play(environment, agent, seed, turns_max=limit, timeout_s=self._timeout_s)
        return msgspec.structs.replace(episode, agent=name)

    async def _play_interleaved(self, *episodes: AgentEpisode) -> list[AgentEpisode]:
        """Plays these episodes again, interleaved turn by turn."""
        async with AsyncExitStack() as stack:
            environments = [await stack.enter_async_context(self._open_environment()) for _ in episodes]
            first = [await self._reset(each, one.seed) for each, one in zip(environments, episodes, strict=True)]
            steps: list[list[Step]] = [[] for _ in episodes]
            for turn in range(max(len(episode.actions) for episode in episodes)):
                for environment, episode, taken_step in zip(environments, episodes, steps, strict=True):
                    # An episode that ends earlier than alone differs in any case.
                    if turn < len(episode.actions) and not (taken_step and taken_step[-1].done):
                        taken_step.append(await self._step(environment, episode.actions[turn]))
        return [
            msgspec.structs.replace(episode, observation=observation, steps=tuple(taken_step))
            for episode, observation, taken_step in zip(episodes, first, steps, strict=True)
        ]

    async def _cancel(self, what: str, running: asyncio.Task[Any], wait: Callable[[], Awaitable[None]]) -> None:
        try:
            await wait()
        finally:
            over = running.done()
            running.cancel()
        await asyncio.wait({running}, timeout=self._timeout_s)
        advice = "do not catch CancelledError; release resources in `finally` or in close"
        if not running.done():
            await cancel_call(running, TASK_END_S)
            raise CheckFailed(f"{what} to end when it is cancelled", f"it runs on after {self._timeout_s:g} s", advice)
        error = None if running.cancelled() else running.exception()
        if not over and not running.cancelled():
            actual = error_text(error) if error is not None else "it went on to its end"
            raise CheckFailed(f"{what} to end with CancelledError when it is cancelled", actual, advice)


# ---- comparing and describing ----


def _comparable(step: Step) -> tuple[str, str, bool]:
    """The part of a step that has to repeat. The reward as text, so that NaN equals itself."""
    return step.observation, repr(float(step.reward)), step.done


def _trace(episode: AgentEpisode) -> tuple[str, tuple[tuple[str, str, bool], ...]]:
    return episode.observation, tuple(map(_comparable, episode.steps))


def _difference(one: AgentEpisode, other: AgentEpisode) -> str:
    """Where two episodes of the same seed and actions differ."""
    if one.observation != other.observation:
        return f"seed {one.seed}, at reset: {short_repr(one.observation)}, and then {short_repr(other.observation)}"
    for turn, (left, right) in enumerate(zip(one.steps, other.steps, strict=False)):
        first, second = _comparable(left), _comparable(right)
        if first != second:
            return f"seed {one.seed}, turn {turn}: {short_repr(first)}, and then {short_repr(second)}"
    return f"seed {one.seed}: {len(one.steps)} turns, and then {len(other.steps)}"


async def _yield_to_loop(ticks: int) -> None:
    for _ in range(ticks):
        await asyncio.sleep(0)


async def _require_none_left(before: set[asyncio.Task[Any]], cancelled: str) -> None:
    remaining = asyncio.all_tasks() - before
    if remaining:
        await asyncio.wait(remaining, timeout=TASK_END_S)
    remaining = {task for task in remaining if not task.done()}
    if remaining:
        names = sorted(getattr(task.get_coro(), "__qualname__", task.get_name()) for task in remaining)
        for task in remaining:
            task.cancel()
        await asyncio.wait(remaining, timeout=TASK_END_S)
        actual = f"{', '.join(names)}, {TASK_END_S:g} s after close"
        advice = "start tasks in a task group inside the call, or cancel and await them in close"
        raise CheckFailed(f"no task left of a {cancelled} that was cancelled", actual, advice)


def error_text(error: BaseException) -> str:
    if isinstance(error, agents.CloseFailed) and error.__cause__ is not None:
        error = error.__cause__
    text = "".join(traceback.format_exception_only(error)).strip().replace("\n", "; ")
    return text if len(text) <= ERROR_MAX else f"{text[:ERROR_MAX]}..."


CHECKS: Mapping[str, tuple[str, Callable[[ConformanceChecker], Awaitable[None]], tuple[str, ...]]] = {
    "declared": ("the task has all attributes of the Task protocol", ConformanceChecker.declared, ()),
    "plays": ("every agent plays episodes to the end or the last turn", ConformanceChecker.plays, ("declared",)),
    "reset_repeats": ("the same seed gives the same first observation", ConformanceChecker.reset_repeats, ("plays",)),
    "steps_repeat": (
        "the same seed and actions give the same observations and rewards",
        ConformanceChecker.steps_repeat,
        ("reset_repeats",),
    ),
    "seeds_differ": ("different seeds give different episodes", ConformanceChecker.seeds_differ, ("plays",)),
    "instances_apart": (
        "two instances do not disturb each other",
        ConformanceChecker.instances_apart,
        ("steps_repeat",),
    ),
    "garbage": ("step returns for any text", ConformanceChecker.garbage, ("plays",)),
    "words": ("observations and actions of its agents use only `words`", ConformanceChecker.words, ("plays",)),
    "tokens_fit": ("actions of its agents fit into tokens_max", ConformanceChecker.tokens_fit, ("plays",)),
    "rewards": ("rewards are finite, and their sum is in reward_range", ConformanceChecker.rewards, ("plays",)),
    "metrics": ("metrics are numbers, each with a name", ConformanceChecker.metrics, ("plays",)),
    "ends": ("an episode ends within turns_max", ConformanceChecker.ends, ("plays",)),
    "after_done": (
        "a step after the end raises or gives no reward",
        ConformanceChecker.after_done,
        ("ends", "steps_repeat"),
    ),
    "closes": ("close can be called at any time, and twice", ConformanceChecker.closes, ("plays",)),
    "cancels": ("a cancelled reset or step leaves nothing behind", ConformanceChecker.cancels, ("plays",)),
    "random": (f"`random` gets at most {RANDOM_MAX}", ConformanceChecker.random_agent, ("rewards",)),
    "teacher": (
        f"`teacher` gets at most {TEACHER_MAX}, or less than `expert`",
        ConformanceChecker.teacher_agent,
        ("rewards",),
    ),
    "expert": (f"`expert` gets at least {EXPERT_MIN}", ConformanceChecker.expert_agent, ("rewards",)),
}
"""By name, in the order of the checks: the requirement, its check, and the requirements that it requires."""
