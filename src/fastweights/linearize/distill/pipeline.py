"""The whole conversion as one run that can be resumed: plan, convert, transfer, rank, finetune,
evaluate, report, export."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from fastweights.linearize.distill.context import Conversion, ConversionContext
from fastweights.linearize.distill.fit import Fit
from fastweights.linearize.distill.verbs import VERBS, FinetuneVerb, RankLayersVerb, Verb
from fastweights.runs.errors import Stopped, TrainingError
from fastweights.runs.files import remove_partials
from fastweights.runs.folder import create_run, is_run, lock_run, missing_folders, remove_if_refused
from fastweights.runs.layout import Layout
from fastweights.runs.packages import require_package
from fastweights.runs.processes import join_processes
from fastweights.runs.report import Reporter
from fastweights.runs.results import remove_damaged, seal
from fastweights.runs.watch import PATIENCE
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
        conversion: The model, the text and the method.
        out: The folder, new or of this same conversion.
        until: Name of the last step to do, one of `VERBS`.
        device: Where the model computes; None for the CPU.
        layout: How the model lies in the memory of the processes while it is trained; no part of
            the conversion. Between the stages every process has the whole model.
        reporter: Receives progress events.
        stop: Called between steps of training; once it returns True, a checkpoint is written and
            the run ends.
        patience: Seconds that one of several processes waits for another one that is silent.

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
    verbs = _verbs_until(until)
    device = device or torch.device("cpu")
    _require_packages(conversion, verbs, device)
    _require_divisible(conversion, layout)
    processes = join_processes(device, patience)
    for fit in _fits(conversion):
        fit.sequences_at_once(processes)
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
                seal(out, _results(out))
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
    is_new = not is_run(context.out, context.conversion)
    if is_new:
        context.require_budget()
    if context.processes.is_first:
        create_run(context.out, context.conversion)
        held.enter_context(lock_run(context.out))
        remove_partials(context.out)
        for path in remove_damaged(context.out, _results(context.out)):
            context.reporter.note(f"{path} is missing or damaged; writing it again.")
        record_numerics(context.out)
    for verb in VERBS:
        verb.check(context.out)
    with remove_if_refused(missing):
        context.require_text()
        if is_new and any(isinstance(verb, RankLayersVerb) for verb in verbs):
            context.require_ranking()


def _results(out: Path) -> list[Path]:
    """What the steps of a run leave, each of which can be made again from what is before it."""
    return [out / "adapter", *(out / verb.result for verb in VERBS)]


def _fits(conversion: Conversion) -> list[Fit]:
    """The settings of the stages that are trained."""
    stages = conversion.method.transfer, conversion.method.adapt
    return [stage.fit for stage in stages if stage is not None]


def _verbs_until(name: str) -> tuple[Verb, ...]:
    return VERBS[: [verb.name for verb in VERBS].index(name) + 1]


def _require_divisible(conversion: Conversion, layout: Layout) -> None:
    if not layout.shard:
        return
    if conversion.bits is not None:
        raise TrainingError(
            f"bits={conversion.bits}: quantised weights are not divided over processes; leave out"
            " one of the two"
        )
    transfer = conversion.method.transfer
    if transfer is not None and transfer.blockwise:
        raise TrainingError(
            "a transfer block by block holds one block at a time, and divides none; leave out"
            " blockwise or shard"
        )


def _require_packages(
    conversion: Conversion, verbs: tuple[Verb, ...], device: torch.device
) -> None:
    """What this run will need, asked for before it begins."""
    adapt, bits = conversion.method.adapt, conversion.bits
    finetunes = any(isinstance(verb, FinetuneVerb) for verb in verbs)
    if finetunes and adapt is not None and adapt.lora is not None:
        require_package("peft", "LoRA", "or take 0 steps of finetuning")
    if bits is None:
        return
    require_package("bitsandbytes", f"bits={bits}", "or leave the weights as they are")
    if bits == 4 and device.type == "cpu":
        raise ValueError(
            "bits=4 on a CPU: bitsandbytes passes no gradients through such weights there; take"
            " bits=8"
        )
