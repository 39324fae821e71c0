"""Limits: every bound of the scheduler by name, which admission control enforces.

Owns their defaults and what is valid. A trace records them, since a replay under others decides otherwise.
"""

from __future__ import annotations

import math

import msgspec

from tangram.errors import InvalidConfig


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """A name for every limit of the scheduler."""

    queue_max: int = 2_000_000
    """Waiting actions, over all runs."""
    run_queue_max: int = 2_000_000
    """Waiting actions of one run."""
    runs_max: int = 10_000
    """Different names of runs since the start. Each run keeps its lanes and its share."""
    sandboxes_max: int = 1_000_000
    """Sandboxes that hold or wait for memory."""
    ageing_s: float = 600.0
    """Wait after which later actions of the same run no longer overtake an action."""
    attempts_max: int = 3
    """Starts of one action, failed ones included, before it is lost."""
    stranded_s: float = 300.0
    """How long an action waits for a pool that can no longer satisfy it, before it is lost."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if field.endswith("_s"):
                if type(value) not in (float, int) or not 0 < value < math.inf:
                    raise InvalidConfig(f"limits.{field}", value, "a positive, finite number of seconds")
            elif type(value) is not int or value < 1:
                raise InvalidConfig(f"limits.{field}", value, "a positive whole number")
