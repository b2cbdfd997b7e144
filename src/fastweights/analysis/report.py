"""Profiles and findings as one self-contained HTML page, with its pictures beside it as PNG
files.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fastweights.analysis import maps
from fastweights.analysis.figures import (
    LONGEST,
    ReportFigure,
    comparison,
    profile_figures,
    teacher_distances,
)
from fastweights.analysis.profile import LayerProfile, Profile
from fastweights.analysis.theory import Finding
from fastweights.render.plots import canvas, png

Row = dict[str, object]

_STYLE = """
:root { color-scheme: light; --ink: #1d2433; --soft: #5b6577; --line: #e3e7ee; --accent: #4c78a8; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 2rem 1.25rem 4rem; background: #fff; color: var(--ink);
  font: 15px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { margin: 2.5rem 0 .5rem; border-top: 1px solid var(--line);
  padding-top: 1.5rem; font-size: 1.25rem; } h3 { font-size: 1rem; margin: 1.5rem 0 .4rem; }
p, figcaption { color: var(--soft); margin: .25rem 0 .75rem; max-width: 75ch; }
figure { margin: 0 0 1rem; } img { max-width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; margin: .5rem 0 1rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } nav a { margin-right: 1rem; color: var(--accent); }
.yes { color: #2e7d4f; } .no { color: #b3303f; font-weight: 600; }
details summary { cursor: pointer; color: var(--accent); }
"""


def write_report(profiles: Sequence[Profile], findings: Sequence[Finding], out: Path) -> Path:
    """Write ``report.html`` and its PNG files into the folder `out`; the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    sections = [
        *_comparison_section(profiles, out),
        *(_model(p, out) for p in profiles),
        *_theory(findings, out),
    ]
    title = " · ".join(p.name for p in profiles) or "The theory"
    return write_page(title, "As linear time-varying systems and as attention maps.", sections, out)


def write_page(title: str, intro: str, sections: Sequence[str], out: Path) -> Path:
    """``report.html`` in the folder `out`, made of `section`s; its path."""
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
    """A part of a page, with its place in the page's navigation."""
    return (
        "<section><h2"
        f" id='{_slug(title)}'>{escape(title)}</h2><p>{escape(intro)}</p>{body}</section>"
    )


def layer_rows(profile: Profile) -> list[Row]:
    """The figures of every layer, for a table."""
    return [{"layer": number, **_layer_row(layer)} for number, layer in enumerate(profile.layers)]


def _layer_row(layer: LayerProfile) -> Row:
    row: Row = {"mixer": layer.mixer, "rule": layer.rule, "heads": layer.of}
    if layer.memory is not None:
        m = layer.memory
        life = float(m.half_lives.median())
        row |= {
            "state rows k": m.hankel.shape[-1],
            "half-life": "> 1e5" if life > LONGEST else life,
            "dimension used": float(m.dimensions.mean()),
        }
    return row | {
        "dilution": float(maps.dilution(layer.phi).mean()),
        "span": float(maps.span(layer.phi).mean()),
        "rank": float(maps.rank(layer.phi).mean()),
        "negative": float(maps.negative_share(layer.phi).mean()),
    }


def _comparison_section(profiles: Sequence[Profile], out: Path) -> list[str]:
    if len(profiles) < 2:
        return []
    drawn = [comparison(profiles), teacher_distances(profiles)]
    rows: list[Row] = [
        {"model": p.name, "parameters": f"{p.parameters:,}", **_means(p)} for p in profiles
    ]
    body = table(rows) + "".join(figure(p, "", out) for p in drawn if p is not None)
    return [f"<section><h2 id='compared'>Compared</h2>{body}</section>"]


def _means(profile: Profile) -> Row:
    """Means of the layers' numbers, where all layers that have one agree that it is a number."""
    rows = layer_rows(profile)
    found: Row = {}
    for name in ("half-life", "dimension used", "dilution", "span", "rank", "negative"):
        numbers = [row[name] for row in rows if name in row]
        if numbers and all(isinstance(n, float) for n in numbers):
            found[name] = sum(n for n in numbers if isinstance(n, float)) / len(numbers)
        elif numbers:
            found[name] = "> 1e5"
    return found


def _model(profile: Profile, out: Path) -> str:
    slug = _slug(profile.name)
    seen = profile.extent
    intro = (
        f"{profile.parameters:,} parameters, {len(profile.layers)} layers, {profile.tokens} tokens"
        f" of text; at most {seen.heads} heads of a layer, windows of {seen.window} tokens."
    )
    body = table(layer_rows(profile)) + _algorithms(profile)
    drawn = "".join(figure(picture, f"{slug}-", out) for picture in profile_figures(profile))
    return section(profile.name, intro, body + drawn)


def _algorithms(profile: Profile) -> str:
    rows: dict[tuple[str, str], Row] = {}
    for layer in profile.layers:
        for verdict in layer.algorithms or ():
            name = verdict.algorithm.name
            answer = verdict.cost if verdict.refusal is None else f"no: {verdict.refusal}"
            rows.setdefault(
                (layer.mixer, name),
                {"mixer": layer.mixer, "algorithm": name, "operations per head": answer},
            )
    if not rows:
        return "<p>No layer has a finite linear form.</p>"
    return (
        "<details><summary>Algorithms that its structure"
        f" allows</summary>{table(list(rows.values()))}</details>"
    )


def _theory(findings: Sequence[Finding], out: Path) -> list[str]:
    if not findings:
        return []
    parts = []
    for finding in findings:
        drawing, axes = canvas(1, 1, 5.2, 3.2)
        finding.draw(axes[0, 0])
        verdict = (
            "<span class='yes'>borne out</span>"
            if finding.verdict
            else "<span class='no'>refuted</span>"
        )
        picture = ReportFigure(_slug(finding.source), finding.source, "", drawing)
        parts.append(
            f"<h3>{escape(finding.source)}</h3><p>{escape(finding.statement)} {verdict}</p>"
            + table(finding.figures())
            + figure(picture, "", out, titled=False)
        )
    return [f"<section><h2 id='theory'>The theory, executed</h2>{''.join(parts)}</section>"]


def figure(picture: ReportFigure, prefix: str, out: Path, titled: bool = True) -> str:
    """The picture as HTML, and as ``<prefix><slug>.png`` in the folder `out`."""
    content = png(picture.figure)
    (out / f"{prefix}{picture.slug}.png").write_bytes(content)
    title = f"<h3>{escape(picture.title)}</h3>" if titled else ""
    source = f"data:image/png;base64,{b64encode(content).decode()}"
    image = f"<img alt='{escape(picture.title, quote=True)}' src='{source}'>"
    return f"{title}<figure><figcaption>{escape(picture.caption)}</figcaption>{image}</figure>"


def table(rows: Sequence[Row]) -> str:
    """An HTML table; a row may lack columns."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(_cell(row.get(name)) for name in columns)}</tr>" for row in rows)
    return (
        "<div"
        f" class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
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


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "model"
