"""How long each head of a model remembers, what it attends to, and a page of pictures."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fastweights import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.analysis.profile import ProfileLimits, profile
from fastweights.analysis.report import write_report

torch.manual_seed(0)
config = FastWeightsConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=3,
    mixers=[{"name": name, "heads": 2} for name in ("metala", "gla", "gated_deltanet")],
)
model = FastWeightsForCausalLM(config).eval()
found = profile(
    "example", model, torch.randint(0, 64, (1, 96)), ProfileLimits(heads=2, window=32, cuts=2)
)

for layer in found.layers:
    half_life, used = layer.memory.half_lives.median(), layer.memory.dimensions.mean()
    near = layer.phi.abs().tril().triu(-7).sum() / layer.phi.abs().sum()
    print(
        f"{layer.mixer}: half-life {half_life:.1f} tokens, {used:.1f} dimensions of the state in"
        f" use, {near:.0%} of the map within 8 tokens"
    )

with TemporaryDirectory() as folder:
    page = write_report([found], [], Path(folder))
    print(f"{page.name}: {page.stat().st_size:,} bytes, with all its pictures")
