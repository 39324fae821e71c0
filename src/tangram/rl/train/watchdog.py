"""The watchdog: detects a stall, names what the run waits for, and stops what is stuck.

Owns the decision, and no clock: time is an argument. Activity is a step, group or trajectory that ends, a trajectory
that changes its stage, or a generated token. Promises that a run with activity within `stall_s` has no stall, that a
run without any has one every `stall_s`, and that each stall names its cause.

    watchdog = Watchdog(settings.training.stall_s, settings.training.stalls_max, now)
    watchdog.on_progress(now)    # a step, or a group with members
    stall = watchdog.check(now, snapshot_run(rollout, router, client, training=(12, 300.0)))    # every few seconds
    if stall and not stall.give_up: abort_stuck(rollout, stall)
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
from tangram.rl.inference.router import Router
from tangram.rl.rollout.episode import WAITED_FOR_BY_STAGE, WAITING
from tangram.rl.rollout.rollout import Rollout
from tangram.rl.trajectories.trajectory import Stage
from tangram.runtime.shortage import short_kind_when_queued

STALL_CAUSE = "nothing moved"
"""First words of the cause of trajectories that a stall stops; what they waited for follows."""


class LiveTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory in flight."""

    id: str
    task: str
    stage: str
    stage_s: float
    """Seconds in this stage."""
    waiting_for: str
    """The component that must respond before it continues, if the episode knows it."""
    pool: str = ""
    """The pool that one of its actions waits for."""

    @property
    def is_blocked(self) -> bool:
        """Whether other trajectories keep it from being served, so that it is not itself what is stuck."""
        return bool(self.pool) or self.stage == WAITING or self.waiting_for != WAITED_FOR_BY_STAGE[self.stage]


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run at one moment."""

    trajectories: tuple[LiveTrajectory, ...] = ()
    """Oldest first."""
    engines: dict[str, int] = {}
    """Number of requests inside each engine."""
    tokens: int = 0
    """Prefilled and decoded by all engines so far."""
    training: tuple[int, float] | None = None
    """The step that the trainer works on, and for how many seconds."""


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    """The number of the stall in a row, from 1."""
    text: str
    """What the run waits for."""
    stuck_trajectories: tuple[str, ...] = ()
    """Trajectories to be stopped and played again."""
    give_up: bool = False
    """It is the last of the stalls in a row that are allowed."""


class _WaitCause(NamedTuple):
    waiting_for: str
    trajectories: int


class Watchdog:
    def __init__(self, stall_s: float, stalls_max: int, now: float) -> None:
        self._stall_s = stall_s
        self._stalls_max = stalls_max
        self._last_activity_at = self._last_stall_at = now
        self._stalls_in_row = 0
        self._tokens = 0

    def on_progress(self, now: float) -> None:
        """Records a step that is done, or a group that ended with members. A trajectory without a reward, such as a
        stopped one, is no evidence that its next attempt will do better."""
        self._last_activity_at = max(self._last_activity_at, now)
        self._stalls_in_row = 0

    def check(self, now: float, snapshot: RunSnapshot) -> Stall | None:
        """Returns a stall when one is due. Activity delays the next stall; only progress resets the count of stalls in
        a row, because a replayed trajectory is active too until it is stuck in the same place."""
        moved = [now - since_s for since_s in _stage_ages(snapshot)]
        if self._has_new_tokens(snapshot):
            moved.append(now)
        self._last_activity_at = max([self._last_activity_at, *moved])
        if now - max(self._last_activity_at, self._last_stall_at) < self._stall_s:
            return None
        self._last_stall_at = now
        self._stalls_in_row += 1
        stalled_s = now - self._last_activity_at
        give_up = self._stalls_in_row >= self._stalls_max
        return Stall(
            number=self._stalls_in_row,
            text=f"{STALL_CAUSE} for {stalled_s:.0f} s: {describe_waits(snapshot)}",
            stuck_trajectories=() if give_up else self._stuck_trajectories(snapshot),
            give_up=give_up,
        )

    def _has_new_tokens(self, snapshot: RunSnapshot) -> bool:
        before, self._tokens = self._tokens, snapshot.tokens
        return before != snapshot.tokens

    def _stuck_trajectories(self, snapshot: RunSnapshot) -> tuple[str, ...]:
        """Returns ids, oldest first. The first stall selects only trajectories that nothing else blocks, so that those
        behind them can continue. If that did not help, or there are none, it selects all."""
        first = (
            []
            if self._stalls_in_row > 1
            else [trajectory for trajectory in snapshot.trajectories if not trajectory.is_blocked]
        )
        return tuple(
            trajectory.id
            for trajectory in sorted(first or snapshot.trajectories, key=lambda trajectory: -trajectory.stage_s)
        )


def _stage_ages(snapshot: RunSnapshot) -> Iterator[float]:
    """Seconds since each trajectory and the current step last changed."""
    yield from (trajectory.stage_s for trajectory in snapshot.trajectories)
    if snapshot.training is not None:
        yield snapshot.training[1]


# ---- descriptions ----


def describe_waits(snapshot: RunSnapshot) -> str:
    """What the run waits for, most frequent first."""
    parts = []
    if snapshot.training is not None:
        step, since_s = snapshot.training
        parts.append(f"the trainer has worked on step {step} for {since_s:.0f} s (raise training.stall_s if it should)")
    causes = sorted(_wait_causes(snapshot), key=lambda cause: -cause.trajectories)
    parts += [_cause_text(cause, alone=len(causes) == 1) for cause in causes]
    if not snapshot.trajectories and snapshot.training is None:
        parts.append("no trajectory is in flight")
    return "; ".join(parts)


def _cause_text(cause: _WaitCause, *, alone: bool) -> str:
    if cause.trajectories == 1:
        return f"{'the only trajectory' if alone else '1 trajectory'} waits for {cause.waiting_for}"
    return f"{'all ' if alone else ''}{cause.trajectories} trajectories wait for {cause.waiting_for}"


def _wait_causes(snapshot: RunSnapshot) -> Iterable[_WaitCause]:
    generating = [
        trajectory
        for trajectory in snapshot.trajectories
        if trajectory.stage == Stage.GENERATE and not trajectory.is_blocked
    ]
    yield from _engine_causes(len(generating), snapshot.engines)
    oldest_s: dict[str, float] = {}
    counts: dict[str, int] = {}
    for trajectory in snapshot.trajectories:
        if trajectory.is_blocked or trajectory.stage != Stage.GENERATE:
            name = _wait_name(trajectory)
            counts[name] = counts.get(name, 0) + 1
            oldest_s[name] = max(oldest_s.get(name, 0.0), trajectory.stage_s)
    for name, count in counts.items():
        yield _WaitCause(f"{name} since {oldest_s[name]:.0f} s", count)


def _engine_causes(generating: int, inside: dict[str, int]) -> Iterable[_WaitCause]:
    """Which request is in which engine is not known here, only how many are; others than trajectories may send requests
    too."""
    for name, requests in sorted(inside.items(), key=lambda item: -item[1]):
        if count := min(requests, generating):
            generating -= count
            yield _WaitCause(f"engine {name}", count)
    if generating:
        yield _WaitCause("an engine that serves", generating)


def _wait_name(trajectory: LiveTrajectory) -> str:
    if trajectory.pool:
        return f"pool `{trajectory.pool}`"
    if trajectory.is_blocked:
        return trajectory.waiting_for
    return f"{trajectory.waiting_for} of task {trajectory.task} in {trajectory.stage}"


# ---- snapshot and abort ----


def snapshot_run(
    rollout: Rollout,
    router: Router | None = None,
    client: Client | None = None,
    *,
    training: tuple[int, float] | None = None,
) -> RunSnapshot:
    """Returns the current state of a run."""
    pools = waiting_pools(client)
    live = []
    for episode in rollout.in_flight():
        stage, since_s, what = episode.current_wait()
        pool = pools.get(episode.id, "")
        live.append(
            LiveTrajectory(id=episode.id, task=episode.task, stage=stage, stage_s=since_s, waiting_for=what, pool=pool)
        )
    engines: dict[str, int] = {}
    tokens = 0
    if router is not None:
        engines = {engine.name: engine.requests for engine in router.statistics().engines if engine.requests}
        tokens = sum(engine.prefill_tokens + engine.decode_tokens for engine in router.engine_statistics())
    return RunSnapshot(trajectories=tuple(live), engines=engines, tokens=tokens, training=training)


def waiting_pools(client: Client | None) -> dict[str, str]:
    """Returns the pool that an action of each trajectory waits for. Empty for a remote service, which does not report
    it."""
    transport = client.transport if client is not None else None
    scheduler = transport.orchestrator.decider if isinstance(transport, LocalTransport) else None
    if not isinstance(scheduler, Scheduler):
        return {}
    return {
        entry.action.trajectory: _pool_name(short_kind_when_queued(scheduler, entry))
        for entry in scheduler.entries.values()
        if entry.state is State.QUEUED and entry.action.trajectory
    }


def _pool_name(kind: str) -> str:
    """The pools of one quota share its name."""
    name, _, counted = kind.rpartition("/")
    return name if counted in (REQUESTS, TOKENS) and name else kind


def abort_stuck(rollout: Rollout, stall: Stall) -> int:
    """Stops stuck trajectories, in engine and environment; their groups play them again as the settings say. Returns
    how many."""
    return rollout.abort(stall.stuck_trajectories, cause=stall.text, replay=True)
