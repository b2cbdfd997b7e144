"""Softmax layers without positions beside linear layers that have them (HyPE)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from conversions import SHORT, conversion, shorten, write_source
from families import logits, padded, student, teacher
from fastweights.linearize import CannotLinearize, LinearAttentionConfig, linearize
from fastweights.linearize.distill.pipeline import run_conversion
from fastweights.linearize.distill.recipes import RECIPES
from fastweights.linearize.distill.run import ConversionRun
from fastweights.linearize.distill.student import StudentModel
from tolerances import SAME, error

HYPE = LinearAttentionConfig(window=4, positions="linear", log_scale=7)


def softmax_layer(x: np.ndarray, attention: Any, base: int) -> np.ndarray:
    """o_t = softmax_s(log_a(t + a) q_t·k_s / √d) v_s of hidden states ``[t d]``, one by one."""
    q, k, v, o = (
        getattr(attention, f"{name}_proj").weight.detach().double().numpy() for name in "qkvo"
    )
    size = attention.head_dim
    heads, groups = len(q) // size, len(k) // size
    out = np.zeros_like(x)
    for t in range(len(x)):
        scale = np.log(t + base) / np.log(base) if base else 1.0
        mixed = []
        for head in range(heads):
            rows = slice(head * size, (head + 1) * size)
            group = head * groups // heads
            shared = slice(group * size, (group + 1) * size)
            asked = scale * q[rows] @ x[t]
            scores = [asked @ (k[shared] @ x[s]) / size**0.5 for s in range(t + 1)]
            weights = np.exp(np.array(scores) - max(scores))
            sums = sum(w * (v[shared] @ x[s]) for s, w in enumerate(weights))
            mixed.append(sums / weights.sum())
        out[t] = o @ np.concatenate(mixed)
    return out


@pytest.mark.parametrize(("base", "training"), [(0, False), (7, False), (7, True)])
def test_a_layer_that_stays_softmax_has_no_positions(base: int, training: bool) -> None:
    """In steps, too, and a scale of its scores that grows with the position, unless it trains."""
    analog = LinearAttentionConfig(window=4, positions="linear", log_scale=base)
    model = student(analog=analog, layers=[0, 2]).train(training)
    attention, seen = model.model.layers[1].self_attn, []
    attention.register_forward_hook(
        lambda _, args, kwargs, out: seen.append((kwargs["hidden_states"], out[0])),
        with_kwargs=True,
    )
    ids = padded(pad=0, t=12)["input_ids"][:1]
    with torch.no_grad():
        model(ids, use_cache=False)
        first = model(ids[:, :8])
        for t in range(8, 12):
            first = model(ids[:, t : t + 1], past_key_values=first.past_key_values)
    (x, whole), *steps = seen
    want = softmax_layer(x[0].double().numpy(), attention, 0 if training else base)
    assert error(whole[0].double(), torch.from_numpy(want)) <= SAME
    assert error(torch.cat([o for _, o in steps], 1), whole) <= SAME


def test_linear_layers_keep_theirs() -> None:
    """All of them linear, nothing changes; with one that is not, it does."""
    inputs, plain = padded(), LinearAttentionConfig(window=4)
    assert torch.equal(logits(student(analog=HYPE), inputs), logits(student(analog=plain), inputs))
    assert (
        error(
            logits(student(analog=HYPE, layers=[0, 2]), inputs),
            logits(student(analog=plain, layers=[0, 2]), inputs),
        )
        > 1e-2
    )


def test_it_is_saved(tmp_path: Path) -> None:
    model = student("qwen3", HYPE, [0, 2])
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, padded()), logits(model, padded()))


def test_families_without_rotary_positions_are_refused() -> None:
    with pytest.raises(CannotLinearize, match="takes no position_embeddings"):
        linearize(teacher("gpt2"), HYPE, [0, 2])
    linearize(teacher("gpt2"), HYPE)


@pytest.mark.long
def test_halo_learns_from_the_model_with_positions(tmp_path: Path) -> None:
    """The kept layer has lost its own, so that the model is no longer its own teacher."""
    source = write_source(tmp_path)
    recipe = shorten(RECIPES["halo"], SHORT)
    assert recipe.analog.positions == "linear"
    whole = conversion(source, recipe=recipe, softmax_layers=1)
    assert run_conversion(whole, tmp_path / "run", until="eval")
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    student = StudentModel.begin(ConversionRun(whole, tmp_path / "run"))
    original = AutoModelForCausalLM.from_pretrained(source / "model")
    ids = [batch["input_ids"] for batch in student.text.validation.sequential_batches(1)]
    with torch.no_grad():
        losses = [float(original(x, labels=x).loss) for x in ids if x.shape == ids[0].shape]
    assert found["softmax"]["nats_per_token"] == pytest.approx(np.mean(losses), abs=1e-4)
    assert student.has_own_teacher
    assert not student.with_model(student.convert_again([0, 2], None)).has_own_teacher
