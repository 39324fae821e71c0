"""Step times of a language model on a class of hardware: a roofline model times an efficiency.

Owns the arithmetic of a step, the published data of the device classes and the shapes of the models. It keeps no state
and reads no clock: same input, same output. More compute, more bandwidth or a higher efficiency never makes a step
slower. All results are **simulated**.

    step = max(weight multiplications / compute, weights / bandwidth)      every token of the step shares the weights
         + prefill attention / compute + keys and values read / bandwidth  each sequence has its own
         + exchange between the devices of the engine + a fixed overhead
"""

from __future__ import annotations

import math

import msgspec

from tangram.errors import InvalidConfig

BYTES = 2
"""Bytes per number: weights and KV cache are bfloat16."""
MEMORY_SHARE = 0.9
"""Share of the device memory for weights and KV cache: the default of vLLM."""
EXCHANGE_S = 10e-6
"""Latency of one all-reduce between the devices of a node; assumed."""

PCIE = 50e9
"""Bytes per second between a device and the memory of its host: PCIe 5.0 x16, rounded down; assumed."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A class of devices, with published data."""

    name: str
    flops: float
    """Per second, dense bfloat16."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    memory_bytes: float
    link: float
    """Bytes per second to the other devices of its node."""
    cost: float
    """Per hour, H20 = 1."""


H800 = Gpu(name="H800", flops=989.5e12, bandwidth=3.35e12, memory_bytes=80e9, link=400e9, cost=2.85)
H20 = Gpu(name="H20", flops=148e12, bandwidth=4.0e12, memory_bytes=96e9, link=900e9, cost=1.0)


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder-only transformer; the fields follow its public config.json."""

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
        """Parameters of one expert, over all layers."""
        return self.layers * 3 * self.hidden * self.mlp

    @property
    def parameters(self) -> int:
        """All parameters. Embedding and output head are two matrices."""
        return self.attention_parameters + self.experts * self.expert_parameters + 2 * self.vocabulary * self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with; the embedding lookup costs nothing."""
        experts = self.experts_per_token * self.expert_parameters
        return self.attention_parameters + experts + self.vocabulary * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Size of one token in the KV cache."""
        return 2 * self.layers * self.kv_heads * self.head * BYTES

    def weights_read(self, tokens: int) -> float:
        """Return the expected bytes of weights that a step over `tokens` tokens reads. Tokens pick experts
        independently."""
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
    """The share of its published peak that a class of devices reaches."""

    prefill: float = 1.0
    """Share of the compute."""
    decode: float = 1.0
    """Share of the memory bandwidth."""
    overhead_s: float = 0.0
    """Added to every step: scheduling and kernel launches on the CPU."""


LEVEL = 0.7
"""Geometric mean of the efficiencies of the two classes, in both phases. Assumed: serving engines report 0.6 to 0.8."""
OVERHEAD_S = 0.002
"""Per step. Assumed: a few milliseconds of an engine's loop do not overlap with the device."""


def efficiencies(prefill_ratio: float, decode_ratio: float) -> dict[str, Efficiency]:
    """Return the efficiencies of H800 and H20 that have these ratios (H800 : H20)."""
    prefill, decode = math.sqrt(prefill_ratio), math.sqrt(decode_ratio)
    return {
        H800.name: Efficiency(prefill=LEVEL * prefill, decode=LEVEL * decode, overhead_s=OVERHEAD_S),
        H20.name: Efficiency(prefill=LEVEL / prefill, decode=LEVEL / decode, overhead_s=OVERHEAD_S),
    }


CALIBRATED = efficiencies(prefill_ratio=0.783, decode_ratio=1.018)
"""Fitted to one published figure: Qwen3-8B, 2 H800 against 6 H20 (about the same cost), prefix caching, batches of 64
to 192. FrozenLake on H800 takes down to 0.53 of the time on H20; GEM-math on H20 takes 0.49-0.79 of the time on H800.
Ratios of times show how the classes differ, not how fast either is. Therefore the ratio of each phase is fitted and the
level of both is assumed. A test checks that these efficiencies reproduce the figure."""


class Speed:
    """Step times of one engine: a model on several devices of a class, with tensor parallelism."""

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
        """Seconds to copy one token's KV cache back from host memory."""
        # Two all-reduces in each layer; a ring moves 2 (n - 1) / n times the bytes.
        around = 2.0 * (devices - 1) / devices
        self._exchange_s = 2 * model.layers * around * model.hidden * BYTES / gpu.link
        self.fixed_s = efficiency.overhead_s + (2 * model.layers * EXCHANGE_S if devices > 1 else 0.0)
        self._shared_s: dict[int, float] = {}
        room = devices * gpu.memory_bytes * MEMORY_SHARE - BYTES * model.parameters
        self.capacity = math.floor(room / model.kv_bytes)
        """Tokens whose KV cache fits next to the weights."""
        if self.capacity < 1:
            raise InvalidConfig("devices", devices, f"enough of {gpu.name} to hold the weights of {model.name}")

    def step_s(self, prefill: int, attended: float, decoding: int, context: float) -> float:
        """Return the seconds of one step: `prefill` prompt tokens that attend to `attended` tokens in total, and one
        more token for each of `decoding` sequences, whose KV caches hold `context` tokens in total."""
        return self.shared_s(prefill + decoding) + attended * self._attend_s + context * self.kv_s

    def shared_s(self, tokens: int) -> float:
        """Return the part of a step that does not depend on the length of the sequences."""
        known = self._shared_s.get(tokens)
        if known is None:
            weights_s = max(tokens * self._token_s, self.model.weights_read(tokens) * self._read_s)
            known = self._shared_s[tokens] = weights_s + tokens * self._exchange_s + self.fixed_s
        return known
