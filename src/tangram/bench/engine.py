"""The engine: what a command and a long prompt cost running requests, and the token throughput.

The engine runs in its own process, as in a rollout, and records the end of each of its steps by its own clock; the gaps
between these ends are the gaps between the tokens of every running request. The latency of a command is from sending it
here to the end of the first step after it was taken; both processes share a clock. Costs are medians of the gap of a
step with a command, or with a chunk of a long prompt, minus that of a step without, over the latter.
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
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tangram.bench.base import PRINTED, BenchRun, at_least, at_most, paired_ratio_of_values
from tangram.errors import ManagerError
from tangram.reports.statistics import mean_of
from tangram.rl.config.rollout_settings import EngineSettings
from tangram.rl.inference.engines.messages import StepRecord
from tangram.rl.inference.engines.process import ProcessEngine
from tangram.rl.inference.engines.protocol import GenerationRequest, PolicyWeights, Sampling, SamplingSeed

if TYPE_CHECKING:
    from tangram.rl.model.transformer import Transformer


class EngineSizes(msgspec.Struct, frozen=True, kw_only=True):
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
    """Tokens per request when throughput is measured."""
    waves: int = 3
    """Batches of requests in one measurement of throughput."""
    others: int = 8
    """Running requests when gaps are measured."""
    rounds: int = 3
    """Complete generations of these in one measurement of gaps."""
    short_prompt: int = 6
    long_prompt: int = 128
    pause_steps: int = 16
    """Mean steps between two commands."""


LABEL = "measured"
FULL = EngineSizes()
QUICK = EngineSizes(repetitions=5, waves=1, rounds=2)


COMMANDS_MIN = 5
"""Least number of commands of each kind in one repetition: a median of fewer is unreliable."""
ATTEMPTS_MAX = 20
"""Attempts to get that many. When other programs use the cores, several commands are taken at once."""


class _Command(NamedTuple):
    kind: str
    given_s: float


async def measure(sizes: EngineSizes, run: BenchRun) -> None:
    rates: list[float] = []
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
        await _tokens_per_s(engine, sizes)  # warm-up
        steps, _ = await _BackgroundRequests(engine, sizes, 0, 0.0).run(_no_op)
        pause_s = sizes.pause_steps * statistics.median(gap for gap, _ in _token_gaps(steps, sizes))
        for number in range(sizes.repetitions):
            rates.append(await _tokens_per_s(engine, sizes))
            plain.append(_plain_tokens_per_s(model, sizes))
            steps, commands = await _run_with_commands(engine, sizes, number, pause_s)
            median = statistics.median(gap for gap, step in _token_gaps(steps, sizes) if not step.commands)
            for kind, costs in cost_by_kind.items():
                after = [gap for gap, step in _token_gaps(steps, sizes) if step.commands == (kind,)]
                costs.append((statistics.median(after) - median) / median)
                taken_by_kind[kind] += _command_latencies(kind, steps, commands)
            quiet, _ = await _BackgroundRequests(engine, sizes, number, pause_s).run(_no_op)
            whole_costs += _total_add_cost(steps, sizes)
            crowd = _BackgroundRequests(engine, sizes, number, pause_s)
            crowded, _ = await crowd.run(crowd.long_prompts)
            quiet_p99.append(_p99([gap for gap, _ in _token_gaps(quiet, sizes)]))
            quiet_p50.append(statistics.median(gap for gap, _ in _token_gaps(quiet, sizes)))
            crowded_p99.append(_p99([gap for gap, _ in _token_gaps(crowded, sizes)]))
            reading = [gap for gap, step in _token_gaps(crowded, sizes) if step.prefilled == sizes.chunk]
            chunk_costs += [statistics.median(reading) / quiet_p50[-1] - 1.0] if reading else []
            began_s = time.monotonic()
            await engine.update(weights)
            update_s.append(time.monotonic() - began_s)
            run.progress((number + 1) / sizes.repetitions)
    worst = max(cost_by_kind.values(), key=statistics.fmean)
    run.add("control_cost_steps", mean_of(worst), at_most(1.0))
    run.add("prefill_gap", paired_ratio_of_values(crowded_p99, quiet_p99), at_most(3.0))
    run.add("throughput_share", paired_ratio_of_values(rates, plain), at_least(0.5))
    run.add("tokens_per_s", statistics.median(rates), PRINTED)
    run.add("plain_tokens_per_s", statistics.median(plain), PRINTED)
    for kind, name in (("Add", "add"), ("Abort", "abort")):
        run.add(f"{name}_cost_steps", mean_of(cost_by_kind[kind]), PRINTED)
        run.add(f"{name}_ms_p50", 1e3 * statistics.median(taken_by_kind[kind]), PRINTED)
    for name, costs in (("add_whole_cost_steps", whole_costs), ("chunk_cost_steps", chunk_costs)):
        if costs:
            run.add(name, mean_of(costs), PRINTED)
    run.add("update_ms", 1e3 * statistics.median(update_s), PRINTED)
    run.add("step_ms_p50", 1e3 * statistics.median(quiet_p50), PRINTED)
    run.add("step_ms_p99", 1e3 * statistics.median(quiet_p99), PRINTED)
    run.notes.append("Gaps are times between the ends of two steps, by the clock of the engine process.")
    run.notes.append(
        "control_cost_steps: cost in the step in which the engine accepts the command; add_whole_cost_steps: cost of "
        "an ADD to other requests over all steps that prefill its prompt. A prompt with more tokens than running "
        "requests is prefilled in separate calls instead, and each costs chunk_cost_steps."
    )
    run.notes.append(
        "add_ms and abort_ms: from sending the command to the end of the first step after the engine accepted it."
    )


@contextlib.asynccontextmanager
async def _engine(sizes: EngineSizes) -> AsyncIterator[tuple[ProcessEngine, Transformer, PolicyWeights]]:
    """Return the engine, its model for direct calls, and its weights."""
    from tangram.rl.model.transformer import Transformer, small_config
    from tangram.rl.model.weight_store import publish

    config = small_config(
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


def _request(sizes: EngineSizes, name: str, prompt: int, tokens: int) -> GenerationRequest:
    chance = random.Random(name)
    return GenerationRequest(
        id=name,
        tokens=tuple(chance.randrange(sizes.vocabulary) for _ in range(prompt)),
        sampling=Sampling(tokens_max=tokens),
        noise=SamplingSeed(seed=chance.getrandbits(32)),
    )


# ---- speed ----


async def _tokens_per_s(engine: ProcessEngine, sizes: EngineSizes) -> float:
    pending = [_request(sizes, f"speed-{number}", sizes.prompt, sizes.tokens) for number in range(_count(sizes))]
    began_s = time.monotonic()
    written = await asyncio.gather(*map(engine.generate, pending))
    took_s = time.monotonic() - began_s
    return sum(len(each.tokens) for each in written) / took_s


def _count(sizes: EngineSizes) -> int:
    return sizes.waves * sizes.batch


def _plain_tokens_per_s(model: Transformer, sizes: EngineSizes) -> float:
    import torch

    from tangram.rl.model.transformer import KVCache

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same as the engine
    try:
        cache = KVCache(model.config, sizes.batch, sizes.context_max, model.dtype)
        slots = torch.arange(sizes.batch)
        written: list[torch.Tensor] = []
        began_s = time.monotonic()
        with torch.inference_mode():
            for _ in range(sizes.waves):
                prompts = torch.randint(sizes.vocabulary, (sizes.batch, sizes.prompt))
                logits = model.forward_cached(
                    prompts, torch.zeros(sizes.batch, dtype=torch.long), slots, cache, sizes.prompt
                )
                for position in range(sizes.prompt, sizes.prompt + sizes.tokens):
                    tokens = torch.multinomial(torch.softmax(logits, dim=-1), 1)
                    written.append(tokens)
                    if len(written) % sizes.tokens:
                        start = torch.full((sizes.batch,), position)
                        logits = model.forward_cached(tokens, start, slots, cache, position + 1)
        took_s = time.monotonic() - began_s
    finally:
        torch.set_num_threads(threads)
    return sum(tokens.numel() for tokens in written) / took_s


# ---- gaps ----


class _BackgroundRequests:
    """Requests that run while something else happens."""

    def __init__(self, engine: ProcessEngine, sizes: EngineSizes, number: int, pause_s: float) -> None:
        self._engine, self._sizes, self._pause_s = engine, sizes, pause_s
        self._random = random.Random(number)
        self._commands: list[_Command] = []
        self._names = 0

    async def run(self, meanwhile: Callable[[], Awaitable[None]]) -> tuple[list[StepRecord], list[_Command]]:
        """Return the steps and the commands sent."""
        before, sizes = len(self._engine.steps), self._sizes
        for _ in range(sizes.rounds):
            others = [
                self._generate(sizes.prompt, sizes.context_max - sizes.prompt, counted=False)
                for _ in range(sizes.others)
            ]
            more = asyncio.ensure_future(meanwhile())
            await asyncio.gather(*others)
            more.cancel()
            await asyncio.gather(more, return_exceptions=True)
            await self._engine.suspend()  # its answer follows the reports of all steps
            await self._engine.resume()
        return self._engine.steps[before:], self._commands

    def _generate(self, prompt: int, tokens: int, *, counted: bool = True) -> asyncio.Future[object]:
        self._names += 1
        if counted:
            self._commands.append(_Command("Add", time.monotonic()))
        return asyncio.ensure_future(
            self._engine.generate(_request(self._sizes, f"other-{self._names}", prompt, tokens))
        )

    async def control(self) -> None:
        """Send ADD and ABORT alternately, at times unrelated to the steps."""
        while True:
            await self._pause()
            pending = self._generate(self._sizes.short_prompt, self._sizes.tokens)
            try:
                await self._pause()
                self._commands.append(_Command("Abort", time.monotonic()))
            finally:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)

    async def long_prompts(self) -> None:
        """Send long prompts, one after the other."""
        pending: list[asyncio.Future[object]] = []
        try:
            while True:
                pending.append(self._generate(self._sizes.long_prompt, 1))
                await self._pause()
        finally:
            for each in pending:
                each.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _pause(self) -> None:
        await asyncio.sleep(self._pause_s * (0.5 + self._random.random()))


async def _run_with_commands(
    engine: ProcessEngine, sizes: EngineSizes, number: int, pause_s: float
) -> tuple[list[StepRecord], list[_Command]]:
    """Repeat until enough commands were taken individually. Raises ManagerError after ATTEMPTS_MAX attempts."""
    steps: list[StepRecord] = []
    commands: list[_Command] = []
    for _ in range(ATTEMPTS_MAX):
        others = _BackgroundRequests(engine, sizes, number, pause_s)
        more = await others.run(others.control)
        steps += more[0]
        commands += more[1]
        command_counts = [step.commands for _, step in _token_gaps(steps, sizes)]
        if min(command_counts.count(("Add",)), command_counts.count(("Abort",))) >= COMMANDS_MIN:
            return steps, commands
    raise ManagerError(f"fewer than {COMMANDS_MIN} commands were taken individually: the machine is too busy")


async def _no_op() -> None:
    pass


def _token_gaps(steps: list[StepRecord], sizes: EngineSizes) -> list[tuple[float, StepRecord]]:
    """Return the token gap of each step that decoded for all background requests, as did the one before."""
    return [
        (step.ended_s - before.ended_s, step)
        for before, step in itertools.pairwise(steps)
        if min(before.decoded, step.decoded) >= sizes.others
    ]


def _total_add_cost(steps: list[StepRecord], sizes: EngineSizes) -> list[float]:
    """Return the total cost of an ADD in steps: how much longer the gaps were in all steps that prefilled its prompt; a
    sum of medians, one for each of these steps. Empty if other commands always interfered."""
    gaps = _token_gaps(steps, sizes)
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


def _command_latencies(kind: str, steps: list[StepRecord], commands: list[_Command]) -> list[float]:
    """Return, for each command that was taken alone, the time from sending it to the end of the next step."""
    given_s = [command.given_s for command in commands if command.kind == kind]
    ended = [step.ended_s for step in steps if step.commands == (kind,)]
    return [min(end - at for at in given_s if at <= end) for end in ended if any(at <= end for at in given_s)]


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]
