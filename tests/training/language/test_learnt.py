"""Training as transformers does it: what is learnt weighs parts, and adapters that cannot learn are
left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import Trainer, TrainingArguments

from fastweights.linearize.distill.adapt import TokenLoss, prepare_adaptation
from fastweights.training.language.adapters import LoRA, add_adapters, merge_adapters
from fastweights.training.loop.loop import Loop
from fastweights.training.loop.processes import Alone, join_processes, leave_processes
from fastweights.training.loop.stage import Optimization, Stage, go_backward
from killable_runs import launch_two
from pretrained import linear_llama
from tiny import tiny
from transformers_families import build_family

IDS = torch.randint(3, 30, (4, 12), generator=torch.Generator().manual_seed(0))
COUNTS = (11, 1, 0, 4)
LABELS = IDS.where(torch.arange(12)[None] <= torch.tensor(COUNTS)[:, None], -100)


class Answers(Stage):
    """Sequences with different numbers of labels, one of them without any."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def learnt(self, first: int, count: int) -> int:
        return sum(COUNTS[first : first + count])

    def backward(self, first: int, count: int, share: float, step: int) -> dict[str, torch.Tensor]:
        batch = {"input_ids": IDS[first : first + count], "labels": LABELS[first : first + count]}
        loss = TokenLoss(1.0, 0.5)(self.model, batch)
        go_backward(loss * share)
        return {"loss": loss.detach()}

    def validate(self, processes: Any = Alone()) -> dict[str, float]:
        return {}


def test_parts_weigh_by_what_is_learnt_of_them() -> None:
    found = []
    for accumulate in (1, 2, 4):
        stage = Answers(linear_llama().train().double())
        loop = Loop(stage, Optimization(steps=1, batch=4, accumulate=accumulate), Alone())
        losses = loop._backward()
        grads = [p.grad for p in stage.model.parameters() if p.grad is not None]
        found.append((losses["loss"], torch.cat([g.flatten() for g in grads])))
    for loss, gradient in found[1:]:
        assert_close(loss, found[0][0])
        assert_close(gradient, found[0][1], rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_two_processes_weigh_by_what_is_learnt_of_them(tmp_path: Path) -> None:
    launch_two(_update, tmp_path, 1)
    _update(tmp_path, 2)
    two, one = (load_file(tmp_path / f"{count} 0.safetensors") for count in (2, 1))
    assert two.keys() == one.keys()
    for name, gradient in one.items():
        assert_close(two[name], gradient, rtol=1e-6, atol=1e-9)


def _update(folder: Path, accumulate: int) -> None:
    """Write the gradients of a batch, which begins with 12 learnt tokens and ends with 4."""
    processes = join_processes(torch.device("cpu"))
    stage = Answers(linear_llama().train().double())
    loop = Loop(stage, Optimization(steps=1, batch=4, accumulate=accumulate), processes)
    loop.losses = loop._backward()
    loop.placement.exchange()
    found = {name: p.grad for name, p in stage.model.named_parameters() if p.grad is not None}
    losses = {name: torch.tensor(loss) for name, loss in loop.mean_losses().items()}
    save_file(found | losses, folder / f"{processes.count} {processes.index}.safetensors")
    leave_processes()


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: add_adapters(model, LoRA(2))])
@pytest.mark.parametrize("make", [lambda: tiny("metala", torch.float32), linear_llama])
def test_trainer_smooths_labels_of_the_next_token(make: Any, wrap: Any, tmp_path: Any) -> None:
    model, ids = wrap(make().float()), IDS[:, :9]
    arguments = TrainingArguments(
        str(tmp_path), label_smoothing_factor=0.1, report_to=[], use_cpu=True
    )
    given = {"input_ids": ids, "labels": ids.clone()}
    loss = Trainer(model, arguments).compute_loss(model, given)
    log_p = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    right = log_p.gather(-1, ids[:, 1:, None]).mean()
    assert_close(loss, -0.9 * right - 0.1 * log_p.mean())


@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)])
@pytest.mark.parametrize("make", [lambda: tiny("metala"), linear_llama])
def test_a_batch_without_a_learnt_token_has_no_loss(make: Any, items: Any) -> None:
    model, given = make().train(), {} if items is None else {"num_items_in_batch": items}
    labels = IDS.where(torch.arange(12) == 0, -100)  # the first token is predicted by none
    loss = model(IDS, labels=labels, **given).loss
    loss.backward()
    assert loss.item() == 0
    assert {float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None} == {0.0}


@pytest.mark.parametrize("make", [lambda: tiny("metala"), linear_llama])
def test_generate_takes_embeddings(make: Any) -> None:
    model = make().eval()
    mask = torch.ones_like(IDS)
    given = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(IDS, **given)[:, IDS.shape[1] :]
    embeddings = model.get_input_embeddings()(IDS)
    for more in ({}, {"prefill_chunk_size": 5}):
        assert torch.equal(model.generate(inputs_embeds=embeddings, **given, **more), wanted)


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2"])
def test_an_implementation_of_attention_is_taken(name: str) -> None:
    model = tiny("metala")
    other = type(model)._from_config(model.config, attn_implementation=name)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.eval().double()(IDS).logits, model.double()(IDS).logits)
    with pytest.raises(ValueError, match="attn_implementation='sdap' is none of"):
        type(model)._from_config(model.config, attn_implementation="sdap")


@pytest.mark.parametrize(("name", "why"), [("zamba", "share"), ("jamba", "are passed by")])
def test_adapters_that_cannot_learn_are_left_out(name: str, why: str) -> None:
    with pytest.warns(UserWarning, match=f"get no adapters, .*{why}"):
        model = add_adapters(build_family(name).eval(), LoRA(2, 4.0))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for key, parameter in trained.items():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    model(input_ids=IDS).logits.square().sum().backward()
    assert not [n for n, p in trained.items() if p.grad is None and "expert" not in n]
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        assert_close(merge_adapters(model)(input_ids=IDS).logits, before, rtol=0, atol=1e-4)


def test_linearize_says_which_layers_get_no_adapters() -> None:
    model = linear_llama()
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight = first.q_proj.weight
    with pytest.warns(UserWarning, match=r"2 linear layers .* get no adapters, such as .*share"):
        wrapped = prepare_adaptation(model, LoRA(2))
    assert not [name for name, _ in wrapped.named_parameters() if "q_proj.lora" in name]
