"""The transformer: what is read by parts, beside others and behind padding is what a plain forward pass computes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tangram.errors import InvalidConfig, InvalidInput

torch = pytest.importorskip("torch", reason="PyTorch is an extra, which is not installed")

from tangram.rl.model.transformer import (  # noqa: E402
    KVCache,
    RopeScaling,
    Transformer,
    TransformerConfig,
    rotary_table,
    small_config,
)

VOCABULARY, LENGTH = 50, 48

PLAIN = small_config(VOCABULARY, context_max=64)
GROUPED = msgspec.structs.replace(PLAIN, kv_heads=2, head_width=10, qkv_bias=True, output_bias=True, tied=True)
CONFIGS = pytest.mark.parametrize("config", [PLAIN, GROUPED], ids=["plain", "grouped"])
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(config: TransformerConfig, seed: int = 1, dtype: Any = torch.float64) -> Transformer:
    """With logits, biases and norms that are far from each other: what is mixed up shows."""
    model = Transformer.new(config, seed, dtype)
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("norm", "bias", "head", "embedding")):
                weight.add_(torch.randn(weight.shape, generator=chance).to(dtype), alpha=0.3)
    return model


def texts(rows: int, length: int = LENGTH, seed: int = 3) -> Any:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def ints(*values: int) -> Any:
    return torch.tensor(values)


def plain(model: Transformer, tokens: Any) -> Any:
    with torch.inference_mode():
        return model(tokens)


# ---- read equals forward ----


@CONFIGS
@DTYPES
@pytest.mark.parametrize("chunks", [[LENGTH], [1] * LENGTH, [5, 1, 17, 2, 7, 1, 1, 14], [47, 1]], ids=str)
def test_reading_by_chunks_of_any_size_gives_what_a_plain_forward_gives(
    config: TransformerConfig, dtype: Any, tolerance: float, chunks: list[int]
) -> None:
    assert sum(chunks) == LENGTH
    model, tokens = made(config, dtype=dtype), texts(3)
    expected = plain(model, tokens)
    cache = KVCache(config, 5, 60, dtype)
    start = 0
    with torch.inference_mode():
        for chunk in chunks:
            key_length = min(60, start + max(chunk, 20))
            at = torch.full((3,), start)
            logits = model.forward_cached(tokens[:, start : start + chunk], at, ints(4, 0, 2), cache, key_length)
            start += chunk
            torch.testing.assert_close(logits, expected[:, start - 1], rtol=0, atol=tolerance)
            if dtype == torch.float64:
                assert logits.argmax(-1).tolist() == expected[:, start - 1].argmax(-1).tolist()


@CONFIGS
def test_texts_at_different_positions_are_written_on_side_by_side(config: TransformerConfig) -> None:
    """Greedy, each with its own start, as an engine does it."""
    model, prompts = made(config), [texts(1, length, seed=length)[0] for length in (3, 11, 20, 7)]
    alone = []
    for prompt in prompts:
        written = prompt
        for _ in range(20):
            written = torch.cat((written, plain(model, written[None])[0, -1:].argmax(-1)))
        alone.append(written.tolist())

    cache, slots = KVCache(config, 4, 64, torch.float64), torch.arange(4)
    lengths = ints(*(len(prompt) for prompt in prompts))
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    together = [prompt.tolist() for prompt in prompts]
    with torch.inference_mode():
        logits = model.forward_cached(padded, torch.zeros(4, dtype=torch.int64), slots, cache, 24, lengths)
        for step in range(20):
            tokens = logits.argmax(-1)
            for row, token in zip(together, tokens.tolist(), strict=True):
                row.append(token)
            logits = model.forward_cached(tokens[:, None], lengths + step, slots, cache, 64)
    assert together == alone


def test_many_texts_come_and_go_in_random_order_and_none_disturbs_another() -> None:
    """Chunks of random rows, slots and padding; a slot is used again without being cleared."""
    model, chance = made(GROUPED), random.Random(5)
    cache = KVCache(GROUPED, 6, LENGTH, torch.float64)
    text_by_slot: dict[int, Any] = {}
    read_by_slot: dict[int, int] = {}
    checked = 0
    with torch.inference_mode():
        for turn in range(150):
            slots = chance.sample(range(6), chance.randint(1, 6))
            count = chance.choice([1, 1, 3, 8])
            for slot in slots:
                if slot not in text_by_slot or read_by_slot[slot] + count > LENGTH:
                    text_by_slot[slot], read_by_slot[slot] = texts(1, seed=turn * 10 + slot)[0], 0
            valid = [chance.randint(0, count) for _ in slots]
            start = [read_by_slot[slot] for slot in slots]
            tokens = texts(len(slots), count, seed=1000 + turn)
            for row, slot in enumerate(slots):
                tokens[row, : valid[row]] = text_by_slot[slot][start[row] : start[row] + valid[row]]
            logits = model.forward_cached(tokens, ints(*start), ints(*slots), cache, LENGTH, ints(*valid))
            for row, slot in enumerate(slots):
                read_by_slot[slot] += valid[row]
                if valid[row]:
                    expected = model(text_by_slot[slot][None, : read_by_slot[slot]])[0, -1]
                    torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-9)
                    checked += 1
    assert checked > 200


# ---- padding and neighbours ----


def test_padding_is_never_written_where_it_could_be_read() -> None:
    model, tokens = made(PLAIN), texts(2)
    cache = KVCache(PLAIN, 2, LENGTH, torch.float64)
    slots, none = torch.arange(2), torch.zeros(2, dtype=torch.int64)
    with torch.inference_mode():
        model.forward_cached(tokens[:, :20], none, slots, cache, LENGTH)
        before = [(keys.clone(), values.clone()) for keys, values in zip(cache.keys, cache.values, strict=True)]
        model.forward_cached(tokens[:, 20:30], ints(20, 0), slots, cache, LENGTH, ints(4, 0))
    for (keys, values), keys_now, values_now in zip(before, cache.keys, cache.values, strict=True):
        for was, now in ((keys, keys_now), (values, values_now)):
            changed = (was != now).any(-1).any(1)[:, :LENGTH]
            assert changed[0].nonzero().flatten().tolist() == [20, 21, 22, 23]
            assert not changed[1].any()


def test_what_padding_consists_of_changes_no_bit() -> None:
    model, tokens = made(PLAIN, dtype=torch.float32), texts(2, 16)
    other = tokens.clone()
    other[0, 9:] = (other[0, 9:] + 1) % VOCABULARY
    losses = []
    for each in (tokens, other):
        cache = KVCache(PLAIN, 2, LENGTH)
        with torch.inference_mode():
            logits = model.forward_cached(each, ints(0, 0), ints(0, 1), cache, LENGTH, ints(9, 16))
            losses += [logits, model.forward_cached(ints(7, 8)[:, None], ints(9, 16), ints(0, 1), cache, LENGTH)]
    assert torch.equal(losses[0], losses[2]) and torch.equal(losses[1], losses[3])


def test_a_forward_depends_neither_on_padding_nor_on_neighbours() -> None:
    model, tokens = made(GROUPED), texts(3, 20)
    valid = torch.arange(20) < ints(20, 13, 1)[:, None]
    padded = tokens.masked_fill(~valid, -100)
    with torch.inference_mode():
        logits = model(padded, valid)
        for row, length in enumerate((20, 13, 1)):
            alone = model(tokens[row : row + 1, :length])[0]
            torch.testing.assert_close(logits[row, :length], alone, rtol=0, atol=1e-9)


@CONFIGS
@pytest.mark.parametrize("count", [1, 8])
def test_decoding_is_bitwise_independent_of_what_other_slots_hold(config: TransformerConfig, count: int) -> None:
    """At constant slots and key length, on one thread."""
    model, slots, mine = made(config, dtype=torch.float32), torch.arange(8), 3
    tokens = texts(1, 40, seed=9)[0]
    outputs = []
    for neighbours in (0, 1, 2):
        cache = KVCache(config, 8, LENGTH)
        beside = texts(8, 40, seed=20 + neighbours)
        starts = torch.zeros(8, dtype=torch.int64)
        logits = []
        with torch.inference_mode():
            for at in range(0, 40, count):
                batch = beside[:, at : at + count].clone()
                batch[mine] = tokens[at : at + count]
                valid = torch.full((8,), 0 if neighbours == 0 else count)
                if neighbours == 2:
                    valid = torch.randint(0, count + 1, (8,), generator=torch.Generator().manual_seed(at))
                valid[mine] = count
                logits.append(model.forward_cached(batch, starts, slots, cache, LENGTH, valid)[mine])
                starts = starts + valid
        outputs.append(torch.stack(logits))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_which_slot_a_text_lies_in_changes_no_bit() -> None:
    model, tokens = made(PLAIN, dtype=torch.float32), texts(8, 24)
    outputs = []
    for shift in (0, 1, 5):
        cache, logits = KVCache(PLAIN, 8, LENGTH), []
        with torch.inference_mode():
            for at in range(24):
                batch = tokens[:, at : at + 1].roll(shift, 0)
                starts = torch.full((8,), at)
                logits.append(model.forward_cached(batch, starts, torch.arange(8), cache, LENGTH).roll(-shift, 0))
        outputs.append(torch.stack(logits))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@CONFIGS
@pytest.mark.parametrize("count", [1, 6])
def test_slots_that_are_copied_give_the_bits_of_slots_that_lie_together(config: TransformerConfig, count: int) -> None:
    model, tokens = made(config, dtype=torch.float32), texts(4, 30)
    outputs = []
    for slots in (ints(0, 1, 2, 3), ints(2, 3, 4, 5), ints(6, 0, 5, 2)):
        cache, logits = KVCache(config, 7, LENGTH), []
        with torch.inference_mode():
            for at in range(0, 30, count):
                logits.append(
                    model.forward_cached(tokens[:, at : at + count], torch.full((4,), at), slots, cache, LENGTH)
                )
        outputs.append(torch.stack(logits))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_the_key_length_changes_only_the_last_bits() -> None:
    model, tokens = made(GROUPED), texts(2, 20)
    outputs = []
    for key_length in (20, 33, 64):
        cache = KVCache(GROUPED, 2, 64, torch.float64)
        with torch.inference_mode():
            outputs.append(model.forward_cached(tokens, ints(0, 0), ints(0, 1), cache, key_length))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-9)
    torch.testing.assert_close(outputs[0], outputs[2], rtol=0, atol=1e-9)


def test_a_token_behind_the_keys_that_are_looked_at_is_our_bug() -> None:
    model, cache = made(PLAIN), KVCache(PLAIN, 1, LENGTH, torch.float64)
    with torch.inference_mode():
        with pytest.raises(AssertionError, match="beyond the 10 keys"):
            model.forward_cached(ints(1)[:, None], ints(10), ints(0), cache, 10)
        with pytest.raises(AssertionError, match="49 keys of 48"):
            model.forward_cached(ints(1)[:, None], ints(10), ints(0), cache, 49)


# ---- the model itself ----


def test_equal_seeds_give_equal_weights_and_other_seeds_other_weights() -> None:
    torch.manual_seed(1)
    one = Transformer.new(PLAIN, 7)
    torch.manual_seed(2)
    same, other = Transformer.new(PLAIN, 7), Transformer.new(PLAIN, 8)
    double = Transformer.new(PLAIN, 7, torch.float64)
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, same.state_dict()[name])
        assert torch.equal(weight.double(), double.state_dict()[name])
    assert not torch.equal(one.embedding, other.embedding)


@pytest.mark.parametrize("tied", [True, False])
def test_a_new_policy_is_close_to_uniform(tied: bool) -> None:
    model = Transformer.new(msgspec.structs.replace(PLAIN, tied=tied), 1)
    logprobs = torch.log_softmax(plain(model, texts(4)), -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    assert entropy.min() > 0.95 * math.log(VOCABULARY)


@CONFIGS
def test_gradients_are_those_of_finite_differences(config: TransformerConfig) -> None:
    model, tokens = made(config), texts(2, 7)
    chosen = texts(2, 7, seed=8)

    def loss() -> Any:
        return -torch.log_softmax(model(tokens), -1).gather(-1, chosen[..., None]).mean()

    loss().backward()
    for name, weight in model.named_parameters():
        direction = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        with torch.no_grad():
            weight.add_(direction, alpha=1e-5)
            above = loss()
            weight.add_(direction, alpha=-2e-5)
            below = loss()
            weight.add_(direction, alpha=1e-5)
        assert weight.grad is not None
        expected = (weight.grad * direction).sum().item()
        assert ((above - below) / 2e-5).item() == pytest.approx(expected, rel=1e-5, abs=1e-6), name


def test_a_model_that_has_served_can_be_trained() -> None:
    """What is made in inference mode cannot be used in training: the table of angles must not be."""
    model, cache = Transformer.new(PLAIN, 1), KVCache(PLAIN, 1, LENGTH)
    with torch.inference_mode():
        model.forward_cached(texts(1, 4), ints(0), ints(0), cache, LENGTH)
    model(texts(1, 4)).sum().backward()
    assert model.layers[0].qkv.grad is not None


def test_a_model_learns() -> None:
    """Repeat the token of eight positions ago."""
    model = Transformer.new(PLAIN, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(150):
        tokens = texts(32, 8, seed=step).repeat(1, 2)
        loss = torch.nn.functional.cross_entropy(model(tokens)[:, 7:-1].flatten(0, 1), tokens[:, 8:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5  # of 3.9 at the beginning


def test_positions_are_as_exact_as_the_dtype_even_after_a_conversion() -> None:
    config = msgspec.structs.replace(PLAIN, context_max=5000)
    model = Transformer.new(config, 1)
    with torch.inference_mode():
        model(texts(1))
        tokens = texts(1, 5000)
        assert torch.equal(model.double()(tokens), Transformer.new(config, 1).double()(tokens))
    angle = 4999 * 10000.0 ** (-2 / 16)
    assert rotary_table(config, torch.float64)[4999, 1].item() == pytest.approx(math.cos(angle), abs=1e-11)
    assert rotary_table(config, torch.float32)[4999, 1].item() != pytest.approx(math.cos(angle), abs=1e-9)


def test_half_precision_works() -> None:
    model, tokens = Transformer.new(GROUPED, 1), texts(2, 10)
    expected = plain(model, tokens)[:, -1]
    model = model.bfloat16()
    cache = KVCache(GROUPED, 2, LENGTH, torch.bfloat16)
    with torch.inference_mode():
        model.forward_cached(tokens[:, :6], ints(0, 0), ints(0, 1), cache, LENGTH)
        logits = model.forward_cached(tokens[:, 6:], ints(6, 6), ints(0, 1), cache, LENGTH)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), expected, rtol=0, atol=0.05)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"vocabulary": 0}, "vocabulary"),
        ({"layers": -1}, "layers"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"head_width": 15}, "head_width"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"norm_eps": math.nan}, "norm_eps"),
        ({"output_bias": True}, "output_bias"),
        ({"context_max": 1 << 40}, "context_max"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        msgspec.structs.replace(PLAIN, **changed)
    assert caught.value.field == field


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="a divisor of width, which is 64"):
        small_config(VOCABULARY, heads=5)


@pytest.mark.parametrize("changed", [{"factor": 0.5}, {"low": 4.0, "high": 1.0}, {"low": 0.0}, {"context": 0}])
def test_a_stretch_that_cannot_be_is_refused(changed: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"factor": 8.0, "low": 1.0, "high": 4.0, "context": 64}
    RopeScaling(**fields)
    with pytest.raises(InvalidConfig):
        RopeScaling(**(fields | changed))


def test_a_cache_longer_than_the_context_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="context_max"):
        KVCache(PLAIN, 1, PLAIN.context_max + 1)
    with pytest.raises(InvalidConfig, match="slots"):
        KVCache(PLAIN, 0, 8)


def test_a_text_longer_than_the_context_is_refused() -> None:
    with pytest.raises(InvalidInput, match="at most 64"):
        made(PLAIN)(texts(1, 65))
