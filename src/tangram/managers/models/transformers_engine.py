"""Engines for Hugging Face models: a reward model, a teacher and a judge.

Each is a PyTorch service whose module comes from `transformers`. `model` is a directory, or a name that the library can
download. Payloads and answers are JSON; texts need the tokenizer of the model, token ids do not.

    RewardModel   {"text": …} or {"token_ids": […]}                     {"scores": […]}
    Teacher       {"text": …} or {"token_ids": […]}                     {"token_ids": […], "logprobs": […]}
    Judge         the same, with "tokens_max" and "temperature"         {"token_ids": […], "text": …}

`logprobs` are those of the tokens from the second on, each given all before it. Several payloads are padded to one
batch. A payload beyond the limits of the model raises InvalidAction with the limit: more tokens than it has positions,
tokens outside its vocabulary, a temperature out of range. Without `tokens_max` a judge generates up to 256 tokens, or
as many as there are positions left.
"""

from __future__ import annotations

import json
from typing import Any

from tangram.errors import InvalidAction
from tangram.managers.models.engine import Weights
from tangram.managers.models.torch_engine import PlacedModule, TorchEngine

JUDGE_TOKENS_MAX = 256
"""Maximum tokens that a judge generates, unless the payload sets `tokens_max`."""
TEMPERATURE_MIN, TEMPERATURE_MAX = 0.01, 100.0
"""Range of values other than 0. Below, probabilities overflow in half precision; above, all are equal."""
BATCH_MAX = 16


class TransformersEngine(TorchEngine):
    """The common part of the three engines."""

    imports = ("torch", "transformers")
    auto: str
    """The class of `transformers` that builds the module."""
    fields: tuple[str, ...] = ("text", "token_ids")
    """Fields of a payload."""

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

    def read(self, payload: bytes, vocabulary: int, length_max: int | None) -> tuple[dict[str, Any], list[int]]:
        """The fields of a payload, and its tokens."""
        expected = 'JSON with "text" or "token_ids"'
        try:
            request = json.loads(payload)
        except ValueError as error:
            raise InvalidAction("payload", str(error), expected) from None
        if not isinstance(request, dict) or ("text" in request) == ("token_ids" in request):
            raise InvalidAction("payload", payload[:100], expected)
        unknown = [name for name in request if name not in self.fields]
        if unknown:
            raise InvalidAction("payload", unknown, f"only {', '.join(self.fields)}")
        tokens = request["token_ids"] if "token_ids" in request else self.tokens_of(request["text"])
        if (
            not isinstance(tokens, list)
            or not tokens
            or not all(type(token) is int and 0 <= token < vocabulary for token in tokens)
        ):
            raise InvalidAction("payload", str(tokens)[:100], f"at least one token, each from 0 to {vocabulary - 1}")
        if length_max is not None and len(tokens) > length_max:
            raise InvalidAction("payload", f"{len(tokens)} tokens", f"at most {length_max}, the positions of the model")
        return request, tokens

    @property
    def tokenizer(self) -> Any:
        """Loaded at the first text."""
        if self._tokenizer is None:
            import transformers

            try:
                self._tokenizer = transformers.AutoTokenizer.from_pretrained(self._model)
            except (OSError, ValueError) as error:
                expected = f"token_ids: there is no tokenizer in {self._model}"
                raise InvalidAction("payload text", f"{error}"[:200], expected) from None
        return self._tokenizer

    def tokens_of(self, text: object) -> list[int]:
        if not isinstance(text, str):
            raise InvalidAction("payload", text, "a string")
        tokens: list[int] = self.tokenizer(text)["input_ids"]
        return tokens

    def read_all(self, placed: PlacedModule, payloads: list[bytes]) -> tuple[list[dict[str, Any]], list[list[int]]]:
        config = placed.module[0].config.get_text_config()
        read = [self.read(payload, config.vocab_size, length_max_of(config)) for payload in payloads]
        return [request for request, _ in read], [tokens for _, tokens in read]


def length_max_of(config: Any) -> int | None:
    """The number of positions of a model. None: it has no limit."""
    positions = getattr(config, "max_position_embeddings", None)
    return positions if type(positions) is int and positions > 0 else None


def pad_rows(rows: list[list[int]], device: str, *, left: bool = False) -> tuple[Any, Any]:
    """Padded tokens and their attention mask, as tensors."""
    import torch

    length = max(map(len, rows))
    gaps = [[0] * (length - len(row)) for row in rows]
    tokens = [gap + row if left else row + gap for row, gap in zip(rows, gaps, strict=True)]
    ones = [gap + [1] * len(row) if left else [1] * len(row) + gap for row, gap in zip(rows, gaps, strict=True)]
    return torch.tensor(tokens, device=device), torch.tensor(ones, device=device)


