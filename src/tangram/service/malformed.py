"""Malformed records: what the decoder says of one, as an error that names the field, what came and what is right.

Owns the translation. Promises that the field is named as in the body, and that a large or hostile body costs no more
than having decoded it.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tangram.errors import InvalidAction
from tangram.service.wire import WORDS_BY_PATTERN

SHOWN_BYTES_MAX = 64 << 10
"""Of a body that is looked at again for the value that was wrong."""
_AT = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`\Z")
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_WORDS = {f"`str` matching regex {pattern!r}": words for pattern, words in WORDS_BY_PATTERN.items()}


class _Said:
    """Shown as it is."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def malformed(error: msgspec.ValidationError, body: bytes) -> InvalidAction:
    said, field = str(error), ""
    found = _AT.search(said)
    if found is not None:
        said, field = said[: found.start()], found[1]
    for kind, expected in ((_MISSING, "this field, which is required"), (_UNKNOWN, "no field of this name")):
        named = kind.fullmatch(said)
        if named is not None:
            inner = f"{field}.{named[1]}".lstrip(".")
            return InvalidAction(inner, _value(body, inner) if kind is _UNKNOWN else _Said("none"), expected)
    if not said.startswith("Expected "):
        return InvalidAction(field or "body", _Said(said), "what the reference says of it")
    expected, _, got = said.removeprefix("Expected ").partition(", got ")
    return InvalidAction(field or "body", _Said(got) if got else _value(body, field), _WORDS.get(expected, expected))


def _value(body: bytes, field: str) -> Any:
    """What the body has there, where that is easily told."""
    try:
        value = msgspec.json.decode(body) if len(body) <= SHOWN_BYTES_MAX else None
        for name in field.replace("[", ".").replace("]", "").split("."):
            value = value[int(name)] if isinstance(value, list) else value[name]  # type: ignore[index]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, LookupError, TypeError, ValueError):
        return _Said("something else")
    return value
