"""Hardware affinity: tasks on the class of hardware that suits them, against fleets of one class at equal cost.
Emulated.

Two tasks run together. `reader` has several turns and in each reads a long observation and writes a word; `writer`
reads a line and writes a long answer. The prefix of a session stays in the KV cache, so a turn prefills only new
tokens. Engines, router and routing are real; each engine is a process whose prefill and decoding take at least as long
as on the emulated hardware. The classes differ as published: compute 989.5 : 148, bandwidth 3.35 : 4.0, cost 2.85 : 1.
The ratio of prefill time to decode time is a choice of this benchmark, stated in its settings. Slots (concurrent
requests per engine) are the same for both classes, and as many requests are in flight as a fleet has slots.

The result also contains the simulated gains on the published fleets, tasks and models; see sim/serving.py.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

import msgspec

from tangram.bench.base import PRINTED, BenchRun, Progress, at_least, paired_ratio_of_values, subprogress
from tangram.rl.config.rollout_settings import EngineSettings
from tangram.rl.inference.affinity import BANDWIDTH, COMPUTE, HARDWARE_BY_CLASS
from tangram.rl.inference.engines.process import ProcessEngine
from tangram.rl.inference.engines.protocol import Generation, GenerationRequest, PolicyWeights, Sampling, SamplingSeed
from tangram.rl.inference.profiler import Profiler
from tangram.rl.inference.router import Router
from tangram.sim.serving import PUBLISHED_VS_BANDWIDTH, PUBLISHED_VS_COMPUTE, AffinityGains, affinity_gains
from tangram.sim.serving_model import MODELS, QWEN3_8B, QWEN3_14B, QWEN3_32B

READER, WRITER = "reader", "writer"
MIX = "mix"
FLEETS: Mapping[str, Mapping[str, int]] = {
    COMPUTE: {COMPUTE: 2},
    BANDWIDTH: {BANDWIDTH: 6},
    MIX: {COMPUTE: 1, BANDWIDTH: 3},
}
"""Engines by class. The fleets cost 5.7, 6 and 5.85."""
AFFINITY = {READER: COMPUTE, WRITER: BANDWIDTH}
WORDS = 64
"""Vocabulary size; the tokens themselves do not matter."""


class AffinitySizes(msgspec.Struct, frozen=True, kw_only=True):
    seeds: int = 3
    sessions: int = 12
    """Readers, all in flight at once."""
    turns: int = 3
    observation: int = 40
    """Mean tokens that a reader reads in a turn."""
    word: int = 3
    """Tokens that a reader writes in a turn."""
    writers: int = 72
    question: int = 4
    answer: int = 20
    """Mean tokens that a writer writes."""
    varied: float = 0.2
    """Lengths vary uniformly by up to this share."""
    slots: int = 13
    chunk: int = 480
    """Prompt tokens that all readers of an engine prefill between two decode steps."""
    prefill_s_per_token: float = 0.0015
    """Seconds on the compute class."""
    decode_s_per_step: float = 0.06
    """Seconds on the compute class. A decode step takes as long as the prefill of 40 tokens."""
    simulated: tuple[str, ...] = (QWEN3_8B.name, QWEN3_14B.name, QWEN3_32B.name)
    """Models of the simulated gains."""
    simulated_ended: int = 3072
    """Trajectories of the simulated gains."""


LABEL = "emulated"
FULL = AffinitySizes()
QUICK = AffinitySizes(seeds=1, writers=36, turns=2, simulated=(QWEN3_8B.name,), simulated_ended=1024)


# ---- the work -----------------------------------------------------------------------------------------------------


class Reader(msgspec.Struct, frozen=True):
    name: str
    observations: tuple[int, ...]
    """Tokens of each observation."""


class Writer(msgspec.Struct, frozen=True):
    name: str
    question: int
    answer: int


def draw_work(sizes: AffinitySizes, seed: int) -> tuple[list[Reader], list[Writer]]:
    """Draw the work of a seed, the same for all fleets."""
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


class FleetDriver:
    """Plays the work on one fleet. The requests in flight are limited to one less than the slots of each engine: then
    no request queues, and no session loses its prefix between two turns. A session keeps its place for all of its
    turns."""

    def __init__(self, router: Router, fleet: str, sizes: AffinitySizes, profiler: Profiler) -> None:
        self._router = router
        self._fleet = fleet
        self._sizes = sizes
        self._profiler = profiler
        counts = FLEETS[fleet]
        shared = asyncio.Semaphore(sum(counts.values()) * (sizes.slots - 1))
        apart = {name: asyncio.Semaphore(count * (sizes.slots - 1)) for name, count in counts.items()}
        self._slots = {task: apart[AFFINITY[task]] if fleet == MIX else shared for task in AFFINITY}

    async def play(self, seed: int) -> float:
        """Play a seed and return the seconds."""
        readers, writers = draw_work(self._sizes, seed)
        began = time.perf_counter()
        # Readers start first: every fleet has the same number of them, and each keeps a place for all of its turns.
        async with asyncio.TaskGroup() as group:
            for reader in readers:
                group.create_task(self._read(reader, seed))
            for writer in writers:
                group.create_task(self._write(writer, seed))
        return time.perf_counter() - began

    async def _read(self, reader: Reader, seed: int) -> None:
        tokens: tuple[int, ...] = ()
        async with self._slots[READER]:
            for turn, length in enumerate(reader.observations):
                tokens = (*tokens, *_words(length, turn))
                request = GenerationRequest(
                    id=f"{reader.name}-{turn}",
                    session=f"{self._fleet}-{reader.name}",  # the prefixes cached for another fleet must not match
                    task=READER,
                    tokens=tokens,
                    sampling=Sampling(tokens_max=self._sizes.word),
                    noise=SamplingSeed(seed=seed),
                )
                tokens = (*tokens, *(await self._generate(request)).tokens)

    async def _write(self, writer: Writer, seed: int) -> None:
        async with self._slots[WRITER]:
            request = GenerationRequest(
                id=writer.name,
                task=WRITER,
                tokens=_words(writer.question, 0),
                sampling=Sampling(tokens_max=writer.answer),
                noise=SamplingSeed(seed=seed),
            )
            await self._generate(request)

    async def _generate(self, request: GenerationRequest) -> Generation:
        generation = await self._router.generate(request)
        assert len(generation.tokens) == request.sampling.tokens_max
        self._profiler.add_generation(request.task, generation, context=len(request.tokens))
        return generation


def _words(count: int, turn: int) -> tuple[int, ...]:
    return tuple((7 * turn + 3 * number) % WORDS for number in range(count))


# ---- fleets -------------------------------------------------------------------------------------------------------


def engine_settings(sizes: AffinitySizes, hardware: str, count: int) -> EngineSettings:
    """Return the settings of a class, with speeds relative to `compute` as published."""
    gpu, base = HARDWARE_BY_CLASS[hardware], HARDWARE_BY_CLASS[COMPUTE]
    longest = sizes.turns * (sizes.observation * (1.0 + sizes.varied) + sizes.word) + 2
    return EngineSettings(
        name=hardware,
        hardware=hardware,
        count=count,
        slots=sizes.slots,
        chunk=sizes.chunk,
        context_max=max(round(longest), sizes.question + round(sizes.answer * (1.0 + sizes.varied)) + 2),
        prefill_s_per_token=sizes.prefill_s_per_token * base.flops / gpu.flops,
        decode_s_per_step=sizes.decode_s_per_step * base.bandwidth / gpu.bandwidth,
    )


def cost(fleet: str) -> float:
    return sum(HARDWARE_BY_CLASS[name].cost * count for name, count in FLEETS[fleet].items())


class BorrowedEngine:
    """Wraps a running engine, so that fleets reuse the same processes one after the other."""

    def __init__(self, engine: ProcessEngine) -> None:
        self.name, self.hardware, self.output_is_trainable = engine.name, engine.hardware, engine.output_is_trainable
        self.generate, self.statistics = engine.generate, engine.statistics
        self.fetch, self.suspend, self.update, self.resume = engine.fetch, engine.suspend, engine.update, engine.resume

    async def start(self, weights: PolicyWeights) -> None:
        pass

    async def close(self) -> None:
        pass


@asynccontextmanager
async def running_engines(sizes: AffinitySizes) -> AsyncIterator[list[ProcessEngine]]:
    """Start the largest number of engines of each class that a fleet has."""
    counts = {name: max(fleet.get(name, 0) for fleet in FLEETS.values()) for name in HARDWARE_BY_CLASS}
    engines = [
        ProcessEngine(engine_settings(sizes, name, count), number, record_steps=True)
        for name, count in counts.items()
        for number in range(count)
    ]
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
        weights = _publish_weights(sizes, folder)
        try:
            await asyncio.gather(*(engine.start(weights) for engine in engines))
            await asyncio.gather(*(_warm(engine, sizes) for engine in engines))
            yield engines
        finally:
            await asyncio.gather(*(engine.close() for engine in engines))


async def _warm(engine: ProcessEngine, sizes: AffinitySizes) -> None:
    """Warm up: the first steps of a process are slow."""
    sampling, noise = Sampling(tokens_max=3), SamplingSeed(seed=0)
    requests = [
        GenerationRequest(id=f"warm-{slot}", tokens=_words(8, 0), sampling=sampling, noise=noise)
        for slot in range(sizes.slots)
    ]
    await asyncio.gather(*(engine.generate(request) for request in requests))


def make_router(name: str, engines: Sequence[ProcessEngine]) -> Router:
    chosen = [
        BorrowedEngine(engine)
        for hardware, count in FLEETS[name].items()
        for engine in [each for each in engines if each.hardware == hardware][:count]
    ]
    return Router(chosen, affinity=AFFINITY if name == MIX else {})


def _publish_weights(sizes: AffinitySizes, folder: str) -> PolicyWeights:
    from tangram.rl.model.transformer import Transformer, small_config
    from tangram.rl.model.weight_store import publish

    config = small_config(
        WORDS, layers=1, width=32, heads=2, context_max=engine_settings(sizes, COMPUTE, 1).context_max
    )
    return publish(Transformer.new(config, 0), config, folder, 0)


# ---- the benchmark ------------------------------------------------------------------------------------------------


class FleetResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one fleet."""

    seconds: tuple[float, ...]
    """Seconds by seed."""
    prefilled: int
    """Tokens prefilled for readers."""
    recommended: tuple[str, ...]
    """Recommendations of the profiler."""


