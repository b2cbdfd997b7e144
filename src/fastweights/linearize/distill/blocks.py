"""Attention transfer for models larger than memory: block by block, hidden states on disk between
them.

The layers pass the softmax's output on, so that what a block reads does not depend on what the
blocks before it learn: block by block and all at once are the same training. With a model loaded
with ``device_map`` and an offload folder, only the weights of the current block are in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastweights.linearize.convert.attention import blocks, branches
from fastweights.linearize.convert.modes import Mode
from fastweights.linearize.convert.transformers_seams import attentions_with_branch, skip_blocks
from fastweights.linearize.distill.fit import TRAINED, fit, load_parameters
from fastweights.linearize.distill.recipe import TransferConfig
from fastweights.linearize.distill.stages import TransferStage
from fastweights.linearize.distill.transfer import BackwardInForward
from fastweights.training.data.documents import Batches
from fastweights.training.loop.files import reserve, sync
from fastweights.training.loop.loop import Session
from fastweights.training.loop.processes import Alone, Processes
from fastweights.training.loop.report import Counts
from fastweights.training.loop.stage import Every

NO_BRANCH_MARKER = "passed"
"""The file that says so of a block without a branch."""


class _FinishedError(Exception):
    """Raised when a block has given its output and the rest of the forward pass is not needed."""


def transfer_blockwise(
    model: PreTrainedModel,
    train: Batches,
    settings: TransferConfig,
    out: Path,
    session: Session | None = None,
) -> bool:
    """Train every branch, one block after another, in the folder `out`.

    Called again it resumes with the block at which it was stopped. Two files hold the hidden states
    of steps · batch sequences of all processes, which must therefore run on one machine.

    Args:
        model: The linearized model.
        train: Batches to train on.
        settings: The settings of the transfer.
        out: The folder, new or of this same transfer.
        session: Who trains it here and now, with the whole model in each process; None for the
            processes that this one was launched with.

    Returns:
        Whether the transfer is complete.

    Raises:
        ValueError: If the model has no list of blocks.
    """
    session = session or Session.of(model)
    if not blocks(model):
        raise ValueError(f"a {type(model).__name__} has no list of blocks; leave --blockwise out")
    out.mkdir(parents=True, exist_ok=True)
    model.requires_grad_(False)
    for number, block in enumerate(blocks(model)):
        done = out / f"block-{number:04d}"
        if (done / TRAINED).exists():
            load_parameters(model, done)
        elif not (done / NO_BRANCH_MARKER).exists() and not _BlockStage(
            model, number, train, settings, out
        ).run(done, session):
            return False
        block.requires_grad_(False)
        # what the block has read; what it has given is read by the next one
        _file(out, number).unlink(missing_ok=True)
    _file(out, len(blocks(model))).unlink(missing_ok=True)
    return True


class _BlockStage(TransferStage):
    """One block, on the hidden states that the block before it has left."""

    def __init__(
        self,
        model: PreTrainedModel,
        number: int,
        train: Batches,
        settings: TransferConfig,
        out: Path,
    ) -> None:
        config = settings.fit
        super().__init__(model, train, None, settings.loss, settings.dropout, config.seed)
        self.config = replace(config, every=Every(config.every.log, config.steps, config.steps))
        self.number, self.out, self.last = number, out, 0.0
        self.branch = dict(_branches_of(model, number))
        model.requires_grad_(False)
        for branch in self.branch.values():
            branch.requires_grad_(True)
        self.before = None if number == 0 else self._states(number)
        self.after = self._states(number + 1)

    def run(self, done: Path, session: Session) -> bool:
        if self.branch:
            return fit(self, self.config, done, session)
        with self.config.precision(self.model.device):
            self._pass_on()
        done.mkdir(exist_ok=True)
        (done / NO_BRANCH_MARKER).touch()
        return True

    def layers(self) -> Mapping[int, nn.Module]:
        return self.branch

    def judged(self) -> dict[str, list[str]]:
        return {}  # there is no held-out text on disk

    def combine(
        self,
        parts: Sequence[Mapping[str, Tensor]],
        shares: Sequence[float],
        processes: Processes,
    ) -> dict[str, Tensor]:
        losses = super().combine(parts, shares, processes)
        self.last = float(losses["loss"])
        return losses

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        sync(_file(self.out, self.number + 1))  # a later sitting goes on to write after these
        super().save(folder, tensors)

    def attend(self, first: int, count: int, mode: Mode) -> None:
        rows = slice(first, first + count)
        hidden = None if self.before is None else self.before[rows].to(self.model.device)
        with (
            _run_block_alone(blocks(self.model), self.number, hidden, self.after[rows]),
            suppress(_FinishedError),
        ):
            super().attend(first, count, mode)

    def _pass_on(self) -> None:
        """Pass a block without a branch through, since it has nothing to learn."""
        size = self.config.batch // self.config.accumulate
        for first in range(0, self.config.steps * self.config.batch, size):
            self.attend(first, size, BackwardInForward())
        sync(_file(self.out, self.number + 1))

    def validate(self, processes: Processes = Alone()) -> Mapping[str, float]:
        """The last training loss, on text that this block has not seen before; what is on disk is
        complete now.
        """
        sync(_file(self.out, self.number + 1))
        return {"val_loss": processes.total({"loss": self.last})["loss"] / processes.count}

    def summary(self) -> Counts:
        return {**super().summary(), "validation_tokens": self.train.length}

    def _states(self, number: int) -> Tensor:
        """``[sequences t d]`` of what block `number` reads, in a file mapped into memory."""
        shape = (
            self.config.steps * self.config.batch,
            self.train.length,
            self.model.config.hidden_size,
        )
        size = shape[0] * shape[1] * shape[2]
        path = _file(self.out, number)
        reserve(path, size * self.model.dtype.itemsize)
        return torch.from_file(str(path), shared=True, size=size, dtype=self.model.dtype).view(
            shape
        )


def _file(out: Path, number: int) -> Path:
    return out / f"hidden-{number:04d}.bin"


def _branches_of(model: PreTrainedModel, number: int) -> Iterator[tuple[int, nn.Module]]:
    held = {id(module.linear_branch) for module in attentions_with_branch(blocks(model)[number])}
    yield from ((layer, branch) for layer, branch in branches(model).items() if id(branch) in held)


@contextmanager
def _run_block_alone(
    blocks: Iterable[Any], number: int, hidden: Tensor | None, after: Tensor
) -> Iterator[None]:
    """Inside the block a forward runs block `number` alone, on `hidden` if it is given, and ends
    with its output.
    """
    with skip_blocks([block for place, block in enumerate(blocks) if place != number]):
        block = list(blocks)[number]

        def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return args if hidden is None else (hidden, *args[1:])

        def finish(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            after.copy_(output[0] if isinstance(output, tuple) else output)
            raise _FinishedError

        with block.register_forward_pre_hook(before), block.register_forward_hook(finish):
            yield
