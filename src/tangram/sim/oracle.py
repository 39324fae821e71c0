"""Perfect knowledge, for measuring what learning is worth: estimates that are the simulator's truth."""

from __future__ import annotations

from tangram.core.action import Action
from tangram.core.profile import Estimate, Knowledge
from tangram.sim.episode import Step


class Oracle(Knowledge):
    """Knows every action before it runs and learns nothing."""

    __slots__ = ("_truth",)

    def __init__(self, truth: dict[str, Step]) -> None:
        super().__init__()
        self._truth = truth

    def estimate(self, action: Action) -> Estimate:
        step = self._truth[action.id]
        return Estimate(step.work_s, 0.0, min(0.98, step.speedup.exponent_near(8.0)), step.busy, 1.0)

    def observe(self, action: Action, *, execution_s: float, units: float | None, cpu_s: float | None) -> None:
        pass
