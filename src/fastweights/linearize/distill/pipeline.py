"""The whole conversion as one run that can be resumed: plan, convert, the stages of its recipe with
the ranking of layers between them, evaluate, report, export."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from fastweights.linearize.distill.context import LANDMARKS, Conversion, ConversionContext
from fastweights.linearize.distill.training import AdaptVerb
from fastweights.linearize.distill.verb import Verb
from fastweights.linearize.distill.verbs import RankLayersVerb, verbs_of, verbs_until
from fastweights.runs.errors import CheckpointError, Stopped, TrainingError
from fastweights.runs.files import remove_partials
from fastweights.runs.folder import (
    create_run,
    is_run,
    lock_run,
    missing_folders,
    read_record,
    remove_if_refused,
)
from fastweights.runs.layout import Layout
from fastweights.runs.packages import require_package
from fastweights.runs.processes import PATIENCE, join_processes
from fastweights.runs.report import Reporter
from fastweights.runs.results import remove_damaged, seal
from fastweights.train.numerics import record_numerics


def run_conversion(
    conversion: Conversion,
    out: Path,
    *,
    until: str = "export",
    device: torch.device | None = None,
    layout: Layout = Layout(),
    reporter: Reporter = Reporter(),
    stop: Callable[[], bool] = lambda: False,
    patience: float = PATIENCE,
) -> bool:
    """Convert a softmax model in a folder, or resume the conversion that was stopped there.

    ``out/model`` is the result, a folder that ``AutoModelForCausalLM.from_pretrained`` reads,
    ``out/adapter`` what it takes to make it from the softmax model, ``out/report/report.html`` the
    report, and the JSON files beside them its numbers.

    Args:
        conversion: The model, the text and the recipe.
        out: The folder, new or of this same conversion.
        until: Name of the last step to do, as `verbs_until` takes it.
        device: Where the model computes; None for the CPU.
        layout: How the model lies in the memory of the processes while it is trained; no part of
            the conversion. Between the stages every process has the whole model.
        reporter: Receives progress events.
        stop: Called between steps of training; once it returns True, a checkpoint is written and
            the run ends.
        patience: Seconds that one of several processes waits for another one.

    Returns:
        Whether the end was reached; False if the run was stopped before.

    Raises:
        CannotLinearize: If the model, or a chosen layer, has no linear counterpart.
        DataError: If the text cannot be read, or is too short.
        CheckpointError: If `out` holds another run, or is damaged.
        NonFiniteError: If a loss or a gradient becomes infinite or NaN.
        TrainingError: If the processes cannot share a batch.
        ValueError: If no layer would be left linear, or something is missing: peft for LoRA,
            bitsandbytes for `bits`, or a GPU for 4 bits.
    """
    verbs = verbs_until(conversion.recipe, until)
    device = device or torch.device("cpu")
    _require_packages(conversion, verbs, device)
    _require_divisible(conversion, layout)
    processes = join_processes(device, patience)
    for stage in conversion.recipe.stages:
        stage.fit.sequences_at_once(processes)
    reporter = reporter if processes.is_first else Reporter()
    context = ConversionContext(conversion, out, processes, reporter, stop, layout)
    with ExitStack() as held:
        if not _open_together(context, held, verbs):
            return False
        for verb in verbs:
            if processes.any(stop()):
                return False
            reporter.note(f"── {verb.name}")
            if not verb.run_together(context):
                return False
            if processes.is_first:
                seal(out, _results(context))
        processes.wait()
    return True


def _open_together(context: ConversionContext, held: ExitStack, verbs: tuple[Verb, ...]) -> bool:
    """Open the folder in all processes; False if reading the text was stopped."""
    with context.processes.first_then_others():
        try:
            _open_folder(context, held, verbs)
        except Stopped:
            return False
    return True


def _open_folder(context: ConversionContext, held: ExitStack, verbs: tuple[Verb, ...]) -> None:
    """Make the run's folder, or find it; `held` keeps other runs out of it."""
    missing = missing_folders(context.out)
    _require_recipe(context.out)
    is_new = not is_run(context.out, context.conversion)
    if is_new:
        context.require_budget()
        context.require_teachers()
    if context.processes.is_first:
        create_run(context.out, context.conversion)
        held.enter_context(lock_run(context.out))
        remove_partials(context.out)
        for path in remove_damaged(context.out, _results(context)):
            context.reporter.note(f"{path} is missing or damaged; writing it again.")
        record_numerics(context.out)
    for verb in verbs_of(context.conversion.recipe):
        verb.check(context.out)
    with remove_if_refused(missing):
        context.require_text()
        if is_new and any(isinstance(verb, RankLayersVerb) for verb in verbs):
            context.require_ranking()


def _results(context: ConversionContext) -> list[Path]:
    """What the steps of a run leave, each of which can be made again from what is before it."""
    verbs = verbs_of(context.conversion.recipe)
    names = (LANDMARKS, "adapter", *(verb.result for verb in verbs))
    return [context.out / name for name in names]


def _require_recipe(out: Path) -> None:
    """Raise CheckpointError if a folder holds a conversion from before there were recipes."""
    record = read_record(out)
    if isinstance(record, dict) and "method" in record and record.get("type") == "Conversion":
        raise CheckpointError(
            f"{out} holds a conversion that an earlier version of fastweights began, whose stages"
            " this one cannot resume; finish it with that version, or choose another folder"
        )


def _require_divisible(conversion: Conversion, layout: Layout) -> None:
    if not layout.shard:
        return
    if conversion.bits is not None:
        raise TrainingError(
            f"bits={conversion.bits}: quantised weights are not divided over processes; leave out"
            " one of the two"
        )
    if any(getattr(stage, "blockwise", False) for stage in conversion.recipe.stages):
        raise TrainingError(
            "a transfer block by block holds one block at a time, and divides none; leave out"
            " blockwise or shard"
        )


def _require_packages(
    conversion: Conversion, verbs: tuple[Verb, ...], device: torch.device
) -> None:
    """What this run will need, asked for before it begins."""
    bits = conversion.bits
    if conversion.recipe.adapters and any(isinstance(verb, AdaptVerb) for verb in verbs):
        require_package("peft", "LoRA", "or take 0 steps of finetuning")
    if bits is None:
        return
    require_package("bitsandbytes", f"bits={bits}", "or leave the weights as they are")
    if bits == 4 and device.type == "cpu":
        raise ValueError(
            "bits=4 on a CPU: bitsandbytes passes no gradients through such weights there; take"
            " bits=8"
        )
