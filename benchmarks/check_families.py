"""What holds of every sound language model, tried on transformers' linear families and on ours.

    python benchmarks/check_families.py [--out FILE] [--only mamba2,metala]

Small models with random weights: transformers' as they are and, where `patch_transformers` has
functions for them, patched; and one of every mixer of ours. Writes JSON, family by family.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from fastweights.engines.transformers import patch_transformers
from fastweights.lab.bench.machine import provenance
from fastweights.lab.check import check_model
from fastweights.mixers import MIXERS
from fastweights.training.loop.files import write_json
from tiny import tiny
from transformers_families import build_family, present_families


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/check.json"))
    parser.add_argument("--only", help="families and mixers, by ,")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    header = provenance()
    rows: list[dict[str, Any]] = []
    for family, kind, findings in _checked(chosen.only and chosen.only.split(",")):
        rows.append({"family": family, "kind": kind, "findings": findings})
        write_json(chosen.out, {"header": header, "rows": rows})
        broken = [found["law"] for found in findings if found["breach"]]
        print(f"{kind:13} {family:18} breaks {', '.join(broken) or 'nothing'}", flush=True)


def _checked(wanted: list[str] | None) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    for family in present_families():
        if wanted is None or family in wanted:
            model = build_family(family)
            yield family, "transformers", _records(model)
            with patch_transformers(model) as patch:
                if patch.replaced:
                    yield family, "patched", _records(model)
    for name in MIXERS:
        if wanted is None or name in wanted:
            yield name, "ours", _records(partial(tiny, name, torch.float32)())


def _records(model: Any) -> list[dict[str, Any]]:
    return [finding.record() for finding in check_model(model)]


if __name__ == "__main__":
    main()
