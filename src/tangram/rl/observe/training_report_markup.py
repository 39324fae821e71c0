"""Markup of the training report: its tables, the places of its charts, and how long something took in words.

Owns how text becomes markup. Promises that whatever is handed over as text stays text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from tangram.reports.formatting import seconds
from tangram.reports.page import prose

COLUMNS_MAX = 16


class Markup(str):
    """Is markup already."""


def duration(value: float) -> str:
    """For sentences: 43 s, 4 min 12 s, 2 h 05 min."""
    if value < 100.0:
        return seconds(value)
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def chart_figure(id: str, heading: str) -> str:
    return f'<figure class="chart" data-chart="{escape(id)}"><h3>{escape(heading)}</h3></figure>'


def table(heads: Iterable[str], rows: Iterable[Sequence[str]], left: Sequence[int] = ()) -> str:
    css = ['class="left"' if place in left else "" for place in range(COLUMNS_MAX)]
    head = "".join(f'<th scope="col" {css[place]}>{escape(words)}</th>' for place, words in enumerate(heads))
    body = "".join(
        "<tr>"
        + "".join(
            f"<td {css[place]}>{cell if isinstance(cell, Markup) else prose(cell)}</td>"
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide told"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
