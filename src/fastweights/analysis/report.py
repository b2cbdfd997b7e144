"""Profiles and findings as one self-contained HTML page, with its pictures also as PNG files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fastweights.analysis import maps
from fastweights.analysis.figures import LONGEST, comparison, profile_figures, teacher_distances
from fastweights.analysis.profile import LayerProfile, Profile
from fastweights.analysis.theory import TheoryFinding
from fastweights.render.html import (
    ReportFigure,
    Row,
    figure,
    long_table,
    section,
    slug,
    table,
    write_page,
)
from fastweights.render.plots import canvas
from fastweights.render.units import layers_in_words


def write_report(profiles: Sequence[Profile], findings: Sequence[TheoryFinding], out: Path) -> Path:
    """Write ``report.html`` and its PNG files into the folder `out`, and return the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    sections = [
        *_comparison_section(profiles, out),
        *(_model(p, out) for p in profiles),
        *_theory(findings, out),
    ]
    title = " · ".join(p.name for p in profiles) or "The theory"
    return write_page(
        title, "Models as linear time-varying systems and as attention maps.", sections, out
    )


def layer_rows(profile: Profile) -> list[Row]:
    """Return the numbers of every layer, as rows of a table."""
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
    if layer.phi is None:
        return row
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
    name = slug(profile.name)
    seen = profile.extent
    intro = (
        f"{profile.parameters:,} parameters, {len(profile.layers)} layers, {profile.tokens} tokens"
        f" of text; at most {seen.heads} heads of a layer, windows of {seen.window} tokens."
        f"{_places(profile)}"
    )
    body = long_table(layer_rows(profile)) + _algorithms(profile)
    drawn = "".join(figure(picture, f"{name}-", out) for picture in profile_figures(profile))
    return section(profile.name, intro, body + drawn)


def _places(profile: Profile) -> str:
    """Which layers of the model these are, where they are not all of them."""
    numbers = {int(found[0]) for p in profile.layers if (found := re.findall(r"\d+", p.path))}
    if numbers == set(range(len(profile.layers))):
        return ""
    return f" Its layers from 0 are {layers_in_words(numbers)} of the model."


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


def _theory(findings: Sequence[TheoryFinding], out: Path) -> list[str]:
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
        picture = ReportFigure(slug(finding.source), finding.source, "", drawing)
        parts.append(
            f"<h3>{escape(finding.source)}</h3><p>{escape(finding.statement)} {verdict}</p>"
            + table(finding.figures())
            + figure(picture, "", out, titled=False)
        )
    return [f"<section><h2 id='theory'>The theory, executed</h2>{''.join(parts)}</section>"]
