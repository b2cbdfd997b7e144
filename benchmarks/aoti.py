"""Every mixer exported and compiled ahead of time, beside our own decoding; writes JSON.

    python benchmarks/aoti.py --out benchmarks/results/aoti.json [MIXER …]

A model of one layer (width 16, float32, random weights) for each mixer: the largest difference of a
logit over a prompt of 150 tokens and 64 decoded ones, relative to the largest logit, of the
exported programs and of the compiled ones; tokens per second of the compiled ones over ours, of the
prompt and of the others, one thread, the median of alternating rounds; the seconds that
compiling took. Rows that the file has are kept: it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch._inductor.package import load_package

from fastweights.engines.aoti import export_programs, read_by, write_package
from fastweights.engines.exported.comparison import EngineComparison, one_layer
from fastweights.engines.exported.errors import ExportError
from fastweights.lab.bench.machine import provenance
from fastweights.mixers import MIXERS
from fastweights.models import FastWeightsForCausalLM
from fastweights.training.loop.files import read_json, write_json

WIDTH, PROMPT = 16, 150
Row = dict[str, Any]


def row(mixer: str) -> Row:
    """What is found of a mixer, or why there is nothing."""
    try:
        return {"mixer": mixer, **_measure(one_layer(mixer, WIDTH))}
    except ExportError as error:
        return {"mixer": mixer, "reason": str(error)}


def _measure(model: FastWeightsForCausalLM) -> Row:
    comparison = EngineComparison(PROMPT)
    graphs = {name: p.module(check_guards=False) for name, p in export_programs(model).items()}
    exported = EngineComparison(PROMPT, rounds=1).compare(model, read_by(graphs))
    with TemporaryDirectory() as folder:
        out = Path(folder, "model.pt2")
        start = perf_counter()
        write_package(model, out)
        seconds = perf_counter() - start
        compiled = {name: load_package(str(out), name) for name in graphs}
        found = comparison.compare(model, read_by(compiled))
    speeds = {"compiled": found.theirs._asdict(), "fastweights": found.ours._asdict()}
    errors = {"exported": exported.error, "compiled": found.error}
    return {"errors": errors, "seconds": seconds, "tokens_per_second": speeds}


def main() -> None:
    parser = argparse.ArgumentParser(description="every mixer, compiled ahead of time")
    parser.add_argument("mixers", nargs="*", default=list(MIXERS))
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    there = read_json(chosen.out)["rows"] if chosen.out.exists() else []
    rows = {found["mixer"]: found for found in there}
    for mixer in chosen.mixers:
        if mixer in rows:
            continue
        rows[mixer] = row(mixer)
        print(rows[mixer], flush=True)
        in_order = [rows[name] for name in MIXERS if name in rows]
        write_json(chosen.out, {**provenance(), "rows": in_order})


if __name__ == "__main__":
    main()
