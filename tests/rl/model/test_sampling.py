"""Noise and draws: known answers, the right distribution, and log-probabilities of what was drawn from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tangram.errors import InvalidAction, InvalidConfig
from tangram.rl.inference.engines.protocol import Sampling, SamplingSeed
from tangram.rl.model.sampling import BrokenLogits, draw, philox, require_valid_seed, uniforms

# Counter, key and words as the authors of Philox publish them in Random123 (tests/kat_vectors, philox4x32 10).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
CHI_SQUARE_19 = 43.8
"""That of 19 degrees of freedom is above this once in a thousand times."""
LAST = 1.0 - 2.0**-53
"""The greatest number that the noise can be."""


def softmax(logits: list[float]) -> np.ndarray:
    shares = np.exp(np.array(logits) - max(logits))
    return shares / shares.sum()


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_published_vectors(counter, key, words) -> None:
    values = philox(np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None])
    assert tuple(values[:, 0].tolist()) == words


def test_philox_gives_the_published_vectors_side_by_side() -> None:
    counters = np.array([counter for counter, _, _ in KNOWN_ANSWERS], dtype=np.uint64).T
    keys = np.array([key for _, key, _ in KNOWN_ANSWERS], dtype=np.uint64).T
    assert [tuple(each) for each in philox(counters, keys).T.tolist()] == [words for _, _, words in KNOWN_ANSWERS]


def test_the_noise_of_a_position_does_not_depend_on_where_one_begins() -> None:
    noise = SamplingSeed(seed=2**63 + 5, member=3, attempt=1)
    assert uniforms(noise, 10, 20).tolist() == [uniforms(noise, position, 1)[0] for position in range(10, 30)]


def test_seed_member_attempt_and_position_each_change_the_noise() -> None:
    places = [
        (SamplingSeed(seed=seed, member=member, attempt=attempt), position)
        for seed in (0, 1, 2**32, 2**64 - 1)
        for member in (0, 1, 2)
        for attempt in (0, 1, 2)
        for position in (0, 1, 2)
    ]
    assert len({uniforms(noise, position, 1)[0] for noise, position in places}) == len(places)


def test_noise_is_uniform_from_0_to_below_1() -> None:
    values = uniforms(SamplingSeed(seed=7), 0, 100_000)
    assert values.min() >= 0.0 and values.max() < 1.0
    counts = np.histogram(values, bins=20, range=(0.0, 1.0))[0]
    assert ((counts - 5000) ** 2 / 5000).sum() < CHI_SQUARE_19


@pytest.mark.parametrize(
    ("field", "noise"),
    [
        ("seed", SamplingSeed(seed=-1)),
        ("seed", SamplingSeed(seed=2**64)),
        ("member", SamplingSeed(seed=0, member=2**32)),
    ],
)
def test_noise_for_which_there_is_no_room_is_refused(field: str, noise: SamplingSeed) -> None:
    with pytest.raises(InvalidAction, match=field):
        require_valid_seed(noise)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(temperature=2.0, top_k=5),
        Sampling(top_p=0.8),
        Sampling(temperature=1.5, top_k=12, top_p=0.9),
    ],
    ids=str,
)
def test_token_frequencies_match_their_probabilities(sampling: Sampling) -> None:
    count = 20_000
    row = torch.randn(20, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1.5
    drawn = draw(row.expand(count, -1), [sampling] * count, uniforms(SamplingSeed(seed=11), 0, count))

    shares = softmax((row / sampling.temperature).tolist())
    order = sorted(range(20), key=lambda token: -shares[token])
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1.0:
        total, kept = sum(shares[token] for token in order), []
        while sum(shares[token] for token in kept) < sampling.top_p * total:
            kept.append(order[len(kept)])
        order = kept
    expected = np.array([shares[token] if token in order else 0.0 for token in range(20)])
    expected *= count / expected.sum()
    counts = np.bincount(drawn.tokens, minlength=20)
    left_out = expected == 0.0
    assert counts[left_out].sum() == 0
    assert ((counts - expected)[~left_out] ** 2 / expected[~left_out]).sum() < CHI_SQUARE_19
    for token, logprob in zip(drawn.tokens[:100], drawn.logprobs[:100], strict=True):
        assert logprob == pytest.approx(math.log(expected[token] / count), abs=1e-12)


def test_rows_with_different_settings_are_drawn_as_if_each_were_alone() -> None:
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(2))
    samplings = [
        Sampling(),
        Sampling(temperature=0.0),
        Sampling(temperature=0.5, top_k=3, keep_ids=True),
        Sampling(top_p=0.5, keep_ids=True),
        Sampling(top_p=0.5),
        Sampling(temperature=3.0),
    ]
    noise = uniforms(SamplingSeed(seed=5), 0, 6)
    together = draw(logits, samplings, noise)
    for row in range(6):
        alone = draw(logits[row : row + 1], samplings[row : row + 1], noise[row : row + 1])
        assert (together.tokens[row], together.kept_ids[row]) == (alone.tokens[0], alone.kept_ids[0])
        assert together.logprobs[row] == pytest.approx(alone.logprobs[0], abs=1e-12)


def test_temperature_0_takes_the_most_likely_with_its_probability_at_temperature_1() -> None:
    logits = [0.0, 2.0, 1.0, 2.0]
    for noise in (0.0, 0.5, LAST):
        drawn = draw(torch.tensor([logits]), [Sampling(temperature=0.0)], [noise])
        assert drawn.tokens == [1]
        assert drawn.logprobs[0] == pytest.approx(math.log(softmax(logits)[1]), abs=1e-7)


def test_the_ids_of_the_sampled_subset_are_returned_when_tokens_were_excluded() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
    assert draw(logits, [Sampling(top_k=2, keep_ids=True)], [0.5]).kept_ids == [(0, 2)]
    assert draw(logits, [Sampling(top_p=0.6, keep_ids=True)], [0.5]).kept_ids == [(0,)]
    assert draw(logits, [Sampling(keep_ids=True)], [0.5]).kept_ids == [None]
    assert draw(logits, [Sampling(top_k=2)], [0.5]).kept_ids == [None]


@given(
    logits=st.lists(st.floats(-1e4, 1e4) | st.just(-math.inf), min_size=1, max_size=40),
    temperature=st.sampled_from([0.0, 1e-3, 1.0, 99.0]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1e-9, 0.5, 1.0]),
    noise=st.sampled_from([0.0, 2.0**-53, 0.5, LAST]),
)
def test_what_is_drawn_always_had_a_probability(logits, temperature, top_k, top_p, noise) -> None:
    if max(logits) == -math.inf:
        return
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    drawn = draw(np.array([logits]), [sampling], [noise])
    assert 0 <= drawn.tokens[0] < len(logits)
    assert -math.inf < drawn.logprobs[0] <= 1e-12
    assert logits[drawn.tokens[0]] > -math.inf


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_invalid_logits_are_reported_with_their_row(broken: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = broken
    with pytest.raises(BrokenLogits, match=r"rows \[1\]"):
        draw(logits, [Sampling()] * 3, [0.5] * 3)
    with pytest.raises(BrokenLogits):
        draw(torch.full((1, 4), -math.inf), [Sampling()], [0.5])


def test_without_temperature_the_log_probability_is_that_of_temperature_1() -> None:
    logits = np.array([[0.0, 2.0, 1.0]])
    drawn = draw(logits, [Sampling(temperature=0.0)], [0.999])
    assert drawn.tokens == [1]
    assert drawn.logprobs == pytest.approx([2.0 - np.log(np.exp(logits).sum())])


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (Sampling(temperature=0.0), "sampling.temperature"),
        (Sampling(temperature=0.0, top_k=5, keep_ids=True), "sampling.temperature"),
        (Sampling(top_k=5), "sampling.top_k"),
        (Sampling(top_p=0.9), "sampling.top_p"),
    ],
    ids=str,
)
def test_what_a_policy_cannot_be_trained_on_is_refused(sampling: Sampling, field: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        sampling.require_trainable()
    assert refused.value.field == field


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.3), Sampling(top_k=5, top_p=0.9, keep_ids=True)], ids=str
)
def test_what_a_policy_can_be_trained_on_is_not_refused(sampling: Sampling) -> None:
    sampling.require_trainable()
