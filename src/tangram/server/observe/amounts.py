"""Amounts in words: what an action asks for, and what it got.

Owns the words, as they stand in stories.
"""

from __future__ import annotations

from tangram.core.demand import CORE, CPU, GPU, MEMORY, Amounts, Demand


def asked_for(demand: Demand) -> str:
    """What it wants of which kinds: `1 to 4 cores of cpu and 1 unit of search`."""
    return " and ".join([f"{_amounts(kind, amounts)} of {kind}" for kind, amounts in demand.pools.items()])


def share(pool: str, reserved: int, limit: int) -> str:
    """Units of one pool: `0.5 cores (limit 4 cores) of cpu@n0`."""
    kind = pool.partition("@")[0]
    more = f" (limit {_amount(kind, limit)})" if limit != reserved else ""
    return f"{_amount(kind, reserved)}{more} of {pool}"


def _amounts(kind: str, amounts: Amounts) -> str:
    if not amounts.declared:
        return f"what is learned, up to {_amount(kind, amounts.max)}"
    if amounts.max == amounts.min:
        return _amount(kind, amounts.min)
    if amounts.choices:
        return f"{', '.join(_number(kind, choice) for choice in amounts.choices[:-1])} or {_amount(kind, amounts.max)}"
    return f"{_number(kind, amounts.min)} to {_amount(kind, amounts.max)}"


def _amount(kind: str, units: int) -> str:
    number = _number(kind, units)
    if kind == MEMORY:
        return f"{number} MiB"
    noun = "core" if kind == CPU else "device" if kind == GPU else "unit"
    return f"{number} {noun}" if number == "1" else f"{number} {noun}s"


def _number(kind: str, units: int) -> str:
    return f"{units / CORE:g}" if kind == CPU else str(units)
