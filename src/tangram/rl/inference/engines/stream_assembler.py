"""The stream assembler: validates the chunks of a response and joins them as they arrive.

Owns the received part of one response. Promises that each token is in the vocabulary and has a log-probability and a
version, and that there are no more than requested. Raises ValueError for an invalid response.
"""

from __future__ import annotations

import time

from tangram.rl.inference.engines.protocol import Generation, GenerationRequest
from tangram.rl.inference.engines.server_adapters import SHOWN_CHARACTERS, CompletionChunk


class NoLogprobs(Exception):
    """The response has ids but no log-probabilities."""


class UnexpectedFinish(Exception):
    """The response ended neither with a stop token nor at its limit."""


class StreamAssembler:
    """The response so far."""

    def __init__(
        self, engine: str, request: GenerationRequest, *, vocabulary: int | None = None, probing: bool = False
    ) -> None:
        """`vocabulary`: number of tokens, if known."""
        self._engine = engine
        self._request = request
        self._vocabulary = vocabulary
        self._probing = probing
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._prefilled = len(request.tokens)
        self._reused = 0
        self._queued_at = self._began_at = time.monotonic()
        self._first_token_at: float | None = None
        self.finish: str | None = None

    def begin(self) -> None:
        """The request is sent now; the time before was waiting."""
        self._began_at = time.monotonic()

    def add(self, chunk: CompletionChunk, version: int, *, logprobs: bool) -> None:
        """Raises ValueError and UnexpectedFinish."""
        if chunk.tokens and chunk.logprobs is None and logprobs:
            if self._probing:
                raise NoLogprobs
            raise ValueError("tokens without log-probabilities, which it returned at its start")
        values = chunk.logprobs if logprobs and chunk.logprobs is not None else (0.0,) * len(chunk.tokens)
        if len(values) != len(chunk.tokens):
            raise ValueError(f"{len(chunk.tokens)} tokens and {len(values)} log-probabilities")
        if len(self._tokens) + len(chunk.tokens) > self._request.sampling.tokens_max:
            raise ValueError(f"more than the {self._request.sampling.tokens_max} tokens that were requested")
        if self._vocabulary is not None and any(not 0 <= token < self._vocabulary for token in chunk.tokens):
            bad = next(token for token in chunk.tokens if not 0 <= token < self._vocabulary)
            raise ValueError(
                f"token {bad}, and the vocabulary has {self._vocabulary}: policy.checkpoint has to be the folder of "
                "the model that it serves"
            )
        if chunk.tokens and self.finish is not None:
            raise ValueError("tokens after the end")
        if self._first_token_at is None and chunk.tokens:
            self._first_token_at = time.monotonic()
        self._tokens += chunk.tokens
        self._logprobs += values
        self._versions += [version if chunk.version is None else chunk.version] * len(chunk.tokens)
        self.finish = chunk.finish or self.finish
        if chunk.finish is not None and chunk.finish not in ("stop", "length"):
            raise UnexpectedFinish(
                f"ended the answer by {str(chunk.finish)[:SHOWN_CHARACTERS]!r}, which does not end an action"
            )
        if chunk.prompt is not None and chunk.cached is not None:
            self._reused = min(chunk.cached, len(self._request.tokens))
            self._prefilled = len(self._request.tokens) - self._reused

    def require_stop(self) -> None:
        """The stop token is part of the result. Raises UnexpectedFinish."""
        stop = self._request.sampling.stop
        if self.finish != "stop" or not stop or (self._tokens and self._tokens[-1] in stop):
            return
        at = f"at token {self._tokens[-1]}" if self._tokens else "without a token"
        raise UnexpectedFinish(
            f"ended the answer by itself {at}, and an action ends by one of {list(stop)}: name the token in "
            "eos_token_id of generation_config.json in policy.checkpoint, and serve the model without stop texts"
        )

    def partial(self) -> Generation | None:
        return self.generation() if self._tokens else None

    def generation(self) -> Generation:
        now = time.monotonic()
        first_token_at = self._first_token_at if self._first_token_at is not None else now
        return Generation(
            tokens=tuple(self._tokens),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
            finish="stop" if self.finish == "stop" else "length",
            engine=self._engine,
            prefilled=self._prefilled,
            reused=self._reused,
            waiting_s=self._began_at - self._queued_at,
            prefill_s=first_token_at - self._began_at,
            decode_s=now - first_token_at,
        )
