"""Check, time and decide on one NVIDIA GPU, each stage in under ten minutes:

    PYTHONPATH=src python benchmarks/gpu_day.py correct --out runs/gpu

then `times` and `decide`. The same command goes on where it was stopped, and tries again what
failed. What each stage does is told in docs/gpu-checks.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from fastweights.lab.bench.day.plan import FAMILIES, MODELS, SUITE, DayPlan
from fastweights.lab.bench.day.stages import STAGES, run_stage
from fastweights.lab.bench.day.summary import summarize


def main(arguments: list[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    plan = DayPlan.rehearsal() if chosen.rehearse else DayPlan()
    plan = replace(plan, seconds=chosen.seconds, model=chosen.model)
    start = time.monotonic()
    try:
        ledger = run_stage(STAGES[chosen.stage], plan, chosen.out, chosen.without)
    except ValueError as error:
        sys.stderr.write(f"benchmarks/gpu_day.py: {error}\n")
        return 2
    text = summarize(chosen.stage, ledger, plan)
    (chosen.out / f"{chosen.stage}.txt").write_text(text, encoding="utf-8")
    sys.stdout.write(f"{time.monotonic() - start:.0f} s\n{text}")
    return 1 if ledger.faults() or ledger.left() else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--without",
        nargs="+",
        default=(),
        choices=(*FAMILIES, SUITE, MODELS),
        metavar="FAMILY",
        help=f"families to leave out: {', '.join((*FAMILIES, SUITE, MODELS))}",
    )
    parser.add_argument(
        "--seconds", type=float, default=DayPlan.seconds, help="default: %(default)s"
    )
    parser.add_argument("--model", type=Path, help="softmax model to linearize")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
