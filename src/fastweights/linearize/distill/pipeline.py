"""The whole conversion as one run that can be resumed: plan, convert, the stages of its recipe with
the ranking of layers between them, evaluate, report, export."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from fastweights.environment import require_package
from fastweights.errors import CheckpointError, Stopped, TrainingError
from fastweights.linearize.distill.conversion import Conversion
from fastweights.linearize.distill.run import ConversionRun
from fastweights.linearize.distill.selection import require_budget, require_ranking
from fastweights.linearize.distill.step import ConversionStep
from fastweights.linearize.distill.steps import RankLayersStep, steps_of, steps_until
from fastweights.linearize.distill.student import LANDMARKS, StudentModel
from fastweights.linearize.distill.training import AdaptStep
from fastweights.training.language.numerics import record_numerics
from fastweights.training.loop.files import remove_partials
from fastweights.training.loop.folder import (
    create_run,
    is_run,
    lock_run,
    missing_folders,
    read_record,
    remove_if_refused,
)
from fastweights.training.loop.layout import Layout
from fastweights.training.loop.processes import PATIENCE, connected, join_processes
from fastweights.training.loop.report import Reporter
from fastweights.training.loop.results import remove_damaged, seal


@connected()
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
        until: Name of the last step to do, as `steps_until` takes it.
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
    steps = steps_until(conversion.recipe, until)
    device = device or torch.device("cpu")
    _require_packages(conversion, steps, device)
    _require_divisible(conversion, layout)
    processes = join_processes(device, patience)
    processes.require_alike(layout, until)
    for stage in conversion.recipe.stages:
        stage.fit.sequences_at_once(processes)
    reporter = reporter if processes.is_first else Reporter()
    run = ConversionRun(
        conversion, out, processes=processes, layout=layout, reporter=reporter, stop=stop
    )
    student: Any = StudentModel.begin(run)
    with ExitStack() as held:
        if not _open_together(student, held, steps):
            return False
        for step in steps:
            if processes.any(stop()):
                return False
            reporter.note(f"── {step.name}")
            try:
                student = step.run_together(student)
            except Stopped:
                return False
            if student is None:
                return False
            if processes.is_first:
                seal(out, _results(run))
        processes.wait()
    return True


def _open_together(
    student: StudentModel, held: ExitStack, steps: tuple[ConversionStep, ...]
) -> bool:
    """Open the folder in all processes; False if reading the text was stopped."""
    with student.run.processes.first_then_others():
        try:
            _open_folder(student, held, steps)
        except Stopped:
            return False
    return True


def _open_folder(student: StudentModel, held: ExitStack, steps: tuple[ConversionStep, ...]) -> None:
    """Make the run's folder, or find it; `held` keeps other runs out of it."""
    run = student.run
    missing = missing_folders(run.out)
    _require_recipe(run.out)
    is_new = not is_run(run.out, run.conversion)
    if is_new:
        require_budget(run)
        student.loader.require_teachers()
    if run.processes.is_first:
        create_run(run.out, run.conversion)
        held.enter_context(lock_run(run.out))
        remove_partials(run.out)
        for path in remove_damaged(run.out, _results(run)):
            run.reporter.note(f"{path} is missing or damaged; writing it again.")
        record_numerics(run.out)
    for step in steps_of(run.conversion.recipe):
        step.check(run.out)
    with remove_if_refused(missing):
        student.text.require()
        if is_new and any(isinstance(step, RankLayersStep) for step in steps):
            require_ranking(student)


def _results(run: ConversionRun) -> list[Path]:
    """What the steps of a run leave, each of which can be made again from what is before it."""
    steps = steps_of(run.conversion.recipe)
    names = (LANDMARKS, "adapter", *(step.result for step in steps))
    return [run.out / name for name in names]


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
    conversion: Conversion, steps: tuple[ConversionStep, ...], device: torch.device
) -> None:
    """What this run will need, asked for before it begins."""
    bits = conversion.bits
    if conversion.recipe.adapters and any(isinstance(step, AdaptStep) for step in steps):
        require_package("peft", "LoRA", "or take 0 steps of finetuning")
    if bits is None:
        return
    require_package("bitsandbytes", f"bits={bits}", "or leave the weights as they are")
    if bits == 4 and device.type == "cpu":
        raise ValueError(
            "bits=4 on a CPU: bitsandbytes passes no gradients through such weights there; take"
            " bits=8"
        )
