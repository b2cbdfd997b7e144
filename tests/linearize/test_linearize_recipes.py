"""Recipes: every loss against a literal sum, what a stage trains, teachers, changes, and files."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fastweights.cli import build_parser
from fastweights.cli.recipes import recipe_of
from fastweights.errors import CheckpointError
from fastweights.linearize import LinearAttentionConfig, Student, Teacher, branches, use_mode
from fastweights.linearize.convert.attention import attend_all
from fastweights.linearize.distill.adapt import ModelLogits, TeacherSource, TokenLoss
from fastweights.linearize.distill.align import HiddenLoss
from fastweights.linearize.distill.changes import StageChange, change_stages, scale_steps
from fastweights.linearize.distill.fit import AdamWByPart, Fit
from fastweights.linearize.distill.recipe import (
    AdaptationConfig,
    AlignmentConfig,
    LinearizationRecipe,
    TransferConfig,
)
from fastweights.linearize.distill.recipe_files import read_recipe
from fastweights.linearize.distill.recipes import RECIPES
from fastweights.linearize.distill.stages import AdaptStage, AlignStage, softmax_layers
from fastweights.linearize.distill.teachers import (
    StoredLogits,
    TopLogits,
    divergence_of_largest,
    largest,
    open_store,
    store_logits,
)
from fastweights.linearize.distill.trained import (
    Adapters,
    AllButMLPs,
    AllWeights,
    Attentions,
    Branches,
    Trained,
)
from fastweights.linearize.distill.transfer import LossOnly, TransferLoss, only_branches
from fastweights.linearize.evaluate.distances import softmax_map
from fastweights.linearize.evaluate.logits import ReadOut, next_logits, total_kl
from fastweights.training.data.documents import Data
from fastweights.training.language.adapters import LoRA
from fastweights.training.loop.identity import to_json_value
from fastweights.training.loop.processes import Alone
from fastweights.training.loop.report import Reporter
from fastweights.training.loop.stage import trainable_parameters
from pretrained import Recorded, batch, linear_llama, llama, stream
from tolerances import assert_close

RULES = ("windowed", "gla", "gated_deltanet", "mesa", "supra")


def analog(rule: str) -> LinearAttentionConfig:
    return LinearAttentionConfig(window=3 if rule == "windowed" else 0, rule=rule)


# losses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_softmax_maps_are_softmax(padded):
    mode, inputs = Recorded(), batch(padded)
    attend_all(linear_llama(), inputs, mode)
    keep = inputs.get("attention_mask", torch.ones(2, 12)).bool().numpy()
    for call, _ in mode.calls.values():
        found, q, k = softmax_map(call).numpy(), call.q.numpy(), call.k.numpy()
        for b, t, h in np.ndindex(*q.shape[:3]):
            if keep[b, t]:
                seen = [s for s in range(t + 1) if keep[b, s]]
                scores = np.array([q[b, t, h] @ k[b, s, h // 2] for s in seen]) / np.sqrt(4)
                weights = np.zeros(12)
                weights[seen] = np.exp(scores - scores.max())
                np.testing.assert_allclose(found[b, h, t], weights / weights.sum(), atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_maps_are_compared_by_the_norm_of_their_difference(rule):
    model, mode = linear_llama(analog(rule)), Recorded()
    attend_all(model, batch(), mode)
    alone = LossOnly(TransferLoss(output=0, maps=2.0))
    attend_all(model, batch(), alone)
    for layer, (call, _) in mode.calls.items():
        far = (softmax_map(call) - call.record().attention_map()).detach().numpy()
        norms = [np.sqrt((far[b, h] ** 2).sum()) for b, h in np.ndindex(*far.shape[:2])]
        assert_close(alone.losses[layer], np.array(2 * np.mean(norms)), f"layer {layer}")


def test_padding_has_no_part_in_maps():
    model = linear_llama()
    whole, padded = LossOnly(TransferLoss(0, 0, 1)), LossOnly(TransferLoss(0, 0, 1))
    places = torch.arange(7)[None]
    cut = {"input_ids": batch()["input_ids"][:1, 5:], "position_ids": places}
    attend_all(model, cut, whole)
    given = {name: x[:1] for name, x in batch(padded=True).items()}
    attend_all(model, {**given, "position_ids": torch.cat([places[:, :5], places], 1)}, padded)
    for layer, loss in whole.losses.items():
        assert_close(padded.losses[layer], loss, f"layer {layer}")


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("blocks", [False, True], ids=["attentions", "blocks"])
def test_hidden_states_are_compared_layer_by_layer(blocks, padded):
    """By hand: each layer of the linear model is called with what the softmax model's layer got."""
    original, model, inputs = llama(), linear_llama(), batch(padded)
    loss = HiddenLoss(0.5, 2.0, blocks=blocks)
    with torch.no_grad():
        for p in Attentions().prepare(model).model.layers[1].self_attn.parameters():
            p.mul_(1.1)
    stage = AlignStage(model, stream(), stream(), loss, lambda: original)
    found = stage.losses(inputs)
    keep = inputs.get("attention_mask", torch.ones(2, 12)).bool().numpy()
    for layer in (0, 1):
        pick = lambda m, n=layer: m.model.layers[n] if blocks else m.model.layers[n].self_attn  # noqa: E731
        given, target = called_with(original, pick(original), inputs)
        masked, _ = called_with(model, pick(model), inputs)
        output = pick(model)(*given[0], **{**masked[1], **hidden_of(given[1])})
        output = output[0] if isinstance(output, tuple) else output
        far, size = (output - target).detach().numpy()[keep], target.numpy()[keep]
        wanted = 0.5 * (far**2).sum() / (size**2).sum()
        wanted += 2 * np.mean(np.sqrt((far**2).sum(-1))) / np.sqrt(16)
        assert_close(found[layer], np.array(wanted), f"layer {layer}")


