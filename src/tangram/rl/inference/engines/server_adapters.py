"""Dialects: what is said to each kind of server, and how its answers are read.

Owns the table of dialects. Never connects. Promises that what is read of an answer is what was said: ids that are
whole numbers, log-probabilities that are numbers of at most 0, and an error for everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from tangram.rl.inference.engines.protocol import Request, Weights

SHOWN = 300
"""Characters of what a server said, in errors."""
SAME = 1e-4
"""Two log-probabilities that differ by less are the same, computed in another batch."""

Calls = tuple[tuple[str, dict[str, Any] | None], ...]
"""Paths with their bodies."""


class TextAlone(ValueError):
    """An answer without ids."""


class Said(NamedTuple):
    """A piece of an answer."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish: str | None
    version: int | None = None
    prompt: int | None = None
    """Tokens that were read, and of these, those that were there:"""
    cached: int | None = None


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """How a kind of server is spoken to."""

    path: str
    streams: bool
    body: Callable[[str, Request, int], dict[str, Any]]
    """Of the model, the request and its seed."""
    said: Callable[[Any], Said]
    """Of what was answered. Raises ValueError, KeyError, TypeError or IndexError for what it does not understand."""
    suspend: Calls = ()
    update: Callable[[Weights], Calls] | None = None
    """None: it takes no weights."""
    resume: Calls = ()
    abort: str = ""
    """Where to say that a request is over; empty: by hanging up."""
    hint: str = ""
    """What to do if it does not take weights."""


def _completion_body(model: str, request: Request, seed: int) -> dict[str, Any]:
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(request.tokens),
        "max_tokens": sampling.tokens_max,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": seed,
        "logprobs": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "stop_token_ids": list(sampling.stop),
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    return body


def _completion_said(answer: Any) -> Said:
    if answer.get("error"):
        raise ValueError(f"an error in place of an answer: {str(answer['error'])[:SHOWN]}")
    usage = answer.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if not answer["choices"]:
        return Said((), (), None, prompt=usage.get("prompt_tokens"), cached=cached)
    choice = answer["choices"][0]
    told = choice.get("logprobs") or {}
    ids = choice.get("token_ids")
    if ids is None:
        # vLLM with --return-tokens-as-token-ids names tokens so.
        names = told.get("tokens") or ([] if not choice.get("text") else [None])
        ids = [_named_id(name) for name in names]
    logprobs = told.get("token_logprobs")
    return Said(
        _ids(ids),
        _logprobs(logprobs) if logprobs is not None else None,
        choice.get("finish_reason"),
        prompt=usage.get("prompt_tokens"),
        cached=cached,
    )


def _named_id(name: object) -> int:
    if not isinstance(name, str) or not name.startswith("token_id:"):
        raise TextAlone
    return int(name.removeprefix("token_id:"))


def _generate_body(model: str, request: Request, seed: int) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "rid": request.id,
        "input_ids": list(request.tokens),
        "sampling_params": {
            "max_new_tokens": sampling.tokens_max,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": list(sampling.stop),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "sampling_seed": seed,
        },
        "return_logprob": True,
        "stream": False,
    }


def _generate_said(answer: Any) -> Said:
    meta = answer["meta_info"]
    told = meta.get("output_token_logprobs")
    ids = answer.get("output_ids")
    if ids is None:
        if told is None:
            raise TextAlone
        ids = [each[1] for each in told]
    if told is not None and [each[1] for each in told] != list(ids):
        raise ValueError("log-probabilities of other tokens than it wrote")
    finish = (meta.get("finish_reason") or {}).get("type")
    version = meta.get("weight_version")
    return Said(
        _ids(ids),
        _logprobs([each[0] for each in told]) if told is not None else None,
        finish,
        version=int(version) if isinstance(version, str | int) and str(version).isdecimal() else None,
        prompt=meta.get("prompt_tokens"),
        cached=meta.get("cached_tokens"),
    )


def _ids(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"what are no ids of tokens: {str(values)[:SHOWN]}")
    return tuple(values)


def _logprobs(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list):
        raise ValueError(f"what are no log-probabilities: {str(values)[:SHOWN]}")
    for value in values:
        if type(value) not in (int, float) or not math.isfinite(value) or value > SAME:
            raise ValueError(f"what is no log-probability: {value!r}")
    return tuple(min(0.0, float(value)) for value in values)


def _vllm_update(weights: Weights) -> Calls:
    reload = {"method": "reload_weights", "kwargs": {"weights_path": weights.folder}}
    # What was read under the old weights is read again, also of requests that are under way.
    return ("/collective_rpc", reload), ("/reset_prefix_cache?reset_running_requests=true", None)


def _sglang_update(weights: Weights) -> Calls:
    body = {"model_path": weights.folder, "weight_version": str(weights.version), "flush_cache": True}
    return (("/update_weights_from_disk", body),)


DIALECTS: Mapping[str, Dialect] = {
    "vllm": Dialect(
        path="/v1/completions",
        streams=True,
        body=_completion_body,
        said=_completion_said,
        suspend=(("/pause?mode=keep", None),),
        update=_vllm_update,
        resume=(("/resume", None),),
        hint="start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment, in a network of your own",
    ),
    "sglang": Dialect(
        path="/generate",
        streams=False,
        body=_generate_body,
        said=_generate_said,
        # Retracted requests are read again, so what they have read under old weights can be thrown away.
        suspend=(("/pause_generation", {"mode": "retract"}),),
        update=_sglang_update,
        resume=(("/continue_generation", {}),),
        abort="/abort_request",
        hint="a version of SGLang that has /update_weights_from_disk and /pause_generation",
    ),
    "plain": Dialect(path="/v1/completions", streams=True, body=_completion_body, said=_completion_said),
}
