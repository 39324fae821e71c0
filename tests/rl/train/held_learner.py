"""Imported by the process of a trainer, as `objective.loss`: steps (`step.0` is the first), saves (`save.0`)
and imitations (`imitate`) that a test can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.rl.train.tiny import come_to

from tangram.rl.model import objective
from tangram.rl.model.learner import Learner

clipped = objective.grpo_clipped_loss


def _holding(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def held(self: Learner, *arguments: Any) -> Any:
        come_to(name.format(self.version))
        return call(self, *arguments)

    return held


Learner.step = _holding("step.{}", Learner.step)  # type: ignore[method-assign]
Learner.save = _holding("save.{}", Learner.save)  # type: ignore[method-assign]
Learner.imitate = _holding("imitate", Learner.imitate)  # type: ignore[method-assign]
