"""Text that others chose, made fit for a terminal or a message.

What an environment, an engine or a model writes may hold anything, sequences that steer a terminal included. What goes
through here is printable, and shows what was there.
"""

from __future__ import annotations

from collections.abc import Iterator


def plain(text: str) -> str:
    """In one line, with what is not printable made visible."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def cut(text: str, most: int) -> str:
    """In one line of at most so many characters, and a mark if there are more."""
    shown = plain(text[:most])
    return shown if len(text) <= most and len(shown) <= most else shown[: most - 1] + "…"


def lines(text: str, most: int, wide: int) -> Iterator[str]:
    """In its own lines, so many of them; the last says how much is missing."""
    found = text.split("\n")
    for line in found[:most]:
        yield cut(line, wide)
    if len(found) > most:
        yield f"(and {len(found) - most:,} lines more)"
