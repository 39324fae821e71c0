"""The teachers: small Llama models with weights drawn from a seed, as checkpoints that `transformers` reads.

Owns the weights and the reference: `logprobs` is the forward pass in numpy, written from the definition of the model.
It shares no code with PyTorch or `transformers`, so a matching answer shows that all weights are right and correctly
combined. Nothing is downloaded, and PyTorch is not imported here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

DOMAINS = ("algebra", "chess", "coding", "geometry", "physics", "search")
"""One teacher each."""
VOCABULARY, HIDDEN, LAYERS, HEADS, KEY_HEADS, INNER = 1024, 192, 3, 6, 2, 512
HEAD = HIDDEN // HEADS
THETA, EPSILON = 10_000.0, 1e-6
SCALE = 0.08
"""Scale of the weights: enough for probabilities that differ from token to token."""
TOLERANCE = 1e-3
"""Maximum difference of log-probabilities between two summation orders of the same float32 numbers."""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "rms_norm_eps": EPSILON,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


class TeacherCall(NamedTuple):
    """A request to a teacher, and its answer."""

    teacher: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class Checkpoint(NamedTuple):
    name: str
    path: str
    """The directory that `transformers` reads."""
    weights: dict[str, Array]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.values())


def make(name: str, seed: int, folder: Path) -> Checkpoint:
    from safetensors.numpy import save_file

    weights = _drawn(np.random.default_rng([seed, DOMAINS.index(name)]))
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint(name, str(path), weights)


def _drawn(rng: np.random.Generator) -> dict[str, Array]:
    def matrix(rows: int, columns: int) -> Array:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(SCALE)

    def norm() -> Array:
        return np.float32(1.0) + rng.standard_normal(HIDDEN, dtype=np.float32) * np.float32(SCALE)

    weights = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "lm_head.weight": matrix(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KEY_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj": (KEY_HEADS * HEAD, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        weights |= {f"model.layers.{layer}.{part}.weight": matrix(*shape) for part, shape in shapes.items()}
        for part in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{part}.weight"] = norm()
    return weights | {"model.norm.weight": norm()}


# ---- the reference ----------------------------------------------------------------------------------------------


def logprobs(weights: dict[str, Array], tokens: tuple[int, ...]) -> Array:
    """Return log-probabilities of the tokens from the second on, each given all before it."""
    x = weights["model.embed_tokens.weight"][list(tokens)]
    for layer in range(LAYERS):
        part = {name: weights[f"model.layers.{layer}.{name}.weight"] for name in _PARTS}
        x = x + _attention(_normal(x, part["input_layernorm"]), part)
        x = x + _inner(_normal(x, part["post_attention_layernorm"]), part)
    logits = _normal(x, weights["model.norm.weight"])[:-1] @ weights["lm_head.weight"].T
    top = logits.max(axis=1, keepdims=True)
    total = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
    chosen: Array = logits[np.arange(len(tokens) - 1), list(tokens[1:])] - total
    return chosen


_PARTS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


def _normal(x: Array, scale: Array) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(EPSILON)) * scale


def _inner(x: Array, part: dict[str, Array]) -> Array:
    gate = x @ part["mlp.gate_proj"].T
    return (gate / (1.0 + np.exp(-gate)) * (x @ part["mlp.up_proj"].T)) @ part["mlp.down_proj"].T


def _attention(x: Array, part: dict[str, Array]) -> Array:
    length = len(x)

    def heads(name: str, count: int) -> Array:
        return (x @ part[name].T).reshape(length, count, HEAD).transpose(1, 0, 2)

    queries, keys = _turned(heads("self_attn.q_proj", HEADS)), _turned(heads("self_attn.k_proj", KEY_HEADS))
    values = heads("self_attn.v_proj", KEY_HEADS)
    keys, values = (np.repeat(each, HEADS // KEY_HEADS, axis=0) for each in (keys, values))
    scores = queries @ keys.transpose(0, 2, 1) / np.float32(np.sqrt(HEAD))
    scores = np.where(np.tri(length, dtype=bool), scores, np.float32(-np.inf))
    shares = np.exp(scores - scores.max(axis=2, keepdims=True))
    shares /= shares.sum(axis=2, keepdims=True)
    return (shares @ values).transpose(1, 0, 2).reshape(length, HIDDEN) @ part["self_attn.o_proj"].T


def _turned(x: Array) -> Array:
    """Rotary positions: rotate the halves of each head by an angle that grows with the position."""
    angles = np.arange(x.shape[1])[:, None] * THETA ** (-np.arange(0, HEAD, 2) / HEAD)
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


class Reference:
    """Checks answers. Repeated requests are computed once."""

    def __init__(self, checkpoints: Iterable[Checkpoint]) -> None:
        self._weights = {checkpoint.name: checkpoint.weights for checkpoint in checkpoints}
        self._known: dict[tuple[str, tuple[int, ...]], Array] = {}

    def error(self, call: TeacherCall) -> float:
        """Return the largest deviation of the answer from the reference; infinite if the length differs."""
        key = call.teacher, call.tokens
        if key not in self._known:
            self._known[key] = logprobs(self._weights[call.teacher], call.tokens)
        expected: Any = self._known[key]
        if len(expected) != len(call.logprobs):
            return float("inf")
        return float(np.abs(expected - np.array(call.logprobs)).max())
