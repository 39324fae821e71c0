"""Outside APIs in the simulator: they count for themselves and answer excess with a 429.

Owns the truth of every quota, independent of what the scheduler believes.
"""

from __future__ import annotations

import math

from tangram.core.action import Action
from tangram.core.messages import Pool
from tangram.sim.episode import ApiModel

REFUSAL_S = 0.05
"""How fast an API says no."""


class Apis:
    """All APIs of a workload."""

    def __init__(self, models: tuple[ApiModel, ...]) -> None:
        self._models = {model.name: model for model in models}
        self._inside: dict[str, int] = dict.fromkeys(self._models, 0)
        self._spent: dict[str, float] = dict.fromkeys(self._models, 0.0)
        self._since: dict[str, float] = dict.fromkeys(self._models, 0.0)
        self._entered: dict[str, list[str]] = {}
        self.rejected = 0

    def enter(self, action: Action, now: float) -> float:
        """0 if the call is let in, else the seconds until the 429."""
        names = [name for name in self._models if name in action.demand.pools]
        if any(not self._admits(self._models[name], now) for name in names):
            self.rejected += 1
            return REFUSAL_S
        for name in names:
            self._inside[name] += 1
            self._spent[name] += 1
        self._entered[action.id] = names
        return 0.0

    def leave(self, action: Action) -> None:
        for name in self._entered.pop(action.id, ()):
            self._inside[name] -= 1

    def change(self, pool: Pool) -> None:
        """The API itself has another quota from now on."""
        name, _, window = pool.kind.partition("/")
        model = self._models.get(name)
        if model is None:
            return
        self._models[name] = ApiModel(
            name=name,
            concurrency=model.concurrency if window else pool.total,
            per_window=pool.total if window else model.per_window,
            window_s=model.window_s,
            bucket=model.bucket,
        )

    def _admits(self, model: ApiModel, now: float) -> bool:
        name = model.name
        if model.concurrency and self._inside[name] >= model.concurrency:
            return False
        if not model.per_window:
            return True
        if model.bucket:
            rate = model.per_window / model.window_s
            self._spent[name] = max(0.0, self._spent[name] - (now - self._since[name]) * rate)
            self._since[name] = now
        else:
            periods = math.floor((now - self._since[name]) / model.window_s + 1e-9)
            if periods:
                self._spent[name] = 0.0
                self._since[name] += periods * model.window_s
        return self._spent[name] + 1.0 <= model.per_window + 1e-6
