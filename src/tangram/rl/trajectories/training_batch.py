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
            self.version - (member.version_first if member.version_first is not None else self.version)
            for group in self.groups
            for member in group.members
        )


class Demonstration(msgspec.Struct, frozen=True, kw_only=True):
    """An episode of a scripted agent, in tokens of the policy, for behaviour cloning."""

    task: str
    tokens: tuple[int, ...]
    is_action: tuple[bool, ...]


def strip_for_training(group: Group) -> Group:
    """The parts of a group that training needs: without the members left out, text and timings."""
    return msgspec.structs.replace(
        group,
        members=tuple(_strip_trajectory(member) for member in group.members),
        left_out=(),
        cause=escape_surrogates(group.cause),
    )


def _strip_trajectory(trajectory: Trajectory) -> Trajectory:
    return msgspec.structs.replace(
        trajectory,
        turns=tuple(_strip_turn(turn) for turn in trajectory.turns),
        observation="",
        cause=escape_surrogates(trajectory.cause),
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
        candidate_token_ids=turn.candidate_token_ids,
        truncated=turn.truncated,
    )


def escape_surrogates(text: str) -> str:
    """Returns text that UTF-8 can encode: environments may return lone surrogates."""
    return text if text.isprintable() else text.encode("utf-8", "backslashreplace").decode()
