"""Every mixer as an ONNX graph, or compiled ahead of time, beside our own decoding.

    python benchmarks/engines.py {onnx,aoti} [MIXER …] [--width 256] [--domain ai.onnx] [--out FILE]

A row per mixer, of a model of one layer with random weights, on one thread: `error`, the largest
difference of a logit over a prompt and 64 tokens behind it, relative to the largest logit;
`tokens_per_second` of the engine and of our `Decoder`, the medians of alternating rounds. Of a
graph also `nodes`, how many there are of each kind; of compiled programs `seconds` of compiling
and the errors before it. Or `reason`, why there is none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor, from_numpy

from fastweights.engines.exported.comparison import EngineComparison, one_layer
from fastweights.engines.exported.errors import ExportError
from fastweights.mixers import MIXERS
from fastweights.models import FastWeightsForCausalLM
from measuring import RESULTS, begin, options

WIDTHS = {"onnx": 256, "aoti": 16}
Row = dict[str, Any]


def by_onnx(domain: str, model: FastWeightsForCausalLM) -> Row:
    """In ONNX Runtime."""
    from fastweights.engines.onnx.domains import DOMAINS
    from fastweights.engines.onnx.write import write_onnx

    with TemporaryDirectory() as folder:
        out = Path(folder, "model.onnx")
        nodes = write_onnx(model, out, DOMAINS[domain])
        session = open_session(out)
    found = EngineComparison(9).compare(model, partial(_run, session))
    speeds = {"onnxruntime": found.theirs.decode, "fastweights": found.ours.decode}
    return {"nodes": nodes, "error": found.error, "tokens_per_second": speeds}


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
    return from_numpy(logits), after


def by_aoti(model: FastWeightsForCausalLM) -> Row:
    """Exported, and compiled by AOTInductor."""
    from torch._inductor.package import load_package

    from fastweights.engines.aoti import export_programs, read_by, write_package

    comparison = EngineComparison(150)
    graphs = {name: p.module(check_guards=False) for name, p in export_programs(model).items()}
    exported = comparison.error(model, read_by(graphs))
    with TemporaryDirectory() as folder:
        out, start = Path(folder, "model.pt2"), perf_counter()
        write_package(model, out)
        seconds = perf_counter() - start
        found = comparison.compare(
            model, read_by({name: load_package(str(out), name) for name in graphs})
        )
    speeds = {"compiled": found.theirs._asdict(), "fastweights": found.ours._asdict()}
    errors = {"exported": exported, "compiled": found.error}
    return {"errors": errors, "seconds": seconds, "tokens_per_second": speeds}


def row(mixer: str, width: int, measure: Callable[[FastWeightsForCausalLM], Row]) -> Row:
    """What is found of a mixer, or why there is nothing."""
    try:
        return {"mixer": mixer, **measure(one_layer(mixer, width))}
    except ExportError as error:
        return {"mixer": mixer, "reason": str(error)}


def main() -> None:
    parser = options(__doc__, "onnx")
    parser.add_argument("engine", choices=WIDTHS)
    parser.add_argument("mixers", nargs="*", default=list(MIXERS))
    parser.add_argument("--width", type=int, help="default: 256 for onnx, 16 for aoti")
    parser.add_argument("--domain", choices=("com.microsoft", "ai.onnx"), default="com.microsoft")
    parser.set_defaults(out=None)
    chosen = parser.parse_args()
    width = chosen.width or WIDTHS[chosen.engine]
    chosen.out = chosen.out or RESULTS / f"{chosen.engine}.json"
    report = begin(chosen.engine, chosen, width=width, domain=chosen.domain)
    measure = partial(by_onnx, chosen.domain) if chosen.engine == "onnx" else by_aoti
    for mixer in chosen.mixers:
        if not report.has(mixer):
            report.add(mixer, [row(mixer, width, measure)])


if __name__ == "__main__":
    main()
