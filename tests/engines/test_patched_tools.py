"""Patched models of transformers in the tools that people use them with."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_utils import local_torch_dtype

from family_readings import distance, draw_text, learn
from fastweights import patch_transformers
from fastweights.models.cache_names import name_of_cache
from kinds import slow_but
from transformers_families import build_family

CLOSE = 1e-5
FAMILIES = ("bamba", "mamba", "qwen3_next")
HYBRIDS = ("bamba", "qwen3_next")
FUSED = {
    "bamba": "mamba2_split_conv1d_scan_combined",
    "mamba": "mamba_inner_fn",
}
every_family = pytest.mark.parametrize("family", FAMILIES)
each_hybrid = pytest.mark.parametrize("family", HYBRIDS)
"""Whose caches hold states of both kinds."""
one_family = pytest.mark.parametrize("family", slow_but(FAMILIES, ("bamba",)))
pytestmark = [
    pytest.mark.sampled,
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(target_parameters|_pattern keys):RuntimeWarning"),
]


def train(family: str, folder: Path, **options: Any) -> list[float]:
    """The losses of a few steps of Trainer."""
    flat = options.pop("flat", False)
    settings = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    lengths = (5, 12, 1, 9, 7, 20, 3, 11) if flat else (12,) * 8
    rows = [draw_text(1, n + i)[0, i:].tolist() for i, n in enumerate(lengths)]
    trainer = Trainer(
        build_family(family),
        settings,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        data_collator=DataCollatorWithFlattening(return_seq_idx=True) if flat else None,
    )
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@each_hybrid
@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param(False, id="plain"),
        pytest.param(True, id="recomputed", marks=pytest.mark.slow),
    ],
)
def test_trainer_has_the_same_losses(family: str, recompute: bool, tmp_path: Path) -> None:
    options = {"gradient_checkpointing": recompute}
    expected = train(family, tmp_path, **options)
    with patch_transformers():
        found = train(family, tmp_path, **options)
    assert len(found) == 4
    assert found == pytest.approx(expected, rel=CLOSE)
    assert found[0] != found[-1]


SETTINGS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "bfloat16": lambda: local_torch_dtype(torch.bfloat16),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_around_do_not_matter(setting: str) -> None:
    """A modelling file is imported, and its functions are compared, wherever a model is made."""
    with patch_transformers("bamba") as patch:
        everything = patch.replaced
    state = torch.get_rng_state()
    with SETTINGS[setting]():
        before = torch.get_default_dtype()
        with patch_transformers("bamba") as patch:
            assert patch.replaced == everything
        assert torch.get_default_dtype() == before
    assert torch.equal(torch.get_rng_state(), state)


@each_hybrid
def test_trainer_takes_packed_batches(family: str, tmp_path: Path) -> None:
    with patch_transformers():
        losses = train(family, tmp_path, flat=True)
    assert len(losses) == 4
    assert all(map(torch.isfinite, torch.tensor(losses)))


@every_family
def test_under_autocast_ours_is_as_near_to_float32_as_theirs(family: str) -> None:
    model, ids = build_family(family).train(), draw_text(2, 37)
    exact = learn(model, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = learn(model, ids)
        with patch_transformers():
            ours = learn(model, ids)
    assert [a.dtype for a in ours] == [a.dtype for a in theirs]
    for found, beside, right in zip(ours, theirs, exact, strict=True):
        assert distance(found, right) < 2 * distance(beside, right)


@each_hybrid
def test_adapters_of_every_linear_layer_count(family: str) -> None:
    """PEFT itself refuses those of Mamba's output and convolution."""
    ids, model = draw_text(2, 23), build_family(family)
    before, _ = learn(model.train(), ids)
    layers = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    settings = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=[n for n in layers if n != "lm_head"]
    )
    adapted = get_peft_model(model, settings).train()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    expected = learn(adapted, ids)
    with patch_transformers():
        found = learn(adapted, ids)
    assert distance(expected[0], before) > 0.1
    assert max(map(distance, found, expected)) < 3 * CLOSE  # large adapters amplify roundings
    outputs = {n: p for n, p in adapted.named_parameters() if "out_proj.lora" in n}
    assert len(outputs) == 4
    assert all(p.grad.abs().sum() > 0 for p in outputs.values())


