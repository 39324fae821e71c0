"""What members and groups that are played besides gain and cost.

A batch of groups is collected, with none, some or many members and groups besides. Environments take log-normal waits
and a random number of turns, made of the seed, so that all cells of the grid play the same groups; turns are written
by a real engine. `speedup_gG_mM` is how much sooner the batch is whole with G groups and M members besides than with
none; `waste_gG_mM` the share of the environments' time that was spent in vain. Keeping the first that end prefers short
trajectories: `bias_turns_gG_mM` is the mean number of turns of those that were kept over that of all that the seeds
would have made.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tangram.bench.base import PRINTED, BenchResult, Findings, Progress
from tangram.bench.rollout import SEEN, TASK, TOKENS, Fixed, Waiting, Waits, serving
from tangram.reports.statistics import mean_of, ratio_of
from tangram.rl.config.rollout_settings import (
    EngineSettings,
    GroupSettings,
    PolicySettings,
    RolloutSettings,
    TaskSettings,
)
from tangram.rl.inference.router import Gateway
from tangram.rl.rollout.records import Ticket
from tangram.rl.rollout.redundancy import report
from tangram.rl.rollout.rollout import Collected, Rollout


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    groups: int = 8
    members: int = 8
    extra: tuple[int, ...] = (0, 2, 4)
    """Groups besides, and members besides: all pairs of them."""
    turns: int = 12
    """At most; at least a third of it."""
    latency_s: float = 0.1
    spread: float = 1.5
    """σ / μ of the log-normal waits."""
    seeds: int = 5


FULL = Sizes()
QUICK = Sizes(groups=4, members=4, extra=(0, 2), turns=9, seeds=2)


class Uneven(Waiting):
    """As many turns as its seed says."""

    async def reset(self, seed: int) -> str:
        said = await super().reset(seed)
        self._latencies = self._latencies[: turns_of(seed, self._member, self._waits.turns)]
        return said


def turns_of(seed: int, member: int, turns_max: int) -> int:
    return random.Random(f"turns {seed} {member}").randint(max(turns_max // 3, 1), turns_max)


def measure(sizes: Sizes, *, trace: Path | None, processes: int | None, progress: Progress) -> BenchResult:
    return asyncio.run(_measure(sizes, progress))


async def _measure(sizes: Sizes, progress: Progress) -> BenchResult:
    found = Findings()
    cells = [(groups, members) for groups in sizes.extra for members in sizes.extra]
    batches: dict[tuple[int, int], list[Collected]] = {cell: [] for cell in cells}
    async with serving(_engine(sizes), PolicySettings()) as gateway:
        await _collect(gateway, sizes, (0, 0), seed=0)  # warm
        for done, (seed, cell) in enumerate(itertools.product(range(sizes.seeds), cells), 1):
            batches[cell].append(await _collect(gateway, sizes, cell, seed))
            progress(done / (sizes.seeds * len(cells)), f"{cell[0]} groups, {cell[1]} members besides")
    plain = [batch.ended_s - batch.began_s for batch in batches[0, 0]]
    for (groups, members), played in batches.items():
        name = f"g{groups}_m{members}"
        ratio = ratio_of(plain, [batch.ended_s - batch.began_s for batch in played])
        assert ratio is not None
        reports = [report(batch.groups, batch.left_out).all for batch in played]
        found.add(f"speedup_{name}", ratio, PRINTED)
        found.add(f"waste_{name}", mean_of([each.waste.environment_s for each in reports]), PRINTED)
        found.add(f"waste_tokens_{name}", mean_of([each.waste.tokens for each in reports]), PRINTED)
        found.add(f"bias_turns_{name}", mean_of([_bias(batch, sizes) for batch in played]), PRINTED)
    last = batches[cells[-1]][-1]
    found.notes.append("Of the last batch with most besides: " + "; ".join(report(last.groups, last.left_out).lines()))
    return found.result("redundancy", "measured", sizes)


def _engine(sizes: Sizes) -> EngineSettings:
    most = (sizes.groups + max(sizes.extra)) * (sizes.members + max(sizes.extra))
    return EngineSettings(slots=most, context_max=sizes.turns * (SEEN + TOKENS) + SEEN, chunk=most * (SEEN + 1))


def _bias(batch: Collected, sizes: Sizes) -> float:
    """Over all members that were begun in all groups, whatever became of them."""
    kept = [len(each.turns) for group in batch.groups for each in group.members]
    begun = [turns_of(each.seed, each.member, sizes.turns) for each in batch.all()]
    return (sum(kept) / len(kept)) / (sum(begun) / len(begun))


async def _collect(gateway: Gateway, sizes: Sizes, cell: tuple[int, int], seed: int) -> Collected:
    waits = Waits(latency_s=sizes.latency_s, spread=sizes.spread, turns=sizes.turns, heavy=True)
    settings = RolloutSettings(
        engines=(_engine(sizes),),
        groups=GroupSettings(size=sizes.members, groups_extra=cell[0], members_extra=cell[1]),
        tasks=(
            TaskSettings(
                name=TASK, environment="tangram.bench.redundancy:Uneven", options=msgspec.to_builtins(waits),
                tokens_max=TOKENS,
            ),
        ),
    )  # fmt: skip
    Waiting.made.clear()
    async with Rollout(settings, gateway, Fixed()) as rollout:
        return await rollout.collect(_tickets(seed), sizes.groups)


def _tickets(seed: int) -> Iterator[Ticket]:
    for number in itertools.count():
        yield Ticket(task=TASK, number=number, seed=random.Random(f"{seed}/{number}").getrandbits(31))
