"""Page: the frame of every report. One self-contained HTML file; nothing is loaded from elsewhere.

Owns the style sheet, light and dark, and the few lines of script that show tooltips.
"""

from __future__ import annotations

import re
from html import escape

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fbfbf9; --card: #ffffff; --ink: #1d2430; --soft: #5b6472; --faint: #8b93a1; --rule: #e4e5e1;
  --grid: #ecede9; --good: #0b7a67; --bad: #b3412f; --band: #f3f4f0;
  --p0: #8a919e; --p1: #0b9683; --p2: #c7852a; --p3: #6366cf; --p4: #c9496a; --p5: #3d8fd1; --p6: #7a8f2e;
  --k0: #3f74a8; --k1: #dd8a2f; --k2: #4f9e63; --k3: #9a6cab; --k4: #cf5a55; --k5: #3aa3a0; --k6: #8d7b5b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171c; --card: #1b1f26; --ink: #e8eaee; --soft: #a7afbc; --faint: #7d8694; --rule: #2d333d;
    --grid: #262b34; --good: #4fd0b8; --bad: #f0897a; --band: #20252d;
    --p0: #949cab; --p1: #38c7b2; --p2: #e5ac57; --p3: #9496f2; --p4: #ef7f9b; --p5: #6fb6ee; --p6: #a9c255;
    --k0: #6ea4d8; --k1: #f0ab5c; --k2: #78c48a; --k3: #c39ad2; --k4: #ec8580; --k5: #62cbc8; --k6: #b9a684;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1120px; margin: 0 auto; padding: 40px 28px 56px; }