def called_with(model, module, inputs):
    """The arguments of a module in a forward pass, and its output."""
    kept = {}

    def keep(_module, args, kwargs, output):
        kept["all"] = (args, kwargs), output[0] if isinstance(output, tuple) else output

    handle = module.register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model.model(**inputs, use_cache=False)
    handle.remove()
    return kept["all"]


def hidden_of(kwargs: Mapping[str, object]) -> dict[str, object]:
    return {name: x for name, x in kwargs.items() if name == "hidden_states"}


def test_a_model_whose_weights_stay_is_its_own_teacher():
    given = AlignStage(only_branches(linear_llama()), stream(), stream(), HiddenLoss(), llama)
    alone = AlignStage(only_branches(linear_llama()), stream(), stream())
    assert given.validate() == pytest.approx(alone.validate())
    assert given.backward(0, 2, 1.0, 0)["loss"] == alone.backward(0, 2, 1.0, 0)["loss"]


@pytest.mark.parametrize("teacher", [None, "copy"])
def test_an_alignment_has_no_dropout(teacher):
    losses = []
    for probability in (0.0, 0.5):
        model, original = linear_llama(), llama()
        for part in (model, original):
            part.model.embed_tokens.register_forward_hook(
                lambda module, args, output, p=probability: torch.dropout(
                    output, p, module.training
                )
            )
        given = None if teacher is None else lambda original=original: original
        stage = AlignStage(Branches().prepare(model.train()), stream(), stream(), teacher=given)
        losses.append(stage.backward(0, 2, 1.0, 0)["loss"])
    assert losses[0] == losses[1]


def test_stored_logits_are_the_divergence_of_their_classes():
    random = np.random.default_rng(0)
    teacher, student = (torch.from_numpy(random.normal(size=(3, 9)) * 3) for _ in range(2))
    tokens, log_shares = largest(teacher, 4)
    found = divergence_of_largest(student, tokens, log_shares.double()) / 3
    total = 0.0
    for p, q, kept in zip(teacher.softmax(-1), student.softmax(-1), tokens.long(), strict=True):
        for token in kept:
            total += float(p[token] * (p[token] / q[token]).log())
        rest = [1 - float(x[kept].sum()) for x in (p, q)]
        total += rest[0] * np.log(rest[0] / rest[1])
    assert float(found) == pytest.approx(total / 3, rel=1e-6)
    assert found < total_kl(teacher, student) / 3
    alike = largest(teacher, 8)
    assert divergence_of_largest(teacher, *alike) == pytest.approx(0, abs=1e-6)


def test_a_share_of_nothing_has_no_gradient():
    teacher = torch.tensor([[0.0, -200.0, -300.0]])
    student = torch.zeros(1, 3, requires_grad=True)
    loss = divergence_of_largest(student, *largest(teacher, 1))
    loss.backward()
    assert loss.isfinite()
    assert student.grad.isfinite().all()


