"""Attention transfer: its losses against the papers' sums, and its gradients against those of the
sum of all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fastweights.linearize import LinearAttentionConfig, Teacher, branches, use_mode
from fastweights.linearize.convert.attention import attend_all
from fastweights.linearize.distill.align import HiddenLoss
from fastweights.linearize.distill.blocks import transfer_blockwise
from fastweights.linearize.distill.fit import TRAINED, Fit, fit
from fastweights.linearize.distill.recipe import TransferConfig
from fastweights.linearize.distill.stages import AlignStage, TransferStage
from fastweights.linearize.distill.trained import Attentions
from fastweights.linearize.distill.transfer import (
    BackwardInForward,
    KeepGraphs,
    LossOnly,
    TransferLoss,
    only_branches,
)
from fastweights.linearize.evaluate.distances import cross_entropy, divergence
from fastweights.linearize.evaluate.report import read_curve
from fastweights.recurrence import Decay
from fastweights.recurrence.mapped import features
from fastweights.train import CheckpointError, Every, NonFiniteError
from fastweights.training.loop.loop import Loop, Session
from fastweights.training.loop.processes import Alone
from fastweights.training.loop.stage import Optimization, trainable_parameters
from killable_runs import launch_two, stop_after
from pretrained import Recorded, batch, linear_llama, llama, stream
from tolerances import assert_close

pytestmark = pytest.mark.sampled

LOSSES = {"output": TransferLoss(), "weights": TransferLoss(0, 1), "both": TransferLoss(2, 0.5)}
ANALOGS = {
    "window": LinearAttentionConfig(window=3),
    "linear": LinearAttentionConfig(window=0),
    "two normalisers": LinearAttentionConfig(window=3, shared=False),
    "query heads": LinearAttentionConfig(window=3, per_query_head=True),
    "delta": LinearAttentionConfig(rule="gated_deltanet", window=0),
    "supra": LinearAttentionConfig(rule="supra", window=0),
}
CASES = {
    f"{name}, {of}": (analog, loss)
    for name, analog in ANALOGS.items()
    for of, loss in LOSSES.items()
    if analog.rule == "windowed" or loss.weights == 0
}


def gradients(model) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in trainable_parameters(model).items()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("analog", "loss"), CASES.values(), ids=CASES)
def test_backward_inside_the_forward_is_that_of_the_summed_losses(analog, loss, padded):
    model, inputs = only_branches(linear_llama(analog)), batch(padded)
    inside, outside = BackwardInForward(loss), KeepGraphs(loss)
    attend_all(model, inputs, inside)
    by_layer = gradients(model)
    attend_all(model, inputs, outside)
    torch.stack(list(outside.losses.values())).sum().backward()
    summed = gradients(model)
    assert by_layer.keys() == summed.keys()
    for name, gradient in summed.items():
        assert_close(by_layer[name], gradient, name)
        assert gradient.abs().sum() > 0 or name.endswith(("mix", "alpha.W", "beta.W"))
    for layer, value in outside.losses.items():
        assert_close(inside.losses[layer], value.detach(), f"loss of layer {layer}")


def test_a_loss_reaches_its_own_layer_alone():
    model = only_branches(linear_llama())
    mode = KeepGraphs()
    attend_all(model, batch(), mode)
    mode.losses[1].backward()
    reached = {name for name, p in trainable_parameters(model).items() if p.grad is not None}
    assert reached == {name for name in trainable_parameters(model) if ".layers.1." in name}


def test_layers_pass_on_the_softmax():
    model, inputs = linear_llama(), batch()
    with torch.no_grad(), use_mode(model, Teacher()):
        expected = model.base_model(**inputs).last_hidden_state
    with torch.no_grad(), use_mode(model, LossOnly()):
        given = model.base_model(**inputs).last_hidden_state
    assert torch.equal(given, expected)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("shared", [True, False], ids=["one normaliser", "two normalisers"])
def test_losses_are_the_papers_sums(shared, padded):
    """Loops over queries and keys in NumPy, from q, k, v, φ and γ."""
    model = linear_llama(LinearAttentionConfig(window=3, shared=shared))
    recorded, inputs = Recorded(), batch(padded)
    attend_all(model, inputs, recorded)
    keep = inputs.get("attention_mask", torch.ones(2, 12)).bool().numpy()
    for call, target in recorded.calls.values():
        record = call.record()
        weights = cross_entropy(record, call.keep), divergence(record, call.keep)
        found = torch.stack([TransferLoss()(call, record, target), *weights])
        want = np.array(_by_hand(record, target, keep, shared))
        assert_close(found, want, f"layer {call.layer}")


def _by_hand(record, target, keep, shared) -> tuple[float, float, float]:
    streams = (record.q, record.k, record.v, features(record.fq), features(record.fk))
    q, k, v, fq, fk = (stream.detach().numpy() for stream in streams)
    mix, y = record.mix.detach().numpy(), target.numpy()
    error = size = entropy = divergent = queries = 0.0
    for b, t, h in np.ndindex(*q.shape[:3]):
        if not keep[b, t]:
            continue
        g, seen = h * k.shape[2] // q.shape[2], [s for s in range(t + 1) if keep[b, s]]
        scores = np.array([q[b, t, h] @ k[b, s, g] for s in seen]) / np.sqrt(q.shape[3])
        near = np.array([t - s < 3 for s in seen])
        teacher = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        window = np.where(near, np.exp(scores - scores[near].max()), 0)
        linear = np.where(near, 0, [fq[b, t, h] @ fk[b, s, g] for s in seen])
        gamma = mix[0, 0, h, 0]
        if shared:
            student = (gamma * window + linear) / (gamma * window + linear).sum()
        elif near.all():
            student = window / window.sum()
        else:
            student = gamma * window / window.sum() + (1 - gamma) * linear / linear.sum()
        entropy -= teacher @ np.log(student)
        divergent += teacher @ np.log(teacher / student)
        queries += 1
        error += ((student @ v[b, seen, g] - y[b, t, h]) ** 2).sum()
        size += (y[b, t, h] ** 2).sum()
    return error / size, entropy / queries, divergent / queries


def test_window_dropout_shows_a_layer_without_its_window():
    model, inputs = linear_llama(), batch()
    alone, dropped, never = LossOnly(), LossOnly(dropout=1.0), LossOnly(dropout=0.0)
    without = linear_llama(LinearAttentionConfig(window=0))
    without.load_state_dict(model.state_dict())
    attend_all(without, inputs, alone)
    attend_all(model, inputs, dropped)
    attend_all(model, inputs, never)
    assert dropped.losses == alone.losses
    assert all(dropped.losses[layer] != never.losses[layer] for layer in never.losses)


def test_a_rule_without_softmax_weights_says_so():
    stream = torch.rand(1, 4, 2, 3)
    with pytest.raises(TypeError, match=r"needs a layer with a window, .* is a Decay alone"):
        cross_entropy(Decay(stream, stream, stream, None), None)


@pytest.mark.parametrize("given", [(-1, 1), (0, 0), (math.nan, 1), (1, math.inf)])
def test_loss_factors_are_checked(given):
    with pytest.raises(ValueError, match="all factors"):
        TransferLoss(*given)


def test_every_layer_learns(tmp_path):
    stage = TransferStage(
        linear_llama(LinearAttentionConfig(window=0), dtype=torch.float32), stream(), stream()
    )
    before = stage.validate()
    assert fit(stage, Fit(steps=20, batch=8), tmp_path)
    after = stage.validate()
    assert all(after[f"val_loss/{layer}"] < before[f"val_loss/{layer}"] for layer in (0, 1))
    assert after["val_loss"] == pytest.approx(
        np.mean([after[f"val_loss/{layer}"] for layer in (0, 1)])
    )
    assert read_curve(tmp_path)[-1].items() >= after.items()


class Padded:
    """Text whose sequences begin with more and more padding, the last of them whole with it."""

    def __init__(self, padding: tuple[int, ...]) -> None:
        self.padding, self.length, self.tokens = padding, 12, 48

    def batch(self, first: int, count: int) -> dict[str, Tensor]:
        ids = stream(12).batch(0, len(self.padding))["input_ids"]
        mask = (torch.arange(12)[None] >= torch.tensor(self.padding)[:, None]).long()
        given = {"input_ids": ids, "attention_mask": mask, "labels": ids}
        return {name: tensor[first : first + count] for name, tensor in given.items()}


PADDINGS = {"whole": (0, 0, 0, 0), "padded": (0, 7, 2, 10), "empty": (12, 0, 5, 12)}
STAGES: dict[str, Callable[[Padded], TransferStage | AlignStage]] = {
    "output": lambda text: TransferStage(linear_llama(), text, stream()),
    "weights": lambda text: TransferStage(linear_llama(), text, stream(), TransferLoss(0, 1)),
    "maps": lambda text: TransferStage(linear_llama(), text, stream(), TransferLoss(0, 0, 1)),
    "attentions": lambda text: AlignStage(
        Attentions().prepare(linear_llama()), text, stream(), HiddenLoss(), llama
    ),
    "squared": lambda text: AlignStage(only_branches(linear_llama()), text, stream()),
    "norm": lambda text: AlignStage(
        only_branches(linear_llama()), text, stream(), HiddenLoss(0, 1)
    ),
}


@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS)
@pytest.mark.parametrize("make", STAGES.values(), ids=STAGES)
def test_parts_of_a_batch_are_the_batch(make, padding):
    """Its loss is a quotient of sums, which is no mean of the parts' quotients."""
    found = []
    for accumulate in (1, 2, 4):
        stage = make(Padded(padding))
        loop = Loop(stage, Optimization(steps=1, batch=4, accumulate=accumulate), Alone())
        losses = {name: float(loss) for name, loss in loop._backward().items()}
        found.append((losses, gradients(stage.model)))
    for losses, of_parts in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-9)
        assert of_parts.keys() == found[0][1].keys()
        for name, gradient in found[0][1].items():
            assert_close(of_parts[name], gradient, name)


