"""Sampling: a token of each distribution, by noise that is computed and not kept.

Owns how chance is made and how it becomes a token. The noise of a token is a function of seed, member, attempt and
position alone (Philox4x32-10 of Salmon, Moraes, Dror and Shaw, 2011), so it does not matter when, where and beside whom
a token is drawn. Everything is computed in float64, whatever the model computes in. Promises that a token that is drawn
had a probability above 0, and that its log-probability is that of the distribution from which it was drawn. At
temperature 0 nothing is drawn: the most likely token is taken, with its log-probability at temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tangram.errors import InvalidAction, ManagerError
from tangram.rl.inference.engines.protocol import Noise, Sampling

ROUNDS = 10
MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
"""By which the two halves of the key grow from round to round."""
WEYL_BY_ROUND = np.arange(ROUNDS, dtype=np.uint64)[:, None, None] * WEYL
WORD_BITS = np.uint64(32)
WORD = np.uint64(0xFFFFFFFF)

WORD_VALUES = 1 << 32
SEED_VALUES = 1 << 64
"""What there is room for: the seed is the key, everything else a word of the counter. So two different tokens never
have the same noise."""


class BrokenLogits(ManagerError):
    """A model gave what is no distribution. Its weights are broken; nothing that it says may be used."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = rows
        super().__init__(f"the logits of rows {list(rows)} are not finite: the weights are broken", retry=False)


class Drawn(NamedTuple):
    """By row."""

    tokens: list[int]
    logprobs: list[float]
    kept: list[tuple[int, ...] | None]
    """The ids among which the token was drawn, where they are asked for and some were left out."""


# ---- noise ------------------------------------------------------------------------------------------------------


def philox(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10. Words of 32 bits in uint64: a counter [4, n] and a key [2, n] or [2, 1] give [4, n]."""
    keys = (key + WEYL_BY_ROUND) & WORD
    multiplied, mixed_in = counter[0::2], counter[1::2]
    for number in range(ROUNDS):
        products = multiplied * MULTIPLIERS
        multiplied = (products >> WORD_BITS)[::-1] ^ mixed_in ^ keys[number]
        mixed_in = (products & WORD)[::-1]
    words = np.empty_like(counter)
    words[0::2], words[1::2] = multiplied, mixed_in
    return words


def require_noise(noise: Noise) -> None:
    """Raises InvalidAction, if there is no room for a number."""
    for field, value, values in (
        ("seed", noise.seed, SEED_VALUES),
        ("member", noise.member, WORD_VALUES),
        ("attempt", noise.attempt, WORD_VALUES),
    ):
        if not 0 <= value < values:
            raise InvalidAction(field, value, f"a whole number from 0 to {values - 1}")


def uniforms(noise: Noise, first: int, count: int) -> NDArray[np.float64]:
    """Numbers from 0 to below 1, of 53 bits, for the tokens at `count` positions from `first` on."""
    counter = np.empty((4, count), dtype=np.uint64)
    counter[0] = np.arange(first, first + count, dtype=np.uint64)
    counter[1], counter[2], counter[3] = noise.member, noise.attempt, 0
    key = np.array([[noise.seed & 0xFFFFFFFF], [noise.seed >> 32]], dtype=np.uint64)
    high, low, _, _ = philox(counter, key)
    return ((high >> np.uint64(5)) * 67108864.0 + (low >> np.uint64(6))) / 9007199254740992.0  # 2**26 and 2**53


# ---- tokens -----------------------------------------------------------------------------------------------------


class Sampler:
    """Draws for rows of which each has its own settings, as often as these stay the same."""

    def __init__(self, samplings: Sequence[Sampling]) -> None:
        self._temperatures: NDArray[np.float64] | None = None
        if any(sampling.temperature not in (0.0, 1.0) for sampling in samplings):
            self._temperatures = np.array([sampling.temperature or 1.0 for sampling in samplings])[:, None]
        self._leaving_out = [(row, sampling) for row, sampling in enumerate(samplings) if sampling.leaves_out]
        self._greedy = [row for row, sampling in enumerate(samplings) if sampling.temperature == 0.0]
        self._rows = np.arange(len(samplings))

    def draw(self, logits: torch.Tensor | NDArray[Any], noise: Sequence[float] | NDArray[np.float64]) -> Drawn:
        """One token for each row of logits [rows, vocabulary], by the uniform number of that row. Raises
        BrokenLogits."""
        given = logits.detach().numpy() if isinstance(logits, torch.Tensor) else logits
        scores = given.astype(np.float64)  # a copy, to be worked in
        best = scores.max(axis=1, keepdims=True)
        if not np.isfinite(best).all():  # one that is no number is the greatest of all
            raise BrokenLogits(np.flatnonzero(~np.isfinite(best[:, 0])).tolist())
        scores -= best
        if self._temperatures is not None:
            scores /= self._temperatures
        kept: list[tuple[int, ...] | None] = [None] * len(scores)
        for row, sampling in self._leaving_out:
            ids = _left(scores[row], sampling)
            kept[row] = tuple(ids.tolist()) if sampling.keep_ids else None
            values = scores[row, ids]
            scores[row] = -np.inf
            scores[row, ids] = values
        sums = np.exp(scores).cumsum(axis=1)
        totals = sums[:, -1]
        # The first whose sum is above the target: what has a share of 0 adds nothing to its sum and is never that one.
        # The greatest number below 1 times a total rounds to less than the total, so there always is one.
        chosen = (sums <= (noise * totals)[:, None]).sum(axis=1)
        for row in self._greedy:
            chosen[row] = scores[row].argmax()
        logprobs = scores[self._rows, chosen] - np.log(totals)
        return Drawn(chosen.tolist(), logprobs.tolist(), kept)


def draw(
    logits: torch.Tensor | NDArray[Any], samplings: Sequence[Sampling], noise: Sequence[float] | NDArray[np.float64]
) -> Drawn:
    """What a Sampler draws, once."""
    return Sampler(samplings).draw(logits, noise)


def _left(scores: NDArray[np.float64], sampling: Sampling) -> NDArray[np.intp]:
    """The ids that top-k and then top-p leave, in ascending order. Of equal ones the lower id goes first."""
    order = np.argsort(-scores, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1.0:
        sums = np.exp(scores[order]).cumsum()
        before = np.concatenate(([0.0], sums[:-1]))
        order = order[before < sampling.top_p * sums[-1]]  # the one that reaches the share is among them
    return np.sort(order)
