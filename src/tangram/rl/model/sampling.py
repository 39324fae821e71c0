"""Sampling: draws tokens with counter-based random numbers.

Owns the random numbers and the choice of tokens by them. The number of a token is a function of seed, member, attempt
and position only (Philox4x32-10 of Salmon, Moraes, Dror and Shaw, 2011), so it does not matter when, where and in which
batch a token is drawn. Everything is computed in float64. Promises that a drawn token has a probability above 0, and
that its log-probability is that of the distribution it was drawn from. At temperature 0 decoding is greedy: the most
likely token, with its log-probability at temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tangram.errors import InvalidAction, ManagerError
from tangram.rl.inference.engines.protocol import Sampling, SamplingSeed

ROUNDS = 10
MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
"""Increments of the two halves of the key from round to round."""
WEYL_BY_ROUND = np.arange(ROUNDS, dtype=np.uint64)[:, None, None] * WEYL
WORD_BITS = np.uint64(32)
WORD = np.uint64(0xFFFFFFFF)

WORD_VALUES = 1 << 32
SEED_VALUES = 1 << 64
"""Range of a seed: it is the key, and everything else is a word of the counter. So two different tokens never have the
same random number."""


class BrokenLogits(ManagerError):
    """A model returned logits that are not finite: its weights are broken, and no output may be used."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"the logits of rows {list(rows)} are not finite: the weights are broken", retry=False)


class SampledTokens(NamedTuple):
    """The sampled tokens, by row."""

    tokens: list[int]
    logprobs: list[float]
    kept_ids: list[tuple[int, ...] | None]
    """The ids among which the token was drawn, if requested and if top-k or top-p left some out."""


# ---- random numbers ----


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


def require_valid_seed(seed: SamplingSeed) -> None:
    """Raises InvalidAction if a number exceeds its range."""
    for field, value, values in (
        ("seed", seed.seed, SEED_VALUES),
        ("member", seed.member, WORD_VALUES),
        ("attempt", seed.attempt, WORD_VALUES),
    ):
        if not 0 <= value < values:
            raise InvalidAction(field, value, f"a whole number from 0 to {values - 1}")


def uniforms(seed: SamplingSeed, first: int, count: int) -> NDArray[np.float64]:
    """Returns uniform numbers in [0, 1), of 53 bits, for the tokens at `count` positions from `first` on."""
    counter = np.empty((4, count), dtype=np.uint64)
    counter[0] = np.arange(first, first + count, dtype=np.uint64)
    counter[1], counter[2], counter[3] = seed.member, seed.attempt, 0
    key = np.array([[seed.seed & 0xFFFFFFFF], [seed.seed >> 32]], dtype=np.uint64)
    high, low, _, _ = philox(counter, key)
    return ((high >> np.uint64(5)) * 67108864.0 + (low >> np.uint64(6))) / 9007199254740992.0  # 2**26 and 2**53


# ---- tokens ----


class Sampler:
    """Draws for rows with individual settings, as long as these stay the same."""

    def __init__(self, samplings: Sequence[Sampling]) -> None:
        self._temperatures: NDArray[np.float64] | None = None
        if any(sampling.temperature not in (0.0, 1.0) for sampling in samplings):
            self._temperatures = np.array([sampling.temperature or 1.0 for sampling in samplings])[:, None]
        self._truncated_rows = [
            (row, sampling) for row, sampling in enumerate(samplings) if sampling.truncates_distribution
        ]
        self._greedy_rows = [row for row, sampling in enumerate(samplings) if sampling.temperature == 0.0]
        self._rows = np.arange(len(samplings))

    def draw(
        self, logits: torch.Tensor | NDArray[Any], uniforms: Sequence[float] | NDArray[np.float64]
    ) -> SampledTokens:
        """Draws one token for each row of logits [rows, vocabulary], by the uniform number of that row. Raises
        BrokenLogits."""
        logit_values = logits.detach().numpy() if isinstance(logits, torch.Tensor) else logits
        scores = logit_values.astype(np.float64)  # a copy, modified below
        best = scores.max(axis=1, keepdims=True)
        if not np.isfinite(best).all():  # NaN propagates into the maximum
            raise BrokenLogits(np.flatnonzero(~np.isfinite(best[:, 0])).tolist())
        scores -= best
        if self._temperatures is not None:
            scores /= self._temperatures
        kept: list[tuple[int, ...] | None] = [None] * len(scores)
        for row, sampling in self._truncated_rows:
            ids = _top_k_top_p_ids(scores[row], sampling)
            kept[row] = tuple(ids.tolist()) if sampling.keep_ids else None
            values = scores[row, ids]
            scores[row] = -np.inf
            scores[row, ids] = values
        sums = np.exp(scores).cumsum(axis=1)
        totals = sums[:, -1]
        # The first id whose cumulative sum is above the target: an id with probability 0 adds nothing and is never
        # chosen. The greatest number below 1 times a total rounds to less than the total, so an id always exists.
        chosen = (sums <= (uniforms * totals)[:, None]).sum(axis=1)
        for row in self._greedy_rows:
            chosen[row] = scores[row].argmax()
        logprobs = scores[self._rows, chosen] - np.log(totals)
        return SampledTokens(chosen.tolist(), logprobs.tolist(), kept)


def draw(
    logits: torch.Tensor | NDArray[Any], samplings: Sequence[Sampling], uniforms: Sequence[float] | NDArray[np.float64]
) -> SampledTokens:
    """Draws once with a Sampler."""
    return Sampler(samplings).draw(logits, uniforms)


def _top_k_top_p_ids(scores: NDArray[np.float64], sampling: Sampling) -> NDArray[np.intp]:
    """Returns the ids that top-k and then top-p keep, in ascending order. Of equal scores the lower id is kept
    first."""
    order = np.argsort(-scores, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1.0:
        sums = np.exp(scores[order]).cumsum()
        before = np.concatenate(([0.0], sums[:-1]))
        order = order[before < sampling.top_p * sums[-1]]  # including the id that reaches top_p
    return np.sort(order)
