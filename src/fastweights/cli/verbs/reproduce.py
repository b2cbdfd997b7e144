"""fastweights reproduce"""

from __future__ import annotations

import os
from argparse import Namespace
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastweights.cli.progress import WIDE
from fastweights.lab.reproduce import (
    CLAIMS,
    Check,
    Claim,
    ClaimVerdict,
    Measures,
    OtherSettings,
    Outcome,
    Trial,
    TrialContext,
    find_claim,
)
from fastweights.lab.reproduce import reproduce as test_claim
from fastweights.lab.reproduce.judge import lack_of_rates
from fastweights.lab.reproduce.measures import At, Sample
from fastweights.lab.sweep import follow, leading
from fastweights.training.loop.identity import key_of
from fastweights.training.loop.processes import Alone, Processes, join_processes

ALL = "all"
COLOURS = {
    ClaimVerdict.HOLDS: "green",
    ClaimVerdict.FAILS: "red",
    ClaimVerdict.OPEN: "yellow",
    ClaimVerdict.UNTESTED: "dim",
}


def reproduce(chosen: Namespace, console: Console) -> None:
    """Test one claim or all, or list them."""
    if not console.is_terminal:
        console.width = WIDE
    if chosen.claim is None:
        console.print(_list())
        return
    processes = _processes(chosen)
    if not processes.is_first:
        follow(processes)
        return
    with leading(processes):
        if chosen.claim == ALL:
            _test_all(chosen, processes, console)
        else:
            other = _settings(chosen)
            out = chosen.out or Path("runs", "reproduce", _folder(chosen.claim, chosen.size, other))
            _test(chosen.claim, out, chosen, processes, console)


def _processes(chosen: Namespace) -> Processes:
    """Those that a launcher has started, or this one alone."""
    device = chosen.device.torch()
    if "RANK" not in os.environ:
        return Alone(device)
    return join_processes(device if device.type == "cpu" else None)


def _settings(chosen: Namespace) -> OtherSettings:
    return OtherSettings(chosen.rates, chosen.seeds, chosen.steps)


def _test(name: str, out: Path, chosen: Namespace, processes: Processes, console: Console) -> None:
    claim = find_claim(name).with_settings(chosen.size, _settings(chosen))
    if reason := lack_of_rates(claim.at(chosen.size).experiment):
        console.print(f"no verdict can come of this: {reason}; --rates has others", soft_wrap=True)
    shared, device = out.parent / "shared", processes.device
    place = TrialContext(shared, device, chosen.data, chosen.workers, processes)
    outcome = test_claim(name, claim, chosen.size, out, place, partial(_begin, console))
    _print(outcome, console)
    console.print(f"{out / 'outcome.json'}, {out / 'picture.png'}", soft_wrap=True)


def _test_all(chosen: Namespace, processes: Processes, console: Console) -> None:
    """The shortest first; one that cannot be tested does not keep the others from it."""
    out, other, reasons = chosen.out or Path("runs", "reproduce"), _settings(chosen), {}
    names = sorted(CLAIMS, key=lambda name: CLAIMS[name].at(chosen.size).minutes)
    for number, name in enumerate(names, 1):
        console.rule(f"{name}, {number} of {len(names)}", align="left")
        try:
            _test(name, out / _folder(name, chosen.size, other), chosen, processes, console)
        except (ValueError, RuntimeError) as error:
            reasons[name] = error
            console.print(Text(str(error), style="red"), soft_wrap=True)
    if reasons:
        raise ValueError(
            f"{len(reasons)} of {len(names)} claims could not be tested: "
            + "; ".join(f"{name}: {error}" for name, error in reasons.items())
            + ". The others are done, and the same command goes on with these"
        )


def _folder(claim: str, size: str, other: OtherSettings) -> str:
    """The claim's own settings have a folder of their own."""
    return f"{claim}-{size}" + (f"-{key_of(other)}" if other.given else "")


def _list() -> Table:
    table = Table("claim", "paper", "where", "statement", box=box.SIMPLE)
    for size in ("cpu", "gpu", "paper"):
        table.add_column(f"{size} [min]", justify="right")
    for name, one in CLAIMS.items():
        minutes = (f"{size.minutes:g}" for size in one.sizes.values())
        table.add_row(name, one.paper, one.place, one.statement, *minutes)
    return table


def _begin(console: Console, trial: Trial, number: int, count: int) -> None:
    console.print(f"{number}/{count}  {trial.name}", soft_wrap=True)


def _print(outcome: Outcome, console: Console) -> None:
    console.print(
        f"{outcome.claim.paper}, {outcome.claim.place}: {outcome.claim.statement}",
        soft_wrap=True,
    )
    for quantity in outcome.measures.quantities:
        console.print(
            _numbers(outcome.claim, outcome.measures.of(quantity), quantity or outcome.claim.unit)
        )
    console.print(_checks(outcome.checks))
    verdict, tally = (
        outcome.verdict,
        ", ".join(f"{count} {name}" for name, count in outcome.tally.items()),
    )
    console.print(
        Text(verdict.value, style=COLOURS[verdict]), f"({tally}), {outcome.minutes:.1f} minutes"
    )
    for line in filter(None, (outcome.claim.remark, outcome.claim.sizes[outcome.size].note)):
        console.print(line, soft_wrap=True)


def _numbers(one: Claim, measures: Measures, title: str) -> Table:
    """Medians and ranges, each beside the number that the paper prints."""
    places = measures.places()
    table = Table(
        "",
        *("" if x is None else str(x) for x in places),
        title=title,
        box=box.SIMPLE,
        title_justify="left",
    )
    for series in measures.series:
        table.add_row(series, *(_cell(one, series, x, measures.sample(series, x)) for x in places))
    return table


def _cell(one: Claim, series: str, x: At, sample: Sample | None) -> str:
    if sample is None:
        return ""
    several = f" ({sample.low:.3g} – {sample.high:.3g})" if len(sample.values) > 1 else ""
    printed = one.figures.get(series, {}).get("" if x is None else str(x))
    return f"{sample.median:.4g}{several}" + ("" if printed is None else f" [paper {printed:g}]")


def _checks(checks: tuple[Check, ...]) -> Table:
    table = Table("statement", "difference", "interval", "", "why not", box=box.SIMPLE)
    for check in checks:
        low, middle, high = check.difference.low, check.difference.middle, check.difference.high
        verdict = Text(check.verdict.value, style=COLOURS[check.verdict])
        interval = f"{low:.3g} … {high:.3g}"
        table.add_row(check.sentence, f"{middle:.3g}", interval, verdict, check.reason)
    return table
