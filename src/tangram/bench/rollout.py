"""Trajectory-level rollout against turn-batched rollout, on the same real engine.

All environments play the same number of turns. An environment answers after a delay drawn from N(μ, σ), at least 0, the
same on both sides; a turn is a fixed number of tokens from a transformer in a separate process that serves all
environments. In turn-batched rollout, all turns are generated as one batch, and the next batch starts when the slowest
environment has answered. In trajectory-level rollout no environment waits for another.

`ideal` is the ratio in a barrier model with the same delays L, the engine time B of a turn of the whole batch, and the
engine time A of a single turn, both measured:

    ideal = sum over turns of (B + max over environments of L)  /  max over environments of sum over turns of (A + L)

It is an upper bound, since in reality no turn has the engine to itself.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

import msgspec

from tangram.bench.base import PRINTED, BenchRun, at_least, paired_ratio_of_values, step_counter
from tangram.reports.statistics import Interval, mean_of
from tangram.rl.config.rollout_settings import (
    EngineSettings,
    GroupSettings,
    PolicySettings,
    RolloutSettings,
    TaskSettings,
)
from tangram.rl.environments.protocol import ExternalResources, MakeAgent, Step
from tangram.rl.inference.engines.process import ProcessEngine
from tangram.rl.inference.router import Router
from tangram.rl.rollout.rollout import Rollout
from tangram.rl.trajectories.trajectory import Group, GroupTicket, Span, Stage

SPREADS = (0.1, 0.3, 0.5, 0.7, 1.0)
"""σ / μ."""
WORDS = 60
"""Vocabulary size; the tokens themselves do not matter."""
OBSERVED_WORDS = 3
"""Tokens of an observation."""
TOKENS, TOKENS_MAX = 4, 12
"""Tokens per turn: for calibration, and the maximum."""
TASK = "waits"


class RolloutSizes(msgspec.Struct, frozen=True, kw_only=True):
    environments: int = 128
    turns: int = 20
    latency_s: float = 0.3
    """μ"""
    batch_share: float = 0.15
    """The engine time of a turn of all environments over μ; determines the tokens per turn."""
    layers: int = 2
    width: int = 64
    spreads: tuple[float, ...] = SPREADS
    seeds: int = 5
    heavy_seeds: int = 2
    heavy_spread: float = 1.0
    """σ / μ of the log-normal delays."""
    failures: float = 0.05
    """Share of the environments that crash once, at any turn."""


LABEL = "measured"
FULL = RolloutSizes()
QUICK = RolloutSizes(turns=8, spreads=(0.1, 0.5, 1.0), seeds=1, heavy_seeds=1)


# ---- waits --------------------------------------------------------------------------------------------------------


class LatencyModel(msgspec.Struct, frozen=True, kw_only=True):
    """Delays of environments, a function of the seed, so that both sides have the same."""

    latency_s: float
    spread: float
    turns: int
    heavy: bool = False
    failures: float = 0.0

    def latencies(self, seed: int, environment: int, attempt: int) -> list[float]:
        chance = random.Random(f"waits {self.spread} {self.heavy} {seed} {environment} {attempt}")
        return [self._draw(chance) for _ in range(self.turns)]

    def crash_turn(self, seed: int, environment: int, attempt: int) -> int | None:
        """Return the turn in which the environment crashes."""
        chance = random.Random(f"crash {seed} {environment}")
        crashes = chance.random() < self.failures
        turn = chance.randrange(self.turns)
        return turn if crashes and attempt == 0 else None

    def _draw(self, chance: random.Random) -> float:
        if not self.heavy:
            return max(0.0, chance.gauss(self.latency_s, self.spread * self.latency_s))
        width = math.sqrt(math.log(1.0 + self.spread**2))
        return chance.lognormvariate(math.log(self.latency_s) - width**2 / 2.0, width)


class DelayEnvironment:
    """An environment that only waits."""

    words: ClassVar[tuple[str, ...]] = tuple(f"w{number}" for number in range(WORDS))
    turns_max: ClassVar[int] = 1_000_000
    tokens_max: ClassVar[int] = TOKENS
    agents: ClassVar[Mapping[str, MakeAgent]] = {}
    made: ClassVar[Counter[str]] = Counter()
    """Environments by trajectory: how often it was started."""

    def __init__(self, resources: ExternalResources, **options: object) -> None:
        self._latency_model = msgspec.convert(options, LatencyModel)
        self._trajectory = resources.trajectory
        self._turn = 0

    async def reset(self, seed: int) -> str:
        self._member = int(self._trajectory.rpartition("/")[2].partition(".")[0])
        self._attempt = self.made[self._trajectory]
        self.made[self._trajectory] += 1
        self._latencies = self._latency_model.latencies(seed, self._member, self._attempt)
        self._crash_turn = self._latency_model.crash_turn(seed, self._member, self._attempt)
        return self._observation()

    async def step(self, action: str) -> Step:
        await asyncio.sleep(self._latencies[self._turn])
        if self._turn == self._crash_turn:
            raise ConnectionResetError("the environment crashed")
        self._turn += 1
        return Step(observation=self._observation(), reward=1.0, done=self._turn == len(self._latencies))

    async def close(self) -> None:
        pass

    def _observation(self) -> str:
        return " ".join(self.words[(self._member + self._turn + word) % WORDS] for word in range(OBSERVED_WORDS))


class FixedLengthCodec:
    """A codec without an end-of-action token: every turn has the maximum length."""

    size = WORDS
    stop: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._id_by_word = {word: number for number, word in enumerate(DelayEnvironment.words)}

    def encode_observation(self, text: str, *, first: bool, cut: bool = False) -> tuple[int, ...]:
        return tuple(self._id_by_word[word] for word in text.split())

    def decode_action(self, tokens: Sequence[int]) -> str:
        return ""

    def encode_action(self, text: str) -> tuple[int, ...]:
        return self.encode_observation(text, first=False)


# ---- playing ------------------------------------------------------------------------------------------------------


def engine_settings(sizes: RolloutSizes) -> EngineSettings:
    return EngineSettings(
        slots=sizes.environments,
        context_max=sizes.turns * (OBSERVED_WORDS + TOKENS_MAX) + OBSERVED_WORDS,
        # All observations are prefilled in one step, as in a batch.
        chunk=sizes.environments * (OBSERVED_WORDS + 1),
    )


@asynccontextmanager
async def running_router(settings: EngineSettings, policy: PolicySettings) -> AsyncIterator[Router]:
    """Start a router with one engine and a new model."""
    from tangram.rl.model.transformer import Transformer, small_config
    from tangram.rl.model.weight_store import publish

    config = small_config(
        WORDS, layers=policy.layers, width=policy.width, heads=policy.heads, context_max=settings.context_max
    )
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
        weights = publish(Transformer.new(config, policy.seed), config, folder, 0)
        router = Router([ProcessEngine(settings)])
        await router.start(weights)
        try:
            yield router
        finally:
            await router.close()


class RolloutTiming(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of one side."""

    seconds: float
    cpu_s: float
    """CPU time of this process."""
    group: Group

    def generations(self) -> list[list[Span]]:
        """Spans of each environment, in the order of turns."""
        return [[span for span in each.spans if span.stage is Stage.GENERATE] for each in self.group.members]


