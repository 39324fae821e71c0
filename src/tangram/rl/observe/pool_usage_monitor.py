"""Pool usage of a training run: the held units of each pool, and those that a reservation per trajectory would hold.

`runtime/pool_usage.py` counts, in the process of the orchestrator. `PoolUsageMonitor` takes the difference of two
readings, so that reports add up to the whole. Taking one never blocks.
"""

from __future__ import annotations

import asyncio

import msgspec

from tangram.client.client import Client
from tangram.errors import TangramError
from tangram.rl.runs.metrics_lines import PoolUse
from tangram.runtime.latency_histogram import LatencyHistogram
from tangram.runtime.views import PoolUsageView, PoolUseReading

POOLS_SHOWN_MAX = 64
"""Each function that is called has its own pool; unused ones are left out."""
POLL_S = 1.0
"""Between two readings of a remote service."""


class PoolUsageMonitor:
    """Reports nothing without a client. Construct it inside the client's context.

    A reading of an embedded client is taken with each report. A remote service is polled in the background, so the last
    second or so appears in the next report; while it does not respond, reports show no use.
    """

    def __init__(self, client: Client | None) -> None:
        self._transport = client.transport if client is not None else None
        self._reported: PoolUsageView | None = None
        """The reading up to which use was reported."""
        self._newest: PoolUsageView | None = None
        self._is_polling = False
        self._poll_timer: asyncio.TimerHandle | None = None
        self._read()

    def close(self) -> None:
        """Ends observation; later reports are empty."""
        self._transport = None
        if self._poll_timer is not None:
            self._poll_timer.cancel()

    def since_last(self) -> tuple[PoolUse, ...]:
        """Returns the usage since the last call, or since construction."""
        if not self._is_polling:
            self._read()
        if self._transport is None or self._newest is None or self._reported is None:
            return ()
        before: dict[str, PoolUseReading] = {}
        if self._reported.instance == self._newest.instance:  # otherwise it was restarted, and counts from 0
            before = {pool.name: pool for pool in self._reported.pools}
        self._reported = self._newest
        uses = [use_between(before.get(pool.name), pool) for pool in self._newest.pools if _is_used(pool, before)]
        return tuple(uses[:POOLS_SHOWN_MAX])

    def _read(self) -> None:
        if self._transport is None:
            return
        reading = self._transport.pool_usage()
        if reading.done():
            self._on_reading(reading)
        else:
            self._is_polling = True
            reading.add_done_callback(self._on_reading)

    def _on_reading(self, reading: asyncio.Future[PoolUsageView]) -> None:
        if reading.cancelled():
            return  # the client has ended
        error = reading.exception()
        if error is None:
            self._newest = reading.result()
            self._reported = self._reported or self._newest
        elif not isinstance(error, TangramError | msgspec.MsgspecError):
            raise error
        if self._is_polling and self._transport is not None:
            self._poll_timer = asyncio.get_running_loop().call_later(POLL_S, self._read)


def _is_used(pool: PoolUseReading, before: dict[str, PoolUseReading]) -> bool:
    """Whether a private pool was used since then. Others always appear."""
    earlier = before.get(pool.name)
    if not pool.private or pool.waiting or earlier is None:
        return True
    return (pool.actions, pool.held_unit_s) != (earlier.actions, earlier.held_unit_s)


def use_between(before: PoolUseReading | None, now: PoolUseReading) -> PoolUse:
    """Returns the use between two readings of a pool; None: since counting began."""
    if before is None or before.actions > now.actions:  # its run has ended, and another one of that name began
        before = msgspec.structs.replace(
            now, actions=0, act_s=0.0, act_cells={}, waiting_s=0.0, held_unit_s=0.0, reserved_unit_s=0.0
        )
    latencies = LatencyHistogram()
    latencies.count = actions = now.actions - before.actions
    latencies.waiting_s = now.waiting_s - before.waiting_s
    latencies.execution_s = now.act_s - before.act_s - latencies.waiting_s
    counts = {cell: count - before.act_cells.get(cell, 0) for cell, count in sorted(now.act_cells.items())}
    latencies.cells = {cell: count for cell, count in counts.items() if count}
    act = latencies.percentiles()
    held_unit_s = now.held_unit_s - before.held_unit_s
    return PoolUse(
        name=now.name,
        total=now.total,
        actions=actions,
        act_mean_s=act.mean_s,
        act_p99_s=act.p99_s,
        act_cells=latencies.cells,
        waiting_mean_s=latencies.waiting_s / actions if actions else 0.0,
        held_unit_s=held_unit_s,
        reserved_unit_s=max(now.reserved_unit_s - before.reserved_unit_s, held_unit_s),  # sums of fractions: not exact
        waiting=now.waiting,
    )
