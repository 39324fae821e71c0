"""What a trainer trains on: the batch of a gradient step, and demonstrations for behaviour cloning."""

from __future__ import annotations

import msgspec

from tangram.rl.trajectories.trajectory import Group


class TrainingBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of one gradient step."""

    version: int
    """From which the step starts."""
    groups: tuple[Group, ...]
    """Sorted by number, so that the same groups give the same step in whatever order they arrived."""

    @property
    def staleness(self) -> tuple[int, ...]:
        """Of each trajectory: the version of the step minus the version of its first token."""
        return tuple(
            self.version - (each.version_first if each.version_first is not None else self.version)
            for group in self.groups
            for each in group.members
        )


class Demonstration(msgspec.Struct, frozen=True, kw_only=True):
    """An episode of a scripted agent, in tokens of the policy, for behaviour cloning."""

    task: str
    tokens: tuple[int, ...]
    is_action: tuple[bool, ...]
