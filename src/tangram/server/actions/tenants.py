"""Qualified names: `TENANT/NAME`, the name that a tenant chose behind its own."""

from __future__ import annotations

TENANT_SEPARATOR = "/"
"""Between the name of a tenant and a name that it chose."""


def tenant_of(qualified_name: str) -> str:
    return qualified_name.partition(TENANT_SEPARATOR)[0]
