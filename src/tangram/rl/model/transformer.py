"""The transformer: a decoder of the Llama and Qwen2 kind, and its KV cache.

Owns its sizes, its arithmetic and the layout of the cache. Never samples, schedules or reads a file. Promises that a
sequence gets the same logits from `forward` and from any division into `forward_cached` calls, up to rounding; and that
`forward_cached` with the same shapes on one thread gives a sequence the same bits in any slot, independent of
other slots.

Shape names: B sequences, T tokens of each, L keys, V vocabulary, W width, D width of a head.
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

HEAD_INIT_STD = 0.02
"""Standard deviation of the first weights of an output layer: the output is close to uniform, so a new policy
explores."""


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary frequencies scaled for a longer context than that of the first training, as in Llama 3.1."""

    factor: float
    low: float
    high: float
    context: int
    """Context length of the first training."""

    def __post_init__(self) -> None:
        if self.factor < 1.0:
            raise InvalidConfig("factor", self.factor, "at least 1")
        if not 0.0 < self.low < self.high:
            raise InvalidConfig("low", self.low, f"more than 0 and less than high, which is {self.high}")
        if self.context < 1:
            raise InvalidConfig("context", self.context, "at least 1")


class TransformerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a transformer."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    """Heads of keys and values; each serves as many heads of queries."""
    head_width: int
    inner: int
    """Width inside the SwiGLU."""
    rope_theta: float = 10000.0
    rope_stretched: RopeScaling | None = None
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the attention output; only Llama checkpoints with `attention_bias` have it."""
    tied: bool = False
    """Whether output layer and embedding share their weights."""
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
            raise InvalidConfig("head_width", self.head_width, "an even number: rotary embedding rotates pairs")
        for key in ("rope_theta", "norm_eps"):
            if not 0.0 < getattr(self, key) < math.inf:
                raise InvalidConfig(key, getattr(self, key), "more than 0")
        if self.output_bias and not self.qkv_bias:
            raise InvalidConfig("output_bias", True, "false where qkv_bias is false")


def small_config(
    vocabulary: int, *, layers: int = 2, width: int = 64, heads: int = 4, context_max: int = 256
) -> TransformerConfig:
    """A config for small tasks on a CPU."""
    if heads < 1 or width % heads:
        raise InvalidConfig("heads", heads, f"a divisor of width, which is {width}")
    return TransformerConfig(
        vocabulary=vocabulary,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        inner=3 * width,
        context_max=context_max,
    )


class KVCache:
    """The KV cache: keys and values of one sequence per slot.

    The caller knows which positions are written: a sequence that continues at `start` is read as if all positions
    before were written. Later positions are masked, but have to be finite: what a model with NaN weights has written
    stays until a new cache is made."""

    def __init__(
        self,
        config: TransformerConfig,
        slots: int,
        length: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if slots < 1:
            raise InvalidConfig("slots", slots, "at least 1")
        if not 1 <= length <= config.context_max:
            raise InvalidConfig("length", length, f"from 1 to context_max of the model, which is {config.context_max}")
        self.length = length
        # One extra position, into which padding is written.
        shape = (slots, config.kv_heads, length + 1, config.head_width)
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in range(config.layers)]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in range(config.layers)]
        self.slot_indices = torch.arange(slots)
        self.positions = torch.arange(length)


