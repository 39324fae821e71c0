"""Amounts as text, for stories: what an action demands and what it was granted."""

from __future__ import annotations

from tangram.core.demand import CORE, CPU, Amounts, Demand
from tangram.core.explain import amount_text


def describe_demand(demand: Demand) -> str:
    """A demand as text: `1 to 4 cores of cpu and 1 unit of search`."""
    return " and ".join([f"{_describe_amounts(kind, amounts)} of {kind}" for kind, amounts in demand.pools.items()])


def describe_share(pool: str, reserved: int, limit: int) -> str:
    """Units of one pool as text: `0.5 cores (limit 4 cores) of cpu@n0`."""
    kind = pool.partition("@")[0]
    more = f" (limit {amount_text(kind, limit)})" if limit != reserved else ""
    return f"{amount_text(kind, reserved)}{more} of {pool}"


def _describe_amounts(kind: str, amounts: Amounts) -> str:
    if not amounts.declared:
        return f"a learned amount, up to {amount_text(kind, amounts.max)}"
    if amounts.max == amounts.min:
        return amount_text(kind, amounts.min)
    if amounts.choices:
        choices = ", ".join(_format_number(kind, choice) for choice in amounts.choices[:-1])
        return f"{choices} or {amount_text(kind, amounts.max)}"
    return f"{_format_number(kind, amounts.min)} to {amount_text(kind, amounts.max)}"


def _format_number(kind: str, units: int) -> str:
    return f"{units / CORE:g}" if kind == CPU else str(units)
