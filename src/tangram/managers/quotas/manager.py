"""Quotas: what an API allows, as pools, and the leases of those who use it.

Owns the names of those pools and every hold on them. Never talks to an API: whoever holds a quota does. Decides nothing
but how much of a quota may be used after the API has complained (`Pace`). Promises that what a quota allows is granted
once, in any stretch of time and whatever clock the API counts by, and that a hold ends when its holder lets go and not
before: whoever is stopped while it asks an API holds the quota until it has left. The end of the manager ends all.

    search             requests under way
    search/requests    requests in a window of time
    search/tokens      tokens in a window of time
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

import msgspec

from tangram.core.action import Action, Usage
from tangram.core.demand import CPU, GPU, MEMORY, Amounts, fixed
from tangram.core.ledger import CORE_KIND
from tangram.core.messages import Event, Grant, Pool, PoolChanged, Window
from tangram.errors import InvalidAction, InvalidConfig
from tangram.managers.quotas.adaptive_rate import Advice, Pace
from tangram.managers.work import Ended, Work
from tangram.processes.streams import Output

REQUESTS, TOKENS = "requests", "tokens"
ARRIVAL_S = 1.0
"""By then a request has reached the API, also on a busy machine. Only what takes longer than that is counted from then
on instead of from its end."""

PAUSE_SAID_S = 5.0
"""Who waits longer than this because of an API is told why."""

Tell = Callable[[Event], None]

log = logging.getLogger("tangram")


class Rate(msgspec.Struct, frozen=True):
    """So many units in so many seconds, however the API counts them: in windows that begin at some time, in the
    seconds before each request, or as a bucket that holds so many and fills steadily."""

    units: int
    seconds: float

    def __post_init__(self) -> None:
        if type(self.units) is not int or self.units < 1:
            raise InvalidConfig("rate.units", self.units, "a whole number of units, at least 1")
        Window(seconds=self.seconds)

    def pool(self, kind: str, share: float = 1.0) -> Pool:
        """With a part of the units; at least one, so that nobody waits for ever. What never exceeds a number in any
        stretch of that many seconds suits all ways to count."""
        window = Window(seconds=self.seconds, sliding=True, arrival_s=ARRIVAL_S)
        return Pool(kind=kind, total=max(1, int(self.units * share)), window=window)


class Quota(msgspec.Struct, frozen=True):
    """What one API allows: any mix of requests under way, requests per window and tokens per window."""

    name: str
    concurrent: int | None = None
    requests: Rate | None = None
    tokens: Rate | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or not self.name.isprintable() or set(self.name) & set("@/"):
            raise InvalidConfig("quota.name", self.name, "printable characters without '@' and '/'")
        if self.name in (CPU, GPU, MEMORY, CORE_KIND):
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
        """With a part of everything."""
        found = []
        if self.concurrent is not None:
            found.append(Pool(kind=self.name, total=max(1, int(self.concurrent * share))))
        for kind, rate in self.rates().items():
            found.append(rate.pool(f"{self.name}/{kind}", share))
        return tuple(found)

    def closed(self) -> Pool:
        """The pool that is enough to close to keep everybody out, with nothing in it."""
        return msgspec.structs.replace(self.pools()[0], total=0)

    def demand(self, *, requests: int = 1, tokens: int = 0) -> dict[str, Amounts]:
        """What so many requests with so many tokens in all need of its pools."""
        for field, units, least in ((REQUESTS, requests, 1), (TOKENS, tokens, 0)):
            if type(units) is not int or units < least:
                raise InvalidAction(field, units, f"a whole number, at least {least}")
        if tokens and self.tokens is None:
            raise InvalidAction(TOKENS, tokens, f"none: quota {self.name} counts no tokens")
        if not tokens and self.tokens is not None:
            raise InvalidAction(TOKENS, tokens, f"an estimate, at least 1: quota {self.name} counts tokens")
        wanted = {} if self.concurrent is None else {self.name: requests}
        wanted |= {f"{self.name}/{kind}": units for kind, units in ((REQUESTS, requests), (TOKENS, tokens))
                   if kind in self.rates()}  # fmt: skip
        for pool in self.pools():
            if wanted[pool.kind] > pool.total:
                raise InvalidAction(pool.kind, wanted[pool.kind], f"at most {pool.total}, which is all that there is")
        return {kind: fixed(units) for kind, units in wanted.items()}

    def rates(self) -> dict[str, Rate]:
        both = {REQUESTS: self.requests, TOKENS: self.tokens}
        return {kind: rate for kind, rate in both.items() if rate is not None}


class HoldLease:
    """The lease of one who uses a quota."""

    def __init__(self, on_end: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()
        self.granted_at = loop.time()
        self._ended: asyncio.Future[Ended] = loop.create_future()
        self._on_end = on_end
        self._stopped = self._given_up = False

    async def wait(self) -> Ended:
        await asyncio.wait({self._ended})
        return self._ended.result()

    def let_go(self, spent: dict[str, int] | None = None) -> None:
        """Done. `spent`: what was really used of pools that were granted by estimate."""
        if not self._ended.done():
            self._ended.set_result(Ended(usage=Usage(spent=spent)))
            self._on_end()

    def resize(self, *, reserved: int, limit: int) -> None:
        """It has no CPU."""

    def used(self) -> float | None:
        return None

    async def stop(self) -> None:
        """Only its holder can let go: what it has asked for is under way, whatever becomes of the action here."""
        self._stopped = True
        if self._given_up:
            self.let_go()
        await asyncio.wait({self._ended})

    def give_up(self) -> None:
        """All ends: a stop no longer waits for the holder."""
        self._given_up = True
        if self._stopped:
            self.let_go()


class QuotaManager:
    """The executor of work that its caller does: it holds what was granted until the caller lets go."""

    def __init__(self, quotas: Iterable[Quota], tell: Tell) -> None:
        """`tell` is given pools that come and change from now on."""
        self._tell = tell
        self._quotas = {quota.name: quota for quota in quotas}
        self._pace_by_quota = {name: Pace(_slowest(quota)) for name, quota in self._quotas.items()}
        self._holds: dict[str, HoldLease] = {}
        self._alarms: dict[str, asyncio.TimerHandle] = {}
        self._closing = False

    def pools(self) -> tuple[Pool, ...]:
        return tuple(pool for quota in self._quotas.values() for pool in quota.pools())

    # ---- quotas ----

    def add(self, quota: Quota) -> None:
        """From now on it can be asked for. The same one may be added again; another one of the same name replaces it,
        unless it counts something else. What the API said about its limits still holds."""
        old = self._quotas.get(quota.name)
        if old is not None and {pool.kind for pool in old.pools()} != {pool.kind for pool in quota.pools()}:
            raise InvalidConfig(f"quota {quota.name}", quota, "the same kinds of limits as before")
        if old == quota:
            return
        self._quotas[quota.name] = quota
        pace = self._pace_by_quota.setdefault(quota.name, Pace(_slowest(quota)))
        pace.window(_slowest(quota))
        self._follow(quota.name)

    def get(self, name: str) -> Quota:
        quota = self._quotas.get(name) if isinstance(name, str) else None
        if quota is None:
            known = ", ".join(map(repr, self._quotas)) or "none; add one with t.add_quota(...)"
            raise InvalidAction("quota", name, f"one of {known}")
        return quota

    def all(self) -> list[Quota]:
        return list(self._quotas.values())

    def advise(self, name: str, advice: Advice, granted_at: float | None = None) -> None:
        """What an API said about its limits, in an answer to a request of which the quota was granted then."""
        self.get(name)
        pace, now = self._pace_by_quota[name], asyncio.get_running_loop().time()
        before_s = pace.paused_s(now)
        pace.heard(advice, now, now if granted_at is None else granted_at)
        pause_s = pace.paused_s(now)
        if pause_s > before_s + PAUSE_SAID_S:
            log.warning("quota %s: its API complained, nothing is asked of it for %.0f s", name, pause_s)
        self._follow(name)

    def _follow(self, name: str) -> None:
        """Say how much there is now, and look again when that changes."""
        loop, pace = asyncio.get_running_loop(), self._pace_by_quota[name]
        now = loop.time()
        self._announce(self._quotas[name], pace.share(now))
        alarm = self._alarms.pop(name, None)
        if alarm is not None:
            alarm.cancel()
        again_s = pace.changes_in(now)
        if again_s is not None:
            self._alarms[name] = loop.call_later(again_s, self._follow, name)

    def _announce(self, quota: Quota, share: float) -> None:
        if share <= 0.0:
            self._tell(PoolChanged(pool=quota.closed()))
            return
        for pool in quota.pools(share):
            self._tell(PoolChanged(pool=pool))

    # ---- holds ----

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> HoldLease:
        hold = self._holds[action.id] = HoldLease(lambda: self._holds.pop(action.id, None))
        if self._closing:
            hold.give_up()
        return hold

    def let_go(self, action: str, spent: dict[str, int] | None = None) -> None:
        """Nothing if it has ended already."""
        hold = self._holds.get(action)
        if hold is not None:
            hold.let_go(spent)

    def granted_at(self, action: str) -> float | None:
        hold = self._holds.get(action)
        return None if hold is None else hold.granted_at

    def close(self) -> None:
        """Wait for no holder any more. Whoever closes the orchestrator says so before: that stops all actions, and
        waits until they have ended."""
        self._closing = True
        for hold in list(self._holds.values()):
            hold.give_up()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for alarm in self._alarms.values():
            alarm.cancel()
        for hold in list(self._holds.values()):
            hold.let_go()


def _slowest(quota: Quota) -> float:
    """Seconds in which a quota shows whether it holds."""
    return max((rate.seconds for rate in quota.rates().values()), default=1.0)
