"""Autoencoders: all tokens of a sequence from one vector of it (MAD's compression)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils.generic import can_return_tuple

from fastweights.layers import upcast
from fastweights.models.block import normalization
from fastweights.models.classify import pool_tokens
from fastweights.models.config import FastWeightsConfig
from fastweights.models.hf import FastWeightsModel, FastWeightsPreTrainedModel
from fastweights.models.loss import IGNORE_INDEX


class FastWeightsForReconstruction(FastWeightsPreTrainedModel):
    """The pooled hidden state plus the sines and cosines of a position, through an MLP: the token
    there.

    The MLP (norm, linear, GELU, twice) and the head do not widen, and have biases (MAD,
    auto_encoder.py).
    """

    def __init__(self, config: FastWeightsConfig) -> None:
        super().__init__(config)
        self.model = FastWeightsModel(config)
        d = config.hidden_size
        layers = [(normalization(config), nn.Linear(d, d), nn.GELU()) for _ in range(2)]
        self.decoder = nn.Sequential(*layers[0], *layers[1], normalization(config))
        self.head = nn.Linear(d, config.vocab_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> CausalLMOutput:
        """Logits ``[b t vocab]`` of the tokens ``input_ids [b t]`` themselves; `labels` are aligned
        with them.
        """
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False, return_dict=True
        )
        code = pool_tokens(self.config, outputs.last_hidden_state, attention_mask)
        logits = self.head(self.decoder(code[:, None] + sinusoids(input_ids.shape[1], code)))
        loss = (
            None
            if labels is None
            else F.cross_entropy(upcast(logits).mT, labels, ignore_index=IGNORE_INDEX)
        )
        return CausalLMOutput(loss=loss, logits=logits)


def sinusoids(length: int, like: Tensor) -> Tensor:
    """``[t d]``: sines, then cosines, of positions times frequencies from 1 to 1/10000, for ``like
    [… d]``.
    """
    half = like.shape[-1] // 2
    frequencies = 10_000 ** -torch.linspace(0, 1, half, device=like.device)
    angles = torch.arange(length, device=like.device)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(like.dtype)
