"""A msgpack encoder in pure Python, for images without msgspec.

Encodes plain values as `msgspec.msgpack.encode` does, and raises the same exceptions for values that do not fit:
TypeError, OverflowError, ValueError. It is sent into sandboxes and needs only Python.
"""

from __future__ import annotations

import struct
from typing import Any

_FLOAT = struct.Struct(">Bd")
_SIZES = ((0xFF, ">BB"), (0xFFFF, ">BH"), (0xFFFFFFFF, ">BI"))


def encode(value: Any) -> bytes:
    parts: list[bytes] = []
    _write(value, parts.append)
    return b"".join(parts)


def _write(value: Any, put: Any) -> None:
    kind = type(value)
    if value is None:
        put(b"\xc0")
    elif kind is bool:
        put(b"\xc3" if value else b"\xc2")
    elif kind is float:
        put(_FLOAT.pack(0xCB, value))
    elif kind is int:
        put(_integer(value))
    elif kind is str:
        data = value.encode()
        put(bytes((0xA0 | len(data),)) if len(data) < 32 else _head(len(data), 0xD9, 0xDA, 0xDB))
        put(data)
    elif kind is bytes:
        put(_head(len(value), 0xC4, 0xC5, 0xC6))
        put(value)
    elif kind is list or kind is tuple:
        put(bytes((0x90 | len(value),)) if len(value) < 16 else _head(len(value), 0, 0xDC, 0xDD))
        for part in value:
            _write(part, put)
    elif kind is dict:
        put(bytes((0x80 | len(value),)) if len(value) < 16 else _head(len(value), 0, 0xDE, 0xDF))
        for key, part in value.items():
            _write(key, put)
            _write(part, put)
    else:
        raise TypeError(f"Encoding objects of type {kind.__name__} is unsupported")


def _integer(value: int) -> bytes:
    if -32 <= value < 128:
        return struct.pack(">b", value) if value < 0 else bytes((value,))
    if not -(1 << 63) <= value < 1 << 64:
        raise OverflowError("can't serialize ints >= 2**64 or < -(2**63)")
    if value >= 0:
        for at, (most, form) in enumerate(_SIZES):
            if value <= most:
                return struct.pack(form, 0xCC + at, value)
        return struct.pack(">BQ", 0xCF, value)
    for code, form, bits in ((0xD0, ">Bb", 7), (0xD1, ">Bh", 15), (0xD2, ">Bi", 31)):
        if value >= -(1 << bits):
            return struct.pack(form, code, value)
    return struct.pack(">Bq", 0xD3, value)


def _head(length: int, *codes: int) -> bytes:
    """The header with the first code whose length field is large enough; 0: no code has that size."""
    for code, (most, form) in zip(codes, _SIZES, strict=True):
        if code and length <= most:
            return struct.pack(form, code, length)
    raise ValueError("Can't encode what is longer than 2**32 - 1")
