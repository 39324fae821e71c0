"""Resumed generations: joins the tokens that several engines generated for one request.

Owns the arithmetic of continuing after the death of an engine. Never calls an engine. Promises that the result has each
token once, in order, with its own log-probability and version.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tangram.rl.inference.engines.protocol import Generation, GenerationRequest


def remaining_request(request: GenerationRequest, pieces: Sequence[Generation]) -> GenerationRequest:
    """The request for the remaining tokens; positions follow from the number of tokens."""
    written = tuple(token for piece in pieces for token in piece.tokens)
    if not written:
        return request
    sampling = msgspec.structs.replace(request.sampling, tokens_max=request.sampling.tokens_max - len(written))
    return msgspec.structs.replace(request, tokens=(*request.tokens, *written), sampling=sampling)


def valid_prefix(written: Generation, request: GenerationRequest) -> Generation:
    """The prefix in which each token has a log-probability and a version, up to the end of the request."""
    count = min(len(written.tokens), len(written.logprobs), len(written.versions), request.sampling.tokens_max)
    if request.sampling.keep_ids and request.sampling.is_truncated:
        count = min(count, len(written.kept or ()))
    ends = [number for number in range(count) if written.tokens[number] in request.sampling.stop]
    if ends:
        count = ends[0] + 1
    return msgspec.structs.replace(
        written,
        tokens=written.tokens[:count],
        logprobs=written.logprobs[:count],
        versions=written.versions[:count],
        kept=written.kept[:count] if written.kept is not None else None,
        finish="stop" if ends else "length",
    )


def is_complete(request: GenerationRequest, pieces: Sequence[Generation]) -> bool:
    """Whether the engine died after the last token."""
    if not pieces:
        return False
    return pieces[-1].finish == "stop" or sum(len(piece.tokens) for piece in pieces) >= request.sampling.tokens_max


def join_generations(pieces: Sequence[Generation], waited_s: float) -> Generation:
    last = pieces[-1]
    with_tokens = [piece for piece in pieces if piece.tokens]
    kept: tuple[tuple[int, ...], ...] | None = None
    if with_tokens and all(piece.kept is not None for piece in with_tokens):
        kept = tuple(ids for piece in with_tokens for ids in piece.kept or ())
    return Generation(
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        logprobs=tuple(value for piece in pieces for value in piece.logprobs),
        versions=tuple(version for piece in pieces for version in piece.versions),
        kept=kept,
        finish=last.finish,
        engine=last.engine,
        prefilled=sum(piece.prefilled for piece in pieces),
        reused=sum(piece.reused for piece in pieces),
        waiting_s=waited_s + sum(piece.waiting_s for piece in pieces),
        prefill_s=sum(piece.prefill_s for piece in pieces),
        decode_s=sum(piece.decode_s for piece in pieces),
    )
