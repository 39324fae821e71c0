"""Codecs: the only place where text becomes tokens and tokens become text.

An observation is encoded once; an action is decoded once, for the environment. Sampled tokens are kept and never
encoded from text again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tangram.errors import InvalidConfig

WORDS_FILE = "words.json"
"""Vocabulary file in a checkpoint folder, for vocabularies of words."""


class Codec(Protocol):
    size: int
    """Size of the vocabulary."""
    stop: tuple[int, ...]
    """Stop tokens: each ends an action. They are part of its tokens, not of its text."""

    def encode_observation(self, text: str, *, first: bool, cut: bool = False) -> tuple[int, ...]:
        """Encodes an observation with the marker tokens after which the policy writes. `cut`: the action before it was
        cut off. Raises ValueError."""
        ...

    def decode_action(self, tokens: Sequence[int]) -> str:
        """Decodes an action for the environment. Raises ValueError for an unknown token."""
        ...

    def encode_action(self, text: str) -> tuple[int, ...]:
        """Encodes an action as a policy would write it, with its stop token. Raises ValueError."""
        ...


class WordCodec:
    """A vocabulary of whole words separated by spaces: small enough for a policy that learns in a minute."""

    PAD, END, ACT = "<pad>", "<end>", "<act>"
    """Padding; the stop token; the marker before an action."""

    def __init__(self, words: Iterable[str]) -> None:
        marks = (self.PAD, self.END, self.ACT)
        self.words = (*marks, *sorted(set(words) - set(marks)))
        """By id. Sorted, so that the same tasks make the same ids."""
        self._id_by_word = {word: number for number, word in enumerate(self.words)}
        for word in self.words:
            if not word or word.split() != [word]:
                raise InvalidConfig("words", word, "words without spaces")
        self.size = len(self.words)
        self.stop: tuple[int, ...] = (self._id_by_word[self.END],)

    def encode_observation(self, text: str, *, first: bool, cut: bool = False) -> tuple[int, ...]:
        return (*self._ids(text), self._id_by_word[self.ACT])

    def decode_action(self, tokens: Sequence[int]) -> str:
        for token in tokens:
            if not 0 <= token < self.size:
                raise ValueError(f"token {token} is none of the {self.size} that the policy knows")
        return " ".join(self.words[token] for token in tokens if token not in self.stop)

    def encode_action(self, text: str) -> tuple[int, ...]:
        return (*self._ids(text), *self.stop)

    def _ids(self, text: str) -> Iterable[int]:
        for word in text.split():
            number = self._id_by_word.get(word)
            if number is None:
                raise ValueError(f"{word!r} is none of the {self.size} words that the policy knows")
            yield number
