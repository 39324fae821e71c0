"""Scheduling policies, by name."""

from __future__ import annotations

import difflib

from tangram.core.policies.adaptive import Adaptive
from tangram.core.policies.base import SchedulingPolicy
from tangram.core.policies.fcfs import Fcfs
from tangram.core.policies.fixed import Fixed
from tangram.errors import InvalidConfig

DEFAULT_POLICY = "adaptive"

POLICIES = {
    "fcfs": "first come, first served, every action at its minimum",
    "fixed:K": "first come, first served, every elastic action on K cores or devices",
    "paper": "the published elastic algorithm, its printed errors repaired",
    "adaptive": "size-aware, sharing cores by learned use, resizing running actions (the default)",
    "adaptive:no-resize": "the same without resizing what runs",
}
"""The policy names, each with a description of one line."""


def policy(name: str) -> SchedulingPolicy:
    """Returns the policy of that name. Raises InvalidConfig with the closest valid name."""
    family, _, option = name.partition(":")
    if name == "fcfs":
        return Fcfs()
    if name == "paper":
        # Imported here because it needs numpy, and a program that only submits actions does not.
        from tangram.core.policies.paper import Paper

        return Paper()
    if name in ("adaptive", "adaptive:no-resize"):
        return Adaptive(resize=not option)
    if family == "fixed" and option.isdecimal() and int(option) > 0:
        return Fixed(int(option))
    near = difflib.get_close_matches(name, POLICIES, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise InvalidConfig("policy", name, f"one of {', '.join(POLICIES)}{hint}")
