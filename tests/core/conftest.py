"""What the tests of the scheduler share: a scheduler driven by hand, one event at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from tangram.core.action import Action, Outcome, Usage
from tangram.core.demand import Amounts, Demand
from tangram.core.limits import Limits
from tangram.core.messages import (
    Cancel,
    Effect,
    Event,
    Finished,
    NodeState,
    Pool,
    Refuse,
    Settle,
    Start,
    Started,
    StartFailed,
    Submit,
    Tick,
    WakeAt,
)
from tangram.core.policies import policy as by_name
from tangram.core.policies.base import SchedulingPolicy
from tangram.core.recent_events import RECENT_EVENTS_MAX
from tangram.core.scheduler import Scheduler


class Cluster:
    """A scheduler and its clock. Every invariant is checked after every event."""

    def __init__(self, *pools: Pool, policy: SchedulingPolicy, **limits: Any) -> None:
        self.scheduler = Scheduler(policy, pools, limits=Limits(**limits))
        self.now = 0.0
        self.effects: list[Effect] = []
        """Of the last event."""

    def send(self, event: Event) -> list[Effect]:
        self.effects = self.scheduler.handle(event, self.now)
        self.scheduler.check()
        return self.effects

    def pass_time(self, seconds: float) -> list[Effect]:
        """Let time pass and notify the scheduler."""
        self.now += seconds
        return self.send(Tick())

    # ---- callers ----

    def submit(self, name: str, pools: dict[str, Amounts], **fields: Any) -> list[Effect]:
        speedup = fields.pop("speedup", None)
        return self.send(Submit(action=Action(id=name, demand=Demand(pools, speedup), **fields)))

    def cancel(self, name: str) -> list[Effect]:
        return self.send(Cancel(action=name))

    # ---- managers ----

    def started(self, *names: str) -> list[Effect]:
        for name in names:
            self.send(Started(action=name))
        return self.effects

    def start_failed(self, name: str, reason: str = "no image", *, retry: bool = True) -> list[Effect]:
        return self.send(StartFailed(action=name, reason=reason, retry=retry))

    def finished(self, name: str, *, lost: str = "", **usage: Any) -> list[Effect]:
        return self.send(Finished(action=name, usage=Usage(**usage), lost=lost))

    def run(self, name: str, seconds: float = 0.0) -> list[Effect]:
        """Started, and after that time Finished."""
        self.started(name)
        self.now += seconds
        return self.finished(name)

    # ---- seeing ----

    def starts(self) -> list[str]:
        """The actions that the last event started, in order."""
        return [effect.action.id for effect in self.effects if isinstance(effect, Start)]

    def start(self, name: str) -> Start:
        return next(effect for effect in self.effects if isinstance(effect, Start) and effect.action.id == name)

    def outcomes(self) -> list[Outcome]:
        return [effect.outcome for effect in self.effects if isinstance(effect, Settle)]

    def outcome(self) -> Outcome:
        """The only one that the last event brought."""
        [outcome] = self.outcomes()
        return outcome

    def refusal(self) -> tuple[str, str]:
        """Limit and reason, the only effect of the last event."""
        [effect] = self.effects
        assert isinstance(effect, Refuse)
        return effect.limit, effect.reason

    def wakes(self) -> list[float]:
        return [effect.at for effect in self.effects if isinstance(effect, WakeAt)]

    def free(self, pool: str) -> int:
        return self.scheduler.ledger.pools[pool].free

    def explain(self, name: str) -> str:
        return self.scheduler.explain(name)

    def running(self) -> list[str]:
        """All that hold units."""
        return list(self.scheduler.grants.holding)


@pytest.fixture
def cluster() -> Callable[..., Cluster]:
    """`cluster(*pools, policy="fcfs", **limits)` makes one."""

    def make(*pools: Pool, policy: str | SchedulingPolicy = "fcfs", **limits: Any) -> Cluster:
        return Cluster(*pools, policy=by_name(policy) if isinstance(policy, str) else policy, **limits)

    return make


def counted(scheduler: Scheduler, now: float) -> int:
    """The elements of every container that a scheduler keeps, once ticks have filled its story."""
    for _ in range(RECENT_EVENTS_MAX):
        scheduler.handle(Tick(), now)
    return _elements(scheduler, {})


def _elements(what: Any, seen: dict[int, None]) -> int:
    """The elements of every container that can be reached from here."""
    if id(what) in seen or isinstance(what, str | bytes | int | float | type | NodeState):
        return 0
    seen[id(what)] = None
    if isinstance(what, dict):
        inside = [*what.keys(), *what.values()]
    elif isinstance(what, list | tuple | set | deque):
        inside = list(what)
    else:
        slots = [name for kind in type(what).__mro__ for name in getattr(kind, "__slots__", ())]
        inside = [getattr(what, name, None) for name in [*slots, *getattr(what, "__dict__", {})]]
        return sum(_elements(some, seen) for some in inside if not callable(some))
    return len(what) + sum(_elements(some, seen) for some in inside)
