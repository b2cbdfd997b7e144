"""Initial weights of a softmax model in which heads already look for what followed the same tokens
before, so that a small model learns to recall in minutes.

A training of billions of tokens forms such *induction heads* (Olsson et al., 2022): in one layer
heads attend to the tokens one and two before, in the next one a head attends to where the same two
tokens stood, and copies what came after them. Here they are random codes in fixed places of the
residual stream; training does the rest.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

HIGH = 6
"""Frequencies of the rotary positions, from the highest, by which the heads of layer 0 count."""
PEAK = 20.0
"""Score of the key that a head looks for, of which the others are some below."""
SIZE, CONSTANT, CODE, COPIED = 0.5, 4.0, 2.0, 12.0
"""Standard deviation of embeddings, and relative to it the constant that they get, codes, copy."""
HEAD = 0.06
"""Size of the output's weights relative to embeddings."""


@torch.no_grad()
def set_induction_heads(model: Any) -> Any:
    """Change the initial weights of a Llama or Qwen3 of transformers, and return it.

    Heads 0 and 1 of layers 0 and 1, which share a key head, are set, the embeddings, of which
    dimension 0 becomes a constant, and those of the output, which are weights of their own.

    Raises:
        ValueError: If two heads do not share a key head, or the model is narrower than three heads.
    """
    config, layers = model.config, model.model.layers
    first, second = (_Heads(layer.self_attn, config.hidden_size) for layer in layers[:2])
    if len(first.q) < 2 * len(first.k) or config.hidden_size < 3 * first.size:
        raise ValueError(
            "induction heads need two heads for every key head, and a width of three heads or more"
        )
    embeddings = model.get_input_embeddings().weight
    embeddings.normal_(0.0, SIZE)
    model.get_output_embeddings().weight.copy_(HEAD * embeddings)
    embeddings[:, 0] = CONSTANT * SIZE
    token, before, before_that = _codes(config.hidden_size)[:, : 3 * first.size].split(
        first.size, 1
    )
    copy = _codes(config.hidden_size)[:, : first.size]
    first.look_back(model.model.rotary_emb.inv_freq[:HIGH], CONSTANT)
    first.read_and_write(token, [CODE * SIZE * before, CODE * SIZE * before_that])
    second.look_for(token, before, before_that)
    second.read_and_write(copy, [COPIED / 2 * SIZE * copy] * 2)
    return model


def _codes(width: int) -> Tensor:
    """Orthonormal columns ``[width width]``, without the dimension of the constant."""
    codes = torch.linalg.qr(torch.randn(width, width))[0]
    codes[0] = 0
    return codes


class _Heads:
    """Heads 0 and 1 of an attention, and the key head that they share: weights ``[h d n]``."""

    def __init__(self, attention: Any, width: int) -> None:
        self.size = attention.head_dim
        self.q, self.k, self.v = (
            getattr(attention, f"{name}_proj").weight.view(-1, self.size, width) for name in "qkv"
        )
        self.o = attention.o_proj.weight.view(width, -1, self.size)
        names = ("q_norm", "k_norm")
        self.norms = [getattr(attention, name).weight for name in names if hasattr(attention, name)]

    def look_back(self, frequencies: Tensor, constant: float) -> None:
        """Head 0 attends to the token before, head 1 to the one before that: the rotary positions
        turn a constant query, which is turned back by so many tokens.
        """
        count = len(frequencies)
        cosines, sines = slice(count), slice(self.size // 2, self.size // 2 + count)
        scale = math.sqrt(PEAK * math.sqrt(self.size) / count) / constant
        self.k[0, cosines, 0] = scale
        for head in (0, 1):
            self.q[head, cosines, 0] = scale * torch.cos((head + 1) * frequencies)
            self.q[head, sines, 0] = -scale * torch.sin((head + 1) * frequencies)
        self._amplify([*range(count), *range(self.size // 2, self.size // 2 + count)])

    def look_for(self, token: Tensor, before: Tensor, before_that: Tensor) -> None:
        """Attend to what followed the present token, best where the one before it is the same too;
        in the lower frequencies, which turn little.
        """
        half = self.size // 2
        near = [*range(half // 2, 3 * half // 4), *range(3 * half // 2, 7 * half // 4)]
        far = [*range(3 * half // 4, half), *range(7 * half // 4, 2 * half)]
        scale = math.sqrt(3 * PEAK * math.sqrt(self.size) / len(near + far))
        self.q[:2], self.k[0] = 0, 0
        for places, asked, found in ((near, token, before), (far, before, before_that)):
            self.q[:2, places] = scale * asked.T[places]
            self.k[0, places] = scale * found.T[places]
        self._amplify(near + far)

    def read_and_write(self, read: Tensor, written: list[Tensor]) -> None:
        self.v[0] = read.T
        for head, columns in enumerate(written):
            self.o[:, head] = columns

    def _amplify(self, places: list[int]) -> None:
        """A norm makes queries and keys equally long: its weights take the scale's part."""
        for weight in self.norms:
            weight[places] = math.sqrt(PEAK / math.sqrt(self.size))
