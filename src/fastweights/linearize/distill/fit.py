"""Training of a part of a model's parameters, those that require a gradient, in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn, optim
from torch.distributed.fsdp import FSDPModule

from fastweights.errors import CheckpointError, TrainingError
from fastweights.linearize.convert.transformers_seams import attentions_with_branch
from fastweights.linearize.distill.best import BEST, BestLoss, BestState
from fastweights.ranges import POSITIVE_NUMBER
from fastweights.training.loop.files import atomic_file
from fastweights.training.loop.folder import is_run
from fastweights.training.loop.loop import Session, run_in_folder
from fastweights.training.loop.metrics import Row
from fastweights.training.loop.optimizers import AdamW, OptimizerConfig
from fastweights.training.loop.processes import Processes
from fastweights.training.loop.report import Reporter
from fastweights.training.loop.results import remove_damaged
from fastweights.training.loop.schedules import Linear, Schedule
from fastweights.training.loop.stage import Optimization, StoredStage, trainable_parameters

TRAINED = "trained.safetensors"
LARGEST_RATE = 10.0
"""Of AdamW. Feature maps saturate: far higher rates would end with a loss that looks sound."""


@dataclass(frozen=True)
class AdamWByPart(AdamW):
    """AdamW with a learning rate of their own for the linear attentions, as KL-guided hybrid
    distillation has it.

    Attributes:
        attention_lr: Peak learning rate of the attentions that have a branch.

    Raises:
        TrainingError: If a number lies outside of its range.
    """

    attention_lr: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        POSITIVE_NUMBER.require(attention_lr=self.attention_lr)

    def build(self, model: nn.Module) -> list[optim.Optimizer]:
        trained = list(trainable_parameters(model).values())
        inside = {id(p) for module in attentions_with_branch(model) for p in module.parameters()}
        parts = [p for p in trained if id(p) in inside], [p for p in trained if id(p) not in inside]
        faster = replace(self, lr=self.attention_lr)
        return [*faster.build_for(model, parts[0]), *self.build_for(model, parts[1])]


@dataclass(frozen=True)
class Fit(Optimization):
    """The settings of one training stage of a linearization, with LoLCATs' defaults.

    Attributes:
        batch: Sequences per update.
        optimizer: The optimiser.
        schedule: How the learning rate changes during training.

    Raises:
        TrainingError: If a number lies outside of its range.
    """

    batch: int = 8
    optimizer: OptimizerConfig = AdamW(lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0)
    schedule: Schedule = Linear(warmup=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.optimizer, AdamW) and self.optimizer.lr > LARGEST_RATE:
            raise TrainingError(
                f"lr = {self.optimizer.lr:g}; every update of AdamW moves every weight by about"
                f" the learning rate, and more than {LARGEST_RATE:g} only destroys it; take a"
                " lower rate, such as 0.01"
            )


class PartialStage(StoredStage):
    """A stage that stores only the trained parameters, in ``trained.safetensors``: in their best
    state by the held-out text, which may be that before the stage.

    Attributes:
        losses_before: The losses on the held-out text before the stage; empty where that is known.
    """

    results = (TRAINED,)
    losses_before: Mapping[str, float] = {}

    def judged(self) -> dict[str, list[str]]:
        """Return the names of what is trained by the loss on held-out text that judges it."""
        return {"val_loss": list(trainable_parameters(self.model))}

    def prepare(self, out: Path) -> None:
        if self.losses_before and not (out / BEST).exists():
            losses = {name: BestLoss(0, self.losses_before[name]) for name in self.judged()}
            BestState(losses, self.tensors()).write(out)

    def draw(self, rows: Sequence[Row], out: Path) -> None:
        best = BestState.read(out)
        if best is not None and "val_loss" in rows[-1]:
            # the parts of a divided model are brought together at the end alone
            now = {} if isinstance(self.model, FSDPModule) else self.tensors()
            better = best.beside(rows[-1], self.judged(), now)
            if better is not None:
                better.write(out)

    def tensors(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in trainable_parameters(self.model).items()}

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TRAINED)

    def load(self, folder: Path) -> None:
        load_parameters(self.model, folder)

    def finish(self, out: Path, tensors: Mapping[str, Tensor]) -> None:
        best = BestState.read(out)
        write_tensors(out / TRAINED, {**tensors, **(best.tensors if best else {})})

    def measure_before(self, config: Fit, processes: Processes) -> None:
        """Measure the state before the stage, by which the states after it are judged."""
        with config.precision(processes.device):
            self.losses_before = self.validate(processes)


def fit(
    stage: PartialStage,
    config: Fit,
    out: Path,
    session: Session | None = None,
) -> bool:
    """Train in the folder `out`, or resume there, as `run_in_folder` does.

    out/trained.safetensors holds the trained parameters in the end.

    Args:
        stage: What is trained.
        config: How it is trained.
        out: The folder, new or of this same training.
        session: Who trains it here and now; None for the processes that this one was launched with.

    Returns:
        Whether the training is complete.

    Raises:
        CheckpointError: If `out` holds another training, or is damaged.
        NonFiniteError: If a loss, gradient or parameter becomes infinite or NaN, or the loss
            explodes.
        Stopped: If `stop` returned True before the first step.
    """
    session = session or Session.of(stage.model)
    processes, reporter = session.processes, session.reporter
    with processes.first_then_others():
        if processes.is_first:
            for path in remove_damaged(out, [out / TRAINED]):
                reporter.note(f"{path} is missing or damaged; writing it again.")
        is_trained = is_run(out, config) and (out / TRAINED).exists()
        is_judged = not stage.judged() or (out / BEST).exists()
    processes.wait()  # nobody looks at the folder any more while the first one begins it
    if is_trained:
        stage.load(out)
        return True
    if not is_judged:
        stage.measure_before(config, processes.watched(session.stop, reporter))
    end = run_in_folder(stage, config, out, session)
    if end.is_complete:
        _keep_best(stage, config, out, reporter)
    return end.is_complete


def _keep_best(stage: PartialStage, config: Fit, out: Path, reporter: Reporter) -> None:
    """Give the model the state that is kept, and say where that is not the end's."""
    best = BestState.read(out)
    said = None if best is None else best.in_words(out.name, config.steps)
    if said is not None:
        reporter.note(said)
        if not isinstance(stage.model, FSDPModule):  # which is made anew from the file
            stage.load(out)


