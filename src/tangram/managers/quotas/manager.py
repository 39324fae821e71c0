"""Quotas: the limits of APIs as pools, and the leases on them.

Owns the names of those pools and every lease on them. Never calls an API: the holder of a lease does. Decides only how
much of a quota may be used after the API has refused a request (adaptive_rate.py). Promises that each unit of a quota
is granted once in any window, whichever clock the API uses, and that a lease does not end before its holder releases
it: an action that is stopped during a request holds the quota until the request has ended. The end of the manager ends
all leases.

The rate limiter itself is a pool with a sliding window: the ledger of the scheduler (core/ledger.py) counts the units
and returns them when the window has passed.

    search             concurrent requests
    search/requests    requests in a window of time
    search/tokens      tokens in a window of time
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Self

import msgspec

from tangram.core.action import Action, Usage
from tangram.core.demand import CPU, EXCLUSIVE_CORE, GPU, MEMORY, Amounts, fixed
from tangram.core.messages import Event, Grant, Pool, PoolChanged, Window
from tangram.errors import InvalidAction, InvalidConfig
from tangram.managers.quotas.adaptive_rate import AdaptiveRate, RateLimitAdvice
from tangram.managers.work import LeaseResult, Work
from tangram.processes.streams import Output

REQUESTS, TOKENS = "requests", "tokens"
ARRIVAL_S = 1.0
"""Time within which a request reaches the API, also on a busy machine. Only a request that takes longer counts from its
start plus this time instead of from its end."""

PAUSE_LOGGED_S = 5.0
"""An action that waits longer than this for an API gets a reason."""

EventListener = Callable[[Event], None]

log = logging.getLogger("tangram")


class Rate(msgspec.Struct, frozen=True):
    """`units` in `seconds`, for every way of counting: fixed windows, a sliding window, or a token bucket of that size
    that refills steadily."""

    units: int
    seconds: float

    def __post_init__(self) -> None:
        if type(self.units) is not int or self.units < 1:
            raise InvalidConfig("rate.units", self.units, "a whole number of units, at least 1")
        Window(seconds=self.seconds)

    def pool(self, kind: str, share: float = 1.0) -> Pool:
        """Returns a pool with a part of the units; at least one, so that no action starves. A limit in every interval
        of that length satisfies all ways of counting."""
        window = Window(seconds=self.seconds, sliding=True, arrival_s=ARRIVAL_S)
        return Pool(kind=kind, total=max(1, int(self.units * share)), window=window)


class Quota(msgspec.Struct, frozen=True):
    """The limits of one API: on concurrent requests, requests per window, tokens per window, or several of these."""

    name: str
    concurrent: int | None = None
    requests: Rate | None = None
    tokens: Rate | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or not self.name.isprintable() or set(self.name) & set("@/"):
            raise InvalidConfig("quota.name", self.name, "printable characters without '@' and '/'")
        if self.name in (CPU, GPU, MEMORY, EXCLUSIVE_CORE):
            raise InvalidConfig("quota.name", self.name, "a name that is not a kind of resource of a machine")
        if self.concurrent is not None and (type(self.concurrent) is not int or self.concurrent < 1):
            raise InvalidConfig(f"quota {self.name} concurrent", self.concurrent, "a whole number, at least 1, or None")
        for kind in (REQUESTS, TOKENS):
            rate = getattr(self, kind)
            if rate is not None and not isinstance(rate, Rate):
                raise InvalidConfig(f"quota {self.name} {kind}", rate, "a Rate, or None")
        if self.concurrent is None and self.requests is None and self.tokens is None:
            raise InvalidConfig(f"quota {self.name}", None, "at least one of concurrent, requests and tokens")

    def pools(self, share: float = 1.0) -> tuple[Pool, ...]:
        """All limits, scaled."""
        pools = []
        if self.concurrent is not None:
            pools.append(Pool(kind=self.name, total=max(1, int(self.concurrent * share))))
        for kind, rate in self.rates().items():
            pools.append(rate.pool(f"{self.name}/{kind}", share))
        return tuple(pools)

    def closed(self) -> Pool:
        """The pool that is closed to close the whole quota."""
        return msgspec.structs.replace(self.pools()[0], total=0)

    def demand(self, *, requests: int = 1, tokens: int = 0) -> dict[str, Amounts]:
        """The demand of this many requests with this many tokens in total."""
        for field, units, least in ((REQUESTS, requests, 1), (TOKENS, tokens, 0)):
            if type(units) is not int or units < least:
                raise InvalidAction(field, units, f"a whole number, at least {least}")
        if tokens and self.tokens is None:
            raise InvalidAction(TOKENS, tokens, f"none: quota {self.name} counts no tokens")
        if not tokens and self.tokens is not None:
            raise InvalidAction(TOKENS, tokens, f"an estimate, at least 1: quota {self.name} counts tokens")
        amounts = {} if self.concurrent is None else {self.name: requests}
        amounts |= {f"{self.name}/{kind}": units for kind, units in ((REQUESTS, requests), (TOKENS, tokens))
                   if kind in self.rates()}  # fmt: skip
        for pool in self.pools():
            if amounts[pool.kind] > pool.total:
                raise InvalidAction(pool.kind, amounts[pool.kind], f"at most {pool.total}, the size of the pool")
        return {kind: fixed(units) for kind, units in amounts.items()}

    def rates(self) -> dict[str, Rate]:
        both = {REQUESTS: self.requests, TOKENS: self.tokens}
        return {kind: rate for kind, rate in both.items() if rate is not None}


class QuotaLease:
    def __init__(self, on_end: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()
        self.granted_at = loop.time()
        self._ended: asyncio.Future[LeaseResult] = loop.create_future()
        self._on_end = on_end
        self._stopped = self._is_abandoned = False

    async def wait(self) -> LeaseResult:
        await asyncio.wait({self._ended})
        return self._ended.result()

    def resize(self, *, reserved: int, limit: int) -> None: ...

    def cpu_seconds(self) -> float | None:
        return None

    def release(self, spent: dict[str, int] | None = None) -> None:
        """Release it. `spent`: the actual use of pools that were granted by estimate."""
        if not self._ended.done():
            self._ended.set_result(LeaseResult(usage=Usage(spent=spent)))
            self._on_end()

    async def stop(self) -> None:
        """Does not end the lease: only the holder can release it, because its request may be in flight."""
        self._stopped = True
        if self._is_abandoned:
            self.release()
        await asyncio.wait({self._ended})

    def abandon(self) -> None:
        """Release all: stop() no longer waits for the holder."""
        self._is_abandoned = True
        if self._stopped:
            self.release()


class QuotaManager:
    """The executor of work that the caller does itself: holds the grant until the caller releases it."""

    def __init__(self, quotas: Iterable[Quota], on_event: EventListener) -> None:
        """`on_event` is called with pools that appear or change from now on."""
        self._on_event = on_event
        self._quotas = {quota.name: quota for quota in quotas}
        self._rate_by_quota = {name: AdaptiveRate(_longest_window_s(quota)) for name, quota in self._quotas.items()}
        self._leases: dict[str, QuotaLease] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._closing = False

    def pools(self) -> tuple[Pool, ...]:
        return tuple(pool for quota in self._quotas.values() for pool in quota.pools())

    # ---- quotas ----

    def add(self, quota: Quota) -> None:
        """Add a quota. Adding the same one again does nothing; another one of the same name replaces it, unless it
        counts something else. Limits that the API has reported stay in force."""
        old = self._quotas.get(quota.name)
        if old is not None and {pool.kind for pool in old.pools()} != {pool.kind for pool in quota.pools()}:
            raise InvalidConfig(f"quota {quota.name}", quota, "the same kinds of limits as before")
        if old == quota:
            return
        self._quotas[quota.name] = quota
        adaptive_rate = self._rate_by_quota.setdefault(quota.name, AdaptiveRate(_longest_window_s(quota)))
        adaptive_rate.set_window(_longest_window_s(quota))
        self._update_pools(quota.name)

    def get(self, name: str) -> Quota:
        quota = self._quotas.get(name) if isinstance(name, str) else None
        if quota is None:
            known = ", ".join(map(repr, self._quotas)) or "none; add one with t.add_quota(...)"
            raise InvalidAction("quota", name, f"one of {known}")
        return quota

    def all(self) -> list[Quota]:
        return list(self._quotas.values())

    def advise(self, name: str, advice: RateLimitAdvice, granted_at: float | None = None) -> None:
        """Record what a response of an API states about its limits. The request was granted at `granted_at`."""
        self.get(name)
        adaptive_rate, now = self._rate_by_quota[name], asyncio.get_running_loop().time()
        before_s = adaptive_rate.paused_s(now)
        adaptive_rate.record_response(advice, now, now if granted_at is None else granted_at)
        pause_s = adaptive_rate.paused_s(now)
        if pause_s > before_s + PAUSE_LOGGED_S:
            log.warning("quota %s: its API refused a request; no request is sent for %.0f s", name, pause_s)
        self._update_pools(name)

    def _update_pools(self, name: str) -> None:
        """Publish the current share, and schedule the next change."""
        loop, adaptive_rate = asyncio.get_running_loop(), self._rate_by_quota[name]
        now = loop.time()
        self._announce(self._quotas[name], adaptive_rate.share(now))
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        again_s = adaptive_rate.changes_in(now)
        if again_s is not None:
            self._timers[name] = loop.call_later(again_s, self._update_pools, name)

    def _announce(self, quota: Quota, share: float) -> None:
        if share <= 0.0:
            self._on_event(PoolChanged(pool=quota.closed()))
            return
        for pool in quota.pools(share):
            self._on_event(PoolChanged(pool=pool))

    # ---- leases ----

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> QuotaLease:
        lease = self._leases[action.id] = QuotaLease(lambda: self._leases.pop(action.id, None))
        if self._closing:
            lease.abandon()
        return lease

    def release(self, action: str, spent: dict[str, int] | None = None) -> None:
        """Does nothing if it has ended."""
        lease = self._leases.get(action)
        if lease is not None:
            lease.release(spent)

    def granted_at(self, action: str) -> float | None:
        lease = self._leases.get(action)
        return None if lease is None else lease.granted_at

    def close(self) -> None:
        """Stop waiting for holders. To be called before the orchestrator is closed, which stops all actions and waits
        until they have ended."""
        self._closing = True
        for lease in list(self._leases.values()):
            lease.abandon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for lease in list(self._leases.values()):
            lease.release()


def _longest_window_s(quota: Quota) -> float:
    """The window after which a quota shows whether its limit holds."""
    return max((rate.seconds for rate in quota.rates().values()), default=1.0)
