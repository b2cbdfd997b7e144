"""The pages of measurements say what benchmarks/results says, and have no picture that no one
draws.
"""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from fastweights.lab.reproduce import CLAIMS, ClaimVerdict

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAMES = [p.stem for p in sorted(DOCS.glob("*.md")) if "<!-- end -->" in p.read_text("utf-8")]
"""Of the pages that have stretches to write into."""
PICTURE = re.compile(r"!\[[^\]]*\]\(measured/([^)]+)\)")


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from pages import PAGES

    return {page.name: page for page in PAGES}


def test_every_page_with_stretches_is_written(pages: dict[str, Any]) -> None:
    assert set(pages) == set(NAMES)


# that one asks every mixer for its kernels; `make docs` renders all of them every time
RENDERED = [pytest.param(n, marks=pytest.mark.slow if n == "mixers" else ()) for n in NAMES]


@pytest.mark.sampled
@pytest.mark.parametrize("name", RENDERED)
def test_a_page_says_what_was_measured(pages: dict[str, Any], name: str) -> None:
    text = pages[name].path.read_text(encoding="utf-8")
    assert pages[name].render(text) == text, "run: make pages"


@pytest.mark.parametrize("name", NAMES)
def test_its_pictures_are_drawn_or_kept(pages: dict[str, Any], name: str) -> None:
    """Those of README.md are kept in git, which GitHub shows without a build."""
    shown = set(PICTURE.findall(pages[name].path.read_text(encoding="utf-8")))
    kept = set(re.findall(r"docs/measured/([\w.-]+)", (ROOT / "README.md").read_text("utf-8")))
    assert shown - kept == set(pages[name].pictures)


@pytest.mark.sampled
@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_drawn(pages: dict[str, Any], name: str) -> None:
    for draw in list(pages[name].pictures.values())[:1]:
        assert draw().startswith(b"\x89PNG")


def test_a_page_without_the_place_is_refused(pages: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no <!-- far_machine -->"):
        pages["linearize-measured"].render("# Another page\n")


HOLDS, FAILS, OPEN, UNTESTED = "holds", "does not hold", "does not show", "not tested"
PROTOCOLS = [
    pytest.param([("a", FAILS), ("b", FAILS)], 2, id="both fail"),
    pytest.param([("a", FAILS), ("a", FAILS)], 1, id="one, shared by two claims"),
    pytest.param([(None, FAILS), (None, FAILS)], 2, id="unnamed ones differ"),
    pytest.param([("a", FAILS), ("b", OPEN)], 0, id="another is open"),
    pytest.param([("a", FAILS), ("b", UNTESTED)], 1, id="another tests nothing"),
    pytest.param([("a", FAILS), ("b", HOLDS)], 0, id="another holds"),
]


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize(("outcomes", "expected"), PROTOCOLS)
def test_protocols_that_agree_on_a_claim_are_counted(
    monkeypatch: pytest.MonkeyPatch, outcomes: list[tuple[str | None, str]], expected: int
) -> None:
    """Claims of the same statement count once where they share a protocol; two protocols reproduce
    a claim, as two contradict it."""
    from pages import reproduce

    claim, other = CLAIMS["dsf-fig1"], CLAIMS["dsf-fig3"]

    def outcome(experiment: str | None, verdict: str) -> dict[str, Any]:
        return {"experiment": experiment, "verdict": verdict, "size": "cpu"}

    rows = [(f"claim {n}", claim, outcome(*one)) for n, one in enumerate(outcomes)]
    elsewhere = ("other", other, outcome("c", FAILS))
    monkeypatch.setattr(reproduce, "_measured", lambda: iter([*rows, elsewhere]))
    assert reproduce._agreed(claim, ClaimVerdict.FAILS) == expected
    swapped = {HOLDS: FAILS, FAILS: HOLDS}
    for _, _, row in rows:
        row["verdict"] = swapped.get(row["verdict"], row["verdict"])
    assert reproduce._agreed(claim, ClaimVerdict.HOLDS) == expected


@pytest.mark.usefixtures("pages")
def test_quantities_stand_beside_those_that_a_paper_prints() -> None:
    """LoLCATs' tables, which have no main quantity."""
    from pages import reproduce

    measures = [
        {"series": "exp, transfer", "value": value, "quantity": name, "seed": seed}
        for seed in (0, 1)
        for name, value in (("PPL@0", 40.0 + seed), ("PPL@2", 30.0))
    ]
    shown = reproduce._numbers(CLAIMS["lolcats-table1"], {"size": "cpu", "measures": measures})
    assert "| exp, transfer | 40.5 (40–41) | 30 |" in shown
    assert "| exp, transfer, paper | 10.42 | 3.11 |" in shown


def test_the_claim_on_table_2_names_who_else_meets_all_conditions() -> None:
    lines = (DOCS / "tables.md").read_text("utf-8").splitlines()
    (row,) = (line for line in lines if "metala" in line and line.count("✓") == 4)
    others = {name.strip() for name in row.split("|")[1].split(",")} - {"metala"}
    assert others
    assert all(name in CLAIMS["metala-table2"].remark.lower() for name in others)


@pytest.mark.usefixtures("pages")
def test_protocols_have_dates_and_replaced_ones_their_verdicts() -> None:
    from pages.page import results
    from pages.reproduce import _outcomes

    protocols = results("reproduce_protocols")
    for outcome in _outcomes().values():
        for commit in outcome["commit"].split(", "):
            assert date.fromisoformat(protocols["commits"][commit])
    for row in protocols["replaced"]:
        assert ClaimVerdict(row["verdict"])
        assert row["held"] <= row["tested"]
        assert row["reason"].endswith(".")
        assert row["claim"] in CLAIMS or "took its place" in row["reason"]