@pytest.mark.parametrize(("ours", "theirs"), [(37, 40), (40, 37)])
def test_wider_logits_are_compared_as_far_as_both_have_them(ours, theirs):
    teacher, student = torch.randn(2, 3, theirs), torch.randn(6, ours)
    learnt = torch.ones(2, 3, dtype=torch.bool)
    there = ReadOut(F.pad(teacher, (0, 0, 0, 1)), theirs, lambda rows: rows)
    rows, divergence = ModelLogits(lambda inputs: there).rows({}, learnt, 0)
    found = divergence(student, *rows) / 6
    p, q = (x.flatten(0, -2)[:, :37].log_softmax(-1) for x in (teacher, student))
    assert_close(found, (p.exp() * (p - q)).sum(-1).mean(), "divergence")


# what a stage trains ------------------------------------------------------------------------------

TRAINED: dict[str, tuple[Trained, str]] = {
    "branches": (Branches(), "linear_branch"),
    "attentions": (Attentions(), "layers.0.self_attn."),
    "all": (AllWeights(), ""),
    "adapters": (Adapters(LoRA(rank=2)), "lora_"),
}


@pytest.mark.parametrize(("trained", "part"), TRAINED.values(), ids=TRAINED)
def test_gradients_reach_what_a_stage_trains(trained, part):
    model = trained.prepare(linear_llama(chosen=[0]))
    names = {name for name, _ in model.named_parameters() if part in name}
    assert set(trainable_parameters(model)) == names != set()
    AdaptStage(model, stream(), stream()).backward(0, 2, 1.0, 0)
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    assert reached == names


def test_all_but_mlps_leaves_those_of_softmax_layers_too():
    model = AllButMLPs().prepare(linear_llama(chosen=[0]))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if ".mlp." in name}
    assert {name.split(".")[2] for name in frozen} == {"0", "1"}


def test_adapters_that_are_there_are_trained_further():
    model = Adapters().prepare(linear_llama())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    again = Adapters(branches=True).prepare(model, seed=7)
    assert again is model
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert any("linear_branch" in name for name in trainable_parameters(model))
    assert any("lora_A" in name for name in trainable_parameters(model))


@pytest.mark.parametrize("trained", [*(t for t, _ in TRAINED.values()), AllButMLPs()], ids=str)
def test_a_plan_counts_what_is_trained(trained):
    model = linear_llama()
    branch = sum(p.numel() for b in branches(model).values() for p in b.parameters())
    paths = [f"model.layers.{layer}.self_attn" for layer in (0, 1)]
    counted = trained.count(llama(), paths, branch)
    found = trainable_parameters(trained.prepare(model)).values()
    assert counted == sum(p.numel() for p in found)


@pytest.mark.parametrize("blocks", [False, True], ids=["attentions", "blocks"])
def test_an_alignment_trains_each_layer_by_its_own_loss(blocks):
    model = Attentions().prepare(linear_llama())
    stage = AlignStage(model, stream(), stream(), HiddenLoss(blocks=blocks), llama)
    given, alive = batch(), list[weakref.ref[torch.Tensor]]()

    def second_alone(_layer: int, loss: torch.Tensor, _weight: torch.Tensor) -> None:
        assert [ref() for ref in alive] == [None] * len(alive), "an earlier graph is kept"
        if len(alive) == 1:
            loss.backward()
        alive.append(weakref.ref(loss))

    stage.losses(given, second_alone)
    assert len(alive) == 2
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    assert {name.split(".")[2] for name in reached} == {"1"}
    assert any("q_proj" in name for name in reached)


def test_going_backward_layer_by_layer_is_the_gradient_of_the_sum():
    found = []
    for by_layer in (True, False):
        model, losses = Attentions().prepare(linear_llama()), list[torch.Tensor]()
        stage = AlignStage(model, stream(), stream(), HiddenLoss(), llama)
        if by_layer:
            stage.backward(0, 2, 0.5, 0)
        else:
            given = stage.train.batch(0, 2)
            stage.losses(given, lambda _layer, loss, _weight, to=losses: to.append(loss))
            (torch.stack(losses).sum() * 0.5).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert_close(gradient, found[1][name], name)


