"""The weight store: what it takes to publish a version, what engines take to read it, and how long they stand still.

Engines in processes of their own write all the time, as in a rollout, for more requests than they have places. Versions
are published one after the other in memory that is shared, from a thread here where a run has a trainer; each is handed
to the engines by their gateway. All that is told of an update is what the gateway tells a run.

`pull_s` is accumulated over the engines: reading of a version beside their steps, and switching to it. `exposed_s` is
of the same updates the time in which an engine was suspended; `exposed_share` is the one over the other, version by
version. `step_gap_ratio` says what reading costs those who are being written for meanwhile: the median gap between two
steps while weights are fetched, over that without; nobody stands still for it, but cores and memory are shared.
`reread_s` is what comes after a switch, in the mean of an engine: steps in which tokens are read again that were read
under the old weights.
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

from tangram.bench.base import PRINTED, BenchResult, Findings, Progress, at_most
from tangram.errors import ManagerError
from tangram.reports.statistics import mean_of
from tangram.rl.config.rollout_settings import EngineSettings
from tangram.rl.inference.engines.messages import StepRecord
from tangram.rl.inference.engines.process import ProcessEngine
from tangram.rl.inference.engines.protocol import Noise, Request, Sampling, Weights
from tangram.rl.inference.router import Gateway
from tangram.rl.inference.router_records import EngineUpdated, Event
from tangram.rl.train.weights_folder import published_folder

if TYPE_CHECKING:
    from tangram.rl.model.transformer import Transformer


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    versions: int = 8
    """That are published and taken, one after the other."""
    engines: int = 2
    vocabulary: int = 1000
    layers: int = 12
    width: int = 640
    heads: int = 10
    """Together 64 million parameters in float32, 256 MB."""
    slots: int = 4
    """Of each engine."""
    context_max: int = 96
    prompt: int = 32
    tokens: int = 48
    quiet_steps: int = 12
    """Of each engine, between two versions."""


FULL = Sizes()
QUICK = Sizes(versions=4, engines=1, layers=8, width=384, heads=6)
"""16 million parameters."""

WRITERS_PER_SLOT = 2
"""Requests that are under way for each place: there is always somebody who waits for one."""
KEPT = 2
"""Published versions, as a trainer keeps them for engines that are slow."""
QUIET_S_MAX = 120.0
"""For so few steps."""
LOOK_S = 0.02


class _Taken(NamedTuple):
    """One version."""

    push_s: float
    updates: list[EngineUpdated]

    @property
    def pull_s(self) -> float:
        return sum(each.pull_s for each in self.updates)

    @property
    def exposed_s(self) -> float:
        return sum(each.exposed_s for each in self.updates)


def measure(sizes: Sizes, *, trace: Path | None, processes: int | None, progress: Progress) -> BenchResult:
    return asyncio.run(_measure(sizes, progress))


async def _measure(sizes: Sizes, progress: Progress) -> BenchResult:
    taken: list[_Taken] = []
    async with _rig(sizes) as rig:
        await rig.quiet()
        for number in range(sizes.versions):
            taken.append(await rig.hand_over(number + 1))
            await rig.quiet()
            progress((number + 1) / sizes.versions)
        await rig.stop()
    found = Findings()
    found.add("exposed_share", mean_of([each.exposed_s / each.pull_s for each in taken]), at_most(0.33))
    found.add("push_s", mean_of([each.push_s for each in taken]), PRINTED)
    found.add("pull_s", mean_of([each.pull_s for each in taken]), PRINTED)
    found.add("exposed_s", mean_of([each.exposed_s for each in taken]), PRINTED)
    found.add("exposed_ms_max", 1e3 * max(each.exposed_s for one in taken for each in one.updates), PRINTED)
    updates = [(rig.engine(each.engine), each) for one in taken for each in one.updates]
    found.add("reread_s", mean_of([_reread_s(engine.steps, each) for engine, each in updates]), PRINTED)
    fetching, quiet = _gaps(rig.engines, [each for _, each in updates])
    found.add("step_ms", 1e3 * statistics.median(quiet), PRINTED)
    if fetching:
        found.add("step_gap_ratio", statistics.median(fetching) / statistics.median(quiet), PRINTED)
    found.add("million_parameters", rig.parameters / 1e6, PRINTED)
    found.notes.append(
        f"{sizes.engines} engines of one thread each and {sizes.slots} places write all the time; the weights are "
        f"{rig.parameters / 1e6:.0f} million parameters in float32, published in {rig.folder.parent}."
    )
    found.notes.append("exposed_s is from SUSPEND to RESUME, summed over engines; reread_s comes after it.")
    return found.result("weights", "measured", sizes)


class _Rig:
    """Engines behind a gateway, with writers that never rest."""

    def __init__(self, sizes: Sizes, folder: Path, model: Transformer) -> None:
        self.folder = folder
        self.parameters = sum(each.numel() for each in model.parameters())
        settings = EngineSettings(
            count=sizes.engines, slots=sizes.slots, sessions=0, context_max=sizes.context_max, chunk=sizes.prompt
        )
        self.engines = [ProcessEngine(settings, number, record_steps=True) for number in range(sizes.engines)]
        self._sizes, self._model = sizes, model
        self._updates: list[EngineUpdated] = []
        self._gateway = Gateway(self.engines, on_event=self._hear)
        self._numbers = itertools.count()
        self._writers: list[asyncio.Task[None]] = []

    def engine(self, name: str) -> ProcessEngine:
        return next(each for each in self.engines if each.name == name)

    async def start(self) -> None:
        _, weights = await self._publish(0)
        await self._gateway.start(weights)
        count = WRITERS_PER_SLOT * self._sizes.slots * self._sizes.engines
        self._writers = [asyncio.create_task(self._write()) for _ in range(count)]

    async def hand_over(self, version: int) -> _Taken:
        self._updates = []
        push_s, weights = await self._publish(version)
        await self._gateway.update(weights)
        return _Taken(push_s, self._updates)

    async def quiet(self) -> None:
        """Until each engine has made some steps in which nothing was read."""
        wanted = {each.name: _decoded(each.steps) + self._sizes.quiet_steps for each in self.engines}
        async with asyncio.timeout(QUIET_S_MAX):
            while any(_decoded(each.steps) < wanted[each.name] for each in self.engines):
                for writer in self._writers:
                    if writer.done():
                        await writer  # says why
                await asyncio.sleep(LOOK_S)

    async def stop(self) -> None:
        for writer in self._writers:
            writer.cancel()
        await asyncio.gather(*self._writers, return_exceptions=True)

    async def close(self) -> None:
        await self.stop()
        await self._gateway.close()

    def _hear(self, event: Event) -> None:
        if isinstance(event, EngineUpdated):
            self._updates.append(event)

    async def _publish(self, version: int) -> tuple[float, Weights]:
        from tangram.rl.model.weight_store import forget, publish

        began_s = time.monotonic()
        weights = await asyncio.to_thread(publish, self._model, self._model.config, self.folder, version)
        push_s = time.monotonic() - began_s
        await asyncio.to_thread(forget, self.folder, KEPT)
        return push_s, weights

    async def _write(self) -> None:
        while True:
            chance = random.Random(next(self._numbers))
            request = Request(
                id=f"r{chance.getrandbits(64):x}",
                tokens=tuple(chance.randrange(self._sizes.vocabulary) for _ in range(self._sizes.prompt)),
                # Not all of one length, so that they do not end all at once.
                sampling=Sampling(tokens_max=chance.randint(self._sizes.tokens // 2, self._sizes.tokens)),
                noise=Noise(seed=chance.getrandbits(32)),
            )
            await self._gateway.generate(request)


@contextlib.asynccontextmanager
async def _rig(sizes: Sizes) -> AsyncIterator[_Rig]:
    from tangram.rl.model.transformer import Transformer, small

    config = small(
        sizes.vocabulary, layers=sizes.layers, width=sizes.width, heads=sizes.heads, context_max=sizes.context_max
    )
    with published_folder() as folder:
        rig = _Rig(sizes, folder, Transformer.new(config, seed=0).requires_grad_(False))
        try:
            await rig.start()
            yield rig
        except TimeoutError as error:
            raise ManagerError(f"the engines made too few steps in {QUIET_S_MAX:.0f} s") from error
        finally:
            await rig.close()


# ---- what the steps say; all processes have the same clock ----


def _decoded(steps: list[StepRecord]) -> int:
    return sum(not step.prefilled for step in steps)


def _gaps(engines: list[ProcessEngine], updates: list[EngineUpdated]) -> tuple[list[float], list[float]]:
    """Between two steps in which nothing was read: while weights were fetched, and while not."""
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
    """Of the steps right after the switch in which tokens were read."""
    after = itertools.dropwhile(lambda step: step.ended_s < update.at_s, steps)
    reading = list(itertools.takewhile(lambda step: step.prefilled, after))
    return reading[-1].ended_s - update.at_s if reading else 0.0
