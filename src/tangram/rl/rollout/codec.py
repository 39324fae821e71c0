"""Codecs: text to tokens and back, at the one place where that happens.

What an environment says is encoded once; what the policy samples is decoded once, for the environment to read. Tokens
that were sampled are kept as they are and never made from text again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tangram.errors import InvalidConfig


class Codec(Protocol):
    size: int
    """Of the vocabulary."""
    stop: tuple[int, ...]
    """Tokens each of which ends an action. They are part of it, and not of its text."""

    def observation(self, text: str, *, first: bool, cut: bool = False) -> tuple[int, ...]:
        """What the policy reads, with the marks before which it begins to write. `cut`: the action before it was not
        ended by the policy itself. Raises ValueError."""
        ...

    def action(self, tokens: Sequence[int]) -> str:
        """What the environment reads. Raises ValueError for what is none of its tokens."""
        ...

    def written(self, text: str) -> tuple[int, ...]:
        """The tokens of an action as a policy would write it, the one that ends it included. Raises ValueError."""
        ...


class Words:
    """A vocabulary of whole words, separated by spaces: small enough for a policy that learns in a minute."""

    PAD, END, ACT = "<pad>", "<end>", "<act>"
    """Nothing; the end of an action; the policy's turn to write."""

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

    def observation(self, text: str, *, first: bool, cut: bool = False) -> tuple[int, ...]:
        return (*self._ids(text), self._id_by_word[self.ACT])

    def action(self, tokens: Sequence[int]) -> str:
        for token in tokens:
            if not 0 <= token < self.size:
                raise ValueError(f"token {token} is none of the {self.size} that the policy knows")
        return " ".join(self.words[token] for token in tokens if token not in self.stop)

    def written(self, text: str) -> tuple[int, ...]:
        return (*self._ids(text), *self.stop)

    def _ids(self, text: str) -> Iterable[int]:
        for word in text.split():
            number = self._id_by_word.get(word)
            if number is None:
                raise ValueError(f"{word!r} is none of the {self.size} words that the policy knows")
            yield number
