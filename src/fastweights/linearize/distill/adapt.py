"""The losses of a model as a whole, in which it adapts to its linear layers (LoLCATs, section 3),
and its adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fastweights.linearize.convert.attention import branches
from fastweights.linearize.convert.attention_layers import CannotLinearize
from fastweights.linearize.convert.transformers_seams import attentions_with_branch
from fastweights.linearize.distill.losses import require_factors
from fastweights.linearize.evaluate.logits import (
    ReadOut,
    mean_over_rows,
    read_out,
    read_teacher,
    total_kl,
)
from fastweights.models.loss import IGNORE_INDEX
from fastweights.ranges import POSITIVE_INTEGER
from fastweights.shapes import Mask
from fastweights.training.language.adapters import (
    LoRA,
    has_adapters,
    without_notes_to_peft,
    without_shared,
    wrap_in_adapters,
)
from fastweights.training.loop.seeds import own_randomness, seed_for


@dataclass(frozen=True)
class TeacherSource:
    """Whose next-token distribution a model learns.

    Attributes:
        model: Another model of the same tokens, a folder or a name on the Hugging Face hub; None
            for the softmax model that is converted, as it was.
        top_k: How many of the teacher's largest logits of each token are computed once, before the
            training, and kept in the run's folder; all other tokens then count as one class. None
            to compute all of them at every step.

    Raises:
        TrainingError: If `top_k` is no whole number above 0.
    """

    model: str | None = None
    top_k: int | None = None

    def __post_init__(self) -> None:
        if self.top_k is not None:
            POSITIVE_INTEGER.require(top_k=self.top_k)


Divergence = Callable[..., Tensor]
"""Of logits and what is known of a teacher."""


class LogitSource(ABC):
    """A teacher that is asked for the distribution of the next token."""

    @abstractmethod
    def rows(
        self, inputs: Mapping[str, Tensor], learnt: Mask, first: int
    ) -> tuple[tuple[Tensor, ...], Divergence]:
        """Return what is known of the n tokens that are learnt, tensors ``[n …]``, and what makes
        of logits ``[m vocabulary]`` of the student and m rows of them Σ KL(teacher ‖ student), in
        nats.

        Args:
            inputs: The batch, without labels.
            learnt: ``[b t-1]``, True at those n tokens.
            first: Number of the batch's first sequence in the stage's text.
        """


@dataclass(frozen=True, eq=False)
class ModelLogits(LogitSource):
    """A teacher whose logits are computed when they are asked for.

    A student may have fewer logits than its teacher, or more, as widths are rounded up: those that
    both have are compared.

    Attributes:
        read: Reads a model's inputs, without gradients.
    """

    read: Callable[[Mapping[str, Tensor]], ReadOut]

    def rows(
        self, inputs: Mapping[str, Tensor], learnt: Mask, first: int
    ) -> tuple[tuple[Tensor, ...], Divergence]:
        read = self.read(inputs)

        def divergence(logits: Tensor, states: Tensor) -> Tensor:
            with torch.no_grad():
                teacher = read.logits(states)
            shared = min(teacher.shape[-1], logits.shape[-1])
            return total_kl(teacher[:, :shared], logits[:, :shared])

        return (read.states[:, :-1][learnt],), divergence


@dataclass(frozen=True)
class TokenLoss:
    """The loss of a whole model: ce · -log p(next token) + kl · KL(teacher ‖ student), in nats.

    Both terms are means over the tokens that are trained on, and 0 if there are none.

    Attributes:
        ce: The factor of the cross-entropy with the text.
        kl: The factor of the divergence from the teacher.
        teacher: Who that is. Where its weights are frozen, the model itself is, without its
            adapters and with its softmax: there is no second copy of the weights.

    Raises:
        ValueError: If a factor is negative, infinite or NaN, or both are 0; if there is a teacher
            without `kl`.
    """

    ce: float = 1.0
    kl: float = 0.0
    teacher: TeacherSource = TeacherSource()

    def __post_init__(self) -> None:
        require_factors(self, self.ce, self.kl)
        if self.kl == 0 and self.teacher != TeacherSource():
            raise ValueError(
                f"{self.teacher} teaches nothing where kl = 0; give kl a factor, such as 1, or"
                " leave the teacher out"
            )

    def __call__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Tensor],
        source: LogitSource | None = None,
        first: int = 0,
        read: Callable[[Any, Mapping[str, Tensor]], ReadOut] = read_out,
    ) -> Tensor:
        """Compute the loss of a batch with ``labels``, a scalar.

        Args:
            model: The student.
            inputs: The batch.
            source: The teacher; None for the model itself.
            first: Number of the batch's first sequence in the stage's text.
            read: Reads a batch with the student.
        """
        targets = inputs["labels"][:, 1:]
        given = {name: x for name, x in inputs.items() if name != "labels"}
        learnt = targets != IGNORE_INDEX
        known, divergence = tuple[Tensor, ...](), None
        if self.kl:
            teacher = ModelLogits(partial(read_teacher, model)) if source is None else source
            known, divergence = teacher.rows(given, learnt, first)
        student = read(model, given)

        def total(states: Tensor, targets: Tensor, *known: Tensor) -> Tensor:
            logits, parts = student.logits(states), list[Tensor]()
            if self.ce:
                parts.append(self.ce * F.cross_entropy(logits, targets, reduction="sum"))
            if divergence is not None:
                parts.append(self.kl * divergence(logits, *known))
            return torch.stack(parts).sum()

        # only states whose next token is learnt are given logits
        rows = student.states[:, :-1][learnt], targets[learnt], *known
        return mean_over_rows(total, student.vocabulary, *rows)


def prepare_adaptation(
    model: PreTrainedModel, lora: LoRA, train_branches: bool = False, seed: int = 0
) -> Any:
    """Put adapters on the projections of a linearized model's converted attentions.

    Args:
        model: The linearized model, which may be in peft's wrapper already: its adapters are
            trained further then.
        lora: The adapters, which alone are trained.
        train_branches: Whether the branches are trained too.
        seed: Seed of the adapters' initial values.

    Returns:
        The model in peft's wrapper. The branches are saved with the adapters, so that both together
        make the linear model from the softmax one.
    """
    wrapped = model if has_adapters(model) else _wrap(model, lora, seed)
    for name, p in wrapped.named_parameters():
        p.requires_grad_("lora_" in name)
    for branch in branches(wrapped).values():
        branch.requires_grad_(train_branches)
    return wrapped


def _wrap(model: PreTrainedModel, lora: LoRA, seed: int) -> Any:
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
        return wrap_in_adapters(model, config)


def projections(model: PreTrainedModel) -> list[str]:
    """List the names of the linear layers in the converted attentions, without those of branches
    and those whose weights other modules have, too.

    Raises:
        CannotLinearize: If there are none.
    """
    attentions = {id(module) for module in attentions_with_branch(model)}
    layers = [
        f"{path}.{name}"
        for path, attention in model.named_modules()
        if id(attention) in attentions
        for name, module in attention.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not name.startswith("linear_branch")
    ]
    found = without_shared(model, layers)
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
