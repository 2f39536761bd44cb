"""HTML pages in a single file, for light and dark mode: text is escaped, images are embedded, nothing is loaded."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --dim: #5c6675; --rule: #d8dde5; --paper: #ffffff; --band: #f4f6f9;
  --strong: #1f5fbf; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --dim: #9aa5b4; --rule: #38414f; --paper: #14181f; --band: #1c222b; --strong: #7fb0ff; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 78rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--rule); }
p, li { max-width: 48rem; }
p.lead { font-size: 1.15rem; }
figure { margin: 1.25rem 0; }
figure img { display: block; width: 100%; height: auto; background: #ffffff; border-radius: 6px;
  border: 1px solid var(--rule); }
figcaption, .note { color: var(--dim); font-size: .9rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--dim); font-weight: 600; text-align: right; vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
tbody tr:hover { background: var(--band); }
tr.strong td { font-weight: 650; color: var(--strong); }
table.words th { text-align: left; }
table.words td { text-align: left; white-space: pre-wrap; overflow-wrap: anywhere; vertical-align: top; }
details pre { background: var(--band); padding: .75rem 1rem; overflow-x: auto; font-size: .85rem; }
"""


def page(title: str, body: Iterable[str]) -> str:
    """A page with `title` as its heading; `body` is HTML made by the other functions."""
    name = escape(title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{name}</h1>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph; `kind` is "lead", "note" or nothing."""
    return f"<p{_class(kind)}>{escape(text)}</p>"


def folded(title: str, text: str) -> str:
    """Text in a box that opens."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def bullets(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, strong: Sequence[str] = (), words: bool = False) -> str:
    """A table. Rows whose first cell is in `strong` are highlighted; with `words`, cells are text and not numbers."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = [f"<tr{_class('strong' if row[0] in strong else '')}>{_cells(row)}</tr>\n" for row in rows]
    top = f"<thead><tr>{head}</tr></thead>" if header else ""
    return (
        f'<div class="scroll"><table{_class("words" if words else "")}>{top}<tbody>\n{"".join(lines)}</tbody></table></div>'
    )


def records(rows: Sequence[Mapping[str, str]], *, strong: Sequence[str] = ()) -> str:
    """A table of rows that all have the same columns, given as cells by column name."""
    return table(list(rows[0]) if rows else [], [list(row.values()) for row in rows], strong=strong)


def figure(png: bytes, caption: str) -> str:
    """An embedded image with a caption."""
    data = base64.b64encode(png).decode("ascii")
    text = escape(caption)
    return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'


def _cells(row: Sequence[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in row)


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
