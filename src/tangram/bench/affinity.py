"""Tasks on the class of hardware that suits them, against fleets of one class at equal cost. Emulated.

Two tasks are played together: `reader` has several turns, in each of which it reads a long observation and writes a
word; `writer` reads a line and writes a long answer. Its prefix stays with a session, so a turn reads only what is new.
Engines, gateway and routing are real; each engine is a process whose reading and writing take at least as long as
emulated hardware would. The classes differ as published: compute 989.5 : 148, bandwidth 3.35 : 4.0, cost 2.85 : 1. What
reading a token takes against a step of writing is a choice of this benchmark, stated in its settings; slots, the
requests that an engine serves at once, are the same for both classes.

Fleets cost about the same: `compute` alone, `bandwidth` alone, and a mix in which readers go to compute and writers to
bandwidth. As many requests are under way as a fleet has places. `gain_vs_*` is the time of a fleet of one class over
that of the mix, seed by seed; `emulated_gain_min` the smaller of both.

Beside it stand the simulated gains on the published fleets, tasks and models: see sim/serving.py.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import msgspec

from tangram.bench.base import PRINTED, BenchResult, Findings, Progress, at_least, paired_values, part
from tangram.rl.config.rollout_settings import EngineSettings
from tangram.rl.inference.affinity import BANDWIDTH, COMPUTE, PUBLISHED
from tangram.rl.inference.engines.process import ProcessEngine
from tangram.rl.inference.engines.protocol import Generation, Noise, Request, Sampling, Weights
from tangram.rl.inference.profiler import Profiler
from tangram.rl.inference.router import Gateway
from tangram.sim.serving import PUBLISHED_VS_BANDWIDTH, PUBLISHED_VS_COMPUTE, AffinityGains, affinity_gains
from tangram.sim.serving_model import MODELS, QWEN3_8B, QWEN3_14B, QWEN3_32B

READER, WRITER = "reader", "writer"
MIX = "mix"
FLEETS: Mapping[str, Mapping[str, int]] = {
    COMPUTE: {COMPUTE: 2},
    BANDWIDTH: {BANDWIDTH: 6},
    MIX: {COMPUTE: 1, BANDWIDTH: 3},
}
"""Engines by class. They cost 5.7, 6 and 5.85."""
AFFINITY = {READER: COMPUTE, WRITER: BANDWIDTH}
WORDS = 64
"""In the vocabulary; what they are does not matter."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    seeds: int = 3
    sessions: int = 12
    """Of readers, all under way at once."""
    turns: int = 3
    observation: int = 40
    """Tokens that a reader reads in a turn, on average."""
    word: int = 3
    """Tokens that it writes."""
    writers: int = 72
    question: int = 4
    answer: int = 20
    """Tokens that a writer writes, on average."""
    varied: float = 0.2
    """Observations and answers are by up to this share longer or shorter, by chance."""
    slots: int = 13
    chunk: int = 480
    """What all sessions of readers read at once: between two chunks there is a step of writing."""
    prefill_s_per_token: float = 0.0015
    """On compute."""
    decode_s_per_step: float = 0.06
    """On compute. A step of writing takes as long as reading 40 tokens."""
    simulated: tuple[str, ...] = (QWEN3_8B.name, QWEN3_14B.name, QWEN3_32B.name)
    """Models."""
    simulated_ended: int = 3072
    """Trajectories."""


FULL = Sizes()
QUICK = Sizes(seeds=1, writers=36, turns=2, simulated=(QWEN3_8B.name,), simulated_ended=1024)


# ---- the work -----------------------------------------------------------------------------------------------------


class Reader(msgspec.Struct, frozen=True):
    name: str
    observations: tuple[int, ...]
    """Tokens of each."""


class Writer(msgspec.Struct, frozen=True):
    name: str
    question: int
    answer: int


def drawn(sizes: Sizes, seed: int) -> tuple[list[Reader], list[Writer]]:
    """The same for all fleets."""
    chance = random.Random(f"affinity {seed}")

    def about(mean: int) -> int:
        return max(1, round(mean * chance.uniform(1.0 - sizes.varied, 1.0 + sizes.varied)))

    readers = [
        Reader(f"reader-{seed}-{number}", tuple(about(sizes.observation) for _ in range(sizes.turns)))
        for number in range(sizes.sessions)
    ]
    writers = [
        Writer(f"writer-{seed}-{number}", sizes.question, about(sizes.answer)) for number in range(sizes.writers)
    ]
    return readers, writers