def test_layers_are_replaced_step_by_step():
    shares = [softmax_layers(range(8), share) for share in (0.5, 0.25, 0.125, 0.0)]
    assert shares == [[1, 3, 5, 7], [3, 7], [7], []]
    model, text = linear_llama(), stream()
    stages = {
        kept: AdaptStage(AllWeights().prepare(model), text, text, softmax=kept).validate()
        for kept in ((), (0, 1), (1,))
    }
    with use_mode(model, Teacher()):
        softmax = TokenLoss()(model, text.batch(0, 1))
    assert len({loss["val_loss"] for loss in stages.values()}) == 3
    alone = AdaptStage(AllWeights().prepare(llama_with(0)), text, text).validate()
    assert stages[(1,)]["val_loss"] == pytest.approx(alone["val_loss"])
    both = AdaptStage(model, text, text, softmax=(0, 1))
    assert_close(both.backward(0, 1, 1.0, 0)["loss"], softmax.detach(), "softmax")


def llama_with(layer: int):
    return linear_llama(chosen=[layer])


def test_a_hidden_window_hides_it_from_the_whole_model():
    model, text = linear_llama(), stream()
    without = linear_llama(LinearAttentionConfig(window=0))
    without.load_state_dict(model.state_dict())
    found = AdaptStage(model, text, text, dropout=1.0).backward(0, 2, 1.0, 0)["loss"]
    assert_close(found, AdaptStage(without, text, text).backward(0, 2, 1.0, 0)["loss"], "loss")
    with use_mode(model, Student()):
        assert found != TokenLoss()(model, text.batch(0, 2))


def test_linear_attentions_have_a_rate_of_their_own():
    model = AllWeights().prepare(linear_llama())
    inside, outside = AdamWByPart(lr=1e-5, attention_lr=1e-2).build(model)
    names = {id(p): name for name, p in model.named_parameters()}
    of = lambda optimizer: {names[id(p)] for g in optimizer.param_groups for p in g["params"]}  # noqa: E731
    assert of(inside) == {name for name in names.values() if ".self_attn." in name}
    assert of(inside) | of(outside) == {*names.values()}
    assert {g["lr"] for g in inside.param_groups} == {1e-2}
    assert {g["lr"] for g in outside.param_groups} == {1e-5}


# stored logits ------------------------------------------------------------------------------------


def stored(**changes) -> StoredLogits:
    return replace(StoredLogits("teacher", 5, Data(("text",)), 16, 0, 70), **changes)


class Counted:
    """The teacher, and how often it was asked."""

    def __init__(self) -> None:
        self.model, self.calls = llama(), 0

    def __call__(self, inputs):
        self.calls += 1
        with torch.no_grad():
            return next_logits(self.model, inputs)


def write(out: Path, teacher: Counted, stop=lambda: False) -> bool:
    if open_store(out, stored(), Alone(), Reporter()):
        return True
    return store_logits(out, stored(), stream(), teacher, Alone(), stop)


def test_stored_logits_are_those_of_the_batch(tmp_path):
    teacher, text = Counted(), stream()
    assert write(tmp_path / "a", teacher)
    student = linear_llama()
    for first, count in ((0, 2), (31, 3), (68, 2)):
        given = text.batch(first, count)
        loss = TokenLoss(0, 1)(student, given, TopLogits(tmp_path / "a"), first)
        learnt = given["labels"][:, 1:] != -100
        inputs = {name: x for name, x in given.items() if name != "labels"}
        kept = largest(teacher(inputs)[learnt], 5)
        logits = next_logits(student, inputs)[learnt]
        wanted = divergence_of_largest(logits, *kept) / len(logits)
        assert_close(loss, wanted.detach(), f"from {first}")


def test_a_store_that_was_stopped_or_damaged_is_completed(tmp_path):
    teacher, out = Counted(), tmp_path / "a"
    turns = iter([False, True])
    assert not write(out, teacher, lambda: next(turns))
    assert teacher.calls == 32
    assert write(out, teacher)
    assert teacher.calls == 70
    assert write(out, teacher)
    assert teacher.calls == 70
    whole = {path.name: path.read_bytes() for path in out.glob("logits-*")}
    damaged = out / "logits-000001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert write(out, teacher)
    assert teacher.calls == 70 + 32
    assert {path.name: path.read_bytes() for path in out.glob("logits-*")} == whole


def test_a_store_of_others_is_refused(tmp_path):
    assert write(tmp_path / "a", Counted())
    with pytest.raises(CheckpointError, match="top_k was 5, is 6"):
        open_store(tmp_path / "a", stored(top_k=6), Alone(), Reporter())


# changes and files --------------------------------------------------------------------------------