@pytest.mark.parametrize("family", FUSED)
def test_no_function_passes_the_output_projection_by(family: str) -> None:
    """What fuses a whole layer reads the projection's weight and none of its adapters."""
    model, ids = build_family(family).train(), draw_text(1, 9)
    projections = [layer for name, layer in model.named_modules() if name.endswith("out_proj")]
    called: list[nn.Module] = []
    for layer in projections:
        layer.register_forward_hook(lambda layer, *_: called.append(layer))
    with patch_transformers() as patch:
        assert f"{family}.{FUSED[family]}" in patch.replaced
        model(ids, use_cache=False)
    assert projections
    assert called == projections


PROMPTS = draw_text(2, 17)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True},
    "beams": {"do_sample": False, "num_beams": 3},
    "padded on the left": {
        "do_sample": False,
        "input_ids": PROMPTS.clone().index_fill_(1, torch.arange(5), 0),
        "attention_mask": torch.ones_like(PROMPTS).index_fill_(1, torch.arange(5), 0),
    },
}


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("bamba", "greedy"),
        ("bamba", "padded on the left"),
        ("mamba", "sampling"),
        ("qwen3_next", "beams"),
    ],
)
def test_generate_chooses_the_same_draw_text(family: str, way: str) -> None:
    model = build_family(family).eval()

    def choose() -> list[list[int]]:
        torch.manual_seed(3)
        return model.generate(**({"input_ids": PROMPTS} | WAYS[way]), max_new_tokens=8).tolist()

    expected = choose()
    with patch_transformers():
        assert choose() == expected


@each_hybrid
def test_a_prefix_is_used_again(family: str) -> None:
    model, ids = build_family(family).eval(), draw_text(1, 20)
    settings = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, **settings).tolist()
    with patch_transformers(), torch.no_grad():
        read = model(ids[:, :12], use_cache=True)
        name = name_of_cache(read)
        for _ in range(2):
            cache = {name: copy.deepcopy(read[name])}
            assert model.generate(ids, **cache, **settings).tolist() == expected


@one_family
def test_copies_are_as_the_model(family: str, tmp_path: Path) -> None:
    """By copy, pickle, a folder, and with accelerate's hooks."""
    model, ids = build_family(family).eval(), draw_text(2, 11)
    expected = model(ids, use_cache=False).logits
    with patch_transformers():
        model.save_pretrained(tmp_path)
        copies = {
            "copy": copy.deepcopy(model),
            "pickle": pickle.loads(pickle.dumps(model)),
            "folder": AutoModelForCausalLM.from_pretrained(tmp_path).eval(),
            "device map": AutoModelForCausalLM.from_pretrained(
                tmp_path, device_map={"": "cpu"}
            ).eval(),
            "offload": cpu_offload(copy.deepcopy(model), torch.device("cpu")),
        }
        with torch.no_grad():
            found = {name: one(ids, use_cache=False).logits for name, one in copies.items()}
        one_by_one = {name: distance(logits, expected) for name, logits in found.items()}
    assert max(one_by_one.values()) < CLOSE, one_by_one
    left = {name: one(ids, use_cache=False).logits for name, one in copies.items()}
    assert all(torch.equal(logits, expected) for logits in left.values()), "after undo"


@one_family
def test_an_exported_program_is_transformers_own(family: str) -> None:
    model, ids = build_family(family).eval(), draw_text(2, 19)
    named = {"input_ids": ids, "use_cache": False}
    with patch_transformers():
        program = torch.export.export(model, (), named)
    assert not any("fastweights" in str(node.target) for node in program.graph.nodes)
    with torch.no_grad():
        expected = model(**named).logits
        assert distance(program.module()(**named).logits, expected) < CLOSE


@pytest.mark.slow
def test_compiled_models_equal_plain_ones() -> None:
    """torch.compile cannot trace the type checker of `conftest`."""
    file = Path(__file__).with_name("compiled_patched_models.py")
    words = ["-m", "pytest", "--noconftest", "--show-capture=no", "--tb=short", str(file)]
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
