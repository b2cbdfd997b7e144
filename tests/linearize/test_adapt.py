"""Stage two: what is trained, its loss against sums by hand, and the teacher within."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fastweights.linearize import CannotLinearize, LinearAttentionConfig, Student, use_mode
from fastweights.linearize.distill.adapt import TokenLoss, prepare_adaptation, projections
from fastweights.linearize.distill.fit import Fit, fit
from fastweights.linearize.distill.recipes import RECIPES
from fastweights.linearize.distill.stages import AdaptStage
from fastweights.linearize.evaluate import logits as logits_module
from fastweights.linearize.evaluate.comparison import (
    DistanceMeter,
    ablations,
    compare_with_softmax,
)
from fastweights.linearize.evaluate.logits import (
    kl,
    mean_over_rows,
    next_logits,
    read_out,
    read_teacher,
    teacher_logits,
)
from fastweights.models.loss import IGNORE_INDEX
from fastweights.training.language.adapters import LoRA
from fastweights.training.loop.stage import trainable_parameters
from pretrained import disturbed, linear_llama, llama, stream
from tolerances import assert_close


def batch() -> dict[str, torch.Tensor]:
    found = stream(responses=True).batch(0, 2)
    assert (found["labels"] == IGNORE_INDEX).any()
    return found


def given() -> dict[str, torch.Tensor]:
    return {name: x for name, x in batch().items() if name != "labels"}


def test_every_projection_of_a_converted_attention_is_adapted():
    model = linear_llama(layers=3, chosen=[0, 2])
    assert projections(model) == [
        f"model.layers.{n}.self_attn.{p}_proj" for n in (0, 2) for p in "qkvo"
    ]
    found = prepare_adaptation(model, LoRA(rank=2))
    assert {name.split(".")[-3] for name in trainable_parameters(found)} == {"lora_A", "lora_B"}
    assert len(trainable_parameters(found)) == 2 * 8


def test_a_model_without_projections_says_so():
    model = linear_llama()
    model.model.layers[0].self_attn = torch.nn.Identity()
    model.model.layers[1].self_attn = torch.nn.Identity()
    with pytest.raises(CannotLinearize, match="no linear layers to adapt"):
        projections(model)


def test_the_teacher_is_the_original_model():
    """Whatever the adapters have become; and the student is as before."""
    original, model = llama(), disturbed(prepare_adaptation(linear_llama(), LoRA()))
    before = next_logits(model, given()).detach()
    wanted = original(**given(), use_cache=False).logits[:, :-1]
    assert_close(teacher_logits(model, given()), wanted, "teacher")
    assert torch.equal(next_logits(model, given()), before)


@pytest.mark.parametrize(("ce", "kl"), [(1, 0), (0, 1), (0.5, 2)])
def test_losses_are_means_over_what_is_learnt(ce, kl):
    model = disturbed(prepare_adaptation(linear_llama(), LoRA()))
    labels = batch()["labels"][:, 1:].numpy()
    student = next_logits(model, given()).detach().numpy()
    teacher = teacher_logits(model, given()).numpy()
    total = count = 0.0
    for b, t in np.argwhere(labels != IGNORE_INDEX):
        p, q = (np.exp(x[b, t] - x[b, t].max()) for x in (teacher, student))
        p, q = p / p.sum(), q / q.sum()
        total += -ce * np.log(q[labels[b, t]]) + kl * (p * np.log(p / q)).sum()
        count += 1
    assert_close(TokenLoss(ce, kl)(model, batch()), np.array(total / count), "loss")


def test_adaptation_lowers_the_loss_and_nothing_else_moves(tmp_path):
    model = prepare_adaptation(linear_llama(dtype=torch.float32), LoRA())
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    stage = AdaptStage(model, stream(), stream(), TokenLoss(1, 0.1))
    before = stage.validate()["val_loss"]
    fit(stage, Fit(steps=15, batch=8), tmp_path)
    assert stage.validate()["val_loss"] < before
    assert all(
        torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen
    )


def test_a_judgement_has_every_token_once():
    model = linear_llama(LinearAttentionConfig(window=3))
    batches = list(stream(16).sequential_batches(4))
    found = compare_with_softmax(model, batches, ablations(model))
    assert list(found) == ["softmax", "linear", "window only", "linear only"]
    assert found["softmax"].kl == pytest.approx(0, abs=1e-12)
    assert found["softmax"].agreement == 1
    assert len({judged.loss.perplexity for judged in found.values()}) == 4
    assert found["linear"].loss.counts.sum() == sum(
        b["labels"][:, 1:].numel() for b in batches if b["labels"].shape[1] == 16
    )
    exact = compare_with_softmax(
        model, batches, {"whole": Student()}, teacher=lambda inputs: read_out(model, inputs)
    )
    assert exact["whole"].kl == pytest.approx(0, abs=1e-12)


def test_distances_vanish_where_the_window_is_the_text():
    far, near = (_distances_beside(window) for window in (3, 16))
    assert near["error"] < 1e-12 < far["error"]
    assert near["divergence"] < 1e-9 < far["divergence"]


def _distances_beside(window: int) -> dict[str, float]:
    model, meter = linear_llama(LinearAttentionConfig(window=window)), DistanceMeter()
    read = read_teacher(model, given(), meter)
    assert_close(read.next_logits().detach(), teacher_logits(model, given()), "logits")
    return meter.distances()


@pytest.mark.parametrize("name", RECIPES)
def test_every_published_recipe_makes_a_model(name):
    recipe = RECIPES[name]
    model = linear_llama(recipe.analog)
    for stage in recipe.stages:
        model = stage.trained.prepare(model)
    with torch.no_grad(), use_mode(model, Student()):
        assert next_logits(model, given()).isfinite().all()


@pytest.mark.parametrize("count", [0, 1, 7])
def test_losses_of_many_rows_are_computed_in_slices(count, monkeypatch) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, count, 11, generator=generator, dtype=torch.float64)
    targets = torch.randint(11, (count,), generator=generator)
    entropy = partial(cross_entropy, reduction="sum")

    def found(rows: int) -> list[torch.Tensor]:
        monkeypatch.setattr(logits_module, "rows_at_once", lambda vocabulary: rows)
        leaf = student.clone().requires_grad_()
        losses = kl(teacher, leaf), mean_over_rows(entropy, 11, leaf, targets)
        return [*losses, *(torch.autograd.grad(loss, leaf)[0] for loss in losses)]

    for sliced, whole in zip(found(3), found(99), strict=True):
        assert_close(sliced, whole, "losses in slices")
