"""Samples: trajectories as arrays, and the rectangles in which a model reads them.

Owns how what was played becomes tensors: texts side by side, padded at the right, and of each action token where it
stands. Never runs a model. Promises that what it hands out is consistent: each token is known to the model, each action
token has something before it, a finite log-probability, and is among the ids that it was sampled from.

Everything of a batch lies in flat arrays, one element for each token or each action token, so that nothing is done
token by token in Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tangram.errors import InvalidInput
from tangram.rl.rollout.records import Trajectory
from tangram.rl.train.records import Demonstration

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PADDING_MAX = 0.1
"""Of a pass: texts of very different lengths are read apart. Small passes cost little more for each token."""
ROWS_MIN = 8
"""Of a pass, below which it is not divided for the sake of padding."""


class Pass(NamedTuple):
    """What a model reads at once, and what is asked of it."""

    tokens: Tensor
    """[B, T], padded at the right."""
    at: Tensor
    """[N]: after which of them, counted through all B * T, an action token stands."""
    targets: Tensor
    """[N]: the action tokens."""
    left_out: Tensor | None
    """[N, V]: which ids could not be sampled; None: all could."""
    chosen: Ints
    """[N]: which action tokens of the samples these are."""


class Samples:
    """`action_counts` [trajectories]; whatever is said of action tokens lies in one array for all of them."""

    def __init__(self, names: Sequence[str], lengths: Ints, tokens: Ints, is_action: NDArray[np.bool_]) -> None:
        """Texts of these lengths, one after the other. Those without an action are not allowed."""
        self.names = names
        self._tokens = tokens
        self._text_starts = starts_of(lengths)
        owner = np.repeat(np.arange(len(lengths)), lengths)
        actions = np.flatnonzero(is_action)
        self.owner: Ints = owner[actions]
        """[actions]: the trajectory of each."""
        self.action_counts: Ints = np.bincount(self.owner, minlength=len(lengths))
        assert self.action_counts.all(), "a text without an action"
        self._action_starts = starts_of(self.action_counts)
        self._positions: Ints = actions - self._text_starts[self.owner]
        self.targets: Ints = tokens[actions]
        self.lengths: Ints = self._positions[self._action_starts + self.action_counts - 1]
        """[trajectories]: what has to be read, which is all before the last action token."""
        self.sampler: Floats = np.zeros(len(actions))
        self.teacher: Floats | None = None
        self._kept_ids: Ints = np.zeros(0, dtype=np.int64)
        self._kept_counts: Ints | None = None
        first = self._positions[self._action_starts]
        if not first.all():
            raise InvalidInput(names[int(np.argmin(first))], "an action at its begin", "an observation before it")

    @classmethod
    def of_trajectories(cls, trajectories: Sequence[Trajectory], *, taught: bool = False) -> Self:
        """Each has an action token. `taught`: with what a teacher says. Raises InvalidInput."""
        turns = [turn for each in trajectories for turn in each.turns]
        pieces = list(chain.from_iterable((turn.observation_tokens, turn.tokens) for turn in turns))
        sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
        tokens = np.fromiter(chain.from_iterable(pieces), np.int64, int(sizes.sum()))
        is_action = np.repeat(np.arange(len(pieces)) % 2 == 1, sizes)
        counts = np.array([len(each.turns) for each in trajectories], dtype=np.int64)
        lengths = np.add.reduceat(sizes, 2 * starts_of(counts)) if len(counts) else np.zeros(0, dtype=np.int64)
        found = cls([each.id for each in trajectories], lengths, tokens, is_action)
        found.sampler = found._logprobs([turn.logprobs for turn in turns], "logprobs")
        if taught:
            missing = next((each.id for each in trajectories if each.teacher_logprobs is None), None)
            if missing is not None:
                raise InvalidInput(f"{missing}: teacher_logprobs", None, "those of a teacher, to distil from it")
            found.teacher = found._logprobs([each.teacher_logprobs or () for each in trajectories], "teacher_logprobs")
        if any(turn.kept is not None for turn in turns):
            found._keep([ids for turn in turns for ids in turn.kept or ((),) * len(turn.tokens)])
        return found

    @classmethod
    def of_demonstrations(cls, demonstrations: Sequence[Demonstration]) -> Self:
        """Those in which nothing is done are left out. Raises InvalidInput."""
        given = [(number, each) for number, each in enumerate(demonstrations) if any(each.is_action)]
        for number, each in given:
            if len(each.is_action) != len(each.tokens):
                wrong = f"{len(each.is_action)} of is_action"
                raise InvalidInput(f"demonstration {number}", wrong, f"{len(each.tokens)}, one for each token")
        lengths = np.array([len(each.tokens) for _, each in given], dtype=np.int64)
        count = int(lengths.sum())
        return cls(
            [f"demonstration {number} of {each.task}" for number, each in given],
            lengths,
            np.fromiter(chain.from_iterable(each.tokens for _, each in given), np.int64, count),
            np.fromiter(chain.from_iterable(each.is_action for _, each in given), np.bool_, count),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def _logprobs(self, pieces: Sequence[Sequence[float]], what: str) -> Floats:
        found = np.fromiter(chain.from_iterable(pieces), np.float64, len(self.targets))
        wrong = ~np.isfinite(found)
        if wrong.any():
            number = int(np.argmax(wrong))
            raise InvalidInput(f"{self.names[self.owner[number]]}: {what}", float(found[number]), "finite numbers")
        return found

    def _keep(self, kept: Sequence[Sequence[int]]) -> None:
        """An action token without ids could have been any."""
        counts = np.fromiter(map(len, kept), np.int64, len(kept))
        ids = np.fromiter(chain.from_iterable(kept), np.int64, int(counts.sum()))
        matches = ids == np.repeat(self.targets, counts)
        among = np.bincount(np.repeat(np.arange(len(kept)), counts), weights=matches, minlength=len(kept)) > 0
        wrong = (counts > 0) & ~among
        if wrong.any():
            number = int(np.argmax(wrong))
            raise InvalidInput(
                f"{self.names[self.owner[number]]}: kept",
                kept[number][:8],
                f"ids with the token {self.targets[number]}, which was sampled from them",
            )
        self._kept_ids, self._kept_counts = ids, counts

    def require_known(self, vocabulary: int, context_max: int | None) -> None:
        """Raises InvalidInput, if a model of these sizes cannot read them."""
        for ids in (self._tokens, self._kept_ids):
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
                wrong = ids[(ids < 0) | (ids >= vocabulary)][0]
                raise InvalidInput("tokens", int(wrong), f"ids from 0 to {vocabulary - 1}, those of the model")
        if context_max is not None and len(self) and self.lengths.max() > context_max:
            number = int(np.argmax(self.lengths))
            raise InvalidInput(
                self.names[number],
                f"{self.lengths[number] + 1} tokens",
                f"at most {context_max + 1}, the context of the model and one more",
            )

    # ---- passes ----

    def passes(self, rows: Ints, rows_max: int, vocabulary: int, device: torch.device | str = "cpu") -> Iterator[Pass]:
        """These trajectories, the short ones first, in rectangles of at most `rows_max`."""
        ordered = rows[np.argsort(self.lengths[rows], kind="stable")]
        begin = 0
        while begin < len(ordered):
            end = self._end(self.lengths[ordered[begin : begin + rows_max]]) + begin
            yield self._pass(ordered[begin:end], vocabulary, device)
            begin = end

    def _end(self, lengths: Ints) -> int:
        """How many of these, which are ascending, are read together."""
        counts = np.arange(1, len(lengths) + 1)
        padded = 1.0 - np.cumsum(lengths) / (counts * lengths)
        within = (padded <= PADDING_MAX) | (counts <= ROWS_MIN)
        return len(lengths) if within.all() else int(np.argmin(within))

    def _pass(self, rows: Ints, vocabulary: int, device: torch.device | str) -> Pass:
        lengths, counts = self.lengths[rows], self.action_counts[rows]
        width = int(lengths.max())
        tokens = np.zeros((len(rows), width), dtype=np.int64)
        tokens[np.arange(width) < lengths[:, None]] = self._tokens[spans(self._text_starts[rows], lengths)]
        chosen = spans(self._action_starts[rows], counts)
        at = np.repeat(np.arange(len(rows)) * width, counts) + self._positions[chosen] - 1
        return Pass(
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(at).to(device),
            torch.from_numpy(self.targets[chosen]).to(device),
            self._left_out(chosen, vocabulary, device),
            chosen,
        )

    def _left_out(self, chosen: Ints, vocabulary: int, device: torch.device | str) -> Tensor | None:
        if self._kept_counts is None:
            return None
        counts = self._kept_counts[chosen]
        left_out = np.ones((len(chosen), vocabulary), dtype=np.bool_)
        left_out[counts == 0] = False
        ids = self._kept_ids[spans(starts_of(self._kept_counts)[chosen], counts)]
        left_out[np.repeat(np.arange(len(chosen)), counts), ids] = False
        return torch.from_numpy(left_out).to(device)


def starts_of(counts: Ints) -> Ints:
    """Where each piece begins, if pieces of these sizes lie one after the other."""
    return np.cumsum(counts) - counts


def spans(starts: Ints, counts: Ints) -> Ints:
    """All numbers from each start on, as many as its count, one after the other."""
    return np.repeat(starts - starts_of(counts), counts) + np.arange(int(counts.sum()))
