"""The visibility filter: what each caller may see of the server over HTTP.

Owns nothing; reads the observer, the metrics, the scheduler and the event log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import BinaryIO

import msgspec

from tangram.core.messages import Pool
from tangram.errors import InvalidAction
from tangram.managers.models import ModelManager
from tangram.runtime.trace_recorder import TraceLog
from tangram.runtime.views import TIMELINE_ROWS_MAX, PoolUsageView, Story, TimelineRow, TimelineView, View
from tangram.runtime.wire import ServiceReply
from tangram.server.observe.state_observer import StateObserver
from tangram.server.tenants import Principal


class VisibilityFilter:
    def __init__(
        self,
        pools: Iterable[Pool],
        observer: StateObserver,
        metrics: Callable[[], str],
        models: ModelManager | None,
        event_log: TraceLog | None,
    ) -> None:
        self._pools = {pool.name: pool for pool in pools}
        """The pools of this machine at full size."""
        self._observer = observer
        self.metrics = metrics
        """Renders all metrics for Prometheus."""
        self._models = models
        self._event_log = event_log

    def view(self, caller: Principal) -> View:
        view = self._observer.view(_visible_run(caller))
        return view if caller.is_admin else _hide_other_runs(view, caller.run)

    def timeline(self, after: int, limit: int, caller: Principal) -> TimelineView:
        return self._observer.timeline(after, limit, _visible_run(caller))

    def timeline_rows(self, caller: Principal) -> tuple[TimelineRow, ...]:
        """All rows that the server remembers."""
        return self._observer.timeline(0, TIMELINE_ROWS_MAX, _visible_run(caller)).rows

    def pool_usage(self, caller: Principal) -> PoolUsageView:
        """Use by the run for which the caller acts; of the admin outside of a run, by all."""
        return self._observer.pool_usage(caller.run or None)

    def story(self, id: str, caller: Principal) -> Story | None:
        """`id` is qualified, as views show it, or as its caller chose it."""
        run = _visible_run(caller)
        return self._observer.story(id, run) or self._observer.story(f"{caller.tenant}/{id}", run)

    def hide_run(self, run: str) -> None:
        """Hides the past of the run from a later run of that name."""
        self._observer.hide_run(run)

    def services(self) -> list[ServiceReply]:
        services = self._models.services() if self._models is not None else ()
        return [
            ServiceReply(name=service.name, degrees=service.degrees, call_s_max=service.call_s_max)
            for service in services
        ]

    def resized_pool(self, name: str, total: int) -> Pool:
        """Returns a pool of this machine with another total and its NUMA nodes in proportion."""
        pool = self._pools.get(name)
        if pool is None:
            raise InvalidAction("pool", name, f"one that can be resized: {', '.join(self._pools)}")
        if not 0 <= total <= pool.total:
            raise InvalidAction(f"total of {name}", total, f"at most {pool.total}")
        shares = [total * units // pool.total for units in pool.numa]
        numa = (*shares[:-1], total - sum(shares[:-1])) if shares else ()
        return msgspec.structs.replace(pool, total=total, numa=numa)

    def has_node(self, name: str) -> bool:
        return any(pool.node == name for pool in self._pools.values())

    def open_trace(self) -> tuple[BinaryIO, int]:
        if self._event_log is None:
            raise InvalidAction("trace", None, "a service that records one: set `service.event_log` in its config")
        return self._event_log.open_snapshot()


def _visible_run(caller: Principal) -> str | None:
    return None if caller.is_admin else caller.run


RUN_POOL_PREFIXES = ("running", "function", "endpoint", "instances")
"""Names of pools of one run start with one of these words and the run."""


def _hide_other_runs(view: View, run: str) -> View:
    """Removes pools of other runs, whose names contain the run."""

    def is_shown(kind: str) -> bool:
        word, _, rest = kind.partition("/")
        return word not in RUN_POOL_PREFIXES or rest.partition("/")[0] == run

    pools = tuple(pool for pool in view.pools if is_shown(pool.kind))
    if len(pools) == len(view.pools):
        return view
    history = tuple(
        msgspec.structs.replace(bucket, busy={kind: part for kind, part in bucket.busy.items() if is_shown(kind)})
        for bucket in view.history
    )
    return msgspec.structs.replace(view, pools=pools, history=history)
