"""The engine: what a command costs those who are being served, what a long prompt costs them, and how fast it writes.

The engine runs in its own process, as in a rollout, and records the end of each of its steps by its own clock; the gaps
between these ends are the gaps between the tokens of every request that is being written for. Seconds of commands are
from the moment they are given here to the end of the step before which they were taken: both processes have the same
clock.

`control_cost_steps` is the gap of a step before which a command was taken, less the gap of one without, over the
latter: medians, and of ADD (a prompt of a few tokens, which are read along with what others write) and ABORT the
greater one. `chunk_cost_steps` is the same of a step that reads a chunk of a long prompt besides. `prefill_gap` is the
99th percentile of the gaps while prompts of 128 tokens arrive one after the other, over that without any.
`throughput_share` compares the engine, asked over its socket, with a plain loop in PyTorch: the same model, the same
number of prompts read at once and continued together in a cache that is there already, sampled by torch.multinomial.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tangram.bench.base import PRINTED, BenchResult, Findings, Progress, at_least, at_most, paired_values
from tangram.errors import ManagerError
from tangram.reports.statistics import mean_of
from tangram.rl.config.rollout_settings import EngineSettings
from tangram.rl.inference.engines.messages import StepRecord
from tangram.rl.inference.engines.process import ProcessEngine
from tangram.rl.inference.engines.protocol import Noise, Request, Sampling, Weights

if TYPE_CHECKING:
    from tangram.rl.model.transformer import Transformer


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    repetitions: int = 7
    vocabulary: int = 150
    layers: int = 2
    width: int = 64
    heads: int = 4
    batch: int = 16
    context_max: int = 256
    chunk: int = 32
    prompt: int = 16
    tokens: int = 128
    """That each request writes where speed is measured."""
    waves: int = 3
    """Batches of requests in one measurement of speed."""
    others: int = 8
    """Requests that are being written for where gaps are measured."""
    rounds: int = 3
    """How often these are written from beginning to end, in one measurement of gaps."""
    short_prompt: int = 6
    long_prompt: int = 128
    pause_steps: int = 16
    """Between two commands, about."""


FULL = Sizes()
QUICK = Sizes(repetitions=5, waves=1, rounds=2)


COMMANDS_MIN = 5
"""Of each kind, in one repetition: fewer have no median worth the name."""
TRIES = 20
"""To have as many. Where others use the cores, several commands are taken at once."""


class _Command(NamedTuple):
    kind: str
    given_s: float


def measure(sizes: Sizes, *, trace: Path | None, processes: int | None, progress: Progress) -> BenchResult:
    return asyncio.run(_measure(sizes, progress))


async def _measure(sizes: Sizes, progress: Progress) -> BenchResult:
    found = Findings()
    ours: list[float] = []
    plain: list[float] = []
    cost_by_kind: dict[str, list[float]] = {"Add": [], "Abort": []}
    taken_by_kind: dict[str, list[float]] = {"Add": [], "Abort": []}
    quiet_p99: list[float] = []
    quiet_p50: list[float] = []
    crowded_p99: list[float] = []
    chunk_costs: list[float] = []
    whole_costs: list[float] = []
    update_s: list[float] = []
    async with _engine(sizes) as (engine, model, weights):
        await _tokens_per_s(engine, sizes)  # the first ones are slower
        steps, _ = await _Others(engine, sizes, 0, 0.0).run(_nothing)
        pause_s = sizes.pause_steps * statistics.median(gap for gap, _ in _gaps(steps, sizes))
        for number in range(sizes.repetitions):
            ours.append(await _tokens_per_s(engine, sizes))
            plain.append(_plain_tokens_per_s(model, sizes))
            steps, commands = await _controlled(engine, sizes, number, pause_s)
            median = statistics.median(gap for gap, step in _gaps(steps, sizes) if not step.commands)
            for kind, costs in cost_by_kind.items():
                after = [gap for gap, step in _gaps(steps, sizes) if step.commands == (kind,)]
                costs.append((statistics.median(after) - median) / median)
                taken_by_kind[kind] += _until_taken(kind, steps, commands)
            quiet, _ = await _Others(engine, sizes, number, pause_s).run(_nothing)
            whole_costs += _whole_cost(steps, sizes)
            crowd = _Others(engine, sizes, number, pause_s)
            crowded, _ = await crowd.run(crowd.long_prompts)
            quiet_p99.append(_p99([gap for gap, _ in _gaps(quiet, sizes)]))
            quiet_p50.append(statistics.median(gap for gap, _ in _gaps(quiet, sizes)))
            crowded_p99.append(_p99([gap for gap, _ in _gaps(crowded, sizes)]))
            reading = [gap for gap, step in _gaps(crowded, sizes) if step.prefilled == sizes.chunk]
            chunk_costs += [statistics.median(reading) / quiet_p50[-1] - 1.0] if reading else []
            began_s = time.monotonic()
            await engine.update(weights)
            update_s.append(time.monotonic() - began_s)
            progress((number + 1) / sizes.repetitions)
    worst = max(cost_by_kind.values(), key=statistics.fmean)
    found.add("control_cost_steps", mean_of(worst), at_most(1.0))
    found.add("prefill_gap", paired_values(crowded_p99, quiet_p99), at_most(3.0))
    found.add("throughput_share", paired_values(ours, plain), at_least(0.5))
    found.add("tokens_per_s", statistics.median(ours), PRINTED)
    found.add("plain_tokens_per_s", statistics.median(plain), PRINTED)
    for kind, name in (("Add", "add"), ("Abort", "abort")):
        found.add(f"{name}_cost_steps", mean_of(cost_by_kind[kind]), PRINTED)
        found.add(f"{name}_ms_p50", 1e3 * statistics.median(taken_by_kind[kind]), PRINTED)
    for name, costs in (("add_whole_cost_steps", whole_costs), ("chunk_cost_steps", chunk_costs)):
        if costs:
            found.add(name, mean_of(costs), PRINTED)
    found.add("update_ms", 1e3 * statistics.median(update_s), PRINTED)
    found.add("step_ms_p50", 1e3 * statistics.median(quiet_p50), PRINTED)
    found.add("step_ms_p99", 1e3 * statistics.median(quiet_p99), PRINTED)
    found.notes.append("Gaps are those between the ends of steps, by the clock of the engine's process.")
    found.notes.append(
        "control_cost_steps is of the step in which the command is taken; add_whole_cost_steps is what an ADD costs "
        "others in all steps in which its prompt is read. A prompt with more tokens than requests are being written "
        "for is read in calls of its own instead, each of which costs chunk_cost_steps."
    )
    found.notes.append("add_ms and abort_ms: from the command to the end of the step before which it was taken.")
    return found.result("engine", "measured", sizes)


@contextlib.asynccontextmanager
async def _engine(sizes: Sizes) -> AsyncIterator[tuple[ProcessEngine, Transformer, Weights]]:
    """The engine, its model to be called here, and its weights."""
    from tangram.rl.model.transformer import Transformer, small
    from tangram.rl.model.weight_store import publish

    config = small(
        sizes.vocabulary, layers=sizes.layers, width=sizes.width, heads=sizes.heads, context_max=sizes.context_max
    )
    model = Transformer.new(config, seed=0).requires_grad_(False)
    settings = EngineSettings(slots=sizes.batch, context_max=sizes.context_max, chunk=sizes.chunk)
    engine = ProcessEngine(settings, record_steps=True)
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
        weights = publish(model, config, folder, 0)
        try:
            await engine.start(weights)
            yield engine, model, weights
        finally:
            await engine.close()


def _request(sizes: Sizes, name: str, prompt: int, tokens: int) -> Request:
    chance = random.Random(name)
    return Request(
        id=name,
        tokens=tuple(chance.randrange(sizes.vocabulary) for _ in range(prompt)),
        sampling=Sampling(tokens_max=tokens),
        noise=Noise(seed=chance.getrandbits(32)),
    )


# ---- speed ----


async def _tokens_per_s(engine: ProcessEngine, sizes: Sizes) -> float:
    asked = [_request(sizes, f"speed-{number}", sizes.prompt, sizes.tokens) for number in range(_count(sizes))]
    began_s = time.monotonic()
    written = await asyncio.gather(*map(engine.generate, asked))
    took_s = time.monotonic() - began_s
    return sum(len(each.tokens) for each in written) / took_s


def _count(sizes: Sizes) -> int:
    return sizes.waves * sizes.batch


def _plain_tokens_per_s(model: Transformer, sizes: Sizes) -> float:
    import torch

    from tangram.rl.model.transformer import Cache

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the engine has
    try:
        cache = Cache(model.config, sizes.batch, sizes.context_max, model.dtype)
        slots = torch.arange(sizes.batch)
        written: list[torch.Tensor] = []
        began_s = time.monotonic()
        with torch.inference_mode():
            for _ in range(sizes.waves):
                prompts = torch.randint(sizes.vocabulary, (sizes.batch, sizes.prompt))
                logits = model.read(prompts, torch.zeros(sizes.batch, dtype=torch.long), slots, cache, sizes.prompt)
                for position in range(sizes.prompt, sizes.prompt + sizes.tokens):
                    tokens = torch.multinomial(torch.softmax(logits, dim=-1), 1)
                    written.append(tokens)
                    if len(written) % sizes.tokens:
                        start = torch.full((sizes.batch,), position)
                        logits = model.read(tokens, start, slots, cache, position + 1)
        took_s = time.monotonic() - began_s
    finally:
        torch.set_num_threads(threads)
    return sum(tokens.numel() for tokens in written) / took_s


# ---- gaps ----


class _Others:
    """Requests that are being written for while something else happens."""

    def __init__(self, engine: ProcessEngine, sizes: Sizes, number: int, pause_s: float) -> None:
        self._engine, self._sizes, self._pause_s = engine, sizes, pause_s
        self._chance = random.Random(number)
        self._commands: list[_Command] = []
        self._names = 0

    async def run(self, meanwhile: Callable[[], Awaitable[None]]) -> tuple[list[StepRecord], list[_Command]]:
        """The steps that were made, and the commands that were given."""
        before, sizes = len(self._engine.steps), self._sizes
        for _ in range(sizes.rounds):
            others = [
                self._ask(sizes.prompt, sizes.context_max - sizes.prompt, counted=False) for _ in range(sizes.others)
            ]
            more = asyncio.ensure_future(meanwhile())
            await asyncio.gather(*others)
            more.cancel()
            await asyncio.gather(more, return_exceptions=True)
            await self._engine.suspend()  # by its answer all steps have been told
            await self._engine.resume()
        return self._engine.steps[before:], self._commands

    def _ask(self, prompt: int, tokens: int, *, counted: bool = True) -> asyncio.Future[object]:
        self._names += 1
        if counted:
            self._commands.append(_Command("Add", time.monotonic()))
        return asyncio.ensure_future(
            self._engine.generate(_request(self._sizes, f"other-{self._names}", prompt, tokens))
        )

    async def control(self) -> None:
        """ADD and ABORT by turns, at times of which the engine knows nothing."""
        while True:
            await self._pause()
            asked = self._ask(self._sizes.short_prompt, self._sizes.tokens)
            try:
                await self._pause()
                self._commands.append(_Command("Abort", time.monotonic()))
            finally:
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)

    async def long_prompts(self) -> None:
        """One after the other is read."""
        asked: list[asyncio.Future[object]] = []
        try:
            while True:
                asked.append(self._ask(self._sizes.long_prompt, 1))
                await self._pause()
        finally:
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _pause(self) -> None:
        await asyncio.sleep(self._pause_s * (0.5 + self._chance.random()))


async def _controlled(
    engine: ProcessEngine, sizes: Sizes, number: int, pause_s: float
) -> tuple[list[StepRecord], list[_Command]]:
    """Until enough commands were taken each by itself. Raises ManagerError, if they never are."""
    steps: list[StepRecord] = []
    commands: list[_Command] = []
    for _ in range(TRIES):
        others = _Others(engine, sizes, number, pause_s)
        more = await others.run(others.control)
        steps += more[0]
        commands += more[1]
        taken = [step.commands for _, step in _gaps(steps, sizes)]
        if min(taken.count(("Add",)), taken.count(("Abort",))) >= COMMANDS_MIN:
            return steps, commands
    raise ManagerError(f"fewer than {COMMANDS_MIN} commands were taken by themselves: the machine is too busy")


async def _nothing() -> None:
    pass


def _gaps(steps: list[StepRecord], sizes: Sizes) -> list[tuple[float, StepRecord]]:
    """How long the others waited for their token, in each step that wrote for all of them, as did the one before."""
    return [
        (step.ended_s - before.ended_s, step)
        for before, step in itertools.pairwise(steps)
        if min(before.decoded, step.decoded) >= sizes.others
    ]


def _whole_cost(steps: list[StepRecord], sizes: Sizes) -> list[float]:
    """Of an ADD, in steps: how much longer the others waited in all the steps in which its prompt was read, than while
    they were alone; a sum of medians, one for each of these steps. Nothing, if other commands always came between."""
    gaps = _gaps(steps, sizes)
    alone = [gap for gap, step in gaps if not step.commands and not step.prefilled and step.decoded == sizes.others]
    by_step: list[list[float]] = [[] for _ in range(sizes.short_prompt)]
    for at, (_, step) in enumerate(gaps):
        if step.commands == ("Add",):
            for seconds, (gap, later) in zip(by_step, gaps[at:], strict=False):
                if later is not step and later.commands:
                    break
                seconds.append(gap)
    if not alone or not all(by_step):
        return []
    usual = statistics.median(alone)
    return [sum(statistics.median(seconds) - usual for seconds in by_step) / usual]


def _until_taken(kind: str, steps: list[StepRecord], commands: list[_Command]) -> list[float]:
    """Of each command that was taken alone: how long after it was given the next step had ended."""
    given = [command.given_s for command in commands if command.kind == kind]
    ended = [step.ended_s for step in steps if step.commands == (kind,)]
    return [min(end - at for at in given if at <= end) for end in ended if any(at <= end for at in given)]


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]
