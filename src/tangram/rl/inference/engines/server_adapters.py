"""Server adapters: the API of each kind of inference server.

Owns the table of adapters. Never connects. Promises that parsed ids are whole numbers and log-probabilities numbers of
at most 0, and raises an error for everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from tangram.rl.inference.engines.protocol import GenerationRequest, PolicyWeights

SHOWN_CHARACTERS = 300
"""Characters of a response in an error message."""
LOGPROB_TOLERANCE = 1e-4
"""Log-probabilities that differ by less are equal up to another batch."""

ControlCalls = tuple[tuple[str, dict[str, Any] | None], ...]
"""Paths with their bodies."""


class TextOnlyResponse(ValueError):
    """A response without ids."""


class CompletionChunk(NamedTuple):
    """A chunk of a response."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish: str | None
    version: int | None = None
    prompt: int | None = None
    """Tokens of the prompt."""
    cached: int | None = None
    """The part of the prompt that was in the KV cache."""


class ServerAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """The API of a kind of server."""

    path: str
    streams: bool
    body: Callable[[str, GenerationRequest, int], dict[str, Any]]
    """Builds the body from model, request and seed."""
    parse: Callable[[Any], CompletionChunk]
    """Parses a response. Raises ValueError, KeyError, TypeError or IndexError for what is malformed."""
    suspend: ControlCalls = ()
    update: Callable[[PolicyWeights], ControlCalls] | None = None
    """None: it takes no weights."""
    resume: ControlCalls = ()
    abort: str = ""
    """Path to abort a request; empty: by closing the connection."""
    hint: str = ""
    """What to do if it does not take weights."""


def _completion_body(model: str, request: GenerationRequest, seed: int) -> dict[str, Any]:
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


def _parse_completion(body: Any) -> CompletionChunk:
    if body.get("error"):
        raise ValueError(f"an error instead of a response: {str(body['error'])[:SHOWN_CHARACTERS]}")
    usage = body.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if not body["choices"]:
        return CompletionChunk((), (), None, prompt=usage.get("prompt_tokens"), cached=cached)
    choice = body["choices"][0]
    entries = choice.get("logprobs") or {}
    ids = choice.get("token_ids")
    if ids is None:
        # vLLM names tokens so with --return-tokens-as-token-ids.
        names = entries.get("tokens") or ([] if not choice.get("text") else [None])
        ids = [_named_id(name) for name in names]
    logprobs = entries.get("token_logprobs")
    return CompletionChunk(
        _ids(ids),
        _logprobs(logprobs) if logprobs is not None else None,
        choice.get("finish_reason"),
        prompt=usage.get("prompt_tokens"),
        cached=cached,
    )


def _named_id(name: object) -> int:
    if not isinstance(name, str) or not name.startswith("token_id:"):
        raise TextOnlyResponse
    return int(name.removeprefix("token_id:"))


def _generate_body(model: str, request: GenerationRequest, seed: int) -> dict[str, Any]:
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


def _parse_generate(body: Any) -> CompletionChunk:
    meta = body["meta_info"]
    entries = meta.get("output_token_logprobs")
    ids = body.get("output_ids")
    if ids is None:
        if entries is None:
            raise TextOnlyResponse
        ids = [entry[1] for entry in entries]
    if entries is not None and [entry[1] for entry in entries] != list(ids):
        raise ValueError("log-probabilities of other tokens than it generated")
    finish = (meta.get("finish_reason") or {}).get("type")
    version = meta.get("weight_version")
    return CompletionChunk(
        _ids(ids),
        _logprobs([entry[0] for entry in entries]) if entries is not None else None,
        finish,
        version=int(version) if isinstance(version, str | int) and str(version).isdecimal() else None,
        prompt=meta.get("prompt_tokens"),
        cached=meta.get("cached_tokens"),
    )


def _ids(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"invalid token ids: {str(values)[:SHOWN_CHARACTERS]}")
    return tuple(values)


def _logprobs(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list):
        raise ValueError(f"invalid log-probabilities: {str(values)[:SHOWN_CHARACTERS]}")
    for value in values:
        if type(value) not in (int, float) or not math.isfinite(value) or value > LOGPROB_TOLERANCE:
            raise ValueError(f"an invalid log-probability: {value!r}")
    return tuple(min(0.0, float(value)) for value in values)


def _vllm_update(weights: PolicyWeights) -> ControlCalls:
    reload = {"method": "reload_weights", "kwargs": {"weights_path": weights.folder}}
    # The KV cache of the old weights is recomputed, also for requests in flight.
    return ("/collective_rpc", reload), ("/reset_prefix_cache?reset_running_requests=true", None)


def _sglang_update(weights: PolicyWeights) -> ControlCalls:
    body = {"model_path": weights.folder, "weight_version": str(weights.version), "flush_cache": True}
    return (("/update_weights_from_disk", body),)


SERVER_ADAPTERS: Mapping[str, ServerAdapter] = {
    "vllm": ServerAdapter(
        path="/v1/completions",
        streams=True,
        body=_completion_body,
        parse=_parse_completion,
        suspend=(("/pause?mode=keep", None),),
        update=_vllm_update,
        resume=(("/resume", None),),
        hint="start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment, in a network of your own",
    ),
    "sglang": ServerAdapter(
        path="/generate",
        streams=False,
        body=_generate_body,
        parse=_parse_generate,
        # Retracted requests are prefilled again, so their KV cache of the old weights can be dropped.
        suspend=(("/pause_generation", {"mode": "retract"}),),
        update=_sglang_update,
        resume=(("/continue_generation", {}),),
        abort="/abort_request",
        hint="a version of SGLang that has /update_weights_from_disk and /pause_generation",
    ),
    "plain": ServerAdapter(path="/v1/completions", streams=True, body=_completion_body, parse=_parse_completion),
}
