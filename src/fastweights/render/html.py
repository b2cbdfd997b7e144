"""Reports as one HTML page that needs no other file, with its pictures beside it as PNG files."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from fastweights.render.plots import png

Row = dict[str, object]
"""A row of a table, by the names of its columns."""
MOST_ROWS = 12
"""Of a table that is open."""

_STYLE = """
:root { color-scheme: light; --ink: #1d2433; --soft: #5b6577; --line: #e3e7ee; --accent: #4c78a8; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 2rem 1.25rem 4rem;
  background: #fff; color: var(--ink);
  font: 15px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; }
h2 { margin: 2.5rem 0 .5rem; border-top: 1px solid var(--line);
  padding-top: 1.5rem; font-size: 1.25rem; } h3 { font-size: 1rem; margin: 1.5rem 0 .4rem; }
p, figcaption { color: var(--soft); margin: .25rem 0 .75rem; max-width: 75ch; }
figure { margin: 0 0 1rem; } img { max-width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; margin: .5rem 0 1rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
.text td { white-space: pre-wrap; overflow-wrap: anywhere; vertical-align: top; }
.text td:first-child { white-space: nowrap; overflow-wrap: normal; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
nav a { margin-right: 1rem; color: var(--accent); }
.yes { color: #2e7d4f; } .no { color: #b3303f; font-weight: 600; }
details summary { cursor: pointer; color: var(--accent); }
"""


@dataclass(frozen=True, eq=False)
class ReportFigure:
    """A drawing of a report.

    Attributes:
        slug: the name of its file, without the ending.
        title: what it shows.
        caption: how to read it.
        figure: the drawing.
    """

    slug: str
    title: str
    caption: str
    figure: Figure


def write_page(title: str, intro: str, sections: Sequence[str], out: Path) -> Path:
    """Write ``report.html``, a page that needs no other file, into a folder.

    Args:
        title: of the page.
        intro: a sentence below it.
        sections: HTML, each as `section` returns it; the page's navigation lists them.
        out: the folder, which is there.

    Returns:
        The page's path.
    """
    names = [re.search(r"<h2 id='([^']+)'>(.*?)</h2>", part) for part in sections]
    links = "".join(f"<a href='#{found[1]}'>{found[2]}</a>" for found in names if found)
    page = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p>{escape(intro)}</p>"
        f"<nav>{links}</nav>{''.join(sections)}</body></html>"
    )
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def section(title: str, intro: str, body: str) -> str:
    """A part of a page as HTML: a heading, a sentence, and `body`, which is HTML already."""
    return (
        "<section><h2"
        f" id='{slug(title)}'>{escape(title)}</h2><p>{escape(intro)}</p>{body}</section>"
    )


def figure(picture: ReportFigure, prefix: str, out: Path, titled: bool = True) -> str:
    """A drawing as HTML with the picture inside it, and beside it as a file.

    Args:
        picture: the drawing and its words.
        prefix: of the file's name, ``<prefix><slug>.png``.
        out: the folder that the file goes to.
        titled: whether the title stands above it.
    """
    content = png(picture.figure)
    (out / f"{prefix}{picture.slug}.png").write_bytes(content)
    title = f"<h3>{escape(picture.title)}</h3>" if titled else ""
    source = f"data:image/png;base64,{b64encode(content).decode()}"
    image = f"<img alt='{escape(picture.title, quote=True)}' src='{source}'>"
    return f"{title}<figure><figcaption>{escape(picture.caption)}</figcaption>{image}</figure>"


def paragraph(text: str) -> str:
    """Text as an HTML paragraph."""
    return f"<p>{escape(text)}</p>"


def table(rows: Sequence[Row]) -> str:
    """Rows as an HTML table: numbers to the right, truth as a tick or a cross; a row may lack
    columns.
    """
    return _table(rows, "scroll")


def long_table(rows: Sequence[Row]) -> str:
    """Rows as `table`, which is folded where they would push the page down."""
    if len(rows) <= MOST_ROWS:
        return table(rows)
    return f"<details><summary>{len(rows)} rows</summary>{table(rows)}</details>"


def text_table(rows: Sequence[Row]) -> str:
    """Rows as `table`, whose texts keep their line breaks and are broken where they are long; what
    cannot be printed is written as Python escapes it.
    """
    shown = [
        {name: visible(cell) if isinstance(cell, str) else cell for name, cell in row.items()}
        for row in rows
    ]
    return _table(shown, "scroll text")


def visible(text: str) -> str:
    """Text in which all that cannot be printed is escaped, but for line breaks."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def _table(rows: Sequence[Row], kind: str) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(_cell(row.get(name)) for name in columns)}</tr>" for row in rows)
    return (
        f"<div class='{kind}'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        "</div>"
    )


def _cell(value: object) -> str:
    match value:
        case None:
            return "<td></td>"
        case bool():
            return f"<td class='{'yes' if value else 'no'}'>{'✓' if value else '✗'}</td>"
        case int():
            return f"<td class='n'>{value:,}</td>"
        case float():
            return f"<td class='n'>{value:.3g}</td>"
        case _:
            return f"<td>{escape(str(value))}</td>"


def slug(name: str) -> str:
    """`name` as a part of a file's name or of an address."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "model"