def measure(sizes: AffinitySizes, run: BenchRun) -> None:
    sides, slower = asyncio.run(_run_fleets(sizes, subprogress(run.progress, 0.0, 0.8)))
    _compare(run, sides)
    run.add("slower_than_emulated", slower, PRINTED)
    run.progress(0.8, "simulating")
    gains = affinity_gains(
        models=[MODELS[name] for name in sizes.simulated],
        warm_up=sizes.simulated_ended // 3,
        ended=sizes.simulated_ended,
    )
    _add_simulated(run, gains)


async def _run_fleets(sizes: AffinitySizes, progress: Progress) -> tuple[dict[str, FleetResult], float]:
    """Return the results of each fleet, and the time of steps relative to the emulated time."""
    sides = {}
    progress(0.0, "starting engines")
    async with running_engines(sizes) as engines:
        for number, fleet in enumerate(FLEETS):
            progress((1 + number) / (1 + len(FLEETS)), fleet)
            sides[fleet] = await _fleet_result(make_router(fleet, engines), fleet, sizes)
    return sides, _slowdown(engines, sizes)


def _slowdown(engines: Sequence[ProcessEngine], sizes: AffinitySizes) -> float:
    """Return the time of steps relative to the emulated time. Counts only steps without a preceding command, before
    which the engine cannot have been idle."""
    took_s = emulated_s = 0.0
    for engine in engines:
        speed = engine_settings(sizes, engine.hardware, 1)
        for before, step in pairwise(engine.steps):
            if not step.commands:
                took_s += step.ended_s - before.ended_s
                emulated_s += step.prefilled * speed.prefill_s_per_token
                emulated_s += speed.decode_s_per_step if step.decoded else 0.0
    return took_s / emulated_s