class TransformerLayer(nn.Module):
    """Attention and SwiGLU, each with a norm before it and a residual connection."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_width, self.norm_eps = config.head_width, config.norm_eps
        attended = config.heads * config.head_width
        multiplications = attended + 2 * config.kv_heads * config.head_width
        # One product for queries, keys and values, and one for gate and up: small products are dominated by call
        # overhead.
        self.attention_norm = empty_parameter(config.width, dtype=dtype)
        self.qkv = empty_parameter(multiplications, config.width, dtype=dtype)
        self.qkv_bias = empty_parameter(multiplications, dtype=dtype) if config.qkv_bias else None
        self.output = empty_parameter(config.width, attended, dtype=dtype)
        self.output_bias = empty_parameter(config.width, dtype=dtype) if config.output_bias else None
        self.mlp_norm = empty_parameter(config.width, dtype=dtype)
        self.gate_up = empty_parameter(2 * config.inner, config.width, dtype=dtype)
        self.down = empty_parameter(config.width, config.inner, dtype=dtype)

    def project_qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [B, T, heads, D], keys and values [B, T, kv_heads, D]."""
        projected = F.linear(rms_norm(x, self.attention_norm, self.norm_eps), self.qkv, self.qkv_bias)
        projected = projected.view(*x.shape[:-1], self.heads + 2 * self.kv_heads, self.head_width)
        turned = apply_rotary(projected[..., : -self.kv_heads, :], cos, sin)
        return turned[..., : self.heads, :], turned[..., self.heads :, :], projected[..., -self.kv_heads :, :]

    def apply_output_and_mlp(self, x: Tensor, attended: Tensor) -> Tensor:
        """The part after attention, whose result is `attended` [B, T, heads * D]."""
        x = x + F.linear(attended, self.output, self.output_bias)
        gate, up = F.linear(rms_norm(x, self.mlp_norm, self.norm_eps), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Transformer(nn.Module):
    def __init__(self, config: TransformerConfig, dtype: torch.dtype = torch.float32) -> None:
        """The weights are uninitialised: `new` makes a trainable model, `model_folder.load` reads one."""
        super().__init__()
        self.config = config
        self.embedding = empty_parameter(config.vocabulary, config.width, dtype=dtype)
        # A ModuleList is typed as a list of plain modules.
        self.layers = cast(
            "list[TransformerLayer]", nn.ModuleList(TransformerLayer(config, dtype) for _ in range(config.layers))
        )
        self.norm = empty_parameter(config.width, dtype=dtype)
        self.head = None if config.tied else empty_parameter(config.vocabulary, config.width, dtype=dtype)
        self._rotary = torch.empty(0)

    @classmethod
    def parameter_count(cls, config: TransformerConfig) -> int:
        """Returns the number of parameters without making the model."""
        with torch.device("meta"):
            return sum(weight.numel() for weight in cls(config).parameters())

    @classmethod
    def new(cls, config: TransformerConfig, seed: int, dtype: torch.dtype = torch.float32) -> Self:
        """Makes the same weights for the same seed, rounded to the dtype."""
        model = cls(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("norm"):
                    weight.fill_(1.0)
                elif name.endswith("bias"):
                    weight.zero_()
                else:
                    weight.normal_(std=init_std(name, weight, config), generator=generator)
        return model.to(dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def forward(self, tokens: Tensor, valid: Tensor | None = None) -> Tensor:
        """Returns the logits [B, T, V] after each of the tokens [B, T].

        Sequences start at the left. `valid` [B, T] masks their tokens; padding may be any id, and its logits are
        undefined. No sequence depends on the padding behind it or on its neighbours."""
        return self._logits(self._hidden(tokens if valid is None else tokens.masked_fill(~valid, 0)))

    def logits_at(self, tokens: Tensor, at: Tensor) -> Tensor:
        """Returns the logits [N, V] after the positions `at` [N], which index the flattened tokens [B, T]. Computes the
        output layer, large for a large vocabulary, only there."""
        return self._logits(self._hidden(tokens).flatten(0, 1)[at])

    def _hidden(self, tokens: Tensor) -> Tensor:
        """Returns the output [B, T, W] of the last layer."""
        length = tokens.shape[1]
        if length > self.config.context_max:
            raise InvalidInput("tokens", length, f"at most {self.config.context_max}, the context of the model")
        cos, sin = self._rotary_table()[:length].unsqueeze(1).chunk(2, dim=-1)
        x = F.embedding(tokens, self.embedding)
        for layer in self.layers:
            queries, keys, values = (each.transpose(1, 2) for each in layer.project_qkv(x, cos, sin))
            grouped = self.config.heads != self.config.kv_heads
            attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=grouped)
            x = layer.apply_output_and_mlp(x, attended.transpose(1, 2).flatten(2))
        return x

    def forward_cached(
        self,
        tokens: Tensor,
        start: Tensor,
        slots: Tensor,
        cache: KVCache,
        key_length: int,
        valid_count: Tensor | None = None,
    ) -> Tensor:
        """Reads further tokens of cached sequences; returns the logits [B, V] after the last valid token of each.

          tokens [B, T]: T = 1 for decode, more for chunked prefill. All integers are int64.
          start [B]: the position of the first token of each row; all earlier positions have been read.
          slots [B]: the slot of each row, all different. Consecutive slots are read in place, others are copied.
          key_length: attention covers this many positions; at least start + valid_count of every row. It affects only
              the last bits of the result.
          valid_count [B]: number of valid tokens of each row, from the left; all if None. The rest is padding: any
              token id, without effect on other rows or on what is read from the cache. A row may have 0; its logits
              are undefined.

        Call it in torch.inference_mode()."""
        rows, count = tokens.shape
        assert count <= key_length <= cache.length, f"{count} tokens, {key_length} keys of {cache.length}"
        offsets = cache.positions[:count]
        positions = written = start.unsqueeze(1) + offsets
        if valid_count is not None:
            padding = offsets >= valid_count.unsqueeze(1)
            written = positions.masked_fill(padding, cache.length)
            positions = positions.masked_fill(padding, 0)
        assert int(positions.max()) < key_length, f"a token is beyond the {key_length} keys of attention"
        cos, sin = self._rotary_table()[positions].unsqueeze(2).chunk(2, dim=-1)
        bias = causal_bias(positions, cache.positions[:key_length], self.dtype)
        put = (slots.unsqueeze(1), slice(None), written)
        first = int(slots[0])
        lie_together = torch.equal(slots, cache.slot_indices[first : first + rows])

        x = F.embedding(tokens, self.embedding)
        for layer, all_keys, all_values in zip(self.layers, cache.keys, cache.values, strict=True):
            queries, keys, values = layer.project_qkv(x, cos, sin)
            all_keys[put] = keys
            all_values[put] = values
            if lie_together:
                keys, values = (each[first : first + rows, :, :key_length] for each in (all_keys, all_values))
            else:
                keys, values = (each[:, :, :key_length].index_select(0, slots) for each in (all_keys, all_values))
            x = layer.apply_output_and_mlp(x, attend(queries, keys, values, bias))
        if valid_count is None or count == 1:
            return self._logits(x[:, -1])
        return self._logits(x[cache.slot_indices[:rows], (valid_count - 1).clamp(min=0)])

    def _logits(self, x: Tensor) -> Tensor:
        x = rms_norm(x, self.norm, self.config.norm_eps)
        return F.linear(x, self.embedding if self.head is None else self.head)

    def _rotary_table(self) -> Tensor:
        """[context_max, 2 * D]. Not a buffer: a dtype conversion of the model would round it, and it has to be
        recomputed."""
        if self._rotary.dtype != self.dtype or self._rotary.device != self.device or not len(self._rotary):
            with torch.inference_mode(False):  # otherwise it could not be used in training
                self._rotary = rotary_table(self.config, self.dtype).to(self.device)
        return self._rotary


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype))


