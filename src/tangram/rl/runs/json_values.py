"""Values that JSON lacks: NaN, infinity, and text with lone surrogates, in the logs of a run.

Owns their form: `{"$number": "nan"}`, `{"$text": "<UTF-8 in hex>"}`.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

NUMBER_KEY, TEXT_KEY = "$number", "$text"
NOT_FINITE = ("nan", "inf", "-inf")


def to_json_values(value: Any, *, escape_surrogates: bool = False) -> Any:
    """What `from_json_values` turns back into this value.

    escape_surrogates: lone surrogates become escapes instead, in keys too, for text that only people read.
    """
    match value:
        case dict():
            return {
                to_json_values(key, escape_surrogates=True) if escape_surrogates else key: to_json_values(
                    item, escape_surrogates=escape_surrogates
                )
                for key, item in value.items()
            }
        case list() | tuple():
            return [to_json_values(item, escape_surrogates=escape_surrogates) for item in value]
        case float() if not math.isfinite(value):
            return {NUMBER_KEY: repr(value)}
        case str() if escape_surrogates:
            return value.encode("utf-8", "backslashreplace").decode()
        case str() if not _is_text(value):
            return {TEXT_KEY: value.encode("utf-8", "surrogatepass").hex()}
    return value


def from_json_values(value: Any) -> Any:
    """Raises ValidationError for a `$text` without valid hex, and UnicodeDecodeError."""
    match value:
        case {"$number": str(number)} if len(value) == 1 and number in NOT_FINITE:
            return float(number)
        case {"$text": str(text)} if len(value) == 1:
            return _decode_hex(text).decode("utf-8", "surrogatepass")
        case dict():
            return {key: from_json_values(item) for key, item in value.items()}
        case list():
            return [from_json_values(item) for item in value]
    return value


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _decode_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise msgspec.ValidationError(str(error)) from None