class RewardModel(TransformersEngine):
    """Scores of sequences. One at a time unless the model has a padding token, by which it finds the last token."""

    auto = "AutoModelForSequenceClassification"

    def answer(self, placed: PlacedModule, payloads: list[bytes]) -> list[bytes]:
        [module] = placed.module
        _, rows = self.read_all(placed, payloads)
        if module.config.get_text_config().pad_token_id is None:
            scores = [score for row in rows for score in self._scores(module, [row], placed.device)]
        else:
            scores = self._scores(module, rows, placed.device)
        return [json.dumps({"scores": score}).encode() for score in scores]

    def _scores(self, module: Any, rows: list[list[int]], device: str) -> list[list[float]]:
        tokens, mask = pad_rows(rows, device)
        pad = module.config.get_text_config().pad_token_id
        if pad is not None:
            tokens = tokens.masked_fill(mask == 0, pad)
        scores: list[list[float]] = module(input_ids=tokens, attention_mask=mask).logits.float().tolist()
        return scores


class Teacher(TransformersEngine):
    """Log-probabilities of given tokens."""

    auto = "AutoModelForCausalLM"

    def answer(self, placed: PlacedModule, payloads: list[bytes]) -> list[bytes]:
        [module] = placed.module
        _, rows = self.read_all(placed, payloads)
        tokens, mask = pad_rows(rows, placed.device)
        logits = module(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        # Avoids a full log-softmax: the vocabulary is large.
        logprobs = logits.gather(2, tokens[:, 1:, None])[..., 0] - logits.logsumexp(2)
        return [
            json.dumps({"token_ids": row, "logprobs": padded[: len(row) - 1]}).encode()
            for row, padded in zip(rows, logprobs.tolist(), strict=True)
        ]


class Judge(TransformersEngine):
    """Generated continuations. Payloads with different lengths or temperatures are not in one batch."""

    auto = "AutoModelForCausalLM"
    fields = ("text", "token_ids", "tokens_max", "temperature")

    def answer(self, placed: PlacedModule, payloads: list[bytes]) -> list[bytes]:
        requests, rows = self.read_all(placed, payloads)
        length_max = length_max_of(placed.module[0].config.get_text_config())
        options = [
            _generation_options(request, length_max and length_max - len(row))
            for request, row in zip(requests, rows, strict=True)
        ]
        answers: dict[int, bytes] = {}
        for batch_options in dict.fromkeys(options):
            numbers = [number for number, other in enumerate(options) if other == batch_options]
            generated = self._generate(placed, [rows[number] for number in numbers], *batch_options)
            for number, tokens in zip(numbers, generated, strict=True):
                answer: dict[str, Any] = {"token_ids": tokens}
                if "text" in requests[number]:
                    answer["text"] = self.tokenizer.decode(tokens, skip_special_tokens=True)
                answers[number] = json.dumps(answer).encode()
        return [answers[number] for number in range(len(payloads))]

    def _generate(
        self, placed: PlacedModule, rows: list[list[int]], tokens_max: int, temperature: float
    ) -> list[list[int]]:
        """Greedy at temperature 0. The token that ends a text is not part of it."""
        [module] = placed.module
        tokens, mask = pad_rows(rows, placed.device, left=True)
        ends = module.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0.0 else {"do_sample": False}
        generated = module.generate(
            input_ids=tokens,
            attention_mask=mask,
            max_new_tokens=tokens_max,
            pad_token_id=ends[0] if ends[0] is not None else 0,
            **sampling,
        )[:, tokens.shape[1] :].tolist()
        return [_cut_at_eos(row, ends) for row in generated]


def _generation_options(request: dict[str, Any], left: int | None) -> tuple[int, float]:
    """Returns `tokens_max` and the temperature. `left`: positions of the model after the tokens."""
    if left is not None and left < 1:
        raise InvalidAction("payload", "as many tokens as the model takes", "fewer, to leave room for an answer")
    tokens_max = request.get("tokens_max", JUDGE_TOKENS_MAX if left is None else min(JUDGE_TOKENS_MAX, left))
    temperature = request.get("temperature", 0.0)
    if type(tokens_max) is not int or tokens_max < 1:
        raise InvalidAction("payload tokens_max", tokens_max, "a positive whole number of tokens")
    if left is not None and tokens_max > left:
        raise InvalidAction("payload tokens_max", tokens_max, f"at most {left}, the remaining positions of the model")
    useful = type(temperature) in (float, int) and TEMPERATURE_MIN <= temperature <= TEMPERATURE_MAX
    if not useful and not (type(temperature) in (float, int) and temperature == 0):
        expected = f"0, or a number from {TEMPERATURE_MIN} to {TEMPERATURE_MAX:g}"
        raise InvalidAction("payload temperature", temperature, expected)
    return tokens_max, float(temperature)


def _cut_at_eos(row: list[int], ends: list[Any]) -> list[int]:
    return next((row[:index] for index, token in enumerate(row) if token in ends), row)
