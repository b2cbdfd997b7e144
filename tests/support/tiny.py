"""Language models small enough to build for every test, one per mixer and a hybrid."""

from __future__ import annotations

import torch

from fastweights import MIXERS, FastWeightsConfig, FastWeightsForCausalLM

VOCABULARY = 31
HYBRID = [{"name": "metala"}, {"name": "softmax", "window": 4}, {"name": "gated_deltanet"}]
LAYERS: dict[str, list[dict[str, object]]] = {
    **{name: [{"name": name}] for name in MIXERS},
    "hybrid": HYBRID,
}


def tiny_config(layers: str = "metala", **fields: object) -> FastWeightsConfig:
    mixers = LAYERS[layers]
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": max(2, len(mixers))}
    return FastWeightsConfig(**{**sizes, "mixers": mixers, **fields})


def tiny(
    layers: str = "metala", dtype: torch.dtype = torch.float64, **fields: object
) -> FastWeightsForCausalLM:
    """A model in eval mode, the same for the same arguments."""
    torch.manual_seed(0)
    return FastWeightsForCausalLM(tiny_config(layers, **fields)).to(dtype).eval()


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Token ids above 0, which the tests take for padding."""
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
