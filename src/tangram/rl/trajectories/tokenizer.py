"""The codec of a Hugging Face tokenizer, for policies that read and write text.

Owns how observations are formatted for a model: by its chat template, if it has one. An observation becomes a user
message, followed by the marker tokens after which the model answers. Tokens of answers are kept, and the next
observation begins with what the template puts after an answer. So the template is only used for the text between two
answers.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tangram.errors import InvalidConfig, ManagerError

MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Placeholder for an answer when the template is rendered. No template contains it."""
GENERATION_CONFIG = "generation_config.json"
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in FILES)


class _GenerationConfig(msgspec.Struct, frozen=True):
    """The part of generation_config.json that is used here."""

    eos_token_id: int | tuple[int, ...] | None = None


def _extra_stop_tokens(folder: Path) -> tuple[int, ...]:
    """Further tokens that end an answer."""
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return ()
    try:
        ids = msgspec.json.decode(path.read_bytes(), type=_GenerationConfig).eos_token_id
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidConfig("checkpoint", str(path), f"a generation config ({error})") from error
    return () if ids is None else (ids,) if isinstance(ids, int) else ids


class TextCodec:
    """Reads a folder with a tokenizer. Raises InvalidConfig."""

    def __init__(self, folder: Path | str) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise InvalidConfig(
                "checkpoint", str(folder), "transformers to read its tokenizer (pip install transformers)"
            )
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise InvalidConfig("checkpoint", str(folder), f"a folder with a tokenizer ({error})") from error
        end = self._tokenizer.eos_token_id
        if end is None:
            raise InvalidConfig("checkpoint", str(folder), "a tokenizer that has a token for the end (eos_token)")
        self.size = len(self._tokenizer)
        self.stop: tuple[int, ...] = tuple(dict.fromkeys((int(end), *_extra_stop_tokens(Path(folder)))))
        self._has_chat_template = bool(self._tokenizer.chat_template)

    def save(self, folder: Path) -> None:
        """Saves the tokenizer as it was read, with all tokens that end an answer. Raises ManagerError."""
        try:
            self._tokenizer.save_pretrained(str(folder))
            (folder / GENERATION_CONFIG).write_bytes(msgspec.json.encode(_GenerationConfig(self.stop)))
        except Exception as error:  # tokenizers raises a bare Exception for a full disk
            raise ManagerError(f"the tokenizer cannot be written to {folder}: {error}") from error

    def encode_observation(self, text: str, *, first: bool, cut: bool = False) -> tuple[int, ...]:
        return self._ids(self._render(text, first=first, cut=cut), marks=first and not self._has_chat_template)

    def decode_action(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode([token for token in tokens if token not in self.stop]))

    def decode_token(self, token: int) -> str:
        """Decodes one token alone; a part of a character becomes �. Empty for an unknown token."""
        return str(self._tokenizer.decode([token])) if 0 <= token < self.size else ""

    def encode_action(self, text: str) -> tuple[int, ...]:
        return (
            *self._ids(text, marks=False),
            self._template_stop_token if self._template_stop_token is not None else self.stop[0],
        )

    def _render(self, text: str, *, first: bool, cut: bool) -> str:
        if not self._has_chat_template:
            return f"{text}\n" if first else f"\n{text}\n"
        message = {"role": "user", "content": text}
        if first:
            return self._apply_template([message])
        after = self._text_after_answer(message)
        return (
            after
            if cut or self._template_stop_token is None
            else after.removeprefix(self.decode_token(self._template_stop_token))
        )

    @functools.cached_property
    def _template_stop_token(self) -> int | None:
        """The token that ends an answer in the template, which may differ from eos_token; None without a template, or
        if it has none."""
        if not self._has_chat_template:
            return None
        after = self._text_after_answer({"role": "user", "content": ""})
        tokens = [token for token in self.stop if (text := self.decode_token(token)) and after.startswith(text)]
        return max(tokens, key=lambda token: len(self.decode_token(token)), default=None)

    def _text_after_answer(self, message: dict[str, str]) -> str:
        """Renders what follows an answer when this message is next."""
        conversation = self._apply_template(
            [{"role": "user", "content": ""}, {"role": "assistant", "content": MARK}, message]
        )
        return conversation.split(MARK, 1)[1]

    def _apply_template(self, messages: list[dict[str, str]]) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _ids(self, text: str, *, marks: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=marks))