def test_each_layer_is_clipped_by_itself(tmp_path):
    """With one layer's gradient a thousand times larger, the other's update stays what it was
    alone.
    """

    class Scaled(TransferStage):
        factor = 1.0

        def backward(self, first, count, share, step):
            losses = super().backward(first, count, share, step)
            for p in branches(self.model)[1].parameters():
                p.grad *= self.factor
            return losses

    ends = []
    for factor in (1.0, 1000.0):
        stage = Scaled(linear_llama(dtype=torch.float32), stream(), stream())
        stage.factor = factor
        fit(stage, Fit(steps=3, batch=2, clip=1e-3), tmp_path / str(factor))
        own = trainable_parameters(stage.model).items()
        ends.append({name: p.detach() for name, p in own if ".layers.0." in name})
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_another_fit_is_not_taken_for_this_one(tmp_path):
    fit(TransferStage(linear_llama(), stream(), stream()), Fit(steps=1), tmp_path)
    with pytest.raises(CheckpointError, match=r"holds another run \(steps was 1, is 2\)"):
        fit(TransferStage(linear_llama(), stream(), stream()), Fit(steps=2), tmp_path)


def test_a_loss_that_is_no_number_stops_the_fit(tmp_path):
    model = linear_llama(dtype=torch.float32)
    stage = TransferStage(model, stream(), stream())
    with torch.no_grad():
        branches(model)[0].mix.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"loss/0 nan.*step 1"):
        fit(stage, Fit(steps=2), tmp_path)


