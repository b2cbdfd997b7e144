"""fastweights check"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastweights.cli.load import load_tokenizer, load_weights
from fastweights.lab.bench.machine import versions
from fastweights.lab.check import LAWS, Finding, Law, Verdict, check_model, tolerance_of
from fastweights.training.loop.files import write_json

STYLES = {Verdict.FAILS: "bold red", Verdict.HOLDS: "green"}


def check(chosen: Namespace, console: Console) -> int:
    """Print a verdict for each law; the status is 1 if the model breaks one that it should obey."""
    laws = _laws(chosen.only)
    if chosen.json is not None and not chosen.json.absolute().parent.is_dir():
        raise ValueError(f"--json {chosen.json}: there is no folder {chosen.json.parent}; make it")
    model = load_weights(chosen.checkpoint, chosen.device.torch())
    model = model if chosen.dtype is None else model.to(getattr(torch, chosen.dtype))
    tolerance = chosen.tolerance or tolerance_of(model.dtype)
    with console.status("checking") as status:
        found = check_model(
            model,
            tokenizer=load_tokenizer(chosen.checkpoint),
            tolerance=tolerance,
            longest=chosen.length,
            laws=laws,
            watch=lambda law: status.update(f"checking: {law.name}"),
        )
    console.print(_table(found))
    broken = [finding.law for finding in found if finding.is_breach]
    for law in broken:
        console.print(f"broken: {law.says}")
    if chosen.json is not None:
        about = {"model": chosen.checkpoint, "type": model.config.model_type}
        numbers = {"dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}
        rows = [finding.record() for finding in found]
        write_json(
            chosen.json,
            {**about, **numbers, "tolerance": tolerance, "versions": versions(), "findings": rows},
        )
    return int(bool(broken))


def _laws(words: str | None) -> Sequence[Law]:
    if words is None:
        return LAWS
    wanted = [word.strip() for word in words.split(",") if word.strip()]
    found = [law for law in LAWS if any(word in law.name for word in wanted)]
    if not found:
        names = ", ".join(law.name for law in LAWS)
        raise ValueError(f"no law has {words!r} in its name; there are {names}")
    return found


def _table(found: Sequence[Finding]) -> Table:
    table = Table(box=box.SIMPLE)
    for column in ("law", "verdict", "difference", "smallest example that fails"):
        table.add_column(column, justify="right" if column == "difference" else "left")
    for finding in found:
        verdict = Text(finding.verdict.value, STYLES.get(finding.verdict, ""))
        table.add_row(finding.law.name, verdict, _difference(finding), _where(finding))
    return table


def _difference(finding: Finding) -> str:
    return "" if finding.difference is None else f"{finding.difference:.1e}"


def _where(finding: Finding) -> str:
    said: list[Any] = [one for one in (finding.example, finding.reason) if one is not None]
    return ": ".join(map(str, said))