.label {
  display: inline-block; font-size: 12px; font-weight: 600; letter-spacing: .06em; text-transform: uppercase;
  color: var(--soft); border: 1px solid var(--rule); border-radius: 99px; padding: 2px 11px; margin-right: 8px;
}
h1 {
  font-size: 31px; line-height: 1.2; letter-spacing: -.015em; margin: 18px 0 10px; max-width: 26em; font-weight: 650;
}
h2 { font-size: 19px; letter-spacing: -.005em; margin: 44px 0 4px; font-weight: 650; }
h3 { font-size: 14px; margin: 0 0 4px; font-weight: 600; }
p { margin: 0 0 10px; max-width: 52em; }
.lead { font-size: 17px; color: var(--soft); }
.say { color: var(--soft); font-size: 14.5px; margin-bottom: 14px; }
.size { margin-top: 56px; padding-top: 8px; border-top: 2px solid var(--ink); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 14px; margin: 26px 0 8px; }
.card, figure, .wide {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 16px 18px; margin: 0;
}
.card b { display: block; font-size: 27px; line-height: 1.2; letter-spacing: -.02em; font-weight: 650; }
.card span { color: var(--soft); font-size: 13.5px; }
.card small { display: block; color: var(--faint); font-size: 12.5px; margin-top: 3px; }
.wide { overflow-x: auto; padding: 4px 18px; }
table { border-collapse: collapse; width: 100%; font-size: 14.5px; }
th, td { text-align: right; white-space: nowrap; vertical-align: top; padding: 9px 0 9px 18px; }
th { font-weight: 500; font-size: 13px; color: var(--soft); }
td { border-top: 1px solid var(--rule); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td small { display: block; font-size: 12.5px; color: var(--faint); }
td small.good { color: var(--good); } td small.bad { color: var(--bad); }
tr.here td { font-weight: 600; } tr.here td small { font-weight: 400; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 8px; }
.dot.pale { opacity: .26; } .dot.half { opacity: .55; }
.grid { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); }
.pair { display: grid; gap: 14px; grid-template-columns: 1fr 1fr; }
.stack { display: grid; gap: 14px; }
@media (max-width: 860px) { .pair { grid-template-columns: 1fr; } h1 { font-size: 26px; } main { padding: 28px 16px; } }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; font-size: 13.5px; color: var(--soft); margin: 0 0 8px; }
.legend i { font-style: normal; color: var(--faint); }
text { fill: var(--soft); font-size: 12px; font-family: inherit; }
text.strong { fill: var(--ink); font-weight: 600; } text.faint { fill: var(--faint); } text.small { font-size: 11px; }
.gridline { stroke: var(--grid); stroke-width: 1; } .axis { stroke: var(--faint); stroke-width: 1; }
.target { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 5 4; }
.limit { stroke: var(--faint); stroke-width: 1; stroke-dasharray: 3 3; }
.life { stroke: var(--rule); stroke-width: 1; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.area { stroke: none; fill-opacity: .28; }
.pale { fill-opacity: .26; } .half { fill-opacity: .55; }
.slice rect { fill: transparent; } .slice line { stroke: var(--ink); stroke-opacity: 0; stroke-width: 1; }
.slice:hover line { stroke-opacity: .35; }
rect[data-tip]:hover, circle[data-tip]:hover { stroke: var(--ink); stroke-width: 1; }
.slice rect:hover { stroke: none; }
footer { margin-top: 52px; border-top: 1px solid var(--rule); padding-top: 18px; color: var(--soft); font-size: 14px; }
code, pre { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre {
  background: var(--band); border: 1px solid var(--rule); border-radius: 8px; padding: 11px 14px; margin: 6px 0 16px;
  white-space: pre-wrap; overflow-wrap: anywhere; color: var(--ink);
}
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 16px; margin: 0 0 14px; }
dt { color: var(--ink); font-weight: 500; } dd { margin: 0; }
#tip {
  position: fixed; pointer-events: none; white-space: pre-line; max-width: 320px; display: none; z-index: 9;
  background: var(--ink); color: var(--paper); font-size: 12.5px; line-height: 1.45; padding: 7px 10px;
  border-radius: 6px; box-shadow: 0 3px 14px rgb(0 0 0 / .22);
}
@media print { body { background: #fff; } figure, .card, .wide { break-inside: avoid; } }
"""

COLOURS = (
    "".join(f".{family}{i} {{ --colour: var(--{family}{i}); }}" for family in ("p", "k") for i in range(7))
    + ".curve { stroke: var(--colour); } .area, .fill, .pale, .half { fill: var(--colour); }"
    + ".dot { background: var(--colour); }"
)

SCRIPT = """
const tip = document.getElementById("tip");
document.addEventListener("mousemove", (event) => {
  const marked = event.target.closest("[data-tip]");
  tip.style.display = marked ? "block" : "none";
  if (!marked) return;
  tip.textContent = marked.dataset.tip;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 12 : event.clientX + 16;
  const top = event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
});
"""


def prose(words: str) -> str:
    """Text from anywhere as markup: escaped, and no line breaks between a number and its unit."""
    return re.sub(r"(?<=[\d×]) (?=(s|ms|min|h|%)\b|%)", "\u00a0", escape(words))


def page(title: str, body: str) -> str:
    """A whole HTML file. `title` is escaped here, `body` is markup."""
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}{COLOURS}</style></head>\n"
        f'<body><main>\n{body}\n</main><div id="tip" role="status"></div><script>{SCRIPT}</script></body></html>\n'
    )


def section(title: str, say: str, content: str) -> str:
    """A heading, a sentence in plain text that says what one sees, and what one sees."""
    return f'<section><h2>{escape(title)}</h2>\n<p class="say">{prose(say)}</p>\n{content}\n</section>'


def figure(content: str, heading: str = "") -> str:
    return f"<figure>{f'<h3>{escape(heading)}</h3>' if heading else ''}{content}</figure>"


def legend(entries: list[tuple[str, str]], also: str = "") -> str:
    """(css classes of the colour, and of its shade, words) in a row, and a remark."""
    marks = "".join(f'<span><span class="dot {css}"></span>{escape(words)}</span>' for css, words in entries)
    return f'<div class="legend">{marks}{f"<i>{escape(also)}</i>" if also else ""}</div>'


def card(value: str, words: str, small: str) -> str:
    return f'<div class="card"><b>{escape(value)}</b><span>{escape(words)}</span><small>{escape(small)}</small></div>'