async def _fleet_result(router: Router, fleet: str, sizes: AffinitySizes) -> FleetResult:
    await router.start(PolicyWeights(version=0, folder=""))
    profiler = Profiler()
    player = FleetDriver(router, fleet, sizes, profiler)
    seconds = [await player.play(seed) for seed in range(sizes.seeds)]
    statistics = router.statistics()
    assert not statistics.resumed and not statistics.fallbacks, "no engine died"
    await router.close()
    return FleetResult(
        seconds=tuple(seconds),
        prefilled=profiler.work(READER).prefilled,
        recommended=tuple(profiler.lines()),
    )


def _compare(run: BenchRun, sides: Mapping[str, FleetResult]) -> None:
    mapped = sides[MIX].seconds
    gains = {name: paired_ratio_of_values(sides[name].seconds, mapped) for name in (COMPUTE, BANDWIDTH)}
    least = min(gains, key=lambda name: gains[name].mean)
    run.add("emulated_gain_min", gains[least], at_least(1.2))
    for name, gain in gains.items():
        run.add(f"gain_vs_{name}", gain, PRINTED)
    for name, side in sides.items():
        run.sides[name] = {
            "seconds": sum(side.seconds) / len(side.seconds),
            "cost": cost(name),
            "prefilled": side.prefilled / len(side.seconds),
        }
    run.notes += [
        f"emulated_gain_min is the gain over {least} alone; fleets cost "
        + ", ".join(f"{cost(name):g} ({name})" for name in FLEETS)
        + ".",
        "Emulated: router and engines are real; speeds are delays with the published ratios of the classes.",
        "Prefill and decoding keep both classes of the mix busy equally long, where the gain is largest. "
        "With only one kind of work, a part of the mix would be idle.",
        "slower_than_emulated: time of steps / emulated time; 1 means that this machine was not a bottleneck.",
        *(f"Profiler, on the work of the {MIX}: {line}" for line in sides[MIX].recommended),
    ]


def _add_simulated(run: BenchRun, gains: AffinityGains) -> None:
    for name, spread, published in (
        ("simulated_vs_compute", gains.simulated_vs_compute, PUBLISHED_VS_COMPUTE),
        ("simulated_vs_bandwidth", gains.simulated_vs_bandwidth, PUBLISHED_VS_BANDWIDTH),
    ):
        run.add(name, spread.mean, PRINTED)
        run.add(f"{name}_low", spread.low, PRINTED)
        run.add(f"{name}_high", spread.high, PRINTED)
        run.notes.append(f"{name}: published {published[0]:.2f}-{published[1]:.2f}; low and high over the models.")
    run.notes.append(
        "Simulated: a roofline of the published devices times efficiencies that were fitted to another figure of the "
        "same publication (each task alone on 2 H800 or 6 H20); rate of tokens in the steady state of the published "
        "fleets and tasks, divided by two."
    )
