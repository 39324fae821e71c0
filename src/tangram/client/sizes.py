"""Sizes: amounts of memory and cores as people write them."""

from __future__ import annotations

import re

from tangram.core.demand import Amounts, cores, learned
from tangram.errors import InvalidAction

_UNITS = {"": 1} | {letter: 1000**power for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {f"{letter}i": 1024**power for power, letter in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)

Cpus = int | float | tuple[float, float] | None
"""A number of cores, a range of which the scheduler chooses, or None: what it needs is learned."""


def in_bytes(field: str, size: int | str) -> int:
    """`"1GiB"`, `"512 MB"`, or a number of bytes."""
    if type(size) is int and size > 0:
        return size
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if found is None or found[2].lower() not in _UNITS:
        raise InvalidAction(field, size, 'a size such as "1GiB" or "512MB", or a positive number of bytes')
    return int(float(found[1]) * _UNITS[found[2].lower()])


def amounts(cpus: Cpus) -> Amounts:
    if cpus is None:
        return learned()
    if isinstance(cpus, tuple):
        if len(cpus) != 2:
            raise InvalidAction("cpus", cpus, "a number of cores, or a pair (least, most)")
        return cores(*cpus)
    return cores(cpus)
