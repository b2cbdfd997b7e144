"""Linear attention and a gated rule beside a window are one graph under torch.compile;
`test_linearize_windows` runs this file, away from the type checker."""

from __future__ import annotations

import torch

from families import logits, padded, student
from fastweights.linearize import LinearAttentionConfig
from tolerances import SAME, error

ANALOGS = (
    LinearAttentionConfig(window=4),
    LinearAttentionConfig(rule="gla", window=3, sinks=2),
)

if __name__ == "__main__":
    for analog in ANALOGS:
        torch.compiler.reset()
        model, inputs = student(analog=analog), padded(pad=0)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            found = compiled(**inputs, use_cache=False).logits
        assert error(found, logits(model, inputs)) <= SAME, analog