def load_parameters(model: nn.Module, out: Path) -> None:
    """Copy the parameters in ``out/trained.safetensors`` into `model`, where it has them.

    Raises:
        CheckpointError: If the file is damaged.
        ValueError: If `model` has none of them.
    """
    copy_parameters(model, read_parameters(out))


def read_parameters(out: Path) -> dict[str, Tensor]:
    """Read the parameters in ``out/trained.safetensors``, or in those of a folder's blocks.

    Raises:
        CheckpointError: If a file is damaged.
    """
    files = [path] if (path := out / TRAINED).exists() else sorted(out.glob(f"block-*/{TRAINED}"))
    found = dict[str, Tensor]()
    for path in files:
        found |= read_tensors(path)
    return found


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file of a run.

    Raises:
        CheckpointError: If it is damaged.
    """
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); remove it, and the same command writes it again"
        ) from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of a run, whole or not at all."""
    with atomic_file(path) as new:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, new)


def copy_parameters(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors whose names `model` has into its parameters and buffers.

    Raises:
        ValueError: If there are none.
    """
    there = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shared = there.keys() & tensors.keys()
    if not shared:
        raise ValueError(
            f"{type(model).__name__} has none of {len(tensors)} trained tensors, such as"
            f" {min(tensors)}"
        )
    with torch.no_grad():
        for name in shared:
            there[name].copy_(tensors[name])