def test_parameters_that_are_no_numbers_stop_the_fit_though_its_loss_is(tmp_path):
    model = linear_llama(dtype=torch.float32)

    class Blind(TransferStage):
        def backward(self, first, count, share, step):
            losses = super().backward(first, count, share, step)
            with torch.no_grad():
                branches(model)[1].mix.fill_(torch.inf)
            return losses

    with pytest.raises(NonFiniteError, match=r"linear_branch.mix has become infinite.*lower"):
        fit(Blind(model, stream(), stream()), Fit(steps=1), tmp_path)
    assert not (tmp_path / "trained.safetensors").exists()
    assert list((tmp_path / "checkpoints").glob("step-*")) == []


def test_a_loss_that_explodes_stops_the_fit(tmp_path):
    class Exploding(TransferStage):
        updates = 0

        def combine(self, parts, shares, processes):
            self.updates += 1
            losses = super().combine(parts, shares, processes)
            return {**losses, "loss": torch.tensor(0.5 if self.updates <= 2 else 2000.0)}

    stage = Exploding(linear_llama(dtype=torch.float32), stream(), stream())
    every = Every(log=1, evaluation=4, checkpoint=1)
    with pytest.raises(NonFiniteError, match=r"was 0.5 in the beginning and is 2000 by step 3"):
        fit(stage, Fit(steps=4, every=every), tmp_path)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000002"]


