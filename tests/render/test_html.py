"""Reports as one HTML page."""

from __future__ import annotations

import pytest

from fastweights.render.html import ReportFigure, figure, section, slug, table, write_page
from fastweights.render.plots import canvas


def test_a_table_says_what_its_values_are() -> None:
    html = table([{"a": 1234, "b": True}, {"b": False, "c": 0.12345}, {"c": "<text>"}])
    assert html.count("<th>") == 3
    assert "<td class='n'>1,234</td><td class='yes'>✓</td><td></td>" in html
    assert "<td class='no'>✗</td><td class='n'>0.123</td>" in html
    assert "&lt;text&gt;" in html


@pytest.mark.usefixtures("pictures")
def test_a_page_lists_its_sections_and_needs_no_other_file(tmp_path) -> None:
    drawing, _ = canvas(1, 1)
    picture = figure(ReportFigure("one", "One & all", "how to read it", drawing), "p-", tmp_path)
    path = write_page("Title", "Intro", [section("What it costs", "a < b", picture)], tmp_path)
    page = path.read_text()
    assert "<a href='#what-it-costs'>What it costs</a>" in page
    assert "a &lt; b" in page
    assert "One &amp; all" in page
    assert "src='data:image/png;base64," in page
    assert (tmp_path / "p-one.png").read_bytes().startswith(b"\x89PNG")


def test_names_become_parts_of_addresses() -> None:
    assert slug("Gated DeltaNet, 2 layers") == "gated-deltanet-2-layers"
    assert slug("…") == "model"
