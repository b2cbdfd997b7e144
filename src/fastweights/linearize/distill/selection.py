"""Candidates that are trained before layers are compared: as many layers softmax as in the end, or
one of them, and all others linear.

KL-guided layer selection (fla-org/hybrid-distillation) restores one layer of an all-linear student
at a time, distils it for a third of the tokens, and ranks layers by the divergence that is left.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path

from fastweights.linearize.distill.context import ConversionContext
from fastweights.linearize.distill.criteria import Candidates, Inputs, Losses
from fastweights.linearize.distill.recipe import AdaptationConfig
from fastweights.linearize.distill.training import AdaptVerb
from fastweights.runs.errors import Stopped


class CandidateVerb(AdaptVerb):
    """Train a candidate, in a folder of its own, with the logits that the whole stage stores.

    Args:
        config: The stage of the recipe.
        share: The share of its steps.
        softmax: The numbers of the layers that the candidate keeps softmax.
    """

    def __init__(self, config: AdaptationConfig, share: float, softmax: Sequence[int]) -> None:
        steps = max(1, round(share * config.fit.steps))
        kept = "-".join(map(str, softmax)) or "none"
        named = replace(config, name=f"candidate-{kept}", fit=replace(config.fit, steps=steps))
        super().__init__(named)
        self.stage = config

    def logits_folder(self, context: ConversionContext) -> Path:
        return context.out / "teacher" / self.stage.name


def trained_losses(context: ConversionContext) -> Losses:
    """Return what trains every candidate shortly, in all processes together, and measures it.

    Args:
        context: The run, whose model has all its linear layers.

    Returns:
        What a criterion asks for losses; it raises `Stopped` where a training was stopped.
    """
    texts, linear = context.ranking_text(), context.linear_layers()

    def losses(choices: Sequence[Collection[int]]) -> list[float]:
        return [_loss(context, texts, sorted(chosen), linear) for chosen in choices]

    return losses


def _loss(
    context: ConversionContext, texts: list[Inputs], chosen: list[int], linear: Sequence[int]
) -> float:
    """What is lost with these layers linear; softmax alone loses nothing, and needs no training."""
    if not chosen:
        return 0.0
    recipe, candidate = context.conversion.recipe, _converted_again(context, chosen)
    softmax = [layer for layer in linear if layer not in chosen]
    if not CandidateVerb(recipe.whole[0], recipe.selection, softmax).run(candidate):
        raise Stopped
    models = Candidates(candidate.model, candidate.changed_original())
    (loss,) = context.conversion.rank_by.measure.losses(models, texts, [chosen])
    first = context.processes.is_first  # whose number all go by
    return context.processes.total({"loss": loss if first else 0.0})["loss"]


def _converted_again(context: ConversionContext, layers: list[int]) -> ConversionContext:
    """The run with another model, of which these layers are linear."""
    other = copy(context)
    other.finished = [*context.finished]
    other.model = context.convert_again(layers, context.conversion.bits)
    return other
