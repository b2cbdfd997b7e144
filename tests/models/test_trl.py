"""TRL's trainers on our models, and on linearized ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel

from fastweights.linearize import LinearAttentionConfig, linearize
from fastweights.training.data.tokenizers import Bytes
from pretrained import llama
from tiny import tiny

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

TOKENIZER = Bytes().build([])
IDS = {name: getattr(TOKENIZER, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
every_kind = pytest.mark.parametrize(
    "kind", [*(pytest.param(k, marks=pytest.mark.slow) for k in ("metala", "hybrid")), "linearized"]
)


def build(kind: str) -> PreTrainedModel:
    fields = {"vocab_size": len(TOKENIZER), **IDS}
    if kind == "linearized":
        return linearize(llama(2, torch.float32, **fields), LinearAttentionConfig(window=3))
    return tiny(kind, torch.float32, **fields)


def settings(folder: Path, **own: Any) -> dict[str, Any]:
    common = {"max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no"}
    quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1}
    return {"output_dir": str(folder), "use_cpu": True, "bf16": False, **common, **quiet, **own}


def first_loss(trainer: Any) -> float:
    trainer.train()
    return trainer.state.log_history[0]["loss"]


def fine_tune(kind: str, folder: Path, **own: Any) -> float:
    texts = Dataset.from_dict({"text": ["hello there " * (i % 3 + 1) for i in range(16)]})
    config = trl.SFTConfig(**settings(folder, **own))
    return first_loss(
        trl.SFTTrainer(build(kind), config, train_dataset=texts, processing_class=TOKENIZER)
    )


@every_kind
def test_supervised_fine_tuning(kind: str, tmp_path: Path) -> None:
    plain = fine_tune(kind, tmp_path, max_length=None)
    assert plain > 1
    flat = fine_tune(kind, tmp_path, max_length=None, padding_free=True)
    assert flat == pytest.approx(plain, rel=1e-5)
    assert fine_tune(kind, tmp_path, max_length=48, packing=True) > 1


@every_kind
def test_preference_optimisation(kind: str, tmp_path: Path) -> None:
    """The reference model is read from the folder that the model came from."""
    build(kind).save_pretrained(tmp_path / "model")
    pairs = {"prompt": ["a", "bc"] * 4, "chosen": ["yes", "good"] * 4}
    trainer = trl.DPOTrainer(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
        args=trl.DPOConfig(**settings(tmp_path / "run")),
        train_dataset=Dataset.from_dict({**pairs, "rejected": ["no", "bad one"] * 4}),
        processing_class=TOKENIZER,
    )
    assert first_loss(trainer) == pytest.approx(0.6931, abs=1e-4)


@every_kind
def test_policy_optimisation(kind: str, tmp_path: Path) -> None:
    own = {"num_generations": 2, "max_completion_length": 4}
    trainer = trl.GRPOTrainer(
        build(kind),
        reward_funcs=lambda completions, **_: [float(i) for i in range(len(completions))],
        args=trl.GRPOConfig(**settings(tmp_path, **own)),
        train_dataset=Dataset.from_dict({"prompt": ["say hi ", "count "] * 4}),
        processing_class=TOKENIZER,
    )
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0
