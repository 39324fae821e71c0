"""A look at the pools of a service elsewhere: what its status routes tell of them.

Owns what was heard. A service shows rows of what has settled, each with the cores that were reserved for it, and its
pools as they are; so its CPU is told, and the pools of quotas and devices are not: nothing shows which of its actions
used them. Rows come over the network, and nobody waits for them: each answer is what had arrived by then, so the last
second or so is in the next one. Never raises because a service does not answer: then there is nothing new.
"""

from __future__ import annotations

import contextlib

import msgspec

from tangram.client.remote import RemoteTransport
from tangram.core.demand import CORE, CPU
from tangram.errors import TangramError
from tangram.rl.observe.pool_usage_sums import Kept, Use
from tangram.rl.train.records import PoolUse
from tangram.runtime.views import PoolView, Row, Timeline, View

TRAJECTORIES_MAX = 20_000
"""Beyond, the one that was heard of longest ago is forgotten."""
ROWS = 5000
"""Asked for at once: what a service gives at most."""


class PoolLook:
    def __init__(self, transport: RemoteTransport) -> None:
        """Wants a running loop: the first look begins at once, and finds out from where on rows count."""
        self._transport = transport
        self._after = 0
        self._instance = ""
        self._looking = False
        self._uses: dict[str, Use] = {}
        self._kept: dict[tuple[str, str, str], Kept] = {}
        """By run, trajectory and pool; the one heard of last at the end."""
        self._pools: tuple[PoolView, ...] = ()
        self._closed = False
        self._begin()

    def close(self) -> None:
        self._closed = True

    def since_last(self) -> tuple[PoolUse, ...]:
        if self._closed:
            return ()
        self._begin()
        return tuple(self._told(pool) for pool in self._pools if pool.kind == CPU)

    def _told(self, pool: PoolView) -> PoolUse:
        use = self._uses.setdefault(pool.name, Use(0.0))
        use.total = pool.total / CORE
        return use.told(pool.name, pool.waiting)

    def _begin(self) -> None:
        if not self._looking:
            self._looking = True
            self._transport.begin(self._look())

    async def _look(self) -> None:
        try:
            with contextlib.suppress(TangramError, msgspec.MsgspecError):
                await self._read()
        finally:
            self._looking = False

    async def _read(self) -> None:
        wire = self._transport.wire
        more = True
        while more and not self._closed:
            answer = await wire.ask("GET", "/v1/timeline", after=str(self._after), limit=str(ROWS))
            timeline = msgspec.json.decode(answer, type=Timeline)
            if self._instance and timeline.instance != self._instance:
                self._after, self._instance = 0, timeline.instance  # it was started anew, and counts from 0
                self._kept.clear()
                continue
            if self._instance:
                for row in timeline.rows:
                    self._take(row)
            more = timeline.last > self._after
            self._after = timeline.last
        self._instance = self._instance or timeline.instance
        self._pools = msgspec.json.decode(await wire.ask("GET", "/v1/view"), type=View).pools

    def _take(self, row: Row) -> None:
        if not row.cpu:
            return
        pool, cores = f"{CPU}@{row.node}", row.cpu / CORE
        use = self._uses.setdefault(pool, Use(0.0))
        use.tally.add(row.waiting_s, row.execution_s, row.overhead_s)
        use.held_unit_s += cores * (row.ended_s - row.granted_s)
        key = (row.run, row.trajectory or row.id, pool)
        kept = self._kept.pop(key, None) or Kept(row.granted_s)
        kept.had(cores, row.granted_s, row.ended_s, use)
        self._kept[key] = kept
        if len(self._kept) > TRAJECTORIES_MAX:
            del self._kept[next(iter(self._kept))]
