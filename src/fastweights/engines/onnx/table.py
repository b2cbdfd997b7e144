# pyright: reportMissingImports=false
"""Every mixer as an ONNX graph: what it holds, how far ONNX Runtime is from our own model, and how
fast it decodes beside it.

    python -m fastweights.engines.onnx.table [MIXER …] [--width 256] [--domain ai.onnx] [--out FILE]

A line of JSON per mixer, of a model of one layer with random weights; a file that is there is gone
on with, and rows of other versions, of another width or processor are measured anew:

    python -m fastweights.engines.onnx.table --out benchmarks/results/onnx.json
"""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.engines.exported.comparison import EngineComparison, one_layer
from fastweights.engines.exported.errors import ExportError
from fastweights.engines.onnx.domains import DOMAINS
from fastweights.engines.onnx.write import write_onnx
from fastweights.environment import commit, cpu_name
from fastweights.mixers import MIXERS
from fastweights.training.loop.files import read_json, write_json

PROMPT = 9
PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime")
Row = dict[str, Any]


def row(mixer: str, width: int, domain: str) -> Row:
    """What is found of one mixer, in a model of one layer of random weights.

    Returns:
        ``nodes``, how many there are of each kind; ``error``, the largest difference of a logit
        over a prompt and 64 tokens behind it, relative to the largest logit; ``tokens_per_second``
        of ONNX Runtime and of our `Decoder`, both on one thread, the medians of alternating rounds.
        Or ``reason``, why there is no graph
    """
    model = one_layer(mixer, width)
    with TemporaryDirectory() as folder:
        out = Path(folder, "model.onnx")
        try:
            nodes = write_onnx(model, out, DOMAINS[domain])
        except ExportError as error:
            return {"mixer": mixer, "reason": str(error)}
        session = open_session(out)
    error, onnx, own = EngineComparison(PROMPT).compare(model, partial(_run, session))
    speed = {"onnxruntime": onnx.decode, "fastweights": own.decode}
    return {"mixer": mixer, "nodes": nodes, "error": error, "tokens_per_second": speed}


def open_session(path: Path) -> Any:
    """ONNX Runtime on one thread of the CPU."""
    os.environ.setdefault("ALLOW_RELEASED_ONNX_OPSET_ONLY", "0")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _run(session: Any, ids: Tensor, states: list[Any]) -> tuple[Tensor, list[Any]]:
    """The logits, and the states as NumPy's arrays."""
    past = {f"past_{i}": np.asarray(state) for i, state in enumerate(states)}
    logits, *after = session.run(None, {"input_ids": ids.numpy(), **past})
    return torch.from_numpy(logits), after


def main() -> None:
    """Print a line of JSON per mixer, and write them all."""
    parser = ArgumentParser(description="every mixer as an ONNX graph")
    parser.add_argument("mixers", nargs="*", default=list(MIXERS))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--domain", choices=DOMAINS, default="com.microsoft")
    parser.add_argument("--out", type=Path, help="file of all rows, which is gone on with")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = _kept(chosen)
    for mixer in chosen.mixers:
        if mixer in rows:
            continue
        rows[mixer] = row(mixer, chosen.width, chosen.domain)
        print(json.dumps(rows[mixer]), flush=True)
        if chosen.out is not None:
            order = [rows[name] for name in MIXERS if name in rows]
            write_json(chosen.out, {**_header(chosen), "commit": commit(), "rows": order})


def _header(chosen: Namespace) -> Row:
    """What rows have to have in common."""
    return {
        "width": chosen.width,
        "domain": chosen.domain,
        "cpu": cpu_name(),
        "versions": {package: version(package) for package in PACKAGES},
    }


def _kept(chosen: Namespace) -> dict[str, Row]:
    """The rows of the file that are as good as new ones."""
    if chosen.out is None or not chosen.out.exists():
        return {}
    found = read_json(chosen.out)
    same = all(found[name] == value for name, value in _header(chosen).items())
    return {row["mixer"]: row for row in found["rows"]} if same else {}


if __name__ == "__main__":
    main()
