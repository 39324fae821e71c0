"""Records of a rollout: trajectories, their turns, and the groups that they form.

Owns what is known of a trajectory once it has ended, and says in one place what may be: exactly one ending, a reward if
and only if the agent came to an end by itself, and for every token of the policy its log-probability and the version of
the weights that sampled it. An infrastructure that failed never becomes a reward of 0. Never plays, trains or writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import msgspec


class Ending(StrEnum):
    """How a trajectory ended. Each has exactly one."""

    FINISHED = "finished"
    """The environment said that it is over."""
    TRUNCATED = "truncated"
    """It used up its turns or its tokens. It has a reward: what it did is the agent's own."""
    STALE = "stale"
    """Its first token was sampled by weights that are too old now."""
    CANCELLED = "cancelled"
    """Nobody needs it any more: enough others ended before it, or the run was stopped."""
    ENV_FAILED = "env_failed"
    """The environment crashed, hung or was lost, to the end of its retries."""
    REWARD_FAILED = "reward_failed"
    """It was played to its end, but no reward could be had."""

    @property
    def rewarded(self) -> bool:
        return self in REWARDED


REWARDED = (Ending.FINISHED, Ending.TRUNCATED)
STOPPED = (Ending.STALE, Ending.CANCELLED)
"""What a trajectory can be stopped as."""


class Stage(StrEnum):
    """What a trajectory is doing."""

    RESET = "reset"
    GENERATE = "generate"
    STEP = "step"
    REWARD = "reward"
    BUFFER = "buffer"
    """Ended and rewarded; waits for its group, or to be trained on."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One stage, from when it was asked for to its end. Times are seconds since the rollout began."""

    stage: Stage
    began_s: float
    ended_s: float
    waiting_s: float = 0.0
    """Of these, the first that passed before anything was done for it: a turn in a queue."""
    waited_for: str = ""
    """What was short meanwhile, as it is called: an engine, a pool, the concurrency of a task."""
    attempt: int = 0
    """Which try this was; 0 is the first."""
    failed: str = ""
    """Why this try brought nothing; empty if it did."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange: what the environment said, and what the policy answered."""

    observation: str
    observation_tokens: tuple[int, ...]
    """As the policy saw it, the marks around it included."""
    action: str
    tokens: tuple[int, ...]
    """Of the action, as they were sampled, the one that ended it included. They are never made from text again."""
    logprobs: tuple[float, ...]
    """Of each token, in the distribution that it was sampled from."""
    versions: tuple[int, ...]
    """Of the weights that sampled each token."""
    kept: tuple[tuple[int, ...], ...] | None = None
    """Where the sampling left tokens out (top-k, top-p): for each token, the ids among which it was sampled."""
    cut: bool = False
    """It reached its limit of tokens before it ended by itself."""
    engine: str = ""
    """That sampled the last of it."""
    prefilled: int = 0
    """Tokens that an engine had to read for it, for the first time or again."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    """Engine time of its reading and of its writing."""

    def __post_init__(self) -> None:
        count = len(self.tokens)
        assert len(self.logprobs) == count == len(self.versions), "each token has a log-probability and a version"
        assert self.kept is None or len(self.kept) == count, "each token has its own kept ids"


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One episode that has ended."""

    id: str
    """`task/group/member.attempt`"""
    task: str
    group: str
    member: int
    attempt: int
    """0, or one more than that of the trajectory in whose place it was played."""
    seed: int
    """Of the group: it makes the environment. With member and attempt it makes the sampling noise."""
    turns: tuple[Turn, ...]
    observation: str = ""
    """What the environment said last, to which there is no answer."""
    ending: Ending
    cause: str = ""
    """Why it ended so, in words; empty if it simply finished."""
    reward: float | None = None
    teacher_logprobs: tuple[float, ...] | None = None
    """Of the policy's own tokens, as a teacher gives them; None if none was asked."""
    metrics: dict[str, float] = {}
    """What the environment and the reward said besides."""
    spans: tuple[Span, ...] = ()
    began_s: float = 0.0
    ended_s: float = 0.0

    def __post_init__(self) -> None:
        assert (self.reward is not None) == self.ending.rewarded, f"{self.id} {self.ending}: reward {self.reward}"
        taught = self.teacher_logprobs
        assert taught is None or len(taught) == len(self.logprobs), f"{self.id}: a teacher says something of each token"

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of it, as the policy saw and wrote it."""
        return tuple(token for turn in self.turns for token in (*turn.observation_tokens, *turn.tokens))

    @property
    def is_action(self) -> tuple[bool, ...]:
        """Of each token: whether the policy wrote it."""
        return tuple(
            mine
            for turn in self.turns
            for mine in (*(False for _ in turn.observation_tokens), *(True for _ in turn.tokens))
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
        """Of its first token, which its staleness is counted from; None if there is no token."""
        return next((turn.versions[0] for turn in self.turns if turn.versions), None)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The siblings of one prompt, as they are trained on together."""

    id: str
    """`task/group`"""
    task: str
    seed: int
    members: tuple[Trajectory, ...]
    """Those to be trained on; each has a reward."""
    left_out: tuple[Trajectory, ...] = ()
    """Those that were played in vain: replaced, failed, or more than were needed."""
    wanted: int
    """Members that it should have had."""
    cause: str = ""
    """Why it has fewer; empty if it has all."""

    def __post_init__(self) -> None:
        assert all(each.ending.rewarded for each in self.members), f"{self.id}: a member without a reward"

    @property
    def whole(self) -> bool:
        return len(self.members) == self.wanted

    @property
    def version_first(self) -> int | None:
        """Of the first token of its oldest member; None if there is no token."""
        return min((each.version_first for each in self.members if each.version_first is not None), default=None)

    @property
    def version_last(self) -> int | None:
        """Of its newest token; None if there is none."""
        return max((max(turn.versions) for each in self.members for turn in each.turns if turn.versions), default=None)

    def all(self) -> Iterator[Trajectory]:
        yield from self.members
        yield from self.left_out


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """A group to be played."""

    task: str
    number: int
    """Of the group within the run; with the task it is its id."""
    seed: int
    series: str = ""
    """Of groups that are not trained on, such as those of an evaluation: stands before the number in the id."""
    size: int | None = None
    """Members, if not as many as the settings say; then there are none besides."""
    temperature: float | None = None
    """With which its tokens are drawn, if not that of the settings."""

    @property
    def group(self) -> str:
        return f"{self.task}/{self.series}{self.number}"

    def trajectory(self, member: int, attempt: int) -> str:
        return f"{self.group}/{member}.{attempt}"
