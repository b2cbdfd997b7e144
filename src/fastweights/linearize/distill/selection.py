"""Which layers stay softmax: rankings, by the model as it is or by candidates that are trained.

A candidate has as many layers softmax as in the end, or one of them, and all others linear.
KL-guided layer selection (fla-org/hybrid-distillation) restores one layer of an all-linear student
at a time, distils it for a third of the tokens, and ranks layers by the divergence that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from fastweights.errors import Stopped
from fastweights.linearize.convert.rotary import positions_of
from fastweights.linearize.distill.recipe import AdaptationConfig
from fastweights.linearize.distill.run import ConversionRun
from fastweights.linearize.distill.student import StudentModel, long_texts, room_for_heads
from fastweights.linearize.distill.training import AdaptStep
from fastweights.linearize.evaluate.criteria import (
    CRITERIA,
    Candidates,
    Criterion,
    Inputs,
    Losses,
    name_of,
)
from fastweights.linearize.evaluate.ranking import Ranking
from fastweights.training.language.existing import fingerprint


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
    elif conversion.rank_by is not None:
        _require_text(student, conversion.rank_by)


def criterion_of(student: StudentModel) -> Criterion:
    """Return what layers are ranked by: what is named, or else recall where the text can show it,
    and damage where it cannot."""
    if student.run.conversion.rank_by is not None:
        return student.run.conversion.rank_by
    try:
        _require_text(student, CRITERIA["recall"])
    except ValueError as error:
        student.run.reporter.note(f"layers are ranked by damage, not by recall: {error}")
        return CRITERIA["damage"]
    return CRITERIA["recall"]


def _require_text(student: StudentModel, criterion: Criterion) -> None:
    criterion.measure.require_text(lambda: student.model, ranking_text(student, criterion))


def ranking_text(student: StudentModel, criterion: Criterion) -> list[Inputs]:
    """Return what layers are compared on."""
    budget, reach = student.run.conversion.state_budget, positions_of(student.model.config)
    length, _ = long_texts(budget, reach)
    sequences = student.text.comparison_batches()
    return criterion.measure.text(sequences, student.text.tokenizer, length)


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


def rank_now(student: StudentModel) -> Ranking:
    """Rank the layers of the model as it is now."""
    run, criterion = student.run, criterion_of(student)
    batches = ranking_text(student, criterion)
    models = Candidates(student.model, student.changed_original())

    def losses(choices: Sequence[Collection[int]]) -> list[float]:
        read = run.follow(batches, "ranking layers")
        return criterion.measure.losses(models, read, choices)

    return _rank(student, criterion, batches, losses)


def _rank(
    student: StudentModel, criterion: Criterion, batches: Sequence[Inputs], losses: Losses
) -> Ranking:
    """Rank the layers by what is lost with each choice of linear ones."""
    data = student.run.conversion.data
    damage = criterion.damage(student.linear_layers(), losses)
    sources = ", ".join(data.validation or data.sources)
    tokens = max(batch["input_ids"].shape[1] for batch in batches)
    return Ranking(
        criterion=name_of(criterion),
        measure=f"{criterion.measure.words}{_training_in_words(student)}",
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


def rank_trained(student: StudentModel) -> Ranking:
    """Rank the layers by candidates, each of which is trained shortly, in all processes together.

    Args:
        student: The model, with all its linear layers.

    Raises:
        Stopped: If a training was stopped.
    """
    criterion, linear = criterion_of(student), student.linear_layers()
    batches = ranking_text(student, criterion)

    def loss(models: Candidates, chosen: Sequence[int]) -> float:
        (found,) = criterion.measure.losses(models, batches, [chosen])
        return found

    def losses(choices: Sequence[Collection[int]]) -> list[float]:
        return [_trained_loss(student, loss, sorted(chosen), linear) for chosen in choices]

    return _rank(student, criterion, batches, losses)


def _trained_loss(
    student: StudentModel,
    loss: Callable[[Candidates, Sequence[int]], float],
    chosen: list[int],
    linear: Sequence[int],
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
    own = loss(models, chosen)
    of_first = {"loss": own if processes.is_first else 0.0}  # by which all processes go
    return processes.total(of_first)["loss"]
