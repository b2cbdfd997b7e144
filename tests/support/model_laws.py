"""What must hold of every language model of ours, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastweights import FastWeightsCache, FastWeightsForCausalLM
from tiny import tokens
from tolerances import array, assert_close


def moved(model: FastWeightsForCausalLM) -> FastWeightsForCausalLM:
    """The model, none of whose parameters is at its start."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(parameter.dtype), alpha=0.2)
    return model


def assert_read_in_any_cut(model: FastWeightsForCausalLM) -> None:
    """Padded, in pieces and packed, a sequence has the logits that it has alone."""
    ids, cache = tokens(2, 9), FastWeightsCache()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    padded = model(ids, attention_mask=mask).logits
    assert_close(padded[0, 4:], array(model(ids[:1, 4:]).logits[0]), "padded")
    assert_close(padded[1], array(model(ids[1:]).logits[0]), "beside a padded one")
    pieces = [
        model(ids[:, i:j], attention_mask=mask[:, :j], past_key_values=cache, use_cache=True).logits
        for i, j in ((0, 1), (1, 5), (5, 6), (6, 9))
    ]
    assert cache.get_seq_length() == 9
    assert_close(torch.cat(pieces, 1)[mask.bool()], array(padded[mask.bool()]), "cut")
    packed = model(ids, segments=torch.tensor([[5, 5, 5, 5, 2, 2, 2, 2, 2]] * 2)).logits
    apart = torch.cat([model(ids[:, :4]).logits, model(ids[:, 4:]).logits], 1)
    assert_close(packed, array(apart), "packed")


def read_in_parts(
    call: Callable[..., tuple[Tensor, ...]], ids: Tensor, lengths: list[int], states: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The logits of parts of a text by a program, one after another, and the states behind them."""
    found = []
    with torch.no_grad():
        for part in ids.split(lengths, 1):
            logits, *states = call(part, *states)
            found.append(logits)
    return torch.cat(found, 1), states


def assert_checkpointed_gradients(model: FastWeightsForCausalLM, *, reentrant: bool) -> None:
    """Checkpointed layers have the gradients of others, and none is zero."""
    model, ids = model.train(), tokens(2, 6)
    want = _gradients(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = _gradients(model, ids)
    assert found.keys() == want.keys() == dict(model.named_parameters()).keys()
    for name, gradient in want.items():
        assert gradient.any()
        assert_close(found[name], array(gradient), name)


def _gradients(model: FastWeightsForCausalLM, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
