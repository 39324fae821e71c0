"""What a trainer trains on: the batch of a gradient step, the parts of a group that it needs, and demonstrations for
behaviour cloning."""

from __future__ import annotations

import msgspec

from tangram.rl.trajectories.trajectory import Group, Trajectory, Turn


class TrainingBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of one gradient step."""

    version: int
    """The version from which the step starts."""
    groups: tuple[Group, ...]
    """Sorted by number, so that the same groups give the same step in any order of arrival."""

    @property
    def staleness(self) -> tuple[int, ...]:
        """The staleness of each trajectory: the version of the step minus the version of its first token."""
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


def strip_for_training(group: Group) -> Group:
    """The parts of a group that training needs: without excluded members, text and timings."""
    return msgspec.structs.replace(
        group,
        members=tuple(_strip_trajectory(each) for each in group.members),
        left_out=(),
        cause=valid_text(group.cause),
    )


def _strip_trajectory(trajectory: Trajectory) -> Trajectory:
    return msgspec.structs.replace(
        trajectory,
        turns=tuple(_strip_turn(each) for each in trajectory.turns),
        observation="",
        cause=valid_text(trajectory.cause),
        metrics={},
        spans=(),
    )


def _strip_turn(turn: Turn) -> Turn:
    return Turn(
        observation="",
        observation_tokens=turn.observation_tokens,
        action="",
        tokens=turn.tokens,
        logprobs=turn.logprobs,
        versions=turn.versions,
        kept=turn.kept,
        cut=turn.cut,
    )


def valid_text(text: str) -> str:
    """Environments may return text with lone surrogates."""
    return text if text.isprintable() else text.encode("utf-8", "backslashreplace").decode()
