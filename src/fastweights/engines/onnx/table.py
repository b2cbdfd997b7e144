# pyright: reportMissingImports=false
"""Every mixer as an ONNX graph: what it holds, how far ONNX Runtime is from our own decoding, and
how fast it is beside it.

    python -m fastweights.engines.onnx.table [MIXER …] [--width 64] [--domain ai.onnx]
"""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.engines.exported.comparison import Comparison, one_layer
from fastweights.engines.exported.errors import ExportError
from fastweights.engines.onnx.domains import DOMAINS
from fastweights.engines.onnx.write import write_onnx
from fastweights.mixers import MIXERS

PROMPT = 9


def row(mixer: str, width: int, domain: str) -> dict[str, Any]:
    """What is found of one mixer, in a model of one layer of random weights.

    ``error`` is the largest difference of a logit over a prompt and 64 tokens behind it, relative
    to the largest logit; ``speed`` the tokens per second of ONNX Runtime over those of our
    `Decoder`, both on one thread, in alternating rounds.
    """
    model = one_layer(mixer, width)
    with TemporaryDirectory() as folder:
        out = Path(folder, "model.onnx")
        try:
            nodes = write_onnx(model, out, DOMAINS[domain])
        except ExportError as error:
            return {"mixer": mixer, "reason": str(error)}
        session = open_session(out)
    error, _, speed = Comparison(PROMPT).compare(model, partial(_run, session))
    return {"mixer": mixer, "nodes": nodes, "error": error, "speed": speed}


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
    """Print a line of JSON per mixer."""
    parser = ArgumentParser(description="every mixer as an ONNX graph")
    parser.add_argument("mixers", nargs="*", default=list(MIXERS))
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--domain", choices=DOMAINS, default="com.microsoft")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for mixer in chosen.mixers:
        print(json.dumps(row(mixer, chosen.width, chosen.domain)), flush=True)


if __name__ == "__main__":
    main()
