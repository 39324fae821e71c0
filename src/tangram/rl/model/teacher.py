"""Teachers: models that score each token of a policy, for distillation; served as model services.

Owns the engine and its payloads. Never samples and never learns. Promises that the log-probability of a token is that
of a plain forward pass over all tokens before it, up to rounding, independent of the batch.

    payload   {"tokens": [...], "at": [...], "temperature": 1.0}    scores the tokens at these positions; temperature 0
                                                                    counts as 1, as in sampling
              "vocabulary": V                                       optional; another vocabulary size is refused
    answer    {"logprobs": [...]}                                   one for each position

The checkpoint is a folder of the Llama or Qwen2 kind, or any causal model that `transformers` reads. It is computed in
float32. Top-k and top-p of the policy do not apply to its teacher, which scores by its own distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from tangram.errors import InvalidAction, ManagerError
from tangram.managers.models.torch_engine import PlacedModule, TorchEngine
from tangram.rl.model.policy import Policy, as_policy, load

BATCH_MAX = 64
"""Trajectories of one call."""
LOGITS_MAX = 1 << 26
"""Logits in memory at once, which takes 256 MiB: larger batches are read in parts. One trajectory always fits."""


class TeacherRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: tuple[int, ...]
    at: tuple[int, ...]
    temperature: float = 1.0
    vocabulary: int | None = None


class TeacherEngine(TorchEngine):
    def __init__(self, checkpoint: str) -> None:
        super().__init__("", forward_batch=answer_payloads, batch_max=BATCH_MAX)
        self._folder = checkpoint

    def build(self) -> Any:
        return load(self._folder).module

    def answer(self, placed: PlacedModule, payloads: list[bytes]) -> list[bytes]:
        [module] = placed.module
        return answer_payloads(as_policy(module), payloads)


def answer_payloads(teacher: Policy, payloads: Sequence[bytes]) -> list[bytes]:
    """Raises InvalidAction for an invalid payload, ManagerError for a broken model."""
    requests = [_parse_request(payload, teacher.vocabulary, teacher.context_max) for payload in payloads]
    answers: list[bytes] = []
    while len(answers) < len(requests):
        for logprobs in logprobs_of(teacher, _leading_batch(requests[len(answers) :], teacher.vocabulary)):
            answers.append(msgspec.json.encode({"logprobs": logprobs}))
    return answers


def _leading_batch(requests: list[TeacherRequest], vocabulary: int) -> list[TeacherRequest]:
    """Returns the longest prefix that may be read at once, padding included."""
    longest = 1
    for count, request in enumerate(requests):
        longest = max(longest, len(request.tokens))
        if count and (count + 1) * longest * vocabulary > LOGITS_MAX:
            return requests[:count]
    return requests


def logprobs_of(teacher: Policy, requests: Sequence[TeacherRequest]) -> list[list[float]]:
    """Raises ManagerError if a log-probability is not finite: the weights are broken."""
    length = max(len(request.tokens) for request in requests)
    tokens = torch.tensor(
        [(*request.tokens, *(0 for _ in range(length - len(request.tokens)))) for request in requests]
    )
    counts = [len(request.at) for request in requests]
    at = torch.tensor(
        [row * length + place for row, request in enumerate(requests) for place in request.at], dtype=torch.int64
    )
    temperatures = torch.tensor([request.temperature or 1.0 for request in requests]).repeat_interleave(
        torch.tensor(counts)
    )
    targets = tokens.flatten()[at].to(teacher.device)
    with torch.inference_mode():
        logits = teacher.logits(tokens.to(teacher.device), (at - 1).to(teacher.device)).float()
        logits /= temperatures.to(teacher.device).unsqueeze(1)
        logprobs = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - logits.logsumexp(1)
    if not bool(logprobs.isfinite().all()):
        raise ManagerError("the log-probabilities of the teacher are not finite: its weights are broken")
    return [part.tolist() for part in logprobs.split(counts)]


def _parse_request(payload: bytes, vocabulary: int, context_max: int | None) -> TeacherRequest:
    try:
        request = msgspec.json.decode(payload, type=TeacherRequest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidAction("payload", str(error), 'JSON with "tokens", "at" and "temperature"') from None
    if request.vocabulary is not None and request.vocabulary != vocabulary:
        expected = f"that of the teacher, which has {vocabulary} tokens"
        raise InvalidAction("vocabulary", f"one of {request.vocabulary} tokens", expected)
    if context_max is not None and len(request.tokens) > context_max:
        raise InvalidAction(
            "tokens", f"{len(request.tokens)} of them", f"at most {context_max}, which the teacher reads"
        )
    for token in request.tokens:
        if not 0 <= token < vocabulary:
            raise InvalidAction("tokens", token, f"from 0 to {vocabulary - 1}: the vocabulary of the teacher")
    for place in request.at:
        if not 1 <= place < len(request.tokens):
            expected = f"from 1 to {len(request.tokens) - 1}: a token with others before it"
            raise InvalidAction("at", place, expected)
    if not 0.0 <= request.temperature <= 100.0:
        raise InvalidAction("temperature", request.temperature, "from 0 to 100")
    return request
