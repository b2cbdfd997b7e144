"""What the training of a language model minimises: cross-entropy and, if it is to be, a z-loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fastweights.models import FastWeightsForCausalLM
from fastweights.models.loss import LOGITS_AT_ONCE, next_token_loss, squared_log_z
from fastweights.training.language.adapters import has_adapters

Objective = Callable[[Any, Mapping[str, Tensor]], dict[str, Tensor]]
"""The losses of a model on a batch, by name; their sum is minimised. ``loss`` is the cross-entropy
of the next token, in nats."""


def make_objective(model: Any, z_loss: float) -> Objective:
    """Return the objective of a model's training.

    Args:
        model: The model, before anything is wrapped around it.
        z_loss: Weight of the mean of log² Z, which is reported as ``z_loss``, weight included; 0
            for none.
    """
    if z_loss == 0:
        return lambda model, batch: {"loss": model(**batch).loss}
    base = model.get_base_model() if has_adapters(model) else model
    losses = _own_losses if isinstance(base, FastWeightsForCausalLM) else _losses_of_logits

    def objective(model: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        loss, log_z = losses(model, batch)
        return {"loss": loss, "z_loss": z_loss * log_z}

    return objective


def _own_losses(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    output = model(**batch, squared_log_z=True)
    return output.loss, output.squared_log_z


def _losses_of_logits(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of another library's model, which holds all logits anyway."""
    output = model(**batch)
    logits, labels = output.logits, batch["labels"]
    chunk = max(1, LOGITS_AT_ONCE // logits.shape[-1])
    return output.loss, next_token_loss(
        lambda z: z, logits, labels, chunk=chunk, term=squared_log_z
    )
