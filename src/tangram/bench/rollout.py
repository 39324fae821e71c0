"""Episodes at their own pace against episodes in batches of turns, on the same real engine.

So many environments play so many equal turns. An environment answers after a wait, drawn from N(μ, σ) and not less
than 0, the same on both sides; a turn is a fixed number of tokens, written by a transformer in a process of its own
that serves all environments at once. Turn-batched, all turns are written as one batch, and the next batch begins when
the slowest environment has answered. At the level of trajectories, nobody waits for anybody.

`speedup_sNN` is the ratio of the times until the last trajectory has ended, for σ / μ of 0.1 to 1.0; beside it stands
`ideal_sNN`, what a barrier model gives with the same waits L, the engine time B of a turn of the whole batch, and the
engine time A of a turn that is alone in the engine, both as measured:

    ideal = sum over turns of (B + max over environments of L)  /  max over environments of sum over turns of (A + L)

Nobody can be faster than that, since no turn is ever alone in the engine.

`speedup_heavy`: waits are log-normal, and some environments crash once and begin anew.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import msgspec

from tangram.bench.base import PRINTED, BenchResult, Findings, Progress, at_least, paired_values
from tangram.reports.statistics import Interval, mean_of
from tangram.rl.config.rollout_settings import (
    EngineSettings,
    GroupSettings,
    PolicySettings,
    RolloutSettings,
    TaskSettings,
)
from tangram.rl.environments.protocol import MakeAgent, Outside, Step
from tangram.rl.inference.engines.process import ProcessEngine
from tangram.rl.inference.router import Gateway
from tangram.rl.rollout.records import Group, Span, Stage, Ticket
from tangram.rl.rollout.rollout import Rollout

SPREADS = (0.1, 0.3, 0.5, 0.7, 1.0)
"""σ / μ."""
WORDS = 60
"""In the vocabulary; what they are does not matter."""
SEEN = 3
"""Tokens of an observation."""
TOKENS, TOKENS_MAX = 4, 12
"""Of a turn: to measure how long one takes, and at most."""
TASK = "waits"


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    environments: int = 128
    turns: int = 20
    latency_s: float = 0.3
    """μ"""
    batch_share: float = 0.15
    """Of μ: what the engine should take for a turn of all environments. So many tokens are written in a turn."""
    layers: int = 2
    width: int = 64
    spreads: tuple[float, ...] = SPREADS
    seeds: int = 5
    heavy_seeds: int = 2
    heavy_spread: float = 1.0
    """σ / μ of the log-normal waits."""
    failures: float = 0.05
    """Share of the environments that crash once, at any turn."""


FULL = Sizes()
QUICK = Sizes(turns=8, spreads=(0.1, 0.5, 1.0), seeds=1, heavy_seeds=1)


# ---- waits --------------------------------------------------------------------------------------------------------


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """How long environments take: made of a seed, so that both sides have the same."""

    latency_s: float
    spread: float
    turns: int
    heavy: bool = False
    failures: float = 0.0

    def of(self, seed: int, environment: int, attempt: int) -> list[float]:
        chance = random.Random(f"waits {self.spread} {self.heavy} {seed} {environment} {attempt}")
        return [self._draw(chance) for _ in range(self.turns)]

    def crash(self, seed: int, environment: int, attempt: int) -> int | None:
        """The turn in which it crashes."""
        chance = random.Random(f"crash {seed} {environment}")
        crashes = chance.random() < self.failures
        turn = chance.randrange(self.turns)
        return turn if crashes and attempt == 0 else None

    def _draw(self, chance: random.Random) -> float:
        if not self.heavy:
            return max(0.0, chance.gauss(self.latency_s, self.spread * self.latency_s))
        width = math.sqrt(math.log(1.0 + self.spread**2))
        return chance.lognormvariate(math.log(self.latency_s) - width**2 / 2.0, width)


class Waiting:
    """An environment that does nothing but take its time."""

    words: ClassVar[tuple[str, ...]] = tuple(f"w{number}" for number in range(WORDS))
    turns_max: ClassVar[int] = 1_000_000
    tokens_max: ClassVar[int] = TOKENS
    agents: ClassVar[Mapping[str, MakeAgent]] = {}
    made: ClassVar[Counter[str]] = Counter()
    """Environments of each trajectory: how often it began."""

    def __init__(self, outside: Outside, **options: object) -> None:
        self._waits = msgspec.convert(options, Waits)
        self._trajectory = outside.trajectory
        self._turn = 0

    async def reset(self, seed: int) -> str:
        self._member = int(self._trajectory.rpartition("/")[2].partition(".")[0])
        self._attempt = self.made[self._trajectory]
        self.made[self._trajectory] += 1
        self._latencies = self._waits.of(seed, self._member, self._attempt)
        self._crash = self._waits.crash(seed, self._member, self._attempt)
        return self._said()

    async def step(self, action: str) -> Step:
        await asyncio.sleep(self._latencies[self._turn])
        if self._turn == self._crash:
            raise ConnectionResetError("the environment crashed")
        self._turn += 1
        return Step(observation=self._said(), reward=1.0, done=self._turn == len(self._latencies))

    async def close(self) -> None:
        pass

    def _said(self) -> str:
        return " ".join(self.words[(self._member + self._turn + word) % WORDS] for word in range(SEEN))


class Fixed:
    """A codec without a token that ends an action: every turn has as many as are allowed."""

    size = WORDS
    stop: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._id_by_word = {word: number for number, word in enumerate(Waiting.words)}

    def observation(self, text: str, *, first: bool, cut: bool = False) -> tuple[int, ...]:
        return tuple(self._id_by_word[word] for word in text.split())

    def action(self, tokens: Sequence[int]) -> str:
        return ""

    def written(self, text: str) -> tuple[int, ...]:
        return self.observation(text, first=False)


# ---- playing ------------------------------------------------------------------------------------------------------


def engine_settings(sizes: Sizes) -> EngineSettings:
    return EngineSettings(
        slots=sizes.environments,
        context_max=sizes.turns * (SEEN + TOKENS_MAX) + SEEN,
        # All that environments said is read in one step, as in a batch.
        chunk=sizes.environments * (SEEN + 1),
    )


@asynccontextmanager
async def serving(settings: EngineSettings, policy: PolicySettings) -> AsyncIterator[Gateway]:
    """A gateway with one engine and a new model."""
    from tangram.rl.model.transformer import Transformer, small
    from tangram.rl.model.weight_store import publish

    config = small(
        WORDS, layers=policy.layers, width=policy.width, heads=policy.heads, context_max=settings.context_max
    )
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
        weights = publish(Transformer.new(config, policy.seed), config, folder, 0)
        gateway = Gateway([ProcessEngine(settings)])
        await gateway.start(weights)
        try:
            yield gateway
        finally:
            await gateway.close()


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One way of playing, once."""

    seconds: float
    cpu_s: float
    """Of this process."""
    group: Group

    def generations(self) -> list[list[Span]]:
        """Of each environment, in the order of turns."""
        return [[span for span in each.spans if span.stage is Stage.GENERATE] for each in self.group.members]


