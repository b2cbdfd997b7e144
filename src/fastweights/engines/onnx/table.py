# pyright: reportMissingImports=false
"""Every mixer as an ONNX graph: what it holds, how far ONNX Runtime is from our own decoding, and
how fast it is beside it.

    python -m fastweights.engines.onnx.table [MIXER …] [--width 64] [--domain ai.onnx]
"""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser
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

VOCABULARY = 64
PROMPT, DECODED = 9, 64
ROUNDS = 5


def row(mixer: str, width: int, domain: str) -> dict[str, Any]:
    """What is found of one mixer, in a model of one layer of random weights.

    ``error`` is the largest difference of a logit over a prompt and 64 tokens behind it, relative
    to the largest logit; ``speed`` the tokens per second of ONNX Runtime over those of our
    `Decoder`, both on one thread, in alternating rounds.
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
    ratio = median(onnx / own for onnx, own in speeds)
    return {"mixer": mixer, "nodes": nodes, "error": error, "speed": ratio}


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
