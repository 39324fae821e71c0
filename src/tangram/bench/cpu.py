"""Whether an action gets the CPU that it was granted: no less, and no more.

A program that wants all it can get runs with 0.25, 0.5, 1 and 1.5 cores granted, each alone and then beside others that
want as much, with the cores of the machine given out. What it used is what its control group counted. `error_max` is
the largest |used / granted - 1|. `oversold` counts the moments of the trace at which grants had reserved more than
there is; the trace is read anew for that, the scheduler's own books are not asked.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import msgspec

from tangram.bench.base import PRINTED, BenchResult, Findings, Progress, at_most
from tangram.client.client import Client, connect
from tangram.core.demand import CPU
from tangram.core.messages import Finished, Resize, Start, StartFailed
from tangram.runtime.trace_recorder import opened

BUSY = "i=0; while [ $i -lt {cpus} ]; do (while :; do :; done) & i=$((i + 1)); done; wait"
"""As many busy loops as it has cores, until the time limit."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    cores: tuple[float, ...] = (0.25, 0.5, 1.0, 1.5)
    seconds: float = 4.0
    together: tuple[tuple[float, ...], ...] = ((1.0, 1.0), (1.5, 0.5), (0.25, 0.25, 0.5, 1.0), (0.5, 0.5, 0.5, 0.5))
    """Grants that fill two cores, side by side."""


FULL = Sizes()
QUICK = Sizes(seconds=1.5, together=((1.5, 0.5), (0.25, 0.25, 0.5, 1.0)))


def measure(sizes: Sizes, *, trace: Path | None, processes: int | None, progress: Progress) -> BenchResult:
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
        recorded = Path(folder) / "cpu.jsonl"
        found = asyncio.run(_measure(sizes, recorded, progress))
        found.add("oversold", float(_oversold(recorded)), at_most(0.0))
    return found.result("cpu", "measured", sizes)


async def _measure(sizes: Sizes, recorded: Path, progress: Progress) -> Findings:
    found = Findings()
    errors: list[float] = []
    rounds = [(each,) for each in sizes.cores] + list(sizes.together)
    async with connect(cores=2, record=recorded) as t:
        for number, granted in enumerate(rounds):
            used = await t.gather(*(_burn(t, cores, sizes.seconds) for cores in granted))
            for cores, got in zip(granted, used, strict=True):
                errors.append(abs(got / cores - 1.0))
            if len(granted) == 1:
                found.add(f"used_at_{granted[0]:g}", used[0], PRINTED)
            progress((number + 1) / len(rounds))
    found.add("error_max", max(errors), at_most(0.10))
    found.add("error_mean", sum(errors) / len(errors), PRINTED)
    return found


async def _burn(t: Client, cores: float, seconds: float) -> float:
    """Cores that it used on average."""
    async with t.sandbox(memory="64MiB") as box:
        result = await box.exec(BUSY, cpus=cores, timeout_s=seconds)
    return result.usage.cpu_s / result.timing.execution_s


def _oversold(recorded: Path) -> int:
    """Moments at which the reserves of all that ran were above what the pool has."""
    count = 0
    with opened(recorded) as (header, lines):
        total = {pool.name: pool.total for pool in header.pools if pool.kind == CPU}
        held: dict[str, dict[str, int]] = {name: {} for name in total}
        for line in lines:
            message = line.message
            if isinstance(message, Start):
                for share in message.grant.shares:
                    if share.pool in held:
                        held[share.pool][message.action.id] = share.reserved
            elif isinstance(message, Resize) and message.pool in held:
                held[message.pool][message.action] = message.reserved
            elif isinstance(message, Finished | StartFailed):
                for reserves in held.values():
                    reserves.pop(message.action, None)
            count += any(sum(reserves.values()) > total[name] for name, reserves in held.items())
    return count
