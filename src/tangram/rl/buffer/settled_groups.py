"""What has become of the groups that a sample buffer is done with.

Owns the numbers of those that were trained on and of those that were dropped, and counts what was played in vain.
Promises that no group is settled twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tangram.rl.buffer.number_ranges import NumberRanges, Range
from tangram.rl.rollout.records import Trajectory


class Settled:
    def __init__(
        self, trained: Iterable[Range] = (), dropped: Iterable[Range] = (), by_cause: Mapping[str, int] | None = None
    ) -> None:
        self.trained = NumberRanges(trained)
        self.dropped = NumberRanges(dropped)
        self.by_cause = dict(by_cause or {})
        """How many were dropped."""
        self.trajectories_discarded = self.tokens_discarded = 0

    def __contains__(self, number: int) -> bool:
        return number in self.trained or number in self.dropped

    def __len__(self) -> int:
        return len(self.trained) + len(self.dropped)

    def train(self, number: int) -> None:
        assert number not in self, f"group {number} is settled already"
        self.trained.add(number)

    def drop(self, number: int, cause: str) -> None:
        assert number not in self, f"group {number} is settled already"
        self.dropped.add(number)
        self.by_cause[cause] = self.by_cause.get(cause, 0) + 1

    def discard(self, trajectories: Iterable[Trajectory]) -> None:
        for each in trajectories:
            self.trajectories_discarded += 1
            self.tokens_discarded += sum(len(turn.tokens) for turn in each.turns)

    def back_to(self, trained: Iterable[Range]) -> set[int]:
        """Only these were trained on. The others, which are not settled any more."""
        survived = NumberRanges(trained)
        revoked = {number for number in self.trained if number not in survived}
        self.trained = survived
        return revoked

    def check(self) -> None:
        assert sum(self.by_cause.values()) == len([*self.dropped]), f"{self.by_cause} were dropped"
        both = [*self.trained, *self.dropped]
        assert len(both) == len(set(both)) == len(self), "a group is settled twice"
