"""The transformer: a decoder of the Llama and Qwen2 kind, and its KV cache.

Owns its sizes, its arithmetic and where in a cache keys and values lie. Never samples, never schedules and never reads
a file. Promises that a text gets the same logits from `forward` and from any sequence of `read`s, up to rounding; and
that `read` at the same shapes on one thread gives it the same bits in whichever slot it lies, whatever the others hold.

Names of shapes: B texts, T tokens of each, L keys, V vocabulary, W width, D width of a head.
"""

from __future__ import annotations

import math
from typing import Self, cast

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tangram.errors import InvalidConfig, InvalidInput
from tangram.rl.config.rollout_settings import CONTEXT_MAX

HEAD_STD = 0.02
"""Of the first weights of an output layer: what they say is close to uniform, so that a new policy tries everything."""


class Stretched(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary frequencies changed for a longer context than was trained on first, as Llama 3.1 does it."""

    factor: float
    low: float
    high: float
    context: int
    """Trained on first."""

    def __post_init__(self) -> None:
        if self.factor < 1.0:
            raise InvalidConfig("factor", self.factor, "at least 1")
        if not 0.0 < self.low < self.high:
            raise InvalidConfig("low", self.low, f"more than 0 and less than high, which is {self.high}")
        if self.context < 1:
            raise InvalidConfig("context", self.context, "at least 1")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a transformer."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    """Of keys and values; each serves as many heads of queries."""
    head_width: int
    inner: int
    """Width inside the SwiGLU."""
    rope_theta: float = 10000.0
    rope_stretched: Stretched | None = None
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    output_bias: bool = False
    """Of what attention gives; only Llama checkpoints with `attention_bias` have it."""
    tied: bool = False
    """Whether the output layer is the embedding."""
    context_max: int = 256

    def __post_init__(self) -> None:
        for key in ("vocabulary", "width", "layers", "heads", "kv_heads", "head_width", "inner", "context_max"):
            if getattr(self, key) < 1:
                raise InvalidConfig(key, getattr(self, key), "at least 1")
        if self.context_max > CONTEXT_MAX:
            raise InvalidConfig("context_max", self.context_max, f"at most {CONTEXT_MAX}")
        if self.heads % self.kv_heads:
            raise InvalidConfig("kv_heads", self.kv_heads, f"a divisor of heads, which is {self.heads}")
        if self.head_width % 2:
            raise InvalidConfig("head_width", self.head_width, "an even number: positions turn pairs")
        for key in ("rope_theta", "norm_eps"):
            if not 0.0 < getattr(self, key) < math.inf:
                raise InvalidConfig(key, getattr(self, key), "more than 0")
        if self.output_bias and not self.qkv_bias:
            raise InvalidConfig("output_bias", True, "false where qkv_bias is false")


def small(vocabulary: int, *, layers: int = 2, width: int = 64, heads: int = 4, context_max: int = 256) -> ModelConfig:
    """One that learns small tasks on a CPU."""
    if heads < 1 or width % heads:
        raise InvalidConfig("heads", heads, f"a divisor of width, which is {width}")
    return ModelConfig(
        vocabulary=vocabulary,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        inner=3 * width,
        context_max=context_max,
    )


class Cache:
    """Keys and values of texts that have been read, one text in each slot.

    Which positions of a slot have been written is known to the caller alone: a text that goes on at `start` is read as
    if all before it were there. What stands behind is written before it is read, and has to be finite until then: what
    a model with a NaN in its weights has written stays until the cache is made anew.
    """

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if slots < 1:
            raise InvalidConfig("slots", slots, "at least 1")
        if not 1 <= length <= config.context_max:
            raise InvalidConfig("length", length, f"from 1 to context_max of the model, which is {config.context_max}")
        self.slots = slots
        self.length = length
        # One position more than is read: padding is written there.
        shape = (slots, config.kv_heads, length + 1, config.head_width)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.in_order = torch.arange(slots, device=device)
        self.positions = torch.arange(length, device=device)


class Layer(nn.Module):
    """Attention and SwiGLU, each behind a norm and added to what came in."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_width, self.norm_eps = config.head_width, config.norm_eps
        attended = config.heads * config.head_width
        made = attended + 2 * config.kv_heads * config.head_width
        # Queries, keys and values are made by one product, gate and up by another: small products cost their call.
        self.attention_norm = unfilled(config.width, dtype=dtype)
        self.qkv = unfilled(made, config.width, dtype=dtype)
        self.qkv_bias = unfilled(made, dtype=dtype) if config.qkv_bias else None
        self.output = unfilled(config.width, attended, dtype=dtype)
        self.output_bias = unfilled(config.width, dtype=dtype) if config.output_bias else None
        self.mlp_norm = unfilled(config.width, dtype=dtype)
        self.gate_up = unfilled(2 * config.inner, config.width, dtype=dtype)
        self.down = unfilled(config.width, config.inner, dtype=dtype)

    def look(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, heads, D], keys and values [B, T, kv_heads, D]."""
        made = F.linear(normed(x, self.attention_norm, self.norm_eps), self.qkv, self.qkv_bias)
        made = made.view(*x.shape[:-1], self.heads + 2 * self.kv_heads, self.head_width)
        turned = turn(made[..., : -self.kv_heads, :], cos, sin)
        return turned[..., : self.heads, :], turned[..., self.heads :, :], made[..., -self.kv_heads :, :]

    def add(self, x: Tensor, attended: Tensor) -> Tensor:
        """What follows attention, which gave `attended` [B, T, heads * D]."""
        x = x + F.linear(attended, self.output, self.output_bias)
        gate, up = F.linear(normed(x, self.mlp_norm, self.norm_eps), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        """Its weights are yet to be filled: `new` makes a model to be trained, `checkpoint.load` reads one."""
        super().__init__()
        self.config = config
        self.embedding = unfilled(config.vocabulary, config.width, dtype=dtype)
        # A ModuleList says of its elements only that they are modules.
        self.layers = cast("list[Layer]", nn.ModuleList(Layer(config, dtype) for _ in range(config.layers)))
        self.norm = unfilled(config.width, dtype=dtype)
        self.head = None if config.tied else unfilled(config.vocabulary, config.width, dtype=dtype)
        self._rotary = torch.empty(0)

    @classmethod
    def size(cls, config: ModelConfig) -> int:
        """How many parameters such a one would have. It is not made."""
        with torch.device("meta"):
            return sum(weight.numel() for weight in cls(config).parameters())

    @classmethod
    def new(cls, config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Self:
        """The same weights for the same seed, rounded to the dtype."""
        model = cls(config)
        chance = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("norm"):
                    weight.fill_(1.0)
                elif name.endswith("bias"):
                    weight.zero_()
                else:
                    weight.normal_(std=first_std(name, weight, config), generator=chance)
        return model.to(dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def forward(self, tokens: Tensor, valid: Tensor | None = None) -> Tensor:
        """The logits [B, T, V] of what follows each of the tokens [B, T].

        Texts begin at the left. `valid` [B, T] says which tokens are theirs; what is padding may be any number, and
        its logits mean nothing. No text depends on the padding behind it or on the texts beside it.
        """
        length = tokens.shape[1]
        if length > self.config.context_max:
            raise InvalidInput("tokens", length, f"at most {self.config.context_max}, the context of the model")
        if valid is not None:
            tokens = tokens.masked_fill(~valid, 0)
        cos, sin = self._rotary_table()[:length].unsqueeze(1).chunk(2, dim=-1)
        x = F.embedding(tokens, self.embedding)
        for layer in self.layers:
            queries, keys, values = (each.transpose(1, 2) for each in layer.look(x, cos, sin))
            grouped = self.config.heads != self.config.kv_heads
            attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=grouped)
            x = layer.add(x, attended.transpose(1, 2).flatten(2))
        return self._logits(x)

    def read(
        self,
        tokens: Tensor,
        start: Tensor,
        slots: Tensor,
        cache: Cache,
        key_length: int,
        valid_count: Tensor | None = None,
    ) -> Tensor:
        """Reads further tokens of texts in the cache; returns the logits [B, V] after the last valid one of each.

        tokens [B, T]: T = 1 to write, more to read a prompt by chunks. All integers are int64.
        start [B]: the position of the first token of each row; all positions before it have been read.
        slots [B]: where each row lies, none twice. Consecutive ones are looked at in place, what others hold is copied.
        key_length: so many positions of the slots are looked at; at least start + valid_count of every row. What is
            computed depends on it in the last bits alone.
        valid_count [B]: how many tokens of each row are its own, from the left; all, if it is not said. What follows
            is padding: it may be any token id, changes nothing in the cache that is ever read, and disturbs no row. A
            row may have 0, in which case its logits mean nothing.

        Call it in torch.inference_mode().
        """
        rows, count = tokens.shape
        assert count <= key_length <= cache.length, f"{count} tokens, {key_length} keys of {cache.length}"
        offsets = cache.positions[:count]
        positions = written = start.unsqueeze(1) + offsets
        if valid_count is not None:
            padding = offsets >= valid_count.unsqueeze(1)
            written = positions.masked_fill(padding, cache.length)
            positions = positions.masked_fill(padding, 0)
        assert int(positions.max()) < key_length, f"a token stands behind the {key_length} keys that are looked at"
        cos, sin = self._rotary_table()[positions].unsqueeze(2).chunk(2, dim=-1)
        bias = unseen(positions, cache.positions[:key_length], self.dtype)
        put = (slots.unsqueeze(1), slice(None), written)
        first = int(slots[0])
        lie_together = torch.equal(slots, cache.in_order[first : first + rows])

        x = F.embedding(tokens, self.embedding)
        for layer, all_keys, all_values in zip(self.layers, cache.keys, cache.values, strict=True):
            queries, keys, values = layer.look(x, cos, sin)
            all_keys[put] = keys
            all_values[put] = values
            if lie_together:
                keys, values = (each[first : first + rows, :, :key_length] for each in (all_keys, all_values))
            else:
                keys, values = (each[:, :, :key_length].index_select(0, slots) for each in (all_keys, all_values))
            x = layer.add(x, attend(queries, keys, values, bias))
        if valid_count is None or count == 1:
            return self._logits(x[:, -1])
        return self._logits(x[cache.in_order[:rows], (valid_count - 1).clamp(min=0)])

    def _logits(self, x: Tensor) -> Tensor:
        x = normed(x, self.norm, self.config.norm_eps)
        return F.linear(x, self.embedding if self.head is None else self.head)

    def _rotary_table(self) -> Tensor:
        """[context_max, 2 * D]. No buffer: a conversion of the model would round it, where it has to be made anew."""
        if self._rotary.dtype != self.dtype or self._rotary.device != self.device or not len(self._rotary):
            with torch.inference_mode(False):  # what is made in it could not be trained with
                self._rotary = rotary_table(self.config, self.dtype).to(self.device)
        return self._rotary


def unfilled(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype))


# ---- arithmetic ----


def first_std(name: str, weight: Tensor, config: ModelConfig) -> float:
    """Of the first weights: what a layer makes of a vector of unit variance has unit variance, and all that is added
    to a vector on its way through the layers has it together."""
    if name == "embedding":
        return HEAD_STD if config.tied else 1.0
    if name == "head":
        return HEAD_STD
    std = weight.shape[1] ** -0.5
    return std * (2 * config.layers) ** -0.5 if name.endswith(("output", "down")) else std


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, in float32 at least."""
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)


