"""Text for a terminal: columns, bars and levels, in block characters and in ASCII."""

from __future__ import annotations

from tangram.reports.terminal import ScreenColumns, bar, level_row, marked_bar, text_table, usage_bar


def test_cells_of_a_table_are_in_columns_and_no_line_ends_with_a_space() -> None:
    rows = [("task", "turns", "why"), ("a", "7", ""), ("longer", "1,024", "it is long")]
    assert text_table(rows, right=(1,)) == ["task    turns  why", "a           7", "longer  1,024  it is long"]


def test_a_bar_is_as_long_as_its_share() -> None:
    assert [bar(share, 4) for share in (-1.0, 0.0, 0.5, 0.53125, 1.0, 7.0)] == ["", "", "██", "██▏", "████", "████"]
    assert bar(0.5, 4, unicode=False) == "##"
    assert usage_bar(0.5, 4, "cyan", unicode=True).plain == "██··  50%"
    assert usage_bar(0.5, 4, "cyan", unicode=False).plain == "##..  50%"


def test_a_mark_stands_in_or_behind_its_bar() -> None:
    assert marked_bar(0.5, 0.25, 4, "cyan").plain == "█│"
    assert marked_bar(1.0, 0.25, 4, "cyan").plain == "█│██"
    assert marked_bar(0.25, 0.75, 4, "cyan").plain == "█  │"
    assert marked_bar(0.0, 1.0, 4, "cyan").plain == "    │"


def test_levels_are_blank_for_nothing_alone() -> None:
    assert level_row([0.0, 0.001, 0.5, 1.0], unicode=True) == " ▁▄█"
    plain = level_row([0.0, 0.001, 1.0], unicode=False)
    assert plain.isascii() and plain[0] == " " and " " not in plain[1:]


def test_columns_of_a_screen_stay_where_they_are() -> None:
    columns = ScreenColumns(("pool", 6), ("waiting", -8), ("held out", 8))
    rows = [columns.head(), columns.row("cpu", 7, "-"), columns.row("a long name", 1_234_567_890, "0.5", style="dim")]
    assert [row.plain for row in rows] == [
        "pool    waiting  held out",
        "cpu           7  -       ",
        "a lon… 1234567890  0.5     ",
    ]
    assert all(row.no_wrap for row in rows)
