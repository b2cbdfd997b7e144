"""Stage two, low-rank adaptation (LoLCATs, section 3): attention weights adapt to the linear
layers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fastweights.layers import upcast
from fastweights.linearize.convert.attention import branches, use_mode
from fastweights.linearize.convert.errors import CannotLinearize
from fastweights.linearize.convert.modes import Mode, Teacher
from fastweights.linearize.convert.transformers_seams import attentions_with_branch
from fastweights.runs.ranges import NON_NEGATIVE_NUMBER
from fastweights.runs.seeds import own_randomness, seed_for
from fastweights.text import IGNORE_INDEX
from fastweights.train.adapters import (
    LoRA,
    has_adapters,
    without_notes_to_peft,
    wrap_in_adapters,
)


@dataclass(frozen=True)
class TokenLoss:
    """The loss of stage two: ce · -log p(next token) + kl · KL(teacher ‖ student), in nats.

    Both terms are means over the tokens that are trained on. The teacher is the model itself,
    without its adapters and with its softmax: there is no second copy of the weights.

    Attributes:
        ce: The factor of the cross-entropy with the text.
        kl: The factor of the divergence from the teacher.

    Raises:
        ValueError: If a factor is negative, infinite or NaN, or both are 0.
    """

    ce: float = 1.0
    kl: float = 0.0

    def __post_init__(self) -> None:
        sound = self.ce in NON_NEGATIVE_NUMBER and self.kl in NON_NEGATIVE_NUMBER
        if not sound or self.ce + self.kl == 0:
            raise ValueError(
                f"{self}: both factors must be at least 0 and finite, and one of them above 0"
            )

    def __call__(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """Compute the loss of a batch with ``labels``, a scalar."""
        labels, given = (
            inputs["labels"],
            {name: x for name, x in inputs.items() if name != "labels"},
        )
        learnt = labels[:, 1:] != IGNORE_INDEX
        logits = next_logits(model, given)[learnt]
        parts = []
        if self.ce:
            parts.append(self.ce * F.cross_entropy(logits, labels[:, 1:][learnt]))
        if self.kl:
            parts.append(self.kl * kl(teacher_logits(model, given)[learnt], logits))
        return torch.stack(parts).sum()


def next_logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Compute the logits ``[b t-1 vocabulary]`` after all tokens but the last, in float32 or
    wider."""
    return upcast(model(**inputs, use_cache=False).logits[:, :-1])


@torch.no_grad()
def teacher_logits(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Compute `next_logits` of the original model: with softmax attention, and without adapters."""
    training = model.training
    model.eval()
    try:
        with without_adapters(model), use_mode(model, Teacher()):
            return next_logits(model, inputs)
    finally:
        model.train(training)


def without_adapters(model: Any) -> AbstractContextManager[Any]:
    """Disable the adapters of `model`, if it has any, for the length of a block."""
    return model.disable_adapter() if has_adapters(model) else nullcontext()


def unwrap_adapters(model: Any) -> PreTrainedModel:
    """Return the model inside peft's wrapper, or `model` itself if it has none."""
    return model.get_base_model() if has_adapters(model) else model


def kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Compute the mean KL(teacher ‖ student) of logits ``[n vocabulary]`` over n, in nats."""
    return F.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), reduction="batchmean", log_target=True
    )


@torch.no_grad()
def kl_from_softmax(model: nn.Module, inputs: Mapping[str, Tensor], mode: Mode) -> float:
    """Compute the mean KL(softmax ‖ `mode`) of the next token over a batch, in nats."""
    given = {name: x for name, x in inputs.items() if name != "labels"}
    with use_mode(model, mode):
        logits = next_logits(model, given)
    return float(kl(teacher_logits(model, given).flatten(0, 1), logits.flatten(0, 1)))


def prepare_adaptation(
    model: PreTrainedModel, lora: LoRA | None, train_branches: bool = False, seed: int = 0
) -> Any:
    """Prepare a linearized model for stage two.

    Args:
        model: The linearized model.
        lora: The adapters to add, which alone are trained; None to train all weights.
        train_branches: Whether the branches are trained too.
        seed: Seed of the adapters' initial values.

    Returns:
        The model, in peft's wrapper if there are adapters. The branches are saved with them, so
        that both together make the linear model from the softmax one.
    """
    if lora is None:
        return model.requires_grad_(True)
    from peft import LoraConfig

    layers = projections(model)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=layers,
        fan_in_fan_out=all(isinstance(model.get_submodule(path), Conv1D) for path in layers),
        modules_to_save=["linear_branch"],
        task_type="CAUSAL_LM",
    )
    with own_randomness(seed_for("adapters", seed)):
        wrapped = wrap_in_adapters(model, config)
    for branch in branches(wrapped).values():
        branch.requires_grad_(train_branches)
    return wrapped


def projections(model: PreTrainedModel) -> list[str]:
    """List the names of the linear layers in the converted attentions, without those of branches.

    Raises:
        CannotLinearize: If there are none.
    """
    attentions = {id(module) for module in attentions_with_branch(model)}
    found = [
        f"{path}.{name}"
        for path, attention in model.named_modules()
        if id(attention) in attentions
        for name, module in attention.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not name.startswith("linear_branch")
    ]
    if not found:
        raise CannotLinearize(
            type(model).__name__,
            "its converted attentions have no linear layers to adapt",
            "train all weights",
        )
    return found


def load_adapters(model: PreTrainedModel, folder: Path) -> Any:
    """Load the adapters and branches that were saved in `folder`, and return `model` with them."""
    from peft import PeftModel

    with without_notes_to_peft():
        return PeftModel.from_pretrained(model, folder)
