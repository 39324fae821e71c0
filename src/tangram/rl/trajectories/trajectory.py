"""Trajectories, their turns, and the groups that they form: what a rollout makes.

Owns the record of an ended trajectory and its invariants: exactly one ending, a reward if and only if the agent itself
reached the end, and for every token of the policy its log-probability and the version of the weights that sampled it. A
failed infrastructure never becomes a reward of 0. Never plays, trains or writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import msgspec


class Ending(StrEnum):
    """How a trajectory ended."""

    FINISHED = "finished"
    """The environment reported the end."""
    TRUNCATED = "truncated"
    """It used up its turns or its tokens. It has a reward, because this is the agent's own doing."""
    STALE = "stale"
    """Its first token was sampled by weights that are too old now, or one of its tokens by newer weights that were
    rolled back."""
    CANCELLED = "cancelled"
    """It is not needed: enough others ended before it, or the run was stopped."""
    ENV_FAILED = "env_failed"
    """The environment crashed, hung or was lost, after all retries."""
    REWARD_FAILED = "reward_failed"
    """It was played to its end, but its reward failed."""

    @property
    def is_rewarded(self) -> bool:
        return self in REWARDED_ENDINGS


REWARDED_ENDINGS = (Ending.FINISHED, Ending.TRUNCATED)
STOP_ENDINGS = (Ending.STALE, Ending.CANCELLED)
"""Endings that `stop` can give."""


class Stage(StrEnum):
    """What a trajectory does."""

    RESET = "reset"
    GENERATE = "generate"
    STEP = "step"
    REWARD = "reward"
    BUFFER = "buffer"
    """Ended and rewarded; waits for its group, or to be trained on."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One stage, from its request to its end. Times are seconds since the rollout began."""

    stage: Stage
    began_s: float
    ended_s: float
    waiting_s: float = 0.0
    """The first part of it, in which the request waited in a queue."""
    waited_for: str = ""
    """What the request waited for: an engine, a pool, the concurrency of a task."""
    attempt: int = 0
    """The number of the try, from 0."""
    failed: str = ""
    """Why this try failed; empty if it did not."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange: an observation of the environment and an action of the policy."""

    observation: str
    observation_tokens: tuple[int, ...]
    """The observation as the policy saw it, with the marker tokens around it."""
    action: str
    tokens: tuple[int, ...]
    """The tokens of the action, exactly as sampled, with its stop token. They are never encoded from text again."""
    logprobs: tuple[float, ...]
    """The log-probability of each token, in the distribution that it was sampled from."""
    versions: tuple[int, ...]
    """The version of the weights that sampled each token."""
    candidate_token_ids: tuple[tuple[int, ...], ...] | None = msgspec.field(default=None, name="kept")
    """For top-k and top-p sampling: for each token, the ids among which it was sampled."""
    truncated: bool = msgspec.field(default=False, name="cut")
    """The action reached its token limit before its stop token."""
    engine: str = ""
    """The engine that sampled the last token."""
    prefilled: int = 0
    """Tokens that an engine prefilled for it, for the first time or again."""
    prefill_s: float = 0.0
    """Engine time of prefill."""
    decode_s: float = 0.0
    """Engine time of decode."""

    def __post_init__(self) -> None:
        count = len(self.tokens)
        assert len(self.logprobs) == count == len(self.versions), "each token has a log-probability and a version"
        ids = self.candidate_token_ids
        assert ids is None or len(ids) == count, "each token has its own candidate ids"


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One episode that has ended."""

    id: str
    """`task/group/member.attempt`"""
    task: str
    group: str
    member: int
    attempt: int
    """0, or one more than the attempt that it replaces."""
    seed: int
    """The seed of the group: it determines the environment, and with member and attempt the sampling noise."""
    turns: tuple[Turn, ...]
    observation: str = ""
    """The last observation, to which there is no action."""
    ending: Ending
    cause: str = ""
    """Why it ended so; empty if it finished normally."""
    reward: float | None = None
    teacher_logprobs: tuple[float, ...] | None = None
    """Of the policy's own tokens; None without a teacher."""
    metrics: dict[str, float] = {}
    """Further metrics of environment and reward."""
    spans: tuple[Span, ...] = ()
    began_s: float = 0.0
    ended_s: float = 0.0

    def __post_init__(self) -> None:
        assert (self.reward is not None) == self.ending.is_rewarded, f"{self.id} {self.ending}: reward {self.reward}"
        teacher_logprobs = self.teacher_logprobs
        assert teacher_logprobs is None or len(teacher_logprobs) == len(self.logprobs), (
            f"{self.id}: a teacher scores each token"
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens, as the policy saw and wrote them."""
        return tuple(token for turn in self.turns for token in (*turn.observation_tokens, *turn.tokens))

    @property
    def action_mask(self) -> tuple[bool, ...]:
        """For each token, whether the policy wrote it."""
        return tuple(
            is_action
            for turn in self.turns
            for is_action in (*(False for _ in turn.observation_tokens), *(True for _ in turn.tokens))
        )

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Of the policy's own tokens, in order."""
        return tuple(value for turn in self.turns for value in turn.logprobs)

    @property
    def versions(self) -> tuple[int, ...]:
        """Of the policy's own tokens, in order."""
        return tuple(version for turn in self.turns for version in turn.versions)

    @property
    def version_first(self) -> int | None:
        """The version of its first token, from which its staleness is counted; None without tokens."""
        return next((turn.versions[0] for turn in self.turns if turn.versions), None)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The siblings of one prompt, which are trained on together."""

    id: str
    """`task/group`"""
    task: str
    seed: int
    members: tuple[Trajectory, ...]
    """Those to be trained on; each has a reward."""
    left_out: tuple[Trajectory, ...] = ()
    """Those without use: replaced, failed, or redundant."""
    wanted: int
    """Number of members of a complete group."""
    cause: str = ""
    """Why it is incomplete; empty if it is complete."""

    def __post_init__(self) -> None:
        assert all(each.ending.is_rewarded for each in self.members), f"{self.id}: a member without a reward"

    @property
    def is_complete(self) -> bool:
        return len(self.members) == self.wanted

    @property
    def version_first(self) -> int | None:
        """The version of the first token of its oldest member; None without tokens."""
        return min((each.version_first for each in self.members if each.version_first is not None), default=None)

    @property
    def version_last(self) -> int | None:
        """The version of its newest token; None without tokens."""
        return max((max(turn.versions) for each in self.members for turn in each.turns if turn.versions), default=None)

    def all_trajectories(self) -> Iterator[Trajectory]:
        yield from self.members
        yield from self.left_out


class GroupTicket(msgspec.Struct, frozen=True, kw_only=True):
    """A group to be played."""

    task: str
    number: int
    """The number of the group within the run; with the task it forms the id."""
    seed: int
    series: str = ""
    """Prefix of the number in the ids of groups that are not trained on, such as those of an evaluation."""
    size: int | None = None
    """Number of members, instead of the settings; then there are no redundant ones."""
    temperature: float | None = None
    """Sampling temperature, instead of the settings."""

    @property
    def group(self) -> str:
        return f"{self.task}/{self.series}{self.number}"

    @property
    def is_trained_on(self) -> bool:
        return not self.series

    def trajectory_id(self, member: int, attempt: int) -> str:
        return f"{self.group}/{member}.{attempt}"
