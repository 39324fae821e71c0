"""Foreign text made safe for a terminal or a message.

The output of an environment, an engine or a model may contain control sequences. These functions escape them visibly.
"""

from __future__ import annotations

from collections.abc import Iterator


def escape_unprintable(text: str) -> str:
    """Escape the characters that are not printable, line breaks included."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def truncate(text: str, most: int) -> str:
    """One line of at most `most` characters, with `…` if text was cut."""
    shown = escape_unprintable(text[:most])
    return shown if len(text) <= most and len(shown) <= most else shown[: most - 1] + "…"


def truncate_lines(text: str, most: int, wide: int) -> Iterator[str]:
    """At most `most` lines of the text; one more gives the number of missing lines."""
    lines = text.split("\n")
    for line in lines[:most]:
        yield truncate(line, wide)
    if len(lines) > most:
        yield f"(and {len(lines) - most:,} lines more)"
