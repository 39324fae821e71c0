"""Malformed records: decoder errors as errors that name the field, its value and what was expected.

Promises that errors name the field as in the body, and that a large or hostile body costs no more than its decoding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

from tangram.errors import InvalidAction
from tangram.runtime.error_records import Verbatim
from tangram.runtime.wire import DESCRIPTION_BY_PATTERN

REDECODED_BYTES_MAX = 64 << 10
"""Size of a body that is decoded again to find the wrong value."""
_AT_PATTERN = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`\Z")
_MISSING_PATTERN = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_INVALID_CHOICE_PATTERN = re.compile(r"Invalid (?:enum )?value .*", re.DOTALL)
_UNKNOWN_PATTERN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_DESCRIPTION_BY_EXPECTED = {
    f"`str` matching regex {pattern!r}": description for pattern, description in DESCRIPTION_BY_PATTERN.items()
}


def to_invalid_action(error: msgspec.ValidationError, body: bytes, kind: Any) -> InvalidAction:
    """`kind` is the record that the body should be."""
    text, field = str(error), ""
    match = _AT_PATTERN.search(text)
    if match is not None:
        text, field = text[: match.start()], match[1]
    for pattern, expected in (
        (_MISSING_PATTERN, "this required field"),
        (_UNKNOWN_PATTERN, "no field of this name"),
    ):
        named = pattern.fullmatch(text)
        if named is not None:
            path = f"{field}.{named[1]}".lstrip(".")
            return InvalidAction(
                path, _value_at(body, path) if pattern is _UNKNOWN_PATTERN else Verbatim("none"), expected
            )
    choices = ", ".join(repr(each) for each in _choices(kind, field)) if _INVALID_CHOICE_PATTERN.fullmatch(text) else ""
    if choices:
        return InvalidAction(field, _value_at(body, field), f"one of {choices}")
    if not text.startswith("Expected "):
        return InvalidAction(field or "body", Verbatim(text), "a value as in the API reference")
    expected, _, actual = text.removeprefix("Expected ").partition(", got ")
    return InvalidAction(
        field or "body",
        Verbatim(actual) if actual else _value_at(body, field),
        _DESCRIPTION_BY_EXPECTED.get(expected, expected),
    )


def _choices(kind: Any, field: str) -> list[Any]:
    """The allowed values of an enumeration, else nothing."""
    *parents, last = re.sub(r"\[[^]]*\]", ".[]", field).split(".")
    kinds = list(_flatten_union(inspect.type_info(kind)))
    for name in parents:
        kinds = [child for parent in kinds for child in _child_types(parent, name)]
    tags = [each.tag for each in kinds if isinstance(each, inspect.StructType) and each.tag_field == last]
    children = [child for parent in kinds for child in _child_types(parent, last)]
    literals = [value for child in children if isinstance(child, inspect.LiteralType) for value in child.values]
    return sorted(tags or literals, key=str)


def _child_types(kind: inspect.Type, name: str) -> Iterator[inspect.Type]:
    """The type of a field or an element."""
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            if field.encode_name == name:
                yield from _flatten_union(field.type)
    elif name == "[]" and isinstance(kind, inspect.DictType):
        yield from _flatten_union(kind.value_type)
    elif name == "[]" and isinstance(kind, inspect.CollectionType):
        yield from _flatten_union(kind.item_type)


def _flatten_union(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The members of a union."""
    if isinstance(kind, inspect.Metadata):
        yield from _flatten_union(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _flatten_union(each)
    else:
        yield kind


def _value_at(body: bytes, field: str) -> Any:
    """The value of the body at that path, if it is easily found."""
    try:
        value = msgspec.json.decode(body) if len(body) <= REDECODED_BYTES_MAX else None
        for name in field.replace("[", ".").replace("]", "").split("."):
            value = value[int(name)] if isinstance(value, list) else value[name]  # type: ignore[index]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, LookupError, TypeError, ValueError):
        return Verbatim("something else")
    return value
