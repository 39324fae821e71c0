"""Page: the frame and the parts of every HTML report. One self-contained file that loads nothing.

Owns the style sheet for light and dark, the tooltips, and how text becomes markup. Promises that text handed over as
text is escaped, and that the same arguments give the same bytes. Only a `Markup` is inserted as it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from tangram.files.atomic_file import atomic_write, check_writable
from tangram.reports.printable import escape_unprintable
from tangram.reports.theme import static, theme_css


class Markup(str):
    """A string that is markup already; a table cell of this type is not escaped."""


def page(title: str, parts: Iterable[str], *, widgets: Sequence[str] = ()) -> str:
    """Return a whole HTML file.

    `title` is text, `parts` are markup; empty ones are left out. Each of `widgets` names a pair of files in
    `reports/static` that the page needs: "charts" (reports/interactive.py), "lanes" (reports/timeline_lanes.py).
    """
    styles = "\n".join([theme_css(), static("page.css"), *(static(f"{name}.css") for name in widgets)])
    scripts = "\n".join([static("page.js"), *(static(f"{name}.js") for name in widgets)])
    body = "\n".join(filter(None, parts))
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{styles}</style></head>\n"
        f'<body><main>\n{body}\n</main><div id="tip" role="status"></div><script>{scripts}</script></body></html>\n'
    )


def write_page(path: Path, text: str, *, option: str = "report") -> None:
    """Write a page atomically. Raises InvalidConfig, naming the option, if `path` cannot be written."""
    check_writable(option, path)
    with atomic_write(option, path) as file:
        file.write(text.encode())


def prose(words: str) -> str:
    """Escape text, and keep a number and its unit on one line."""
    return re.sub(r"(?<=[\d×]) (?=(s|ms|min|h|%)\b|%)", "\u00a0", escape(words))


# ---- the head of a page -----------------------------------------------------------------------------------------


def opening(labels: Iterable[str], headline: str, lead: str, *, warning: str = "") -> str:
    """The labels, the headline and the first paragraph: the answer before the details."""
    warned = f'<p class="lead"><strong>Warning:</strong> {prose(warning)}</p>' if warning else ""
    tags = "".join(f'<span class="label">{escape(label)}</span>' for label in labels)
    return f'{tags}<h1>{escape(headline)}</h1>{warned}<p class="lead">{prose(lead)}</p>'


def card(value: str, words: str, small: str) -> str:
    return f'<div class="card"><b>{escape(value)}</b><span>{escape(words)}</span><small>{escape(small)}</small></div>'


def cards(parts: Sequence[str]) -> str:
    return f'<div class="cards">{"".join(parts)}</div>' if parts else ""


# ---- sections ---------------------------------------------------------------------------------------------------


def section(title: str, say: str, content: str) -> str:
    """A heading, a sentence of text that explains the content, and the content as markup."""
    return f'<section><h2>{escape(title)}</h2>\n<p class="say">{prose(say)}</p>\n{content}\n</section>'


def remark(words: str) -> str:
    """A paragraph after a table or a chart."""
    return f'<p class="say after">{prose(words)}</p>'


def command_block(words: str, command: str) -> str:
    """A sentence and a command or program to copy."""
    return f"<p>{escape(words)}</p><pre>{escape(command)}</pre>"


def folded(summary: str, content: str) -> str:
    """Content that the reader opens."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def figure(content: str, heading: str = "") -> str:
    return f"<figure>{f'<h3>{escape(heading)}</h3>' if heading else ''}{content}</figure>"


def figures(panels: Iterable[str], layout: str = "grid") -> str:
    """Figures side by side (`grid`, `pair`, `charts`, `charts-wide`) or one below the other (`stack`)."""
    return f'<div class="{layout}">{"".join(panels)}</div>'


def legend(entries: Sequence[tuple[str, str]], also: str = "") -> str:
    """A row of (CSS classes of the colour and its shade, name), and a remark."""
    marks = "".join(f'<span><span class="dot {css}"></span>{escape(words)}</span>' for css, words in entries)
    return f'<div class="legend">{marks}{f"<i>{escape(also)}</i>" if also else ""}</div>'


def footer(entries: Iterable[tuple[str, str]], command: str = "") -> str:
    """Definitions of the words on the page, after the command that makes the page again."""
    command_html = command_block("The same again:", escape_unprintable(command)) if command else ""
    listed = "".join(f"<dt>{escape(term)}</dt><dd>{escape(words)}</dd>" for term, words in entries)
    return f"<footer>{command_html}<dl>{listed}</dl></footer>"


# ---- tables -----------------------------------------------------------------------------------------------------


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[int] = (),
    wrap: bool = False,
    highlighted: Collection[int] = (),
) -> str:
    """A table that scrolls sideways if it is wider than the page.

    The first column and those in `left` are aligned to the left, the others to the right. With `wrap`, text in
    left-aligned columns wraps. `highlighted` has the numbers of rows in bold.
    """
    css = [' class="left"' if column in left else "" for column in range(len(heads))]
    head = "".join(f'<th scope="col"{css[column]}>{escape(words)}</th>' for column, words in enumerate(heads))
    body = []
    for number, row in enumerate(rows):
        cells = "".join(
            f"<td{css[column]}>{cell if isinstance(cell, Markup) else prose(cell)}</td>"
            for column, cell in enumerate(row)
        )
        here = ' class="here"' if number in highlighted else ""
        body.append(f"<tr{here}>{cells}</tr>")
    return (
        f'<div class="wide{" wrap" if wrap else ""}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def named(name: str, css: str) -> Markup:
    """A cell: a name after the dot of its colour."""
    return Markup(f'<span class="dot {css}"></span>{escape(name)}')


def with_note(value: str, note: str, css: str = "") -> Markup:
    """A cell: a value with a smaller note below it, which is `good`, `bad` or neither."""
    return Markup(f'{escape(value)}<small class="{css}">{escape(note)}</small>')


def share_bar(parts: Iterable[tuple[str, float, str]], *, track: bool = False) -> Markup:
    """A cell: a bar of (CSS classes, share, tooltip). With `track`, the rest of the bar is visible."""
    marks = "".join(
        f'<i class="{css}" style="width:{100.0 * share:.3f}%" data-tip="{escape(tip)}"></i>'
        for css, share, tip in parts
    )
    return Markup(f'<span class="bar{" track" if track else ""}">{marks}</span>')


# ---- data for scripts -------------------------------------------------------------------------------------------


def script_data(element_id: str, content: Any) -> str:
    """JSON that a script of the page reads; no text in it can end the element."""
    text = msgspec.json.encode(content).decode().replace("<", "\\u003c")
    return f'<script type="application/json" id="{element_id}">{text}</script>'
