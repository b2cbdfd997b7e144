"""Adapters of every linear attention: trained, saved beside the branches, loaded, merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from families import logits, padded, read_anew, student, teacher
from fastweights.linearize import RULES, LinearAttentionConfig, branches, linearize
from fastweights.linearize.distill.adapt import TokenLoss, load_adapters, prepare_adaptation
from fastweights.linearize.evaluate.logits import teacher_logits
from fastweights.training.language.adapters import LoRA, merge_adapters, merged_modules
from pretrained import disturbed
from tolerances import SAME, error

pytestmark = pytest.mark.sampled

ANALOGS = {
    **{rule: LinearAttentionConfig(rule=rule, window=4) for rule in RULES if rule != "supra"},
    "supra": LinearAttentionConfig(rule="supra", window=0),
    "landmarks": LinearAttentionConfig("landmarks", window=4),
    "two normalisers": LinearAttentionConfig(window=4, shared=False, per_query_head=True),
    "sinks": LinearAttentionConfig(window=4, sinks=2),
    "pooled": LinearAttentionConfig(rule="gla", window=4, gates="pooled"),
    "convolved": LinearAttentionConfig(rule="kda", window=0, convolution=3),
}
EACH_TIME = ("landmarks", "kda", "pooled", "supra")
LENGTHS: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def trained(analog: LinearAttentionConfig) -> PeftModel:
    """After one step of adapters and branches; all of them have moved."""
    model = prepare_adaptation(student(analog=analog), LoRA(rank=2), train_branches=True)
    learnt = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, p in learnt.items():
            if "lora_B" in name:
                p.normal_(std=0.1, generator=torch.Generator().manual_seed(5))
    inputs = padded(pad=0, t=12)
    TokenLoss(kl=1.0)(model, {**inputs, "labels": inputs["input_ids"]}).backward()
    still = [name for name, p in learnt.items() if p.grad is None or not p.grad.any()]
    assert still == []
    with torch.no_grad():
        for p in learnt.values():
            p.sub_(p.grad, alpha=0.1)
    return model.eval()


@pytest.mark.parametrize(
    "analog",
    [
        pytest.param(analog, id=name, marks=() if name in EACH_TIME else pytest.mark.slow)
        for name, analog in ANALOGS.items()
    ],
)
def test_adapters_are_kept_and_merged(analog: LinearAttentionConfig, tmp_path: Path) -> None:
    model = trained(analog)
    want = read_anew(model)
    without = teacher_logits(model, padded(pad=0))
    assert error(without, logits(teacher(), padded(pad=0))[:, :-1]) <= SAME
    model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all("lora_" in name or "linear_branch" in name for name in saved)
    again = load_adapters(linearize(teacher(), analog), tmp_path / "adapter")
    assert torch.equal(read_anew(again), want)
    with merged_modules(again):
        held = read_anew(again.get_base_model())
    assert torch.equal(read_anew(again), want)
    merged = merge_adapters(again)
    assert merge_adapters(merged) is merged
    assert error(read_anew(merged), want) <= SAME
    assert torch.equal(read_anew(merged), held)
    inputs = padded()
    said = [merged.generate(**inputs, **LENGTHS, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*said)
    merged.save_pretrained(tmp_path / "model")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(whole) is type(merged)
    assert torch.equal(read_anew(whole), read_anew(merged))
    assert branches(whole).keys() == branches(merged).keys()


@pytest.mark.parametrize("name", ["landmarks", "pooled"])
def test_adapters_of_a_saved_model_are_found_by_their_folder(name: str, tmp_path: Path) -> None:
    """As transformers and peft load them, of a linearized model on disk."""
    student(analog=ANALOGS[name]).save_pretrained(tmp_path / "linear")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "linear")
    model = disturbed(prepare_adaptation(base, LoRA(rank=2)))
    want = read_anew(model)
    model.save_pretrained(tmp_path / "adapter")
    for loader in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
        assert torch.equal(read_anew(loader.from_pretrained(tmp_path / "adapter")), want)


def test_merged_modules_keep_the_weights_type() -> None:
    """peft's adapters are float32 beside weights of any type."""
    model = disturbed(prepare_adaptation(student().to(torch.bfloat16), LoRA(rank=2)))
    with merged_modules(model):
        held = read_anew(model.get_base_model())
    assert held.dtype == torch.bfloat16
    assert torch.equal(read_anew(merge_adapters(model)), held)
