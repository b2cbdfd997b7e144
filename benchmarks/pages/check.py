"""docs/check.md: the laws, and which of them models break."""

from __future__ import annotations

from collections.abc import Iterator

from fastweights.lab.check import LAWS
from fastweights.render.markdown import table
from pages.page import Page, Row, origin, rows_of

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
    """Families of transformers, as they are → patched where that differs."""
    plain, patched = _of("transformers"), {row["family"]: row for row in _of("patched")}
    return _matrix(plain, [patched[row["family"]] for row in plain])


def ours() -> str:
    """The same of our mixers."""
    return _matrix(_of("ours"))


def _of(kind: str) -> list[Row]:
    return rows_of("check", kind=kind)


def fla() -> str:
    """The same of flash-linear-attention's families, and why others were not asked."""
    rows = rows_of("check_fla")
    left = [f"- `{row['family']}`: {row['reason']}" for row in rows if "reason" in row]
    asked = _matrix([row for row in rows if "findings" in row])
    return "\n\n".join([f"{origin('check_fla')}.", asked, *left])


def _matrix(rows: list[Row], changed: list[Row] | None = None) -> str:
    """A line for all families with the same verdicts, a column for each law that some break."""
    before, after = _verdicts(rows), _verdicts(changed or rows)
    tried = [law.name for law in LAWS if law.name in before[0]]
    by_law = {
        name: [_change(_cell(a[name]), _cell(b[name])) for a, b in zip(before, after, strict=True)]
        for name in tried
    }
    held = [name for name in tried if set(by_law[name]) <= {"✓", ""} and "✓" in by_law[name]]
    refused = [name for name in tried if set(by_law[name]) == {SHORT["refused"]}]
    shown = [name for name in tried if set(by_law[name]) - {"✓", "", SHORT["refused"]}]
    lines: dict[tuple[str, ...], list[str]] = {}
    for n, row in enumerate(rows):
        lines.setdefault(tuple(by_law[name][n] for name in shown), []).append(row["family"])
    said = [f"All hold: {', '.join(held)}.", f"All refuse: {', '.join(refused)}."]
    body = ([_joined(names), *cells] for cells, names in lines.items())
    return "\n\n".join([table(("", *shown), body), *said[: 1 + bool(refused)]])


def _joined(names: list[str]) -> str:
    """The names, or how many they are where no reader looks for one."""
    return f"{len(names)} families" if len(names) > 30 else ", ".join(f"`{n}`" for n in names)


def _verdicts(rows: list[Row]) -> list[dict[str, Row]]:
    return [{one["law"]: one for one in row["findings"]} for row in rows]


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before} → {after}"


def _cell(finding: Row) -> str:
    return SHORT.get(finding["verdict"]) if finding["verdict"] in SHORT else _failure(finding)


def _failure(finding: Row) -> str:
    by = "raises" if finding["reason"] else "not finite"
    difference = finding["difference"]
    return f"**{by if difference is None else f'{difference:.0e}'}**"


def reasons() -> str:
    """What was raised, where anything was, by the families that raised it."""
    return "\n".join(_reasons())


def _reasons() -> Iterator[str]:
    who: dict[str, dict[str, None]] = {}
    laws: dict[str, dict[str, None]] = {}
    for row in rows_of("check"):
        for finding in row["findings"]:
            if finding["reason"] and finding["verdict"] != "not asked":
                reason = finding["reason"].replace(f" {row['family']} ", " … ")
                name = "ours" if row["kind"] == "ours" else f"`{row['family']}`"
                who.setdefault(reason, {})[name] = None
                laws.setdefault(reason, {})[finding["law"]] = None
    for reason, names in who.items():
        yield f"- {', '.join(names)}: {reason} ({', '.join(laws[reason])})"


PAGE = Page("check", (laws, versions, theirs, fla, ours, reasons))
