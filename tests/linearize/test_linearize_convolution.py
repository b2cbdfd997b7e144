"""Convolutions of q and k in front of a rule (LAWCAT), and what a model with them can do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from families import CONVOLVED, assert_same, generated, logits, padded, student, teacher
from fastweights.linearize import (
    CannotLinearize,
    LinearAttentionConfig,
    Teacher,
    branches,
    cache_bytes,
    convert_cache,
    linearize,
    use_mode,
)
from fastweights.linearize.convert.convolution import QueryKeyConvolution, convolve_queries_and_keys
from fastweights.linearize.distill.plan import plan
from fastweights.linearize.distill.recipe import LinearizationRecipe
from fastweights.linearize.distill.recipes import RECIPES
from tolerances import error

pytestmark = pytest.mark.sampled

each = pytest.mark.parametrize("analog", CONVOLVED.values(), ids=CONVOLVED)


def literal(x: np.ndarray, taps: np.ndarray, keep: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Σ_j w_j x_{t-j} of the tokens of one document, padding left out, channel by channel."""
    out = np.zeros_like(x)
    for b in range(x.shape[0]):
        for t in np.flatnonzero(keep[b]):
            own = [s for s in range(t + 1) if keep[b, s] and segments[b, s] == segments[b, t]]
            for j, s in enumerate(reversed(own[-len(taps) :])):
                out[b, t] += taps[len(taps) - 1 - j] * x[b, s]
    return out


def test_queries_and_keys_are_convolved_with_their_own_taps() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 9, h, 4, generator=draw, dtype=torch.double) for h in (4, 2))
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, :2], keep[1, 4] = False, False
    segments = torch.tensor([[0] * 5 + [1] * 4, [0] * 7 + [1] * 2])
    convolution = QueryKeyConvolution(24, 3).double()
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            convolve_queries_and_keys(convolution, q, k, (), None, None), (q, k), strict=True
        )
    )
    with torch.no_grad():
        convolution.weight.copy_(torch.randn(3, 24, generator=draw, dtype=torch.double))
        found = convolve_queries_and_keys(convolution, q, k, (), keep, segments)
    given = (x.numpy() for x in (torch.cat([q.flatten(2), k.flatten(2)], 2),))
    want = literal(*given, convolution.weight.detach().numpy(), keep.numpy(), segments.numpy())
    kept = keep.numpy()
    np.testing.assert_allclose(found[0].flatten(2).numpy()[kept], want[kept][:, :16], atol=1e-12)
    np.testing.assert_allclose(found[1].flatten(2).numpy()[kept], want[kept][:, 16:], atol=1e-12)


@each
def test_generation_is_the_full_forward(analog: LinearAttentionConfig) -> None:
    """With padding, alone, in chunks, and by beams."""
    model, inputs = student(analog=analog), padded()
    sequences, found = generated(model, inputs)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 6), value=1)
    full = logits(model, {"input_ids": sequences, "attention_mask": mask}, use_cache=False)
    assert_same(found, full[:, 14:-1])
    alone = {name: x[:1, 5:] for name, x in inputs.items()}
    assert_same(found[:1], generated(model, alone)[1])
    assert_same(generated(model, inputs, prefill_chunk_size=4)[1], found)
    plain = student(analog=replace(analog, convolution=0))
    assert error(logits(plain, inputs), logits(model, inputs)) > 1e-2


@each
def test_the_cache_does_not_grow_and_is_what_the_plan_says(analog: LinearAttentionConfig) -> None:
    model, sizes = student(analog=analog), []
    for t in (3, 31):
        cache = DynamicCache()
        with torch.no_grad():
            model(padded(pad=0, t=t)["input_ids"][:1], past_key_values=cache)
        sizes.append(cache_bytes(cache))
    assert sizes == [plan(teacher(), LinearizationRecipe(analog, ())).state] * 2


def test_it_is_saved_with_its_taps(tmp_path: Path) -> None:
    model = student(analog=CONVOLVED["gla"])
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, padded()), logits(model, padded()))
    assert branches(again)[0].config.convolution == 4
    taps = linearize(teacher(), CONVOLVED["gla"]).model.layers[0].self_attn.linear_branch
    assert taps.convolution.weight.sum(0).eq(1).all()


def test_queries_that_softmax_has_not_kept_are_not_made_up() -> None:
    model, cache = student(analog=CONVOLVED["gla"]), DynamicCache()
    with torch.no_grad(), use_mode(model, Teacher()):
        model(padded(pad=0)["input_ids"], past_key_values=cache)
    with pytest.raises(CannotLinearize, match="goes on from the last queries"):
        convert_cache(model, cache)


def test_what_excludes_each_other_is_refused() -> None:
    for fields, message in (
        ({"window": 4, "convolution": 4}, "a window sees keys as they are"),
        ({"window": 0, "convolution": 4, "per_query_head": True}, "have no convolutions"),
        ({"window": 0, "convolution": 1}, "take 2 or more taps"),
        ({"window": 0, "convolution": -1}, "convolution"),
    ):
        with pytest.raises(ValueError, match=message):
            LinearAttentionConfig(**fields)
    assert RECIPES["lawcat"].analog == CONVOLVED["gla"]
