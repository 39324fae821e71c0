"""Engines: what writes tokens. The protocol, and the records that cross it.

An engine takes requests at any time, works on many at once, and answers each the moment it is done. Tokens go in and
tokens come out. Whoever awaits `generate` and is cancelled aborts that request in the engine and disturbs no other. An
engine that dies raises EngineDied for each of its requests, with all that is known to have been written, so that
somebody else can go on from there.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from tangram.errors import InvalidConfig, ManagerError

Finish = Literal["stop", "length"]
"""A token that ends an action was sampled; or as many as were allowed."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn."""

    temperature: float = 1.0
    """0 takes the most likely token always, and the log-probability told is that of temperature 1, since that of what
    is certain says nothing: for evaluation, not for training."""
    tokens_max: int = 64
    stop: tuple[int, ...] = ()
    top_k: int = 0
    """Only so many of the most likely tokens; 0: all."""
    top_p: float = 1.0
    """Only the most likely tokens that have this share together; 1: all."""
    keep_ids: bool = False
    """Whether the ids that top-k and top-p left are told for each token. Without them the log-probabilities cannot be
    computed again, so a policy cannot be trained on what was sampled."""

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
    def leaves_out(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0

    def require_trainable(self) -> None:
        """Raises InvalidConfig, if a policy cannot be trained on what is sampled so."""
        if self.temperature == 0.0:
            expected = "more than 0: a policy learns nothing from what it always does"
            raise InvalidConfig("sampling.temperature", 0.0, expected)
        if self.leaves_out and not self.keep_ids:
            key, value, everything = ("top_k", self.top_k, 0) if self.top_k else ("top_p", self.top_p, 1)
            expected = f"{everything} for training, or keep_ids = true beside it, to store the tokens that were left"
            raise InvalidConfig(f"sampling.{key}", value, expected)


class Noise(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What chance is made of, besides the position of a token: the same noise, weights and tokens give the same
    token, whoever else is being served."""

    seed: int
    member: int = 0
    attempt: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A text to be continued."""

    id: str
    """Of this request alone."""
    session: str = ""
    """What it continues, mostly a trajectory: an engine may keep what it has read of it. Empty: nothing is kept."""
    task: str = "default"
    """The tag by which a gateway chooses the class of hardware."""
    tokens: tuple[int, ...]
    """All that stands before. The position of the first token to be written is their count."""
    sampling: Sampling
    noise: Noise


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What was written."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token in the distribution from which it was drawn, after temperature, top-k and top-p; at temperature 0,
    where nothing is drawn, in that of temperature 1."""
    versions: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...] | None = None
    finish: Finish
    engine: str = ""
    prefilled: int = 0
    """Tokens that were read, again after an update or an engine's death included."""
    reused: int = 0
    """Tokens that had been read before and were still there."""
    waiting_s: float = 0.0
    """Until the engine began with it."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    """Its share of the time is all of it: what a step takes counts in full for each that is in it."""


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Where the weights of a version are."""

    version: int
    folder: str
    """As rl/model/weight_store.py publishes them; for servers of others, as rl/model/model_folder.py saves them."""


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine has done since it started, and does now."""

    name: str
    version: int = 0
    active: int = 0
    """Requests being served."""
    waiting: int = 0
    """Requests that have no place yet."""
    resident: int = 0
    """Tokens of ended requests that are still there to be continued."""
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    idle_s: float = 0.0
    suspended_s: float = 0.0
    """Between SUSPEND and RESUME."""
    update_s: float = 0.0
    """Of the weights, reading, beside its work or not, and switching."""


class EngineDied(ManagerError):
    """An engine ended, hung or broke down with a request inside."""

    def __init__(self, name: str, reason: str, written: Generation | None) -> None:
        self.name = name
        self.written = written
        """What is known to have been written until then; its `finish` means nothing."""
        super().__init__(f"engine {name}: {reason}")


class RequestRefused(ManagerError):
    """An engine does not take this request, and goes on with others."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"engine {name}: {reason}", retry=False)


class Engine(Protocol):
    name: str
    hardware: str
    """The class of hardware that it runs on, such as `compute` or `bandwidth`."""
    trains: bool
    """Whether what it writes may be trained on: it tells ids, log-probabilities and versions, and takes weights."""

    async def start(self, weights: Weights) -> None:
        """Ready to serve with these weights; a server of others counts its own as these. Also after it died. Raises
        ManagerError."""
        ...

    async def generate(self, request: Request) -> Generation:
        """Raises EngineDied, RequestRefused, and InvalidInput for a request that makes no sense to it."""
        ...

    async def fetch(self, weights: Weights) -> None:
        """Weights are at hand, so that `update` has only to switch; it goes on writing meanwhile. Whoever cannot do
        that does nothing. Raises EngineDied; ManagerError if the weights cannot be had, and nothing has changed."""
        ...

    async def suspend(self) -> None:
        """Takes requests, but writes nothing until `resume`. What is being served stays."""
        ...

    async def update(self, weights: Weights) -> None:
        """From the next token on. What was read under older weights is read again. Raises EngineDied; ManagerError if
        the weights cannot be had, and the old ones stay."""
        ...

    async def resume(self) -> None: ...

    async def close(self) -> None:
        """Ends it; what is in it dies."""
        ...

    def statistics(self) -> EngineStatistics: ...