class Player:
    """Plays the work on one fleet. Whoever is under way has one of as many places as its engines have slots, less one
    of each: then no engine queues anybody, to whom a session could lose its prefix between two turns. A session has
    its place for all of its turns."""

    def __init__(self, gateway: Gateway, fleet: str, sizes: Sizes, profiler: Profiler) -> None:
        self._gateway = gateway
        self._fleet = fleet
        self._sizes = sizes
        self._profiler = profiler
        counts = FLEETS[fleet]
        shared = asyncio.Semaphore(sum(counts.values()) * (sizes.slots - 1))
        apart = {name: asyncio.Semaphore(count * (sizes.slots - 1)) for name, count in counts.items()}
        self._places = {task: apart[AFFINITY[task]] if fleet == MIX else shared for task in AFFINITY}

    async def play(self, seed: int) -> float:
        """The seconds that it took."""
        readers, writers = drawn(self._sizes, seed)
        began = time.perf_counter()
        # Readers come first: they are the same number everywhere, and take a place for all of their turns.
        async with asyncio.TaskGroup() as group:
            for reader in readers:
                group.create_task(self._read(reader, seed))
            for writer in writers:
                group.create_task(self._write(writer, seed))
        return time.perf_counter() - began

    async def _read(self, reader: Reader, seed: int) -> None:
        tokens: tuple[int, ...] = ()
        async with self._places[READER]:
            for turn, length in enumerate(reader.observations):
                tokens = (*tokens, *_words(length, turn))
                request = Request(
                    id=f"{reader.name}-{turn}",
                    session=f"{self._fleet}-{reader.name}",  # what another fleet has read is not to be had
                    task=READER,
                    tokens=tokens,
                    sampling=Sampling(tokens_max=self._sizes.word),
                    noise=Noise(seed=seed),
                )
                tokens = (*tokens, *(await self._asked(request)).tokens)

    async def _write(self, writer: Writer, seed: int) -> None:
        async with self._places[WRITER]:
            request = Request(
                id=writer.name,
                task=WRITER,
                tokens=_words(writer.question, 0),
                sampling=Sampling(tokens_max=writer.answer),
                noise=Noise(seed=seed),
            )
            await self._asked(request)

    async def _asked(self, request: Request) -> Generation:
        found = await self._gateway.generate(request)
        assert len(found.tokens) == request.sampling.tokens_max
        self._profiler.add_generation(request.task, found, context=len(request.tokens))
        return found


def _words(count: int, turn: int) -> tuple[int, ...]:
    return tuple((7 * turn + 3 * number) % WORDS for number in range(count))


# ---- fleets -------------------------------------------------------------------------------------------------------


def engine_settings(sizes: Sizes, hardware: str, count: int) -> EngineSettings:
    """Speeds of a class, by the published ratios to `compute`."""
    own, base = PUBLISHED[hardware], PUBLISHED[COMPUTE]
    longest = sizes.turns * (sizes.observation * (1.0 + sizes.varied) + sizes.word) + 2
    return EngineSettings(
        name=hardware,
        hardware=hardware,
        count=count,
        slots=sizes.slots,
        chunk=sizes.chunk,
        context_max=max(round(longest), sizes.question + round(sizes.answer * (1.0 + sizes.varied)) + 2),
        prefill_s_per_token=sizes.prefill_s_per_token * base.tflops / own.tflops,
        decode_s_per_step=sizes.decode_s_per_step * base.bandwidth_tb_s / own.bandwidth_tb_s,
    )


def cost(fleet: str) -> float:
    return sum(PUBLISHED[name].cost * count for name, count in FLEETS[fleet].items())


class Lent:
    """An engine that runs already: fleets are made of the same processes, one after the other."""

    def __init__(self, engine: ProcessEngine) -> None:
        self.name, self.hardware, self.trains = engine.name, engine.hardware, engine.trains
        self.generate, self.statistics = engine.generate, engine.statistics
        self.fetch, self.suspend, self.update, self.resume = engine.fetch, engine.suspend, engine.update, engine.resume

    async def start(self, weights: Weights) -> None:
        pass

    async def close(self) -> None:
        pass


@asynccontextmanager
async def running(sizes: Sizes) -> AsyncIterator[list[ProcessEngine]]:
    """As many engines of each class as a fleet has at most."""
    counts = {name: max(fleet.get(name, 0) for fleet in FLEETS.values()) for name in PUBLISHED}
    engines = [
        ProcessEngine(engine_settings(sizes, name, count), number, record_steps=True)
        for name, count in counts.items()
        for number in range(count)
    ]
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
        weights = _published(sizes, folder)
        try:
            await asyncio.gather(*(engine.start(weights) for engine in engines))
            await asyncio.gather(*(_warm(engine, sizes) for engine in engines))
            yield engines
        finally:
            await asyncio.gather(*(engine.close() for engine in engines))


async def _warm(engine: ProcessEngine, sizes: Sizes) -> None:
    """The first steps of a process are slow."""
    sampling, noise = Sampling(tokens_max=3), Noise(seed=0)
    requests = [
        Request(id=f"warm-{slot}", tokens=_words(8, 0), sampling=sampling, noise=noise) for slot in range(sizes.slots)
    ]
    await asyncio.gather(*(engine.generate(request) for request in requests))


def fleet_of(name: str, engines: Sequence[ProcessEngine]) -> Gateway:
    chosen = [
        Lent(engine)
        for hardware, count in FLEETS[name].items()
        for engine in [each for each in engines if each.hardware == hardware][:count]
    ]
    return Gateway(chosen, affinity=AFFINITY if name == MIX else {})