async def play(
    generator: Gateway, sizes: Sizes, waits: Waits, seed: int, *, barrier: bool, tokens: int = TOKENS
) -> Side:
    settings = RolloutSettings(
        engines=(engine_settings(sizes),),
        groups=GroupSettings(size=sizes.environments, size_min=1),
        tasks=(
            TaskSettings(
                name=TASK,
                environment="tangram.bench.rollout:Waiting",
                options=msgspec.to_builtins(waits),
                tokens_max=tokens,
                backoff_s=0.0,
            ),
        ),
    )
    Waiting.made.clear()
    async with Rollout(settings, generator, Fixed(), barrier=barrier) as rollout:
        began, cpu_s = time.perf_counter(), time.process_time()
        group = await rollout.play(Ticket(task=TASK, number=0, seed=seed))
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    assert group.whole, group.cause
    return Side(seconds=seconds, cpu_s=cpu_s, group=group)


def batch_s(side: Side) -> float:
    """What the engine took for a whole batch, on the turn-batched side: from when the last environment had answered
    until the last turn was written."""
    turns = zip(*side.generations(), strict=True)
    return statistics.fmean(
        max(span.ended_s for span in spans) - max(span.began_s for span in spans) for spans in turns
    )


def ideal(waits: Waits, seed: int, environments: int, *, together_s: float, single_s: float) -> float:
    """The barrier model, with the engine time of a turn of all environments, and of one that is alone."""
    drawn = [waits.of(seed, environment, 0) for environment in range(environments)]
    batched = sum(together_s + max(turn) for turn in zip(*drawn, strict=True))
    alone = max(sum(single_s + latency for latency in each) for each in drawn)
    return batched / alone


# ---- the benchmark ------------------------------------------------------------------------------------------------


def measure(sizes: Sizes, *, trace: Path | None, processes: int | None, progress: Progress) -> BenchResult:
    return asyncio.run(_measure(sizes, progress))


class _Told:
    """Progress by rounds of both sides."""

    def __init__(self, sizes: Sizes, progress: Progress) -> None:
        self._left = self._all = len(sizes.spreads) * sizes.seeds + sizes.heavy_seeds
        self._progress = progress

    def one(self, words: str) -> None:
        self._left -= 1
        self._progress(1.0 - self._left / self._all, words)


