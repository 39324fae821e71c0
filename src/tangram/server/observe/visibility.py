"""Sight: what the service shows of itself over HTTP, to each caller what it may see.

Owns nothing: it asks the picture, the metrics, the scheduler and the event log. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import BinaryIO, Protocol

import msgspec

from tangram.core.messages import Pool
from tangram.errors import InvalidAction
from tangram.managers.models import ModelManager
from tangram.runtime.views import Story, Timeline, View
from tangram.runtime.wire import ServiceReply
from tangram.server.http.auth import Caller
from tangram.server.observe.event_log import EventLog


class Picture(Protocol):
    """Of all runs, or as one of them may see it."""

    def view(self, run: str | None) -> View: ...

    def timeline(self, after: int, limit: int, run: str | None) -> Timeline: ...

    def story(self, id: str, run: str | None) -> Story | None: ...

    def hide(self, run: str) -> None: ...


class Sight:
    def __init__(
        self,
        pools: Iterable[Pool],
        picture: Picture,
        metrics: Callable[[], str],
        models: ModelManager | None,
        event_log: EventLog | None,
    ) -> None:
        self._pools = {pool.name: pool for pool in pools}
        """Of the machine, as large as they can be."""
        self._picture = picture
        self.metrics = metrics
        """All of them, as Prometheus reads them."""
        self._models = models
        self._event_log = event_log

    def view(self, caller: Caller) -> View:
        found = self._picture.view(_run(caller))
        return found if caller.admin else _without_others(found, caller.run)

    def timeline(self, after: int, limit: int, caller: Caller) -> Timeline:
        return self._picture.timeline(after, limit, _run(caller))

    def story(self, id: str, caller: Caller) -> Story | None:
        """`id` with the name of its run before it, as the view shows it; or as its caller chose it."""
        run = _run(caller)
        return self._picture.story(id, run) or self._picture.story(f"{caller.space}/{id}", run)

    def forget(self, run: str) -> None:
        """Whoever comes under its name later sees nothing of it."""
        self._picture.hide(run)

    def services(self) -> list[ServiceReply]:
        found = self._models.services() if self._models is not None else ()
        return [
            ServiceReply(name=service.name, degrees=service.degrees, call_s_max=service.call_s_max) for service in found
        ]

    def resized(self, name: str, total: int) -> Pool:
        """A pool of this machine with another total, its NUMA nodes in the same proportions."""
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

    def trace(self) -> tuple[BinaryIO, int]:
        if self._event_log is None:
            raise InvalidAction("trace", None, "a service that records one: give its config `service.event_log`")
        return self._event_log.opened()


def _run(caller: Caller) -> str | None:
    return None if caller.admin else caller.run


OF_RUNS = ("running", "function", "endpoint", "instances")
"""Pools that belong to one run begin with one of these words and its name."""


def _without_others(view: View, run: str) -> View:
    """Pools that belong to another run tell its name."""

    def is_shown(kind: str) -> bool:
        word, _, rest = kind.partition("/")
        return word not in OF_RUNS or rest.partition("/")[0] == run

    pools = tuple(pool for pool in view.pools if is_shown(pool.kind))
    if len(pools) == len(view.pools):
        return view
    history = tuple(
        msgspec.structs.replace(bucket, busy={kind: part for kind, part in bucket.busy.items() if is_shown(kind)})
        for bucket in view.history
    )
    return msgspec.structs.replace(view, pools=pools, history=history)
