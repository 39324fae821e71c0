"""Samples: trajectories as arrays, and the padded microbatches that a model reads.

Owns the conversion of trajectories to tensors: sequences side by side, padded on the right, with the position of each
action token. Never runs a model. Promises consistent samples: each token is in the vocabulary; each action token has a
token before it, a finite log-probability, and is among the ids that it was sampled from.

A batch is stored in flat arrays with one element per token, or per action token, so that no Python code runs per token.
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
from tangram.rl.trajectories.training_batch import Demonstration
from tangram.rl.trajectories.trajectory import Trajectory

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PADDING_MAX = 0.1
"""Share of padding in a microbatch; sequences of very different lengths are read apart. A smaller microbatch costs
little more per token."""
ROWS_MIN = 8
"""A microbatch with fewer rows is not divided to save padding."""


class Microbatch(NamedTuple):
    """The input of one forward pass, and the positions that are scored."""

    tokens: Tensor
    """[B, T], padded on the right."""
    positions: Tensor
    """[N]: index into the flattened B * T positions after which each action token follows."""
    targets: Tensor
    """[N]: the action tokens."""
    excluded_ids: Tensor | None
    """[N, V]: ids that could not be sampled; None if all could."""
    action_indices: Ints
    """[N]: indices of these action tokens within the samples."""


class PackedSamples:
    """`action_counts` [trajectories]; all arrays about action tokens have one element per action token."""

    def __init__(self, names: Sequence[str], lengths: Ints, tokens: Ints, is_action: NDArray[np.bool_]) -> None:
        """`lengths`: of the concatenated sequences; each has an action token."""
        self.names = names
        self._tokens = tokens
        self._sequence_starts = start_offsets(lengths)
        owner = np.repeat(np.arange(len(lengths)), lengths)
        actions = np.flatnonzero(is_action)
        self.trajectory_index: Ints = owner[actions]
        """[actions]: index of the trajectory."""
        self.action_counts: Ints = np.bincount(self.trajectory_index, minlength=len(lengths))
        assert self.action_counts.all(), "a sequence without an action"
        self._action_starts = start_offsets(self.action_counts)
        self._positions: Ints = actions - self._sequence_starts[self.trajectory_index]
        self.targets: Ints = tokens[actions]
        self.lengths: Ints = self._positions[self._action_starts + self.action_counts - 1]
        """[trajectories]: number of tokens to read, which is all before the last action token."""
        self.sampler_logprobs: Floats = np.zeros(len(actions))
        self.teacher_logprobs: Floats | None = None
        self._kept_ids: Ints = np.zeros(0, dtype=np.int64)
        self._kept_counts: Ints | None = None
        first = self._positions[self._action_starts]
        if not first.all():
            raise InvalidInput(names[int(np.argmin(first))], "an action at its start", "an observation before it")

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory], *, with_teacher: bool = False) -> Self:
        """Each trajectory has an action token. `with_teacher`: with log-probabilities of a teacher. Raises
        InvalidInput."""
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        parts = list(chain.from_iterable((turn.observation_tokens, turn.tokens) for turn in turns))
        sizes = np.fromiter(map(len, parts), np.int64, len(parts))
        tokens = np.fromiter(chain.from_iterable(parts), np.int64, int(sizes.sum()))
        is_action = np.repeat(np.arange(len(parts)) % 2 == 1, sizes)
        counts = np.array([len(trajectory.turns) for trajectory in trajectories], dtype=np.int64)
        lengths = np.add.reduceat(sizes, 2 * start_offsets(counts)) if len(counts) else np.zeros(0, dtype=np.int64)
        samples = cls([trajectory.id for trajectory in trajectories], lengths, tokens, is_action)
        samples.sampler_logprobs = samples._logprobs([turn.logprobs for turn in turns], "logprobs")
        if with_teacher:
            missing = next((trajectory.id for trajectory in trajectories if trajectory.teacher_logprobs is None), None)
            if missing is not None:
                raise InvalidInput(f"{missing}: teacher_logprobs", None, "those of a teacher, to distil from it")
            samples.teacher_logprobs = samples._logprobs(
                [trajectory.teacher_logprobs or () for trajectory in trajectories], "teacher_logprobs"
            )
        if any(turn.candidate_token_ids is not None for turn in turns):
            samples._store_kept_ids(
                [ids for turn in turns for ids in turn.candidate_token_ids or ((),) * len(turn.tokens)]
            )
        return samples

    @classmethod
    def from_demonstrations(cls, demonstrations: Sequence[Demonstration]) -> Self:
        """Skips demonstrations without an action. Raises InvalidInput."""
        selected = [
            (number, demonstration)
            for number, demonstration in enumerate(demonstrations)
            if any(demonstration.is_action)
        ]
        for number, demonstration in selected:
            if len(demonstration.is_action) != len(demonstration.tokens):
                mismatch = f"{len(demonstration.is_action)} of is_action"
                raise InvalidInput(
                    f"demonstration {number}", mismatch, f"{len(demonstration.tokens)}, one for each token"
                )
        lengths = np.array([len(demonstration.tokens) for _, demonstration in selected], dtype=np.int64)
        count = int(lengths.sum())
        return cls(
            [f"demonstration {number} of {demonstration.task}" for number, demonstration in selected],
            lengths,
            np.fromiter(chain.from_iterable(demonstration.tokens for _, demonstration in selected), np.int64, count),
            np.fromiter(chain.from_iterable(demonstration.is_action for _, demonstration in selected), np.bool_, count),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def _logprobs(self, parts: Sequence[Sequence[float]], what: str) -> Floats:
        logprobs = np.fromiter(chain.from_iterable(parts), np.float64, len(self.targets))
        invalid = ~np.isfinite(logprobs)
        if invalid.any():
            number = int(np.argmax(invalid))
            raise InvalidInput(
                f"{self.names[self.trajectory_index[number]]}: {what}", float(logprobs[number]), "finite numbers"
            )
        return logprobs

    def _store_kept_ids(self, kept: Sequence[Sequence[int]]) -> None:
        """An action token without ids could have been any id."""
        counts = np.fromiter(map(len, kept), np.int64, len(kept))
        ids = np.fromiter(chain.from_iterable(kept), np.int64, int(counts.sum()))
        matches = ids == np.repeat(self.targets, counts)
        among = np.bincount(np.repeat(np.arange(len(kept)), counts), weights=matches, minlength=len(kept)) > 0
        invalid = (counts > 0) & ~among
        if invalid.any():
            number = int(np.argmax(invalid))
            raise InvalidInput(
                f"{self.names[self.trajectory_index[number]]}: kept",
                kept[number][:8],
                f"ids with the token {self.targets[number]}, which was sampled from them",
            )
        self._kept_ids, self._kept_counts = ids, counts

    def require_readable(self, vocabulary: int, context_max: int | None) -> None:
        """Raises InvalidInput if a model of these sizes cannot read the samples."""
        for ids in (self._tokens, self._kept_ids):
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
                invalid = ids[(ids < 0) | (ids >= vocabulary)][0]
                raise InvalidInput("tokens", int(invalid), f"ids from 0 to {vocabulary - 1}, those of the model")
        if context_max is not None and len(self) and self.lengths.max() > context_max:
            number = int(np.argmax(self.lengths))
            raise InvalidInput(
                self.names[number],
                f"{self.lengths[number] + 1} tokens",
                f"at most {context_max + 1}, the context of the model and one more",
            )

    # ---- microbatches ----

    def microbatches(
        self, rows: Ints, rows_max: int, vocabulary: int, device: torch.device | str = "cpu"
    ) -> Iterator[Microbatch]:
        """Yields microbatches of at most `rows_max` of these trajectories, short ones first."""
        ordered = rows[np.argsort(self.lengths[rows], kind="stable")]
        begin = 0
        while begin < len(ordered):
            end = self._microbatch_rows(self.lengths[ordered[begin : begin + rows_max]]) + begin
            yield self._microbatch(ordered[begin:end], vocabulary, device)
            begin = end

    def _microbatch_rows(self, lengths: Ints) -> int:
        """Returns how many of these ascending lengths are read together."""
        counts = np.arange(1, len(lengths) + 1)
        padded = 1.0 - np.cumsum(lengths) / (counts * lengths)
        within = (padded <= PADDING_MAX) | (counts <= ROWS_MIN)
        return len(lengths) if within.all() else int(np.argmin(within))

    def _microbatch(self, rows: Ints, vocabulary: int, device: torch.device | str) -> Microbatch:
        lengths, counts = self.lengths[rows], self.action_counts[rows]
        width = int(lengths.max())
        tokens = np.zeros((len(rows), width), dtype=np.int64)
        tokens[np.arange(width) < lengths[:, None]] = self._tokens[
            concatenated_ranges(self._sequence_starts[rows], lengths)
        ]
        chosen = concatenated_ranges(self._action_starts[rows], counts)
        at = np.repeat(np.arange(len(rows)) * width, counts) + self._positions[chosen] - 1
        return Microbatch(
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(at).to(device),
            torch.from_numpy(self.targets[chosen]).to(device),
            self._excluded_ids(chosen, vocabulary, device),
            chosen,
        )

    def _excluded_ids(self, chosen: Ints, vocabulary: int, device: torch.device | str) -> Tensor | None:
        if self._kept_counts is None:
            return None
        counts = self._kept_counts[chosen]
        excluded_ids = np.ones((len(chosen), vocabulary), dtype=np.bool_)
        excluded_ids[counts == 0] = False
        ids = self._kept_ids[concatenated_ranges(start_offsets(self._kept_counts)[chosen], counts)]
        excluded_ids[np.repeat(np.arange(len(chosen)), counts), ids] = False
        return torch.from_numpy(excluded_ids).to(device)


def start_offsets(counts: Ints) -> Ints:
    """Returns the offset of each piece in a concatenation of pieces of these sizes."""
    return np.cumsum(counts) - counts


def concatenated_ranges(starts: Ints, counts: Ints) -> Ints:
    """Returns the concatenation of the ranges `start, start + 1, ...` of these lengths."""
    return np.repeat(starts - start_offsets(counts), counts) + np.arange(int(counts.sum()))
