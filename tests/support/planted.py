"""A Llama whose weights are set by hand so that one layer recalls what stood far back."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fastweights.linearize import LinearAttentionConfig, branches, linearize

SYMBOLS, HEAD, BASE = 16, 64, 1e8
PREVIOUS, INDUCTION, LAYERS = 0, 2, 4
"""Layer 0 says which token stood before each, layer 2 what followed when the present one was there
before; layers 1 and 3 hardly do anything."""

TOKEN, BEFORE, AFTER = (slice(n * SYMBOLS, (n + 1) * SYMBOLS) for n in range(3))
ONE = 3 * SYMBOLS
"""Channels of the stream: the token, the one before it, the prediction, and a constant."""


def planted_llama(vocabulary: int = SYMBOLS, first: int = 0) -> LlamaForCausalLM:
    """The softmax model, which predicts every token that it has read before in the same order.

    It knows the symbols from `first` on; the rest of the vocabulary are all the same to it.
    """
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD,
        rope_theta=BASE,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).double().eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.zero_()
    eye = torch.eye(SYMBOLS, dtype=torch.float64)
    known = slice(first, first + SYMBOLS)
    model.model.embed_tokens.weight[known, TOKEN] = eye
    model.model.embed_tokens.weight[:, ONE] = 1
    model.lm_head.weight[known, AFTER] = 3 * eye
    for number, layer in enumerate(model.model.layers):
        {PREVIOUS: _look_at_previous, INDUCTION: _look_after_same}.get(number, _look_anywhere)(
            layer.self_attn, eye
        )
    return model


def planted_student(window: int = 4) -> Any:
    """The same, all layers linear and without a trace of what is before their windows."""
    model = linearize(planted_llama(), LinearAttentionConfig("relu", window=window)).double()
    with torch.no_grad():
        for branch in branches(model).values():
            branch.phi_q.W.zero_()
    return model


def repeated_symbols(count: int = 3, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Sequences in which all symbols stand in some order, and then in the same order again, but for
    the first, as nothing announces it; with the distance that each token is recalled from."""
    generator = torch.Generator().manual_seed(seed)
    orders = (torch.randperm(SYMBOLS, generator=generator)[None] for _ in range(count))
    distance = torch.tensor([[0] * (SYMBOLS + 1) + [SYMBOLS] * (SYMBOLS - 1)])
    return [{"input_ids": torch.cat([x, x], 1), "distance": distance} for x in orders]


def _look_at_previous(attention: Any, eye: torch.Tensor) -> None:
    """Constant queries, and keys turned by one place: q·k is largest one token back."""
    fast = HEAD // 4
    turned = BASE ** (-torch.arange(fast, dtype=torch.float64) * 2 / HEAD)
    attention.q_proj.weight[:fast, ONE] = 3
    attention.k_proj.weight[:fast, ONE] = 3 * turned.cos()
    attention.k_proj.weight[HEAD // 2 : HEAD // 2 + fast, ONE] = 3 * turned.sin()
    _pass_on(attention, BEFORE, eye)


def _look_after_same(attention: Any, eye: torch.Tensor) -> None:
    """The present token meets those whose predecessor it was, in channels that hardly turn."""
    slow = slice(HEAD // 4, HEAD // 4 + SYMBOLS)
    attention.q_proj.weight[slow, TOKEN] = 6 * eye
    attention.k_proj.weight[slow, BEFORE] = 6 * eye
    _pass_on(attention, AFTER, eye)


def _look_anywhere(attention: Any, eye: torch.Tensor) -> None:
    _pass_on(attention, AFTER, 0.05 * eye)


def _pass_on(attention: Any, to: slice, eye: torch.Tensor) -> None:
    """The token that is looked at goes to these channels."""
    attention.v_proj.weight[:SYMBOLS, TOKEN] = torch.eye(SYMBOLS, dtype=torch.float64)
    attention.o_proj.weight[to, :SYMBOLS] = eye