def _published(sizes: Sizes, folder: str) -> Weights:
    from tangram.rl.model.transformer import Transformer, small
    from tangram.rl.model.weight_store import publish

    config = small(WORDS, layers=1, width=32, heads=2, context_max=engine_settings(sizes, COMPUTE, 1).context_max)
    return publish(Transformer.new(config, 0), config, folder, 0)


# ---- the benchmark ------------------------------------------------------------------------------------------------


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One fleet."""

    seconds: tuple[float, ...]
    """By seed."""
    prefilled: int
    """Tokens that readers had read."""
    recommended: tuple[str, ...]
    """What the profiler says of it."""


def measure(sizes: Sizes, *, trace: Path | None, processes: int | None, progress: Progress) -> BenchResult:
    found = Findings()
    sides, slower = asyncio.run(_played(sizes, part(progress, 0.0, 0.8)))
    _compare(found, sides)
    found.add("slower_than_emulated", slower, PRINTED)
    progress(0.8, "simulating")
    gains = affinity_gains(
        models=[MODELS[name] for name in sizes.simulated],
        warm_up=sizes.simulated_ended // 3,
        ended=sizes.simulated_ended,
    )
    _add_simulated(found, gains)
    progress(1.0)
    return found.result("affinity", "emulated", sizes)


async def _played(sizes: Sizes, progress: Progress) -> tuple[dict[str, Side], float]:
    """Of each fleet, and what steps took over what was emulated."""
    sides = {}
    progress(0.0, "starting engines")
    async with running(sizes) as engines:
        for number, fleet in enumerate(FLEETS):
            progress((1 + number) / (1 + len(FLEETS)), fleet)
            sides[fleet] = await _side(fleet_of(fleet, engines), fleet, sizes)
    return sides, _slower(engines, sizes)


def _slower(engines: Sequence[ProcessEngine], sizes: Sizes) -> float:
    """What steps took over what they should take. Only those before which nothing was said to an engine: before others
    it may have had nothing to do."""
    took_s = emulated_s = 0.0
    for engine in engines:
        speed = engine_settings(sizes, engine.hardware, 1)
        for before, step in pairwise(engine.steps):
            if not step.commands:
                took_s += step.ended_s - before.ended_s
                emulated_s += step.prefilled * speed.prefill_s_per_token
                emulated_s += speed.decode_s_per_step if step.decoded else 0.0
    return took_s / emulated_s


async def _side(gateway: Gateway, fleet: str, sizes: Sizes) -> Side:
    await gateway.start(Weights(version=0, folder=""))
    profiler = Profiler()
    player = Player(gateway, fleet, sizes, profiler)
    seconds = [await player.play(seed) for seed in range(sizes.seeds)]
    statistics = gateway.statistics()
    assert not statistics.resumed and not statistics.fallbacks, "no engine died"
    await gateway.close()
    return Side(
        seconds=tuple(seconds),
        prefilled=profiler.work(READER).prefilled,
        recommended=tuple(profiler.lines()),
    )


def _compare(found: Findings, sides: Mapping[str, Side]) -> None:
    mapped = sides[MIX].seconds
    gains = {name: paired_values(sides[name].seconds, mapped) for name in (COMPUTE, BANDWIDTH)}
    least = min(gains, key=lambda name: gains[name].mean)
    found.add("emulated_gain_min", gains[least], at_least(1.2))
    for name, gain in gains.items():
        found.add(f"gain_vs_{name}", gain, PRINTED)
    for name, side in sides.items():
        found.sides[name] = {
            "seconds": sum(side.seconds) / len(side.seconds),
            "cost": cost(name),
            "prefilled": side.prefilled / len(side.seconds),
        }
    found.notes += [
        f"emulated_gain_min is that against {least} alone; fleets cost "
        + ", ".join(f"{cost(name):g} ({name})" for name in FLEETS)
        + ".",
        "Emulated: gateway, engines and routing are real, speeds are waits by the published ratios of the classes.",
        "There is as much to read and to write as keeps both classes of the mix busy for about as long: there the gain "
        "is greatest. Of work that is all of one kind, a part of the mix would have nothing to do.",
        "slower_than_emulated: what steps took over what was emulated; 1 means that this machine was no limit.",
        *(f"Profiler, told of what the {MIX} played: {line}" for line in sides[MIX].recommended),
    ]


def _add_simulated(found: Findings, gains: AffinityGains) -> None:
    for name, spread, published in (
        ("simulated_vs_compute", gains.simulated_vs_compute, PUBLISHED_VS_COMPUTE),
        ("simulated_vs_bandwidth", gains.simulated_vs_bandwidth, PUBLISHED_VS_BANDWIDTH),
    ):
        found.add(name, spread.mean, PRINTED)
        found.add(f"{name}_low", spread.low, PRINTED)
        found.add(f"{name}_high", spread.high, PRINTED)
        found.notes.append(f"{name}: published {published[0]:.2f}-{published[1]:.2f}; low and high over the models.")
    found.notes.append(
        "Simulated: a roofline of the published devices times efficiencies that were fitted to another figure of the "
        "same publication (each task alone on 2 H800 or 6 H20); rate of tokens in the steady state of the published "
        "fleets and tasks, divided by two."
    )
