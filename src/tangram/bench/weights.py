"""The weight store: time to publish a version, time for engines to load it, and how long they are suspended for it.

Engines in separate processes decode all the time, as in a rollout, for more requests than they have slots. Versions are
published one after the other to shared memory, from a thread here instead of a trainer; the router hands each one to
the engines. All update times are those that the router reports to a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tangram.bench.base import PRINTED, BenchRun, at_most
from tangram.errors import ManagerError
from tangram.reports.statistics import mean_of
from tangram.rl.config.rollout_settings import EngineSettings
from tangram.rl.inference.engines.messages import StepRecord
from tangram.rl.inference.engines.process import ProcessEngine
from tangram.rl.inference.engines.protocol import GenerationRequest, PolicyWeights, Sampling, SamplingSeed
from tangram.rl.inference.router import Router
from tangram.rl.inference.router_records import AnyRouterEvent, EngineUpdated
from tangram.rl.inference.weights_folder import weights_folder

if TYPE_CHECKING:
    from tangram.rl.model.transformer import Transformer


class WeightsSizes(msgspec.Struct, frozen=True, kw_only=True):
    versions: int = 8
    """Versions published and loaded, one after the other."""
    engines: int = 2
    vocabulary: int = 1000
    layers: int = 12
    width: int = 640
    heads: int = 10
    """Attention heads. The model has 64 million parameters in float32, 256 MB."""
    slots: int = 4
    """Slots per engine."""
    context_max: int = 96
    prompt: int = 32
    tokens: int = 48
    quiet_steps: int = 12
    """Steps without an update, per engine, between two versions."""


LABEL = "measured"
FULL = WeightsSizes()
QUICK = WeightsSizes(versions=4, engines=1, layers=8, width=384, heads=6)
"""Its model has 16 million parameters."""

WRITERS_PER_SLOT = 2
"""Requests in flight per slot, so that some always wait."""
VERSIONS_KEPT = 2
"""Published versions kept, as a trainer keeps them for slow engines."""
QUIET_S_MAX = 120.0
"""Time limit for `quiet_steps` steps."""
POLL_S = 0.02


class _VersionTiming(NamedTuple):
    """The timing of one version."""

    push_s: float
    updates: list[EngineUpdated]

    @property
    def pull_s(self) -> float:
        return sum(each.pull_s for each in self.updates)

    @property
    def exposed_s(self) -> float:
        return sum(each.exposed_s for each in self.updates)


async def measure(sizes: WeightsSizes, run: BenchRun) -> None:
    timings: list[_VersionTiming] = []
    async with _running_rig(sizes) as rig:
        await rig.wait_for_decode_steps()
        for number in range(sizes.versions):
            timings.append(await rig.sync_version(number + 1))
            await rig.wait_for_decode_steps()
            run.progress((number + 1) / sizes.versions)
        await rig.stop()
    run.add("exposed_share", mean_of([each.exposed_s / each.pull_s for each in timings]), at_most(0.33))
    run.add("push_s", mean_of([each.push_s for each in timings]), PRINTED)
    run.add("pull_s", mean_of([each.pull_s for each in timings]), PRINTED)
    run.add("exposed_s", mean_of([each.exposed_s for each in timings]), PRINTED)
    run.add("exposed_ms_max", 1e3 * max(each.exposed_s for one in timings for each in one.updates), PRINTED)
    updates = [(rig.engine(each.engine), each) for one in timings for each in one.updates]
    run.add("reread_s", mean_of([_reread_s(engine.steps, each) for engine, each in updates]), PRINTED)
    fetching, quiet = _step_gaps(rig.engines, [each for _, each in updates])
    run.add("step_ms", 1e3 * statistics.median(quiet), PRINTED)
    if fetching:
        run.add("step_gap_ratio", statistics.median(fetching) / statistics.median(quiet), PRINTED)
    run.add("million_parameters", rig.parameters / 1e6, PRINTED)
    run.notes.append(
        f"{sizes.engines} engines with one thread and {sizes.slots} slots each decode all the time; the weights are "
        f"{rig.parameters / 1e6:.0f} million parameters in float32, published in {rig.folder.parent}."
    )
    run.notes.append("exposed_s is from SUSPEND to RESUME, summed over engines; reread_s comes after it.")


class _WeightSyncRig:
    """Engines behind a router, with continuous load."""

    def __init__(self, sizes: WeightsSizes, folder: Path, model: Transformer) -> None:
        self.folder = folder
        self.parameters = sum(each.numel() for each in model.parameters())
        settings = EngineSettings(
            count=sizes.engines, slots=sizes.slots, sessions=0, context_max=sizes.context_max, chunk=sizes.prompt
        )
        self.engines = [ProcessEngine(settings, number, record_steps=True) for number in range(sizes.engines)]
        self._sizes, self._model = sizes, model
        self._updates: list[EngineUpdated] = []
        self._router = Router(self.engines, on_event=self._on_event)
        self._numbers = itertools.count()
        self._writers: list[asyncio.Task[None]] = []

    def engine(self, name: str) -> ProcessEngine:
        return next(each for each in self.engines if each.name == name)

    async def start(self) -> None:
        _, weights = await self._publish(0)
        await self._router.start(weights)
        count = WRITERS_PER_SLOT * self._sizes.slots * self._sizes.engines
        self._writers = [asyncio.create_task(self._write_forever()) for _ in range(count)]

    async def sync_version(self, version: int) -> _VersionTiming:
        self._updates = []
        push_s, weights = await self._publish(version)
        await self._router.update(weights)
        return _VersionTiming(push_s, self._updates)

    async def wait_for_decode_steps(self) -> None:
        """Wait until each engine has made some steps without prefill."""
        steps_by_engine = {each.name: _decoded(each.steps) + self._sizes.quiet_steps for each in self.engines}
        async with asyncio.timeout(QUIET_S_MAX):
            while any(_decoded(each.steps) < steps_by_engine[each.name] for each in self.engines):
                for writer in self._writers:
                    if writer.done():
                        await writer  # raises its error
                await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        for writer in self._writers:
            writer.cancel()
        await asyncio.gather(*self._writers, return_exceptions=True)

    async def close(self) -> None:
        await self.stop()
        await self._router.close()

    def _on_event(self, event: AnyRouterEvent) -> None:
        if isinstance(event, EngineUpdated):
            self._updates.append(event)

    async def _publish(self, version: int) -> tuple[float, PolicyWeights]:
        from tangram.rl.model.weight_store import prune_versions, publish

        began_s = time.monotonic()
        weights = await asyncio.to_thread(publish, self._model, self._model.config, self.folder, version)
        push_s = time.monotonic() - began_s
        await asyncio.to_thread(prune_versions, self.folder, VERSIONS_KEPT)
        return push_s, weights

    async def _write_forever(self) -> None:
        while True:
            chance = random.Random(next(self._numbers))
            request = GenerationRequest(
                id=f"r{chance.getrandbits(64):x}",
                tokens=tuple(chance.randrange(self._sizes.vocabulary) for _ in range(self._sizes.prompt)),
                # Different lengths, so that requests do not end all at once.
                sampling=Sampling(tokens_max=chance.randint(self._sizes.tokens // 2, self._sizes.tokens)),
                noise=SamplingSeed(seed=chance.getrandbits(32)),
            )
            await self._router.generate(request)


@contextlib.asynccontextmanager
async def _running_rig(sizes: WeightsSizes) -> AsyncIterator[_WeightSyncRig]:
    from tangram.rl.model.transformer import Transformer, small_config

    config = small_config(
        sizes.vocabulary, layers=sizes.layers, width=sizes.width, heads=sizes.heads, context_max=sizes.context_max
    )
    with weights_folder() as folder:
        rig = _WeightSyncRig(sizes, folder, Transformer.new(config, seed=0).requires_grad_(False))
        try:
            await rig.start()
            yield rig
        except TimeoutError as error:
            raise ManagerError(f"the engines made too few steps in {QUIET_S_MAX:.0f} s") from error
        finally:
            await rig.close()


# ---- step times; all processes have the same clock ------------


def _decoded(steps: list[StepRecord]) -> int:
    return sum(not step.prefilled for step in steps)


def _step_gaps(engines: list[ProcessEngine], updates: list[EngineUpdated]) -> tuple[list[float], list[float]]:
    """Return the gaps between steps without prefill: while weights were fetched, and otherwise."""
    fetching: list[float] = []
    quiet: list[float] = []
    for engine in engines:
        spans = [(each.at_s - each.took_s, each.at_s) for each in updates if each.engine == engine.name]
        for before, step in itertools.pairwise(engine.steps):
            if step.prefilled or step.commands:
                continue
            gap = step.ended_s - before.ended_s
            if any(begin < before.ended_s and step.ended_s < end for begin, end in spans):
                fetching.append(gap)
            elif all(step.ended_s < begin or end < before.ended_s for begin, end in spans):
                quiet.append(gap)
    return fetching, quiet


def _reread_s(steps: list[StepRecord], update: EngineUpdated) -> float:
    """Return the time of the steps with prefill right after the switch."""
    after = itertools.dropwhile(lambda step: step.ended_s < update.at_s, steps)
    reading = list(itertools.takewhile(lambda step: step.prefilled, after))
    return reading[-1].ended_s - update.at_s if reading else 0.0
