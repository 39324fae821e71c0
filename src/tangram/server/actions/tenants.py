"""Spaces: whose something is, told by its name.

Owns how the name of a caller's space stands before the names that it chose.
"""

from __future__ import annotations

SEPARATOR = "/"
"""Between the space of a caller and a name that it chose."""


def space_of(inner: str) -> str:
    return inner.partition(SEPARATOR)[0]
