"""Sizes: amounts of memory and cores as people write them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from tangram.core.demand import CORE, Amounts, cores, learned
from tangram.errors import InvalidAction, InvalidInput

CORES_MAX = 10**9
"""A larger number of cores is a mistake, such as infinity."""
_UNITS = {"": 1} | {letter: 1000**power for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {f"{letter}i": 1024**power for power, letter in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)

Cpus = int | float | Sequence[float] | None
"""A number of cores, a range (least, most) in which the scheduler chooses, or None to learn the need."""


def parse_size(
    field: str,
    size: int | str,
    *,
    least: int = 1,
    most: int | None = None,
    error: type[InvalidInput] = InvalidAction,
) -> int:
    """Returns the bytes of `"1GiB"`, `"512 MB"`, or a number of bytes."""
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    bytes_ = size if type(size) is int else -1
    if match is not None and match[2].lower() in _UNITS:
        bytes_ = int(float(match[1]) * _UNITS[match[2].lower()])
    if bytes_ < least or (most is not None and bytes_ > most):
        bounds = f", at least {_format_size(least)}" if least > 1 else ""
        bounds += f", at most {_format_size(most)}" if most is not None else ""
        raise error(field, size, f'a size such as "1GiB" or "512MB", or a number of bytes{bounds}')
    return bytes_


def _format_size(size: int) -> str:
    """Formats a size in the largest unit that is not larger than it."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        unit_bytes = _UNITS[unit[:2].lower()]
        if size >= unit_bytes:
            return f"{math.floor(10 * size / unit_bytes) / 10:g} {unit}"
    return f"{size} bytes"


def amounts(cpus: Cpus) -> Amounts:
    if cpus is None:
        return learned()
    pair = tuple(cpus) if isinstance(cpus, tuple | list) else (cpus, cpus)
    if len(pair) != 2 or not all(map(_is_core_count, pair)) or pair[0] > pair[1]:
        raise InvalidAction(
            "cpus", cpus, "a number of cores above 0, such as 2 or 0.5, or (least, most), such as (1, 4)"
        )
    return cores(*map(float, pair))


def _is_core_count(count: object) -> bool:
    """Whether this is a valid number of cores: one that does not round to 0 milli-cores."""
    return isinstance(count, int | float) and type(count) is not bool and 0.5 < count * CORE < CORES_MAX * CORE