def chosen(*words: str) -> LinearizationRecipe:
    return recipe_of(build_parser().parse_args(["linearize", "plan", "MODEL", *words]))


def test_options_are_of_all_stages_that_have_them():
    found = chosen("--recipe", "radlads", "--teacher", "large", "--top-logits", "8", "--batch", "2")
    assert [stage.fit.batch for stage in found.stages] == [2, 2, 2]
    teachers = [stage.loss.teacher for stage in found.whole]
    assert teachers == [TeacherSource("large", 8), TeacherSource()]
    lolcats = chosen("--recipe", "lolcats", "--kl", "1", "--top-logits", "8", "--scale", "0.5")
    assert lolcats.stages[1].loss == TokenLoss(1, 1, TeacherSource(top_k=8))
    both = chosen("--top-logits", "8", "--dropout", "0.5", "--scale", "0.5")
    assert both.stages[0].dropout == 0.5
    assert both.stages[1].loss == TokenLoss(0, 1, TeacherSource(top_k=8))
    assert [stage.fit.steps for stage in both.stages] == [200, 200]
    assert chosen("--scale", "0.5", "--transfer-steps", "7").stages[0].fit.steps == 7
    assert chosen("--finetune-steps", "0").stages == RECIPES["landmarks"].by_layer


@pytest.mark.parametrize(
    "option",
    [("--features", "relu"), ("--rule", "gla"), ("--convolution", "4")],
    ids=" ".join,
)
def test_without_a_name_the_recipe_is_the_one_that_has_what_is_asked_for(option):
    assert chosen() == RECIPES["landmarks"]
    assert not chosen("--one-window").analog.windows_by_head
    assert chosen("--sinks", "4", "--convolution", "0", "--rule", "windowed") == chosen()
    for number in ("0", "1"):
        own = {"window": 0, "sinks": int(number), "windows_by_head": False}
        analog = replace(RECIPES["landmarks"].analog, **own)
        assert chosen("--window", "0", "--sinks", number).analog == analog
    window = ("--window", "0") if option[0] == "--convolution" else ()
    assert chosen(*option, *window) == chosen("--recipe", "lolcats", *option, *window)


def test_single_settings_of_stages_are_changed():
    changes = map(
        StageChange.read,
        ["hidden.lr=1e-2", "kl.length=64", "kl.steps = 7", "long.steps=0", "kl.top_k=8", "kl.ce=1"],
    )
    hidden, kl = change_stages(RECIPES["radlads"], changes).stages
    before = RECIPES["radlads"].stages
    assert hidden.fit.optimizer.lr == 1e-2
    assert replace(hidden, fit=before[0].fit) == before[0]
    assert (kl.length, kl.fit.steps, kl.loss) == (64, 7, TokenLoss(1, 1, TeacherSource(None, 8)))
    dropped = change_stages(RECIPES["lolcats"], [StageChange("finetune", "dropout", 0.5)])
    assert dropped.stages[1].dropout == 0.5
    assert dropped.stages[1].trained == Adapters()


BAD_CHANGES = {
    "zz.steps=1": "no stage 'zz'; its stages are transfer, finetune",
    "transfer.zz=1": "has no setting 'zz'; it has",
    "transfer.steps": "is not STAGE.FIELD=VALUE",
    "transfer.steps=many": "give a value of the same kind",
    "transfer.blockwise=1": "give a value of the same kind",
    "transfer.steps=-1": "steps = -1; it must be 1 or more",
}


@pytest.mark.parametrize(("text", "message"), BAD_CHANGES.items())
def test_changes_that_do_not_fit_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        change_stages(RECIPES["lolcats"], [StageChange.read(text)])


def test_a_scale_is_of_steps_and_warm_ups():
    scaled = scale_steps(RECIPES["mamba-in-llama"], 0.01).stages
    assert [stage.fit.steps for stage in scaled] == [381] * 4
    assert [stage.fit.schedule.warmup for stage in scaled] == [15, 5, 5, 5]
    assert scale_steps(RECIPES["lolcats"], 1e-9).stages[0].fit.steps == 1


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_a_record_is_read_again(name, tmp_path):
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(to_json_value(RECIPES[name])))
    assert read_recipe(path) == RECIPES[name]