async def play_group(
    generator: Router, sizes: RolloutSizes, waits: LatencyModel, seed: int, *, barrier: bool, tokens: int = TOKENS
) -> RolloutTiming:
    settings = RolloutSettings(
        engines=(engine_settings(sizes),),
        groups=GroupSettings(size=sizes.environments, size_min=1),
        tasks=(
            TaskSettings(
                name=TASK,
                environment="tangram.bench.rollout:DelayEnvironment",
                options=msgspec.to_builtins(waits),
                tokens_max=tokens,
                backoff_s=0.0,
            ),
        ),
    )
    DelayEnvironment.made.clear()
    async with Rollout(settings, generator, FixedLengthCodec(), barrier=barrier) as rollout:
        began, cpu_s = time.perf_counter(), time.process_time()
        group = await rollout.play(GroupTicket(task=TASK, number=0, seed=seed))
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    assert group.is_complete, group.cause
    return RolloutTiming(seconds=seconds, cpu_s=cpu_s, group=group)


def batch_s(side: RolloutTiming) -> float:
    """Engine time of a whole batch on the turn-batched side: from the last environment's answer to the end of the last
    turn."""
    turns = zip(*side.generations(), strict=True)
    return statistics.fmean(
        max(span.ended_s for span in spans) - max(span.began_s for span in spans) for spans in turns
    )


def ideal(waits: LatencyModel, seed: int, environments: int, *, together_s: float, single_s: float) -> float:
    """The ratio in the barrier model, with the engine time of a turn of all environments and of a single one."""
    drawn = [waits.latencies(seed, environment, 0) for environment in range(environments)]
    batched = sum(together_s + max(turn) for turn in zip(*drawn, strict=True))
    alone = max(sum(single_s + latency for latency in each) for each in drawn)
    return batched / alone


# ---- the benchmark ------------------------------------------------------------------------------------------------


