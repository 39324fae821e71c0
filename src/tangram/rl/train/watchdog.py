"""Stalls: a run in which nothing moves is noticed, what it waits for is named, and what is stuck is stopped.

Owns the judgement, and no clock: time comes in. What moves is a step, group or trajectory that ends, a trajectory that
comes to another stage, a token that is written. Promises that a run in which something moves within `stall_s` has no
stall, that one in which nothing does has one every `stall_s`, and that each names what is waited for.

    watch = StallWatch(settings.training.stall_s, settings.training.stalls_max, now)
    watch.progress(now)  |  watch.ended(record, now)       # a step, or a group with members; a trajectory
    stall = watch.look(now, seen(rollout, gateway, client, training=(12, 300.0)))     # every few seconds
    if stall and not stall.give_up: free(rollout, stall)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from tangram.client.client import Client
from tangram.client.transport import LocalTransport
from tangram.core.action import State
from tangram.core.scheduler import Scheduler
from tangram.managers.quotas.manager import REQUESTS, TOKENS
from tangram.rl.inference.router import Gateway
from tangram.rl.rollout.episode import ASKED, WAITING
from tangram.rl.rollout.records import Ending, Stage, Trajectory
from tangram.rl.rollout.rollout import Rollout
from tangram.server.observe.shortage import short_kind

CAUSE = "nothing moved"
"""Of trajectories that are stopped for it; what was waited for stands behind it."""


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory in play."""

    id: str
    task: str
    stage: str
    since_s: float
    """How long it has been in this stage."""
    what: str
    """Whose answer it waits for, as far as it knows itself."""
    pool: str = ""
    """For which an action of it waits."""

    @property
    def is_kept(self) -> bool:
        """Others keep it from being served: it is not what is stuck, but waits behind it."""
        return bool(self.pool) or self.stage == WAITING or self.what != ASKED[self.stage]


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment."""

    live: tuple[Live, ...] = ()
    """Oldest first."""
    engines: dict[str, int] = {}
    """Requests inside each engine."""
    tokens: int = 0
    """That engines have read and written so far."""
    training: tuple[int, float] | None = None
    """The step that a trainer works on, and for how long."""
    idle: str = ""
    """Why nothing is in play, if nothing is."""


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    for_s: float
    """How long nothing has moved."""
    number: int
    """Of those in a row, from 1."""
    text: str
    """What is waited for."""
    abort: tuple[str, ...] = ()
    """Trajectories to be stopped and played again."""
    give_up: bool = False
    """It is the last of those that there may be in a row."""


class _Cause(NamedTuple):
    what: str
    trajectories: int


class StallWatch:
    def __init__(self, stall_s: float, stalls_max: int, now: float) -> None:
        self._stall_s = stall_s
        self._stalls_max = stalls_max
        self._moved_at = self._told_at = now
        self._row = 0
        self._tokens = 0

    def progress(self, now: float) -> None:
        """A step is done, or a trajectory or group ended with what it was played for."""
        self._moved_at = max(self._moved_at, now)
        self._row = 0

    def ended(self, record: Trajectory, now: float) -> None:
        """What ended without a reward, as what was stopped does, is no sign that the next attempt does better."""
        if record.ending.rewarded:
            self.progress(now)

    def look(self, now: float, seen: Seen) -> Stall | None:
        """A stall, once. Whatever moves puts it off; that others followed it is forgotten only when there is
        progress, for what is played again moves too, until it is stuck where the one before was."""
        moved = [now - since_s for since_s in _ages(seen)]
        if self._wrote(seen):
            moved.append(now)
        self._moved_at = max([self._moved_at, *moved])
        if now - max(self._moved_at, self._told_at) < self._stall_s:
            return None
        self._told_at = now
        self._row += 1
        for_s = now - self._moved_at
        give_up = self._row >= self._stalls_max
        return Stall(
            for_s=for_s,
            number=self._row,
            text=f"{CAUSE} for {for_s:.0f} s: {waited_for(seen)}",
            abort=() if give_up else self._stuck(seen),
            give_up=give_up,
        )

    def _wrote(self, seen: Seen) -> bool:
        before, self._tokens = self._tokens, seen.tokens
        return before != seen.tokens

    def _stuck(self, seen: Seen) -> tuple[str, ...]:
        """Oldest first. At first those that nobody keeps from going on: whoever waits behind them may then go on. If
        that did not help, or there are none such, all."""
        first = [] if self._row > 1 else [each for each in seen.live if not each.is_kept]
        return tuple(each.id for each in sorted(first or seen.live, key=lambda each: -each.since_s))


def _ages(seen: Seen) -> Iterator[float]:
    """How long each has been at what it does."""
    yield from (each.since_s for each in seen.live)
    if seen.training is not None:
        yield seen.training[1]


# ---- words ----


def waited_for(seen: Seen) -> str:
    """What is waited for, most first."""
    parts = []
    if seen.training is not None:
        step, since_s = seen.training
        parts.append(f"the trainer has worked on step {step} for {since_s:.0f} s (raise training.stall_s if it should)")
    causes = sorted(_causes(seen), key=lambda each: -each.trajectories)
    parts += [_said(cause, alone=len(causes) == 1) for cause in causes]
    if not seen.live and seen.training is None:
        parts.append("no trajectory is in play" + (f": {seen.idle}" if seen.idle else ""))
    return "; ".join(parts)


def _said(cause: _Cause, *, alone: bool) -> str:
    if cause.trajectories == 1:
        return f"{'the only trajectory' if alone else '1 trajectory'} waits for {cause.what}"
    return f"{'all ' if alone else ''}{cause.trajectories} trajectories wait for {cause.what}"


def _causes(seen: Seen) -> Iterable[_Cause]:
    generating = [each for each in seen.live if each.stage == Stage.GENERATE and not each.is_kept]
    yield from _engines(len(generating), seen.engines)
    oldest_s: dict[str, float] = {}
    counts: dict[str, int] = {}
    for each in seen.live:
        if each.is_kept or each.stage != Stage.GENERATE:
            name = _name(each)
            counts[name] = counts.get(name, 0) + 1
            oldest_s[name] = max(oldest_s.get(name, 0.0), each.since_s)
    for name, count in counts.items():
        yield _Cause(f"{name} since {oldest_s[name]:.0f} s", count)


def _engines(generating: int, inside: dict[str, int]) -> Iterable[_Cause]:
    """Which request is in which engine is not known here; how many are, is. Others than trajectories may ask too."""
    for name, requests in sorted(inside.items(), key=lambda each: -each[1]):
        if count := min(requests, generating):
            generating -= count
            yield _Cause(f"engine {name}", count)
    if generating:
        yield _Cause("an engine that serves", generating)


def _name(each: Live) -> str:
    if each.pool:
        return f"pool `{each.pool}`"
    if each.is_kept:
        return each.what
    return f"{each.what} of task {each.task} in {each.stage}"


# ---- looking and acting ----


def seen(
    rollout: Rollout,
    gateway: Gateway | None = None,
    client: Client | None = None,
    *,
    training: tuple[int, float] | None = None,
    idle: str = "",
) -> Seen:
    """A run as it is now."""
    pools = waiting_pools(client)
    live = []
    for episode in rollout.in_play():
        stage, since_s, what = episode.waiting()
        pool = pools.get(episode.id, "")
        live.append(Live(id=episode.id, task=episode.task, stage=stage, since_s=since_s, what=what, pool=pool))
    engines: dict[str, int] = {}
    tokens = 0
    if gateway is not None:
        engines = {each.name: each.requests for each in gateway.statistics().engines if each.requests}
        tokens = sum(each.prefill_tokens + each.decode_tokens for each in gateway.engine_statistics())
    return Seen(live=tuple(live), engines=engines, tokens=tokens, training=training, idle=idle)


def waiting_pools(client: Client | None) -> dict[str, str]:
    """By trajectory, the pool that an action of it waits for. Of a service elsewhere nothing is known: it does not tell
    what actions wait for."""
    transport = client.transport if client is not None else None
    decider = transport.orchestrator.decider if isinstance(transport, LocalTransport) else None
    if not isinstance(decider, Scheduler):
        return {}
    return {
        entry.action.trajectory: _pool_name(short_kind(decider, entry))
        for entry in decider.entries.values()
        if entry.state is State.QUEUED and entry.action.trajectory
    }


def _pool_name(kind: str) -> str:
    """The pools of one quota bear its name."""
    name, _, counted = kind.rpartition("/")
    return name if counted in (REQUESTS, TOKENS) and name else kind


def free(rollout: Rollout, stall: Stall) -> int:
    """Stops what is stuck, in engine and environment, so that its group plays it again as the settings say. How
    many."""
    stuck = set(stall.abort)
    chosen = [each for each in rollout.in_play() if each.id in stuck]
    for episode in chosen:
        episode.given_up = True
        episode.stop(Ending.CANCELLED, stall.text)
    return len(chosen)
