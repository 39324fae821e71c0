"""The codec of a Hugging Face tokenizer, for policies that read and write text.

Owns how observations are put into the form that a model was taught: its chat template, if it has one. An observation
becomes the message of a user, followed by the marks after which the model answers; what the model writes is kept as it
is, and the next observation begins with what the template puts after an answer. Nothing that was written is tokenised
again, so the template is only ever asked for what stands between two answers.
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
"""Stands for an answer where a template is asked what follows one. No template puts it there itself."""
GENERATING = "generation_config.json"
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in FILES)


class _Generating(msgspec.Struct, frozen=True):
    """Of generation_config.json, what matters here."""

    eos_token_id: int | tuple[int, ...] | None = None


def _ends(folder: Path) -> tuple[int, ...]:
    """More tokens that end an answer, as those who trained the model wrote down."""
    path = folder / GENERATING
    if not path.is_file():
        return ()
    try:
        said = msgspec.json.decode(path.read_bytes(), type=_Generating).eos_token_id
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidConfig("checkpoint", str(path), f"a generation config ({error})") from error
    return () if said is None else (said,) if isinstance(said, int) else said


class TextCodec:
    """Of a folder with a tokenizer. Raises InvalidConfig."""

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
        self.stop: tuple[int, ...] = tuple(dict.fromkeys((int(end), *_ends(Path(folder)))))
        self._chats = bool(self._tokenizer.chat_template)

    def save(self, folder: Path) -> None:
        """As it was read, with all tokens that end an answer. Raises ManagerError."""
        try:
            self._tokenizer.save_pretrained(str(folder))
            (folder / GENERATING).write_bytes(msgspec.json.encode(_Generating(self.stop)))
        except Exception as error:  # tokenizers raises a bare one for a disk that is full
            raise ManagerError(f"the tokenizer cannot be written to {folder}: {error}") from error

    def observation(self, text: str, *, first: bool, cut: bool = False) -> tuple[int, ...]:
        return self._ids(self._rendered(text, first=first, cut=cut), marks=first and not self._chats)

    def action(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode([token for token in tokens if token not in self.stop]))

    def token(self, token: int) -> str:
        """What one token says by itself; a part of a character is shown as �. Empty for what is none."""
        return str(self._tokenizer.decode([token])) if 0 <= token < self.size else ""

    def written(self, text: str) -> tuple[int, ...]:
        return (*self._ids(text, marks=False), self._end if self._end is not None else self.stop[0])

    def _rendered(self, text: str, *, first: bool, cut: bool) -> str:
        if not self._chats:
            return f"{text}\n" if first else f"\n{text}\n"
        message = {"role": "user", "content": text}
        if first:
            return self._template([message])
        after = self._after(message)
        return after if cut or self._end is None else after.removeprefix(self.token(self._end))

    @functools.cached_property
    def _end(self) -> int | None:
        """The token that ends an answer in the template, which need not be eos_token; None: there is no template, or it
        puts none there."""
        if not self._chats:
            return None
        after = self._after({"role": "user", "content": ""})
        found = [token for token in self.stop if (text := self.token(token)) and after.startswith(text)]
        return max(found, key=lambda token: len(self.token(token)), default=None)

    def _after(self, message: dict[str, str]) -> str:
        """What stands after an answer, if this message follows."""
        whole = self._template([{"role": "user", "content": ""}, {"role": "assistant", "content": MARK}, message])
        return whole.split(MARK, 1)[1]

    def _template(self, messages: list[dict[str, str]]) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _ids(self, text: str, *, marks: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=marks))
