"""Softmax models of transformers, small enough to build for every test, and text for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fastweights.linearize import AttentionCall, LinearAttentionConfig, Mode, linearize
from fastweights.training.data.documents import Stream
from fastweights.training.data.tokens import Sequences
from turned import turned

VOCABULARY = 37
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(
    layers: int = 2, dtype: torch.dtype = torch.float64, **fields: object
) -> LlamaForCausalLM:
    """A Llama with random weights, the same for the same arguments."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **{**SIZES, "vocab_size": VOCABULARY, "num_hidden_layers": layers, **fields}
    )
    config.initializer_range = 0.3
    return LlamaForCausalLM(config).to(dtype).eval()


def linear_llama(
    analog: LinearAttentionConfig = LinearAttentionConfig(window=3),
    layers: int = 2,
    dtype: torch.dtype = torch.float64,
    chosen: list[int] | None = None,
    **fields: object,
):
    """The same, its `chosen` layers (all of them) linearized; their branches in `dtype` too."""
    return turned(linearize(llama(layers, dtype, **fields), analog, chosen).to(dtype))


def disturbed(model):
    """A model whose adapters are not zero any more."""
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3)
    return model.eval()


def sequences(count: int = 400, documents: int = 4, seed: int = 0) -> Sequences:
    """Random tokens with a rhythm, in documents of equal length, half of every document a
    response.
    """
    random = np.random.default_rng(seed)
    tokens = (np.arange(count) * 5 + random.integers(0, 3, count)) % VOCABULARY
    place, document = (
        np.arange(count) % (count // documents),
        np.arange(count) // (count // documents),
    )
    return Sequences(
        tokens.astype(np.int32), place * 2 >= count // documents, document.astype(np.int32)
    )


def stream(length: int = 16, **settings: bool) -> Stream:
    return Stream(sequences(), length, 0, **settings)


def batch(padded: bool = False) -> dict[str, Tensor]:
    """Two sequences of 12 tokens, the first of them with 5 of padding if there is any."""
    ids = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return {"input_ids": ids, **({"attention_mask": mask} if padded else {})}


class Recorded(Mode):
    """Softmax passed on; keeps what every layer was called with, and gave."""

    constant = False

    def __init__(self) -> None:
        self.calls = dict[int, tuple[AttentionCall, Tensor]]()

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls[call.layer] = call, call.softmax()
        return self.calls[call.layer][1]
