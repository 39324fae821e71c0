"""Engines for Hugging Face models: a reward model, a teacher and a judge.

Each is a PyTorch service whose module comes from `transformers`. `model` is a directory, or a name that the library can
fetch. Payloads and answers are JSON; texts need the tokenizer of the model, token ids do not.

    RewardModel   {"text": …} or {"token_ids": […]}                     {"scores": […]}
    Teacher       {"text": …} or {"token_ids": […]}                     {"token_ids": […], "logprobs": […]}
    Judge         the same, with "tokens_max" and "temperature"         {"token_ids": […], "text": …}

`logprobs` are those of the tokens from the second on, each given all before it. Several payloads are padded to one
batch.
"""

from __future__ import annotations

import json
from typing import Any

from tangram.errors import InvalidAction
from tangram.managers.models.engine import Weights
from tangram.managers.models.torch_engine import Placed, TorchEngine

TOKENS_MAX = 256
"""That a judge writes unless a payload says otherwise."""
BATCH_MAX = 16


class TransformersEngine(TorchEngine):
    """What the three have in common."""

    auto: str
    """The class of `transformers` that makes the module."""

    def __init__(self, model: str, *, dtype: str = "auto", batch_max: int = BATCH_MAX, **options: Any) -> None:
        """`options` go to `from_pretrained`."""
        super().__init__(f"transformers:{self.auto}.from_pretrained")
        self.batch_max = batch_max
        self._model = model
        self._options = {"dtype": dtype, **options}
        self._tokenizer: Any = None

    def warm(self, weights: Weights | None) -> None:
        super().warm(weights)
        import transformers

        logging: Any = transformers.logging
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def build(self) -> Any:
        import transformers

        return getattr(transformers, self.auto).from_pretrained(self._model, **self._options)

    # ---- payloads ----

    def read(self, payload: bytes, vocabulary: int) -> tuple[dict[str, Any], list[int]]:
        """What was asked, and the tokens it is about."""
        expected = 'JSON with "text" or "token_ids"'
        try:
            asked = json.loads(payload)
        except ValueError as error:
            raise InvalidAction("payload", str(error), expected) from None
        if not isinstance(asked, dict) or ("text" in asked) == ("token_ids" in asked):
            raise InvalidAction("payload", payload[:100], expected)
        tokens = asked["token_ids"] if "token_ids" in asked else self.tokens_of(asked["text"])
        if (
            not isinstance(tokens, list)
            or not tokens
            or not all(type(token) is int and 0 <= token < vocabulary for token in tokens)
        ):
            raise InvalidAction("payload", str(tokens)[:100], f"at least one token, each from 0 to {vocabulary - 1}")
        return asked, tokens

    @property
    def tokenizer(self) -> Any:
        """Read when the first text comes."""
        if self._tokenizer is None:
            import transformers

            self._tokenizer = transformers.AutoTokenizer.from_pretrained(self._model)
        return self._tokenizer

    def tokens_of(self, text: object) -> list[int]:
        if not isinstance(text, str):
            raise InvalidAction("payload", text, "a text that is a string")
        tokens: list[int] = self.tokenizer(text)["input_ids"]
        return tokens

    def read_all(self, placed: Placed, payloads: list[bytes]) -> tuple[list[dict[str, Any]], list[list[int]]]:
        vocabulary = placed.module[0].config.get_text_config().vocab_size
        read = [self.read(payload, vocabulary) for payload in payloads]
        return [asked for asked, _ in read], [tokens for _, tokens in read]


def padded(rows: list[list[int]], device: str, *, left: bool = False) -> tuple[Any, Any]:
    """Tokens and the mask of those that count, as tensors. What they are filled up with counts for nothing."""
    import torch

    length = max(map(len, rows))
    gaps = [[0] * (length - len(row)) for row in rows]
    tokens = [gap + row if left else row + gap for row, gap in zip(rows, gaps, strict=True)]
    ones = [gap + [1] * len(row) if left else [1] * len(row) + gap for row, gap in zip(rows, gaps, strict=True)]
    return torch.tensor(tokens, device=device), torch.tensor(ones, device=device)


