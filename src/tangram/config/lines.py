"""Where a TOML file says something.

Owns the search for the line of a key, since the parser of the standard library keeps none. Promises that a line that is
named holds the key, or the head of the nearest table around it; where that is not certain, none is named.
"""

from __future__ import annotations

import re

Place = tuple[str | int, ...]
"""The way to a value: names of tables and keys, and the numbers of tables of which there are several."""

_HEAD = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_.-]+)\s*\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"\s*([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\s*=")


class Lines:
    def __init__(self, text: str) -> None:
        # A text of several lines could look like anything.
        self._found = {} if '"""' in text or "'''" in text else _found(text)

    def of(self, place: Place) -> int | None:
        """Counted from 1."""
        for length in range(len(place), 0, -1):
            line = self._found.get(place[:length])
            if line is not None:
                return line
        return None


def _found(text: str) -> dict[Place, int]:
    """Values that go over several lines never begin one with a bare key and `=`, nor are they a head that is known."""
    found: dict[Place, int] = {}
    count_by_table: dict[Place, int] = {}
    table: Place = ()
    for number, line in enumerate(text.split("\n"), start=1):
        head, key = _HEAD.fullmatch(line), _KEY.match(line)
        if head is not None:
            names = head[2].split(".")
            if head[1] == "[[":
                table = (*_numbered(names[:-1], count_by_table), names[-1])
                count_by_table[table] = count_by_table.get(table, 0) + 1
                found.setdefault(table, number)
            table = _numbered(names, count_by_table)
            found.setdefault(table, number)
        elif key is not None:
            found.setdefault((*table, *key[1].split(".")), number)
    return found


def _numbered(names: list[str], count_by_table: dict[Place, int]) -> Place:
    """`[quotas.tokens]` belongs to the last of the quotas."""
    place: Place = ()
    for name in names:
        place = (*place, name)
        if place in count_by_table:
            place = (*place, count_by_table[place] - 1)
    return place
