"""The engine protocol and its records: engines generate tokens.

An engine accepts requests at any time, batches them, and returns each as soon as it is done. Input and output are
tokens. Cancelling `generate` aborts that request in the engine and affects no other. An engine that dies raises
EngineDied for each of its requests, with all output that is known, so that another engine can continue.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from tangram.errors import InvalidConfig, ManagerError

Finish = Literal["stop", "length"]
"""A stop token was sampled, or the limit of tokens was reached."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled."""

    temperature: float = 1.0
    """0 always takes the most likely token; its log-probability is that of temperature 1, because that of a certain
    choice has no information. For evaluation, not for training."""
    tokens_max: int = 64
    stop: tuple[int, ...] = ()
    top_k: int = 0
    """Only this many of the most likely tokens; 0: all."""
    top_p: float = 1.0
    """Only the most likely tokens with this total probability; 1: all."""
    keep_ids: bool = False
    """Return the ids that top-k and top-p kept for each token. Without them the log-probabilities cannot be recomputed,
    so a policy cannot be trained on the samples."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < 100.0:
            raise InvalidConfig("temperature", self.temperature, "a number from 0 to 100")
        if self.tokens_max < 1:
            raise InvalidConfig("tokens_max", self.tokens_max, "at least 1")
        if self.top_k < 0:
            raise InvalidConfig("top_k", self.top_k, "at least 1, or 0 for all tokens")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidConfig("top_p", self.top_p, "more than 0, at most 1")

    @property
    def truncates_distribution(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0

    def require_trainable(self) -> None:
        """Raises InvalidConfig if a policy cannot be trained on samples of these settings."""
        if self.temperature == 0.0:
            expected = "more than 0: a policy learns nothing from deterministic actions"
            raise InvalidConfig("sampling.temperature", 0.0, expected)
        if self.truncates_distribution and not self.keep_ids:
            key, value, neutral = ("top_k", self.top_k, 0) if self.top_k else ("top_p", self.top_p, 1)
            expected = f"{neutral} for training, or keep_ids = true beside it, to store the tokens that were left"
            raise InvalidConfig(f"sampling.{key}", value, expected)


class SamplingSeed(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Seeds the sampling noise, with the position of a token: equal seed, weights and context give an equal token,
    independent of the rest of the batch."""

    seed: int
    member: int = 0
    attempt: int = 0


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to continue tokens."""

    id: str
    """Unique to this request."""
    session: str = ""
    """The session that it continues, usually a trajectory: an engine may keep its KV cache. Empty: nothing is kept."""
    task: str = "default"
    """The tag by which a router chooses the hardware class."""
    tokens: tuple[int, ...]
    """The whole context. Its length is the position of the first token to generate."""
    sampling: Sampling
    noise: SamplingSeed


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A generated continuation."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The log-probability of each token in the distribution that it was sampled from: after temperature, top-k and
    top-p; at temperature 0, which does not sample, in that of temperature 1."""
    versions: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...] | None = None
    finish: Finish
    engine: str = ""
    prefilled: int = 0
    """Prefilled tokens; repetitions after an update or a death count."""
    reused: int = 0
    """Context tokens that were still in the KV cache."""
    waiting_s: float = 0.0
    """Time until the engine began with the request."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    """Full time of its steps: a step counts in full for each request in its batch."""


class PolicyWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Where the weights of a version are."""

    version: int
    folder: str
    """In the format of rl/model/weight_store.py; for external servers, in that of rl/model/model_folder.py."""


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of an engine since its start, and its current state."""

    name: str
    version: int = 0
    active: int = 0
    """Requests in service."""
    waiting: int = 0
    """Queued requests."""
    resident: int = 0
    """Tokens of ended requests that are still in the KV cache."""
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    idle_s: float = 0.0
    suspended_s: float = 0.0
    """Time between SUSPEND and RESUME."""
    update_s: float = 0.0
    """Weight updates: reading, concurrent with decoding or not, and switching."""


class EngineDied(ManagerError):
    """An engine ended, hung or failed with a request inside."""

    def __init__(self, name: str, reason: str, written: Generation | None) -> None:
        self.name = name
        self.written = written
        """The known output until then; its `finish` has no meaning."""
        super().__init__(f"engine {name}: {reason}")


class ServerUnreachable(EngineDied):
    """The server was not reached, so no request caused it."""


class ServerOverloaded(ServerUnreachable):
    """The server accepts no request, so no request caused it."""


class RequestRefused(ManagerError):
    """An engine rejects this request and continues with others."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"engine {name}: {reason}", retry=False)


class InferenceEngine(Protocol):
    name: str
    hardware: str
    """Its hardware class, such as `compute` or `bandwidth`."""
    output_is_trainable: bool
    """Whether its output can be trained on: it returns ids, log-probabilities and versions, and takes weights."""

    async def start(self, weights: PolicyWeights) -> None:
        """Returns when it is ready to serve with these weights; an external server labels its own as these. Also works
        after it died. Raises ManagerError."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Raises EngineDied, RequestRefused, and InvalidInput for an invalid request."""
        ...

    async def fetch(self, weights: PolicyWeights) -> None:
        """Fetches weights so that `update` only has to switch; decoding continues meanwhile. Does nothing in engines
        that cannot. Raises EngineDied; ManagerError if the weights cannot be read, and nothing has changed."""
        ...

    async def suspend(self) -> None:
        """Accepts requests but decodes nothing until `resume`. Requests in service stay."""
        ...

    async def update(self, weights: PolicyWeights) -> None:
        """Applies from the next token on. The KV cache of older weights is recomputed. Raises EngineDied; ManagerError
        if the weights cannot be read, and the old ones stay."""
        ...

    async def resume(self) -> None: ...

    async def close(self) -> None:
        """Ends it, with all its requests."""
        ...

    def statistics(self) -> EngineStatistics: ...