class RewardModel(TransformersEngine):
    """Scores of sequences. One at a time unless the model has a padding token: it looks for the last that is none."""

    auto = "AutoModelForSequenceClassification"

    def answer(self, placed: Placed, payloads: list[bytes]) -> list[bytes]:
        [module] = placed.module
        _, rows = self.read_all(placed, payloads)
        if module.config.get_text_config().pad_token_id is None:
            scores = [score for row in rows for score in self._scores(module, [row], placed.device)]
        else:
            scores = self._scores(module, rows, placed.device)
        return [json.dumps({"scores": score}).encode() for score in scores]

    def _scores(self, module: Any, rows: list[list[int]], device: str) -> list[list[float]]:
        tokens, mask = padded(rows, device)
        pad = module.config.get_text_config().pad_token_id
        if pad is not None:
            tokens = tokens.masked_fill(mask == 0, pad)
        scores: list[list[float]] = module(input_ids=tokens, attention_mask=mask).logits.float().tolist()
        return scores


class Teacher(TransformersEngine):
    """Log-probabilities of given tokens."""

    auto = "AutoModelForCausalLM"

    def answer(self, placed: Placed, payloads: list[bytes]) -> list[bytes]:
        [module] = placed.module
        _, rows = self.read_all(placed, payloads)
        tokens, mask = padded(rows, placed.device)
        logits = module(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        # Not all probabilities at once: a vocabulary is large.
        found = logits.gather(2, tokens[:, 1:, None])[..., 0] - logits.logsumexp(2)
        said = []
        for row, logprobs in zip(rows, found.tolist(), strict=True):
            said.append(json.dumps({"token_ids": row, "logprobs": logprobs[: len(row) - 1]}).encode())
        return said


class Judge(TransformersEngine):
    """Texts that follow given ones. Payloads that want another length or temperature are not in one batch."""

    auto = "AutoModelForCausalLM"

    def answer(self, placed: Placed, payloads: list[bytes]) -> list[bytes]:
        asked, rows = self.read_all(placed, payloads)
        wishes = [_wish(each) for each in asked]
        answers: dict[int, bytes] = {}
        for wish in dict.fromkeys(wishes):
            numbers = [number for number, other in enumerate(wishes) if other == wish]
            written = self._write(placed, [rows[number] for number in numbers], *wish)
            for number, tokens in zip(numbers, written, strict=True):
                said: dict[str, Any] = {"token_ids": tokens}
                if "text" in asked[number]:
                    said["text"] = self.tokenizer.decode(tokens, skip_special_tokens=True)
                answers[number] = json.dumps(said).encode()
        return [answers[number] for number in range(len(payloads))]

    def _write(self, placed: Placed, rows: list[list[int]], tokens_max: int, temperature: float) -> list[list[int]]:
        """Greedy at temperature 0. The token that ends a text is not part of it."""
        [module] = placed.module
        tokens, mask = padded(rows, placed.device, left=True)
        ends = module.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        how = {"do_sample": True, "temperature": temperature} if temperature > 0.0 else {"do_sample": False}
        written = module.generate(
            input_ids=tokens,
            attention_mask=mask,
            max_new_tokens=tokens_max,
            pad_token_id=ends[0] if ends[0] is not None else 0,
            **how,
        )[:, tokens.shape[1] :].tolist()
        return [_until_end(row, ends) for row in written]


def _wish(asked: dict[str, Any]) -> tuple[int, float]:
    tokens_max, temperature = asked.get("tokens_max", TOKENS_MAX), asked.get("temperature", 0.0)
    if type(tokens_max) is not int or tokens_max < 1:
        raise InvalidAction("payload tokens_max", tokens_max, "a positive whole number of tokens")
    if type(temperature) not in (float, int) or not 0.0 <= temperature < float("inf"):
        raise InvalidAction("payload temperature", temperature, "a number, at least 0")
    return tokens_max, float(temperature)


def _until_end(row: list[int], ends: list[Any]) -> list[int]:
    return next((row[:index] for index, token in enumerate(row) if token in ends), row)
