"""What was heard of an answer: its pieces are checked and put together as they come.

Owns what is known of one answer. Promises that each token is one of the vocabulary and has a log-probability and a
version, that there are no more than were asked for, and a ValueError for an answer that cannot be meant.
"""

from __future__ import annotations

import time

from tangram.rl.inference.engines.protocol import Generation, Request
from tangram.rl.inference.engines.server_adapters import SHOWN, Said


class NoLogprobs(Exception):
    """It told ids and no log-probabilities."""


class OddEnd(Exception):
    """An answer that was ended neither by a token that ends an action nor by its length."""


class Heard:
    """What was heard of an answer so far."""

    def __init__(self, engine: str, request: Request, *, vocabulary: int | None = None, probing: bool = False) -> None:
        """`vocabulary`: how many tokens there are, if that is known."""
        self._engine = engine
        self._request = request
        self._vocabulary = vocabulary
        self._probing = probing
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._prefilled = len(request.tokens)
        self._reused = 0
        self._came_s = self._began_s = time.monotonic()
        self._first_s: float | None = None
        self.finish: str | None = None

    def begin(self) -> None:
        """It is asked now: what passed before was waiting."""
        self._began_s = time.monotonic()

    def take(self, said: Said, version: int, *, logprobs: bool) -> None:
        """Raises ValueError and OddEnd."""
        if said.tokens and said.logprobs is None and logprobs:
            if self._probing:
                raise NoLogprobs
            raise ValueError("tokens without log-probabilities, which it told when it started")
        values = said.logprobs if logprobs and said.logprobs is not None else (0.0,) * len(said.tokens)
        if len(values) != len(said.tokens):
            raise ValueError(f"{len(said.tokens)} tokens and {len(values)} log-probabilities")
        if len(self._tokens) + len(said.tokens) > self._request.sampling.tokens_max:
            raise ValueError(f"more than the {self._request.sampling.tokens_max} tokens that were asked for")
        if self._vocabulary is not None and any(not 0 <= token < self._vocabulary for token in said.tokens):
            wrong = next(token for token in said.tokens if not 0 <= token < self._vocabulary)
            raise ValueError(
                f"token {wrong}, and the vocabulary has {self._vocabulary}: policy.checkpoint has to be the folder of "
                "the model that it serves"
            )
        if said.tokens and self.finish is not None:
            raise ValueError("tokens after the end")
        if self._first_s is None and said.tokens:
            self._first_s = time.monotonic()
        self._tokens += said.tokens
        self._logprobs += values
        self._versions += [version if said.version is None else said.version] * len(said.tokens)
        self.finish = said.finish or self.finish
        if said.finish is not None and said.finish not in ("stop", "length"):
            raise OddEnd(f"ended the answer by {str(said.finish)[:SHOWN]!r}, which is no end of an action")
        if said.prompt is not None and said.cached is not None:
            self._reused = min(said.cached, len(self._request.tokens))
            self._prefilled = len(self._request.tokens) - self._reused

    def require_stop(self) -> None:
        """The token that ends an action is part of it. Raises OddEnd."""
        stop = self._request.sampling.stop
        if self.finish != "stop" or not stop or (self._tokens and self._tokens[-1] in stop):
            return
        at = f"at token {self._tokens[-1]}" if self._tokens else "without a token"
        raise OddEnd(
            f"ended the answer by itself {at}, and an action ends by one of {list(stop)}: name the token in "
            "eos_token_id of generation_config.json in policy.checkpoint, and serve the model without stop texts"
        )

    def so_far(self) -> Generation | None:
        return self.generation() if self._tokens else None

    def generation(self) -> Generation:
        now_s = time.monotonic()
        first_s = self._first_s if self._first_s is not None else now_s
        return Generation(
            tokens=tuple(self._tokens),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
            finish="stop" if self.finish == "stop" else "length",
            engine=self._engine,
            prefilled=self._prefilled,
            reused=self._reused,
            waiting_s=self._began_s - self._came_s,
            prefill_s=first_s - self._began_s,
            decode_s=now_s - first_s,
        )
