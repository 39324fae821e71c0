"""How long one step of a language model takes on a class of hardware: a roofline times efficiency.

Owns the arithmetic of a step, the published data of the device classes and the shapes of the models. Never keeps state
and never looks at a clock: same numbers in, same seconds out. Promises that more compute, more bandwidth or a higher
efficiency never makes a step slower. All of it is **simulated**.

    step = max(weight multiplications / compute, weights / bandwidth)      every token of the step shares the weights
         + prefill attention / compute + keys and values read / bandwidth  each sequence has its own
         + exchange between the devices of the engine + a fixed overhead
"""

from __future__ import annotations

import math

import msgspec

from tangram.errors import InvalidConfig

BYTES = 2
"""Of a number: weights, keys and values are bfloat16."""
MEMORY_SHARE = 0.9
"""Of the device memory is for weights, keys and values: the default of vLLM."""
EXCHANGE_S = 10e-6
"""Latency of one all-reduce between the devices of a node; assumed."""

PCIE = 50e9
"""Bytes per second between a device and the memory of its host: PCIe 5.0 x16, rounded down; assumed."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A class of devices, as published."""

    name: str
    flops: float
    """Per second, dense bfloat16."""
    bandwidth: float
    """Bytes per second of its memory."""
    memory_bytes: float
    link: float
    """Bytes per second to the other devices of its node."""
    cost: float
    """Per hour, H20 = 1."""


H800 = Gpu(name="H800", flops=989.5e12, bandwidth=3.35e12, memory_bytes=80e9, link=400e9, cost=2.85)
H20 = Gpu(name="H20", flops=148e12, bandwidth=4.0e12, memory_bytes=96e9, link=900e9, cost=1.0)
GPUS = {gpu.name: gpu for gpu in (H800, H20)}


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder-only transformer, in the words of its public config.json."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    """Width of the MLP, or of one expert."""
    head: int = 128
    """Width of a head."""
    experts: int = 1
    experts_per_token: int = 1
    vocabulary: int = 151_936

    @property
    def attention_parameters(self) -> int:
        return self.layers * 2 * self.hidden * self.head * (self.heads + self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Of one expert in every layer."""
        return self.layers * 3 * self.hidden * self.mlp

    @property
    def parameters(self) -> int:
        """Embedding and output head are two matrices."""
        return self.attention_parameters + self.experts * self.expert_parameters + 2 * self.vocabulary * self.hidden

    @property
    def active_parameters(self) -> int:
        """What one token is multiplied with: looking up its embedding costs nothing."""
        experts = self.experts_per_token * self.expert_parameters
        return self.attention_parameters + experts + self.vocabulary * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Of one token's keys and values."""
        return 2 * self.layers * self.kv_heads * self.head * BYTES

    def weights_read(self, tokens: int) -> float:
        """Expected bytes of weights that a step over so many tokens reads: tokens pick experts independently."""
        touched = self.experts * (1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens)
        return BYTES * (self.attention_parameters + touched * self.expert_parameters + self.vocabulary * self.hidden)


QWEN3_8B = Model(name="Qwen3-8B", layers=36, hidden=4096, heads=32, kv_heads=8, mlp=12_288)
QWEN3_14B = Model(name="Qwen3-14B", layers=40, hidden=5120, heads=40, kv_heads=8, mlp=17_408)
QWEN3_32B = Model(name="Qwen3-32B", layers=64, hidden=5120, heads=64, kv_heads=8, mlp=25_600)
QWEN3_30B_A3B = Model(
    name="Qwen3-30B-A3B", layers=48, hidden=2048, heads=32, kv_heads=4, mlp=768, experts=128, experts_per_token=8
)
MODELS = {model.name: model for model in (QWEN3_8B, QWEN3_14B, QWEN3_32B, QWEN3_30B_A3B)}


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """Which share of its published numbers a class of devices reaches."""

    prefill: float = 1.0
    """Of the compute."""
    decode: float = 1.0
    """Of the memory bandwidth."""
    overhead_s: float = 0.0
    """Of every step, whatever is in it: scheduling and launching on the CPU."""


class Speed:
    """The step times of one engine: a model on so many devices of a class, split between them by tensor parallelism."""

    __slots__ = (
        "_attend_s",
        "_exchange_s",
        "_read_s",
        "_shared_s",
        "_token_s",
        "capacity",
        "fixed_s",
        "host_s",
        "kv_s",
        "model",
        "of",
    )

    def __init__(self, model: Model, gpu: Gpu, devices: int, efficiency: Efficiency) -> None:
        if devices < 1:
            raise InvalidConfig("devices", devices, "at least 1")
        if min(efficiency.prefill, efficiency.decode) <= 0.0 or efficiency.overhead_s < 0.0:
            raise InvalidConfig("efficiency", efficiency, "shares above 0 and an overhead of at least 0 s")
        compute = devices * gpu.flops * efficiency.prefill
        bandwidth = devices * gpu.bandwidth * efficiency.decode
        self.model, self.of = model, gpu
        self._token_s = 2.0 * model.active_parameters / compute
        self._attend_s = 4.0 * model.layers * model.heads * model.head / compute
        self._read_s = 1.0 / bandwidth
        self.kv_s = model.kv_bytes / bandwidth
        self.host_s = model.kv_bytes / (devices * PCIE)
        """To bring one token's keys and values back from the host."""
        # Two all-reduces in each layer; a ring moves 2 (n - 1) / n times the bytes.
        around = 2.0 * (devices - 1) / devices
        self._exchange_s = 2 * model.layers * around * model.hidden * BYTES / gpu.link
        self.fixed_s = efficiency.overhead_s + (2 * model.layers * EXCHANGE_S if devices > 1 else 0.0)
        self._shared_s: dict[int, float] = {}
        room = devices * gpu.memory_bytes * MEMORY_SHARE - BYTES * model.parameters
        self.capacity = math.floor(room / model.kv_bytes)
        """Tokens whose keys and values fit beside the weights."""
        if self.capacity < 1:
            raise InvalidConfig("devices", devices, f"enough of {gpu.name} to hold the weights of {model.name}")

    def step_s(self, prefill: int, attended: float, decoding: int, context: float) -> float:
        """One step: `prefill` tokens of prompts that attend to `attended` tokens in sum, and one more token for each of
        `decoding` sequences, whose keys and values are `context` tokens in sum."""
        return self.shared_s(prefill + decoding) + attended * self._attend_s + context * self.kv_s

    def shared_s(self, tokens: int) -> float:
        """The part of a step that does not depend on how long the sequences are."""
        known = self._shared_s.get(tokens)
        if known is None:
            weights_s = max(tokens * self._token_s, self.model.weights_read(tokens) * self._read_s)
            known = self._shared_s[tokens] = weights_s + tokens * self._exchange_s + self.fixed_s
        return known
