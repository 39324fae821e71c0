"""Malformed records: what the decoder says of one, as an error that names the field, what came and what is right.

Owns the translation. Promises that the field is named as in the body, and that a large or hostile body costs no more
than having decoded it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

from tangram.errors import InvalidAction
from tangram.runtime.wire import WORDS_BY_PATTERN

SHOWN_BYTES_MAX = 64 << 10
"""Of a body that is looked at again for the value that was wrong."""
_AT = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`\Z")
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_NONE_OF = re.compile(r"Invalid (?:enum )?value .*", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_WORDS = {f"`str` matching regex {pattern!r}": words for pattern, words in WORDS_BY_PATTERN.items()}


class _Said:
    """Shown as it is."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def malformed(error: msgspec.ValidationError, body: bytes, kind: Any) -> InvalidAction:
    """`kind`: of the record that the body should have been."""
    said, field = str(error), ""
    found = _AT.search(said)
    if found is not None:
        said, field = said[: found.start()], found[1]
    for pattern, expected in ((_MISSING, "this field, which is required"), (_UNKNOWN, "no field of this name")):
        named = pattern.fullmatch(said)
        if named is not None:
            inner = f"{field}.{named[1]}".lstrip(".")
            return InvalidAction(inner, _value(body, inner) if pattern is _UNKNOWN else _Said("none"), expected)
    choices = ", ".join(repr(each) for each in _choices(kind, field)) if _NONE_OF.fullmatch(said) else ""
    if choices:
        return InvalidAction(field, _value(body, field), f"one of {choices}")
    if not said.startswith("Expected "):
        return InvalidAction(field or "body", _Said(said), "what the reference says of it")
    expected, _, got = said.removeprefix("Expected ").partition(", got ")
    return InvalidAction(field or "body", _Said(got) if got else _value(body, field), _WORDS.get(expected, expected))


def _choices(kind: Any, field: str) -> list[Any]:
    """What a record takes there, where that is one of a few words; otherwise nothing."""
    *outer, last = re.sub(r"\[[^]]*\]", ".[]", field).split(".")
    kinds = list(_flat(inspect.type_info(kind)))
    for name in outer:
        kinds = [each for found in kinds for each in _below(found, name)]
    tags = [each.tag for each in kinds if isinstance(each, inspect.StructType) and each.tag_field == last]
    found = [each for found in kinds for each in _below(found, last)]
    words = [value for each in found if isinstance(each, inspect.LiteralType) for value in each.values]
    return sorted(tags or words, key=str)


def _below(kind: inspect.Type, name: str) -> Iterator[inspect.Type]:
    """What a field of it, or an element, is."""
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            if field.encode_name == name:
                yield from _flat(field.type)
    elif name == "[]" and isinstance(kind, inspect.DictType):
        yield from _flat(kind.value_type)
    elif name == "[]" and isinstance(kind, inspect.CollectionType):
        yield from _flat(kind.item_type)


def _flat(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Each of what it may be."""
    if isinstance(kind, inspect.Metadata):
        yield from _flat(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _flat(each)
    else:
        yield kind


def _value(body: bytes, field: str) -> Any:
    """What the body has there, where that is easily told."""
    try:
        value = msgspec.json.decode(body) if len(body) <= SHOWN_BYTES_MAX else None
        for name in field.replace("[", ".").replace("]", "").split("."):
            value = value[int(name)] if isinstance(value, list) else value[name]  # type: ignore[index]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, LookupError, TypeError, ValueError):
        return _Said("something else")
    return value
