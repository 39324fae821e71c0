"""Teachers: models that say how likely each token of a policy is to them, served as model services.

Owns the engine and its payloads. Never samples and never learns. Promises that the log-probability of a token is that
of a plain forward pass over all that stands before it, up to rounding, whoever is asked about beside it.

    payload   {"tokens": [...], "at": [...], "temperature": 1.0}    of the tokens at these places; 0 counts as 1, as it
                                                                    does where tokens are drawn
              "vocabulary": V                                       may stand there too: another one is refused
    answer    {"logprobs": [...]}                                   one for each place

The checkpoint is a folder of the Llama or Qwen2 kind, or any causal model that `transformers` reads. It is computed in
float32. What top-k and top-p left out for the policy is not left out for its teacher: that is about what the teacher
would have written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from tangram.errors import InvalidAction, ManagerError
from tangram.managers.models.torch_engine import Placed, TorchEngine
from tangram.rl.model.policy import Policy, load, policy_of

BATCH_MAX = 64
"""Trajectories of one call."""
LOGITS_MAX = 1 << 26
"""That are there at once, which takes 256 MiB: a batch that has more is read in parts. One trajectory always fits."""


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: tuple[int, ...]
    at: tuple[int, ...]
    temperature: float = 1.0
    vocabulary: int | None = None


class TeacherEngine(TorchEngine):
    def __init__(self, checkpoint: str) -> None:
        super().__init__("", forward_batch=answers, batch_max=BATCH_MAX)
        self._folder = checkpoint

    def build(self) -> Any:
        return load(self._folder).module

    def answer(self, placed: Placed, payloads: list[bytes]) -> list[bytes]:
        [module] = placed.module
        return answers(policy_of(module), payloads)


def answers(teacher: Policy, payloads: Sequence[bytes]) -> list[bytes]:
    """Raises InvalidAction for a payload that cannot be meant, ManagerError for a model that is broken."""
    asked = [_asked(payload, teacher.vocabulary, teacher.context_max) for payload in payloads]
    found: list[bytes] = []
    while len(found) < len(asked):
        for logprobs in logprobs_of(teacher, _fitting(asked[len(found) :], teacher.vocabulary)):
            found.append(msgspec.json.encode({"logprobs": logprobs}))
    return found


def _fitting(asked: list[Asked], vocabulary: int) -> list[Asked]:
    """As many of the first as may be read at once, padding included."""
    longest = 1
    for count, each in enumerate(asked):
        longest = max(longest, len(each.tokens))
        if count and (count + 1) * longest * vocabulary > LOGITS_MAX:
            return asked[:count]
    return asked


def logprobs_of(teacher: Policy, asked: Sequence[Asked]) -> list[list[float]]:
    """Raises ManagerError for what is no probability: the weights are broken, and nothing of it may be used."""
    length = max(len(each.tokens) for each in asked)
    tokens = torch.tensor([(*each.tokens, *(0 for _ in range(length - len(each.tokens)))) for each in asked])
    counts = [len(each.at) for each in asked]
    at = torch.tensor([row * length + place for row, each in enumerate(asked) for place in each.at], dtype=torch.int64)
    colder = torch.tensor([each.temperature or 1.0 for each in asked]).repeat_interleave(torch.tensor(counts))
    targets = tokens.flatten()[at].to(teacher.device)
    with torch.inference_mode():
        logits = teacher.logits(tokens.to(teacher.device), (at - 1).to(teacher.device)).float()
        logits /= colder.to(teacher.device).unsqueeze(1)
        found = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - logits.logsumexp(1)
    if not bool(found.isfinite().all()):
        raise ManagerError("the log-probabilities of the teacher are not finite: its weights are broken")
    return [part.tolist() for part in found.split(counts)]


def _asked(payload: bytes, vocabulary: int, context_max: int | None) -> Asked:
    try:
        asked = msgspec.json.decode(payload, type=Asked)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidAction("payload", str(error), 'JSON with "tokens", "at" and "temperature"') from None
    if asked.vocabulary is not None and asked.vocabulary != vocabulary:
        expected = f"that of the teacher, which has {vocabulary} tokens"
        raise InvalidAction("vocabulary", f"one of {asked.vocabulary} tokens", expected)
    if context_max is not None and len(asked.tokens) > context_max:
        raise InvalidAction("tokens", f"{len(asked.tokens)} of them", f"at most {context_max}, which the teacher reads")
    for token in asked.tokens:
        if not 0 <= token < vocabulary:
            raise InvalidAction("tokens", token, f"from 0 to {vocabulary - 1}: so many the teacher knows")
    for place in asked.at:
        if not 1 <= place < len(asked.tokens):
            expected = f"from 1 to {len(asked.tokens) - 1}: a token with others before it"
            raise InvalidAction("at", place, expected)
    if not 0.0 <= asked.temperature <= 100.0:
        raise InvalidAction("temperature", asked.temperature, "from 0 to 100")
    return asked