async def measure(sizes: RolloutSizes, run: BenchRun) -> None:
    advance = step_counter(run.progress, len(sizes.spreads) * sizes.seeds + sizes.heavy_seeds)
    cpu_ms, engine_s, read, shares = [], [], [], {}
    async with running_router(engine_settings(sizes), PolicySettings(layers=sizes.layers, width=sizes.width)) as router:
        tokens = await _calibrate_tokens(router, sizes)
        single_s = await _single_s(router, sizes, tokens)
        for spread in sizes.spreads:
            waits = LatencyModel(latency_s=sizes.latency_s, spread=spread, turns=sizes.turns)
            ratios, ideals = [], []
            for seed in range(sizes.seeds):
                batched, alone = await _play_both(router, sizes, waits, seed, tokens)
                ratios.append(batched.seconds / alone.seconds)
                together_s = batch_s(batched)
                engine_s.append(together_s)
                ideals.append(ideal(waits, seed, sizes.environments, together_s=together_s, single_s=single_s))
                cpu_ms.append(1e3 * alone.cpu_s / (sizes.environments * sizes.turns))
                read += [turn.prefilled for each in alone.group.members for turn in each.turns]
                advance(f"σ/μ {spread}")
            shares[spread] = _add(run, f"s{round(spread * 10):02d}", ratios, ideals)
        heavy = await _play_heavy(router, sizes, tokens, advance)
    run.add("share_of_ideal_min", min(shares.values()), at_least(0.9))
    run.add("speedup_heavy", mean_of(heavy), PRINTED)
    run.add("tokens_per_turn", tokens, PRINTED)
    run.add("batch_s", statistics.fmean(engine_s), PRINTED)
    run.add("single_s", single_s, PRINTED)
    run.add("batch_share_of_latency", statistics.fmean(engine_s) / sizes.latency_s, PRINTED)
    run.add("prefilled_per_turn", statistics.fmean(read), PRINTED)
    run.add("cpu_ms_per_turn", statistics.fmean(cpu_ms), PRINTED)
    run.notes += [
        "ideal: a barrier model with the same delays, in which a turn of the whole batch takes batch_s, and a turn"
        " at trajectory level single_s, as if it had the engine to itself.",
        f"heavy: log-normal delays of σ/μ {sizes.heavy_spread}, {sizes.failures:.0%} of the environments crash once.",
        f"prefilled_per_turn: tokens that the engine prefilled for a turn at trajectory level, of which"
        f" {OBSERVED_WORDS} are new and one is the last token of the previous turn.",
        "cpu_ms_per_turn: CPU time of the rollout process per turn at trajectory level.",
    ]


def _add(run: BenchRun, name: str, ratios: list[float], ideals: list[float]) -> float:
    """Add the metrics and return the share of the ideal."""
    share: Interval = paired_ratio_of_values(ratios, ideals)
    run.add(f"speedup_{name}", mean_of(ratios), PRINTED)
    run.add(f"ideal_{name}", mean_of(ideals), PRINTED)
    run.add(f"share_of_ideal_{name}", share, at_least(0.9))
    return share.mean


async def _play_both(
    router: Router, sizes: RolloutSizes, waits: LatencyModel, seed: int, tokens: int
) -> tuple[RolloutTiming, RolloutTiming]:
    batched = await play_group(router, sizes, waits, seed, barrier=True, tokens=tokens)
    alone = await play_group(router, sizes, waits, seed, barrier=False, tokens=tokens)
    return batched, alone


async def _play_heavy(router: Router, sizes: RolloutSizes, tokens: int, advance: Callable[[str], None]) -> list[float]:
    waits = LatencyModel(
        latency_s=sizes.latency_s, spread=sizes.heavy_spread, turns=sizes.turns, heavy=True, failures=sizes.failures
    )
    ratios = []
    for seed in range(sizes.heavy_seeds):
        batched, alone = await _play_both(router, sizes, waits, seed, tokens)
        ratios.append(batched.seconds / alone.seconds)
        advance("heavy")
    return ratios


async def _calibrate_tokens(router: Router, sizes: RolloutSizes) -> int:
    """Return the tokens per turn that give a turn of all environments its share of the delays. The first steps of a
    process are slow, and later turns slower than first ones, so all turns are played, once to warm up and once to
    measure."""
    waits = LatencyModel(latency_s=0.001, spread=0.5, turns=sizes.turns)
    await play_group(router, sizes, waits, 0, barrier=True)
    took_s = batch_s(await play_group(router, sizes, waits, 1, barrier=True))
    return min(max(round(TOKENS * sizes.batch_share * sizes.latency_s / took_s), 1), TOKENS_MAX)


async def _single_s(router: Router, sizes: RolloutSizes, tokens: int) -> float:
    """Engine time of a turn when the engine is otherwise idle."""
    waits = LatencyModel(latency_s=0.001, spread=0.5, turns=sizes.turns)
    side = await play_group(
        router, msgspec.structs.replace(sizes, environments=1), waits, 0, barrier=False, tokens=tokens
    )
    return statistics.median(span.ended_s - span.began_s for span in side.generations()[0])