def unseen(positions: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of queries at these positions [B, T]: -inf at later keys, [B, 1, T, L]."""
    later = keys > positions.unsqueeze(2)
    return torch.zeros(later.shape, dtype=dtype, device=keys.device).masked_fill_(later, -math.inf).unsqueeze(1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """[B, T, heads * D] of queries [B, T, heads, D] and keys and values [B, kv_heads, L, D]."""
    rows, count, heads, head_width = queries.shape
    kv_heads = keys.shape[1]
    if count == 1:
        # The heads that share keys are as many queries of one head: their keys are read once.
        together = queries.view(rows, kv_heads, heads // kv_heads, head_width)
        return F.scaled_dot_product_attention(together, keys, values, attn_mask=bias).reshape(rows, 1, -1)
    attended = F.scaled_dot_product_attention(
        queries.transpose(1, 2), keys, values, attn_mask=bias, enable_gqa=heads != kv_heads
    )
    return attended.transpose(1, 2).reshape(rows, count, -1)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs of each head [..., D] by the angles of its position. A pair is one element of the first half
    and one of the second, as in the checkpoints of Hugging Face; `sin` has its sign with it."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rotary_table(config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """Cosines and signed sines of every position, side by side: [context_max, 2 * D]."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    positions = torch.arange(config.context_max, dtype=exact)
    angles = positions.unsqueeze(1) * frequencies(config, exact)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos, -sin, sin), dim=1).to(dtype)


def frequencies(config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """By which angle each pair turns from position to position: [D / 2]."""
    found = 1.0 / config.rope_theta ** (torch.arange(0, config.head_width, 2, dtype=dtype) / config.head_width)
    stretched = config.rope_stretched
    if stretched is None:
        return found
    # Pairs that turn often within the first context stay, those that turn seldom are slowed, the rest in between.
    turns = stretched.context * found / (2 * math.pi)
    kept = ((turns - stretched.low) / (stretched.high - stretched.low)).clamp(0.0, 1.0)
    return (1.0 - kept) * found / stretched.factor + kept * found