# ---- arithmetic ----


def init_std(name: str, weight: Tensor, config: TransformerConfig) -> float:
    """Standard deviation of initial weights: a layer maps unit variance to unit variance, and the sum of all residuals
    has unit variance."""
    if name == "embedding":
        return HEAD_INIT_STD if config.tied else 1.0
    if name == "head":
        return HEAD_INIT_STD
    std = weight.shape[1] ** -0.5
    return std * (2 * config.layers) ** -0.5 if name.endswith(("output", "down")) else std


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, in float32 at least."""
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)


def causal_bias(positions: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Attention bias of queries at these positions [B, T]: -inf at later keys, [B, 1, T, L]."""
    later = keys > positions.unsqueeze(2)
    return torch.zeros(later.shape, dtype=dtype, device=keys.device).masked_fill_(later, -math.inf).unsqueeze(1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Returns [B, T, heads * D] for queries [B, T, heads, D] and keys and values [B, kv_heads, L, D]."""
    rows, count, heads, head_width = queries.shape
    kv_heads = keys.shape[1]
    if count == 1:
        # Grouped-query attention: heads that share keys become several queries of one head, so that keys are read once.
        grouped_queries = queries.view(rows, kv_heads, heads // kv_heads, head_width)
        return F.scaled_dot_product_attention(grouped_queries, keys, values, attn_mask=bias).reshape(rows, 1, -1)
    attended = F.scaled_dot_product_attention(
        queries.transpose(1, 2), keys, values, attn_mask=bias, enable_gqa=heads != kv_heads
    )
    return attended.transpose(1, 2).reshape(rows, count, -1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs of each head [..., D] by the angles of its position. A pair is one element of the first half
    and one of the second, as in Hugging Face checkpoints; `sin` includes the sign."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rotary_table(config: TransformerConfig, dtype: torch.dtype) -> Tensor:
    """Cosines and signed sines of every position, side by side: [context_max, 2 * D]."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    positions = torch.arange(config.context_max, dtype=exact)
    angles = positions.unsqueeze(1) * rotary_frequencies(config, exact)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos, -sin, sin), dim=1).to(dtype)


def rotary_frequencies(config: TransformerConfig, dtype: torch.dtype) -> Tensor:
    """Angle per position of each pair: [D / 2]."""
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, config.head_width, 2, dtype=dtype) / config.head_width)
    stretched = config.rope_stretched
    if stretched is None:
        return frequencies
    # Llama 3.1: high frequencies stay, low ones are slowed, those in between are interpolated.
    turns = stretched.context * frequencies / (2 * math.pi)
    kept = ((turns - stretched.low) / (stretched.high - stretched.low)).clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / stretched.factor + kept * frequencies
