"""Whether an action gets the CPU that it was granted: no less, and no more.

A CPU-bound program runs with 0.25, 0.5, 1 and 1.5 cores granted, first alone and then next to other such programs with
all cores of the machine granted. Its use is read from its control group; the moments at which grants had reserved more
than the pool has come from the trace, not from the scheduler's own ledger.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tangram.bench.base import PRINTED, BenchRun, at_most
from tangram.client.client import Client, connect
from tangram.core.demand import CPU
from tangram.core.messages import Finished, Resize, Start, StartFailed
from tangram.runtime.trace_recorder import open_trace

BUSY = "i=0; while [ $i -lt {cpus} ]; do (while :; do :; done) & i=$((i + 1)); done; wait"
"""One busy loop per core, until the time limit."""


class CpuSizes(msgspec.Struct, frozen=True, kw_only=True):
    cores: tuple[float, ...] = (0.25, 0.5, 1.0, 1.5)
    seconds: float = 4.0
    together: tuple[tuple[float, ...], ...] = ((1.0, 1.0), (1.5, 0.5), (0.25, 0.25, 0.5, 1.0), (0.5, 0.5, 0.5, 0.5))
    """Concurrent grants that fill two cores."""


LABEL = "measured"
FULL = CpuSizes()
QUICK = CpuSizes(seconds=1.5, together=((1.5, 0.5), (0.25, 0.25, 0.5, 1.0)))


async def measure(sizes: CpuSizes, run: BenchRun) -> None:
    recorded = run.folder / "cpu.jsonl"
    errors: list[float] = []
    rounds = [(each,) for each in sizes.cores] + list(sizes.together)
    async with connect(cores=2, record=recorded) as t:
        for number, granted in enumerate(rounds):
            used = await t.gather(*(_burn(t, cores, sizes.seconds) for cores in granted))
            for cores, used_cores in zip(granted, used, strict=True):
                errors.append(abs(used_cores / cores - 1.0))
            if len(granted) == 1:
                run.add(f"used_at_{granted[0]:g}", used[0], PRINTED)
            run.progress((number + 1) / len(rounds))
    run.add("error_max", max(errors), at_most(0.10))
    run.add("error_mean", sum(errors) / len(errors), PRINTED)
    run.add("oversold", float(_oversubscribed_moments(recorded)), at_most(0.0))


async def _burn(t: Client, cores: float, seconds: float) -> float:
    """Return the mean number of cores used."""
    async with t.sandbox(memory="64MiB") as sandbox:
        result = await sandbox.exec(BUSY, cpus=cores, timeout_s=seconds)
    return result.usage.cpu_s / result.timing.execution_s


def _oversubscribed_moments(recorded: Path) -> int:
    """Return the number of moments at which the running grants had reserved more than the pool has."""
    count = 0
    with open_trace(recorded) as (header, lines):
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
