"""docs/check.md: the laws, and which of them models break."""

from __future__ import annotations

from collections.abc import Iterator

from fastweights.lab.check import LAWS
from fastweights.render.markdown import table
from pages.page import Page, Row, Stretches, origin, rows_of

SHORT = {"holds": "✓", "refused": "refuses", "not asked": ""}


def laws() -> str:
    """Each law in a sentence."""
    told = (
        (law.name, law.says if law.required else f"{law.says} For information.") for law in LAWS
    )
    return table(("law", "what it says"), told)


def versions() -> str:
    """With what it was tried."""
    return f"{origin('check')}."


def theirs() -> str:
    """A line per family of transformers for each law that one of them does not hold."""
    return _matrix(rows_of("check", kind="transformers"))


def patched() -> str:
    """The same of patched models."""
    return _matrix(rows_of("check", kind="patched"))


def ours() -> str:
    """The same of our mixers."""
    return _matrix(rows_of("check", kind="ours"))


def fla() -> str:
    """The same of flash-linear-attention's families, and why others were not asked."""
    rows = rows_of("check_fla")
    left = [f"- `{row['family']}`: {row['reason']}" for row in rows if "reason" in row]
    asked = _matrix([row for row in rows if "findings" in row])
    return "\n\n".join([f"{origin('check_fla')}.", asked, *left])


def _matrix(rows: list[Row]) -> str:
    verdicts = [{one["law"]: one for one in row["findings"]} for row in rows]
    tried = [law.name for law in LAWS if law.name in verdicts[0]]
    names = [name for name in tried if not all(_holds(found[name]) for found in verdicts)]
    lines = (
        [f"`{row['family']}`", *(_cell(found[name]) for name in names)]
        for row, found in zip(rows, verdicts, strict=True)
    )
    kept = [name for name in tried if name not in names and _asked(name, verdicts)]
    return f"{table(('', *names), lines)}\n\nAll hold: {', '.join(kept)}."


def _holds(finding: Row) -> bool:
    return finding["verdict"] in ("holds", "not asked")


def _asked(name: str, verdicts: list[dict[str, Row]]) -> bool:
    return any(found[name]["verdict"] == "holds" for found in verdicts)


def _cell(finding: Row) -> str:
    return SHORT.get(finding["verdict"]) if finding["verdict"] in SHORT else _failure(finding)


def _failure(finding: Row) -> str:
    by = "raises" if finding["reason"] else "not finite"
    difference = finding["difference"]
    return f"**{by if difference is None else f'{difference:.0e}'}** ({finding['example']})"


def reasons() -> str:
    """What was raised, where anything was, by the families that raised it."""
    return "\n".join(_reasons())


def _reasons() -> Iterator[str]:
    said: dict[tuple[str, str], list[str]] = {}
    for row in rows_of("check"):
        for finding in row["findings"]:
            if finding["reason"] and finding["verdict"] != "not asked":
                who = f"`{row['family']}`" + (", patched" if row["kind"] == "patched" else "")
                said.setdefault((finding["reason"], finding["law"]), []).append(who)
    everyone = len(rows_of("check", kind="ours"))
    for (reason, law), who in said.items():
        yield f"- {law}: {reason}: {'all of ours' if len(who) == everyone else '; '.join(who)}"


PAGE = Page(
    "check",
    Stretches(
        {
            "laws": laws,
            "versions": versions,
            "theirs": theirs,
            "patched": patched,
            "fla": fla,
            "ours": ours,
            "reasons": reasons,
        }
    ),
)
