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
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fastweights.engines.exported.program import Program
from fastweights.engines.onnx.domains import DOMAINS
from fastweights.engines.onnx.write import ExportError, write_onnx
from fastweights.generate import Decoder
from fastweights.mixers import MIXERS
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.runs.files import read_json, write_json
from fastweights.runs.packages import commit
from fastweights.runs.processor import cpu_name

VOCABULARY = 64
PROMPT, DECODED = 9, 64
ROUNDS = 5
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
    torch.manual_seed(0)
    config = FastWeightsConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=1, mixers=[{"name": mixer}]
    )
    model = FastWeightsForCausalLM(config).eval()
    with TemporaryDirectory() as folder:
        out = Path(folder, "model.onnx")
        try:
            nodes = write_onnx(model, out, DOMAINS[domain])
        except ExportError as error:
            return {"mixer": mixer, "reason": str(error)}
        session = open_session(out)
    ids = torch.randint(VOCABULARY, (1, PROMPT + DECODED))
    with torch.no_grad():
        ours = model(input_ids=ids, use_cache=False).logits
    empty = Program(model).layout.empty()
    theirs = torch.cat([logits for logits, _ in _read(session, ids, empty)], 1)
    error = float((theirs - ours).abs().max() / ours.abs().max())
    speeds = [_speeds(model, session, ids, empty) for _ in range(ROUNDS)]
    onnx, own = (median(times) for times in zip(*speeds, strict=True))
    speed = {"onnxruntime": onnx, "fastweights": own}
    return {"mixer": mixer, "nodes": nodes, "error": error, "tokens_per_second": speed}


def open_session(path: Path) -> Any:
    """ONNX Runtime on one thread of the CPU."""
    os.environ.setdefault("ALLOW_RELEASED_ONNX_OPSET_ONLY", "0")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _read(session: Any, ids: Tensor, past: list[Tensor]) -> Any:
    """(logits, states) after the prompt, and after every token behind it."""
    states = [state.numpy() for state in past]
    for piece in [ids[:, :PROMPT], *ids[:, PROMPT:].split(1, 1)]:
        named = {f"past_{i}": state for i, state in enumerate(states)}
        logits, *states = session.run(None, {"input_ids": piece.numpy(), **named})
        yield torch.from_numpy(logits), states


def _speeds(
    model: FastWeightsForCausalLM, session: Any, ids: Tensor, empty: list[Tensor]
) -> tuple[float, float]:
    """Tokens per second of ONNX Runtime and of ours."""
    reading = _read(session, ids, empty)
    next(reading)
    start = perf_counter()
    for _ in reading:
        pass
    theirs = DECODED / (perf_counter() - start)
    decoder = Decoder(model)
    decoder.read(ids[:, :PROMPT])
    start = perf_counter()
    for token in ids[:, PROMPT:].unbind(1):
        decoder.read_token(token)
    return theirs, DECODED / (perf_counter() - start)


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