async def _measure(sizes: Sizes, progress: Progress) -> BenchResult:
    found, told = Findings(), _Told(sizes, progress)
    cpu_ms, engine_s, read, shares = [], [], [], {}
    async with serving(engine_settings(sizes), PolicySettings(layers=sizes.layers, width=sizes.width)) as gateway:
        tokens = await _tokens(gateway, sizes)
        single_s = await _single_s(gateway, sizes, tokens)
        for spread in sizes.spreads:
            waits = Waits(latency_s=sizes.latency_s, spread=spread, turns=sizes.turns)
            ratios, ideals = [], []
            for seed in range(sizes.seeds):
                batched, alone = await _both(gateway, sizes, waits, seed, tokens)
                ratios.append(batched.seconds / alone.seconds)
                together_s = batch_s(batched)
                engine_s.append(together_s)
                ideals.append(ideal(waits, seed, sizes.environments, together_s=together_s, single_s=single_s))
                cpu_ms.append(1e3 * alone.cpu_s / (sizes.environments * sizes.turns))
                read += [turn.prefilled for each in alone.group.members for turn in each.turns]
                told.one(f"σ/μ {spread}")
            shares[spread] = _add(found, f"s{round(spread * 10):02d}", ratios, ideals)
        heavy = await _heavy(gateway, sizes, tokens, told)
    found.add("share_of_ideal_min", min(shares.values()), at_least(0.9))
    found.add("speedup_heavy", mean_of(heavy), PRINTED)
    found.add("tokens_per_turn", tokens, PRINTED)
    found.add("batch_s", statistics.fmean(engine_s), PRINTED)
    found.add("single_s", single_s, PRINTED)
    found.add("batch_share_of_latency", statistics.fmean(engine_s) / sizes.latency_s, PRINTED)
    found.add("prefilled_per_turn", statistics.fmean(read), PRINTED)
    found.add("cpu_ms_per_turn", statistics.fmean(cpu_ms), PRINTED)
    found.notes += [
        "ideal: a barrier model with the same waits, in which a turn of the whole batch takes batch_s, and a turn"
        " at the level of trajectories single_s, as if it were alone there.",
        f"heavy: log-normal waits of σ/μ {sizes.heavy_spread}, {sizes.failures:.0%} of the environments crash once.",
        f"prefilled_per_turn: tokens that the engine read for a turn at the level of trajectories, of which {SEEN} are"
        " new and one was written last.",
        "cpu_ms_per_turn: CPU time of the process of the rollout, for a turn at the level of trajectories.",
    ]
    return found.result("rollout", "measured", sizes)


def _add(found: Findings, name: str, ratios: list[float], ideals: list[float]) -> float:
    """The share of the ideal."""
    share: Interval = paired_values(ratios, ideals)
    found.add(f"speedup_{name}", mean_of(ratios), PRINTED)
    found.add(f"ideal_{name}", mean_of(ideals), PRINTED)
    found.add(f"share_of_ideal_{name}", share, at_least(0.9))
    return share.mean


async def _both(gateway: Gateway, sizes: Sizes, waits: Waits, seed: int, tokens: int) -> tuple[Side, Side]:
    batched = await play(gateway, sizes, waits, seed, barrier=True, tokens=tokens)
    alone = await play(gateway, sizes, waits, seed, barrier=False, tokens=tokens)
    return batched, alone


async def _heavy(gateway: Gateway, sizes: Sizes, tokens: int, told: _Told) -> list[float]:
    waits = Waits(
        latency_s=sizes.latency_s, spread=sizes.heavy_spread, turns=sizes.turns, heavy=True, failures=sizes.failures
    )
    ratios = []
    for seed in range(sizes.heavy_seeds):
        batched, alone = await _both(gateway, sizes, waits, seed, tokens)
        ratios.append(batched.seconds / alone.seconds)
        told.one("heavy")
    return ratios


async def _tokens(gateway: Gateway, sizes: Sizes) -> int:
    """How many make a turn of all environments take its share of the waits. The first steps of a process are slow, and
    later turns slower than first ones, so all are played, once to warm up and once to measure."""
    waits = Waits(latency_s=0.001, spread=0.5, turns=sizes.turns)
    await play(gateway, sizes, waits, 0, barrier=True)
    took_s = batch_s(await play(gateway, sizes, waits, 1, barrier=True))
    return min(max(round(TOKENS * sizes.batch_share * sizes.latency_s / took_s), 1), TOKENS_MAX)


async def _single_s(gateway: Gateway, sizes: Sizes, tokens: int) -> float:
    """What the engine takes for a turn while it has nothing else to do."""
    waits = Waits(latency_s=0.001, spread=0.5, turns=sizes.turns)
    side = await play(gateway, msgspec.structs.replace(sizes, environments=1), waits, 0, barrier=False, tokens=tokens)
    return statistics.median(span.ended_s - span.began_s for span in side.generations()[0])