TOML = """
[analog]
window = 16

[[stages]]
type = "AlignmentConfig"
length = 128
trained = { type = "Attentions" }
loss = { squared = 0.0, norm = 1.0 }
fit = { steps = 10, optimizer = { type = "AdamW", lr = 1e-3 } }

[[stages]]
type = "AdaptationConfig"
name = "kl"
trained = { type = "AllWeights" }
loss = { ce = 0.0, kl = 1.0, teacher = { model = "large", top_k = 64 } }
"""


def test_a_recipe_is_written_by_hand(tmp_path):
    (tmp_path / "mine.toml").write_text(TOML)
    from fastweights.training.loop.optimizers import AdamW

    assert read_recipe(tmp_path / "mine.toml") == LinearizationRecipe(
        LinearAttentionConfig(window=16),
        (
            AlignmentConfig(
                loss=HiddenLoss(0.0, 1.0),
                fit=Fit(steps=10, optimizer=AdamW(lr=1e-3)),
                length=128,
            ),
            AdaptationConfig(
                AllWeights(), TokenLoss(0.0, 1.0, TeacherSource("large", 64)), name="kl"
            ),
        ),
    )


BAD_FILES = {
    "analog = 3": "the recipe, analog is 3; it must be a table",
    "method = 3": "no field method; a LinearizationRecipe has analog, selection, stages",
    "stages = 3": "stages is 3; it must be a list",
    "[[stages]]": r"stages\[0\] has no type; it must be one of TransferConfig",
    '[[stages]]\ntype = "Zz"': "has the type 'Zz'",
    '[[stages]]\ntype = "TransferConfig"\ndropout = "no"': "dropout is 'no'; it must be a number",
    '[[stages]]\ntype = "TransferConfig"\nblockwise = 1': "it must be true or false",
    '[[stages]]\ntype = "TransferConfig"\nfit = { batch = true }': "it must be a whole number",
    '[[stages]]\ntype = "TransferConfig"\nname = "model"': "a stage cannot be called 'model'",
    "[[stages]": "cannot read",
}


@pytest.mark.parametrize(("text", "message"), BAD_FILES.items())
def test_files_that_are_no_recipe_say_why(text, message, tmp_path):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_recipe(tmp_path / "bad.toml")


@pytest.mark.parametrize("name", ["a.TOML", "a.Json", "a.toml"])
def test_files_from_other_systems_are_recipes(tmp_path, name):
    text = '{"stages": []}' if "Json" in name else "stages = []"
    (tmp_path / name).write_bytes(text.encode("utf-8-sig"))
    assert read_recipe(tmp_path / name) == LinearizationRecipe(stages=())
    (tmp_path / name).write_bytes(text.encode("utf-16-le"))
    with pytest.raises(ValueError, match=r"seems to be UTF-16LE; convert it"):
        read_recipe(tmp_path / name)


def test_a_file_of_another_kind_is_no_recipe(tmp_path):
    with pytest.raises(ValueError, match=r"must end in .toml or .json"):
        read_recipe(tmp_path / "recipe.yaml")


BAD_RECIPES = {
    "two of one name": (lambda: (TransferConfig(), TransferConfig()), "have one name"),
    "order": (lambda: (AdaptationConfig(), TransferConfig()), "come before all others"),
    "changed softmax": (lambda: (AlignmentConfig(), TransferConfig()), "put it first"),
    "adapters and weights": (
        lambda: (AlignmentConfig(), AdaptationConfig()),
        "either adapters or the model's own weights",
    ),
    "two adapters": (
        lambda: (AdaptationConfig(), AdaptationConfig(Adapters(LoRA(rank=2)), name="b")),
        "give them one lora",
    ),
    "alignment of all": (lambda: (AlignmentConfig(AllWeights()),), "and not AllWeights"),
    "name": (lambda: (TransferConfig(name="a/b"),), "a stage cannot be called 'a/b'"),
    "share": (lambda: (AdaptationConfig(softmax=0.7),), "from 0 to 0.5"),
    "length": (lambda: (AdaptationConfig(length=1),), "length = 1; it must be 2 or more"),
    "logits": (
        lambda: (AdaptationConfig(loss=TokenLoss(teacher=TeacherSource(top_k=0))),),
        "top_k",
    ),
    "hidden": (lambda: (AlignmentConfig(loss=HiddenLoss(0, 0)),), "all factors"),
}


@pytest.mark.parametrize(("stages", "message"), BAD_RECIPES.values(), ids=BAD_RECIPES)
def test_impossible_recipes_are_refused(stages, message):
    with pytest.raises(ValueError, match=message):
        LinearizationRecipe(stages=stages())
