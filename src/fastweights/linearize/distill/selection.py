"""Which layers stay softmax: rankings, by the model as it is or by candidates that are trained.

A candidate has as many layers softmax as in the end, or one of them, and all others linear.
KL-guided layer selection (fla-org/hybrid-distillation) restores one layer of an all-linear student
at a time, distils it for a third of the tokens, and ranks layers by the divergence that is left.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from fastweights.errors import Stopped
from fastweights.linearize.distill.recipe import AdaptationConfig
from fastweights.linearize.distill.run import ConversionRun
from fastweights.linearize.distill.student import StudentModel, room_for_heads
from fastweights.linearize.distill.training import AdaptStep
from fastweights.linearize.evaluate.criteria import Candidates, Inputs, Losses, name_of
from fastweights.linearize.evaluate.ranking import Ranking, fingerprint


def require_budget(run: ConversionRun) -> None:
    """Check that what the softmax layers may take allows for a conversion.

    Raises:
        ValueError: If it does not.
    """
    layers = [attention.layer for attention in run.plan.converted]
    run.conversion.budget.choose(layers, run.plan.caches)
    if run.conversion.state_budget is not None:
        room_for_heads(run)


def require_ranking(student: StudentModel) -> None:
    """Check that the ranking that is given is of this model, or that the text can show what its
    layers are to be ranked by.

    Raises:
        ValueError: If it is not, or cannot.
    """
    conversion = student.run.conversion
    if conversion.ranking is not None:
        layers = [attention.layer for attention in student.run.plan.converted]
        conversion.ranking.require(_fingerprint(student), layers)
    else:
        measure = conversion.rank_by.measure
        measure.require_text(lambda: student.model, ranking_text(student))


def ranking_text(student: StudentModel) -> list[Inputs]:
    """Return what layers are compared on."""
    measure = student.run.conversion.rank_by.measure
    return measure.text(student.text.comparison_batches(), student.text.tokenizer)


def _fingerprint(student: StudentModel) -> str:
    """Of the softmax model."""
    _ = student.model  # whose weights are on this machine from then on
    return fingerprint(student.run.conversion.model)


def trains_candidates(student: StudentModel) -> bool:
    """Whether candidates are trained before layers are compared, and some of them are kept."""
    conversion = student.run.conversion
    if not conversion.recipe.selection or conversion.ranking is not None:
        return False
    return bool(conversion.budget.choose(student.linear_layers(), student.run.plan.caches))


def losses_now(student: StudentModel) -> Losses:
    """Return what is lost with each choice of linear layers, of the model as it is now."""
    run, batches = student.run, ranking_text(student)
    models = Candidates(student.model, student.changed_original())
    measure = run.conversion.rank_by.measure
    return lambda choices: measure.losses(models, run.follow(batches, "ranking layers"), choices)


def rank(student: StudentModel, losses: Losses) -> Ranking:
    """Rank the layers by what is lost with each choice of linear ones."""
    conversion = student.run.conversion
    damage = conversion.rank_by.damage(student.linear_layers(), losses)
    sources = ", ".join(conversion.data.validation or conversion.data.sources)
    batches = ranking_text(student)
    tokens = max(batch["input_ids"].shape[1] for batch in batches)
    return Ranking(
        criterion=name_of(conversion.rank_by),
        measure=f"{conversion.rank_by.measure.words}{_training_in_words(student)}",
        damage=dict(sorted(damage.items())),
        order=tuple(damage),
        model=_fingerprint(student),
        text=f"{len(batches)} sequences of {tokens} tokens, held out of {sources}",
    )


def _training_in_words(student: StudentModel) -> str:
    recipe = student.run.conversion.recipe
    if not trains_candidates(student):
        return ""
    return f", after {recipe.selection:.3g} of the steps of {recipe.whole[0].name}"


class CandidateStep(AdaptStep):
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

    def logits_folder(self, run: ConversionRun) -> Path:
        return run.out / "teacher" / self.stage.name


def trained_losses(student: StudentModel) -> Losses:
    """Return what trains every candidate shortly, in all processes together, and measures it.

    Args:
        student: The model, with all its linear layers.

    Returns:
        What a criterion asks for losses; it raises `Stopped` where a training was stopped.
    """
    texts, linear = ranking_text(student), student.linear_layers()

    def losses(choices: Sequence[Collection[int]]) -> list[float]:
        return [_loss(student, texts, sorted(chosen), linear) for chosen in choices]

    return losses


def _loss(
    student: StudentModel, texts: list[Inputs], chosen: list[int], linear: Sequence[int]
) -> float:
    """What is lost with these layers linear; softmax alone loses nothing, and needs no training."""
    if not chosen:
        return 0.0
    conversion, processes = student.run.conversion, student.run.processes
    recipe, softmax = conversion.recipe, [layer for layer in linear if layer not in chosen]
    step = CandidateStep(recipe.whole[0], recipe.selection, softmax)
    candidate = step.run(student.with_model(student.convert_again(chosen, conversion.bits)))
    if candidate is None:
        raise Stopped
    models = Candidates(candidate.model, candidate.changed_original())
    (loss,) = conversion.rank_by.measure.losses(models, texts, [chosen])
    return processes.total({"loss": loss if processes.is_first else 0.0})["loss"]  # all go by its