@pytest.mark.slow
@pytest.mark.parametrize("blockwise", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_train_as_one(tmp_path: Path, blockwise: bool):
    launch_two(_transfer, tmp_path / "two", blockwise)
    _transfer(tmp_path / "one", blockwise)
    found = {"two": tmp_path / "two", "one": tmp_path / "one"}
    parts = [path.relative_to(found["one"]) for path in found["one"].rglob(TRAINED)]
    assert len([part for part in parts if "checkpoints" not in str(part)]) == 1 + blockwise
    for part in parts:
        two, one = (load_file(found[name] / part) for name in ("two", "one"))
        for name, tensor in one.items():
            assert_close(two[name], tensor, name)
    for ours, theirs in zip(*(read_curve(path) for path in found.values()), strict=True):
        timeless = {name: x for name, x in theirs.items() if name.startswith(("loss", "val"))}
        assert {name: ours[name] for name in timeless} == pytest.approx(timeless)


def _transfer(out: Path, blockwise: bool) -> None:
    model, config = linear_llama(), Fit(steps=3, batch=4)
    settings = TransferConfig(fit=config)
    if blockwise:
        assert transfer_blockwise(model, stream(), settings, out)
    else:
        assert fit(TransferStage(model, stream(), stream(), settings.loss), config, out)


@pytest.mark.parametrize("name", ["window", "delta"])
def test_bfloat16_goes_on_to_the_same_end(tmp_path: Path, name: str):
    ends = {}
    for bf16, sittings in ((False, [99]), (True, [99]), (True, [2, 99])):
        for calls in sittings:
            model = linear_llama(ANALOGS[name], dtype=torch.float32)
            stage = TransferStage(model, stream(), stream())
            config = Fit(steps=5, batch=4, bf16=bf16)
            folder = tmp_path / f"{bf16} {len(sittings)}"
            fit(stage, config, folder, Session(stop=stop_after(calls)))
        ends[bf16, len(sittings)] = {n: p.detach() for n, p in trainable_parameters(model).items()}
    one, often, plain = ends[True, 1], ends[True, 2], ends[False, 1]
    assert all(torch.equal(one[name], often[name]) for name in one)
    assert {p.dtype for p in one.values()} == {torch.float32}
    assert any(not torch.equal(one[name], plain[name]) for name in one)
    for name, p in one.items():
        torch.testing.assert_close(p, plain[name], rtol=0.05, atol=0.02)


@pytest.mark.parametrize("layers", [None, [0, 2]], ids=["all layers", "some layers"])
def test_block_by_block_is_the_same_training(tmp_path, layers):
    config, ends = Fit(steps=3, batch=4, accumulate=2), []
    for blockwise in (False, True):
        model = linear_llama(layers=3, chosen=layers)
        if blockwise:
            assert transfer_blockwise(
                model, stream(), TransferConfig(fit=config), tmp_path / "blocks"
            )
        else:
            fit(TransferStage(model, stream(), stream()), config, tmp_path / "joint")
        ends.append(model.state_dict())
    for name, tensor in ends[0].items():
        assert_close(ends[1][name], tensor, name)
    assert not list((tmp_path / "blocks").glob("*.bin"))


def test_block_by_block_goes_on_where_it_stopped(tmp_path):
    settings, ends = TransferConfig(fit=Fit(steps=2, batch=2)), []
    for name, sittings in (("once", [99]), ("twice", [3, 99])):
        for calls in sittings:
            model, session = linear_llama(layers=3), Session(stop=stop_after(calls))
            complete = transfer_blockwise(model, stream(), settings, tmp_path / name, session)
        assert complete
        ends.append(model.state_dict())
    assert all(torch.equal(ends[0][name], tensor) for name, tensor in ends[1].items())
