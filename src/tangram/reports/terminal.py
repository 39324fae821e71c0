"""Text for a terminal: consoles, tables, bars and sparklines in the one style of all commands.

Promises that names are printed as text, never as markup, and that a table in a file or a pipe is not cut.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from tangram.reports.printable import escape_unprintable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

WIDTH_MIN = 120
"""Columns of a table that goes to a file or a pipe."""
EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
SPARKS, PLAIN_SPARKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
PLAIN_LEVELS = " .:-=+*%#"


def stdout_console() -> Console:
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=max(WIDTH_MIN, int(os.environ.get("COLUMNS", 0) or 0)))


def is_unicode(console: Console) -> bool:
    """Whether the console can print block characters."""
    return console.encoding.lower().startswith("utf")


def print_plain(console: Console, content: RenderableType) -> None:
    """Print without interpreting markup, numbers or emoji codes."""
    console.print(content, markup=False, highlight=False, emoji=False)


def table(title: str, *heads: str, right: Collection[str] = (), no_wrap: bool = False) -> Table:
    """A table without rows. `right`: the columns that are aligned to the right."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left", no_wrap=no_wrap)
    return table


def text_table(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Lines with the cells of each row in columns, for text that may go anywhere. `right`: the numbers of the columns
    that are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.rjust(width) if number in right else text.ljust(width)
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def row(text: str, style: str = "") -> Text:
    """A row of a screen, cut at its right edge."""
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


class ScreenColumns:
    """Columns of rows of a screen, each with its head and a fixed width, so that nothing moves when a value changes.

    A negative width aligns to the right. Text on the left is cut at its width; numbers on the right never are.
    """

    def __init__(self, *columns: tuple[str, int]) -> None:
        self._columns = columns

    def head(self) -> Text:
        return self.row(*(head for head, _ in self._columns), style="bold")

    def row(self, *values: object, style: str = "") -> Text:
        line = ""
        for value, (_, width) in zip(values, self._columns, strict=True):
            gap = "" if not line else "  " if width > 0 else " "
            line += gap + (cell(str(value), width) if width > 0 else str(value).rjust(-width))
        return row(line, style=style)


def cell(text: str, width: int) -> str:
    """Pad or cut foreign text to this many columns."""
    from rich.cells import cell_len, set_cell_size

    shown = escape_unprintable(text)
    return set_cell_size(shown, width) if cell_len(shown) <= width else set_cell_size(shown, width - 1) + "…"


def bar(share: float, width: int, *, unicode: bool = True) -> str:
    """A share of this many columns, in eighths of one; `unicode`: in block characters."""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8] if unicode else "#" * (eighths // 8)


def marked_bar(share: float, mark: float, width: int, style: str) -> Text:
    """A bar with a mark at another share: `███▌   │`."""
    from rich.text import Text

    full, place = bar(share, width), min(width, round(width * mark))
    before, after = full[:place].ljust(place), full[place + 1 :]
    return Text.assemble((before, style), ("│", "dim"), (after, style))


def usage_bar(share: float, width: int, style: str, *, unicode: bool) -> Text:
    """A bar with its share in percent: `███▌······  35%`."""
    from rich.text import Text

    share = min(1.0, max(0.0, share))
    full = bar(share, width, unicode=unicode)
    rest = ("·" if unicode else ".") * (width - len(full))
    return Text.assemble((full, style), (rest, "dim"), f" {share:4.0%}")


def progress_bar(share: float, width: int, *, unicode: bool) -> tuple[tuple[str, str], tuple[str, str]]:
    """The done and the open part of a progress bar, each with its style."""
    full = round(width * min(1.0, max(0.0, share)))
    done, rest = ("━", "━") if unicode else ("-", ".")
    return (done * full, "green"), (rest * (width - full), "dim")


def sparkline(values: Sequence[float], unicode: bool = True) -> str:
    """A character for each value, scaled from their minimum to their maximum, at least from 0 to 1."""
    if not values:
        return ""
    marks = SPARKS if unicode else PLAIN_SPARKS
    low, high = min(0.0, *values), max(1.0, *values)
    return "".join(marks[min(len(marks) - 1, int((value - low) / (high - low) * len(marks)))] for value in values)


def level_row(shares: Sequence[float], *, unicode: bool) -> str:
    """A character for each share from 0 to 1, blank for 0 alone."""
    levels = f" {SPARKS}" if unicode else PLAIN_LEVELS
    return "".join(levels[math.ceil(share * (len(levels) - 1))] for share in shares)
