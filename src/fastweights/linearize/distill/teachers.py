"""Teachers beside the model that is trained: another model, or logits that were computed before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastweights.errors import DataError
from fastweights.linearize.distill.adapt import Divergence, LogitSource
from fastweights.linearize.evaluate.logits import inputs_of
from fastweights.shapes import Mask
from fastweights.training.data.documents import Batches, Data
from fastweights.training.loop.files import atomic_file, remove_partials
from fastweights.training.loop.folder import create_run, is_run
from fastweights.training.loop.processes import Processes
from fastweights.training.loop.report import Reporter
from fastweights.training.loop.results import remove_damaged, seal

SEQUENCES = 32
"""Of a file of stored logits."""

Logits = Callable[[Mapping[str, Tensor]], Tensor]
"""Returns a teacher's logits ``[b t-1 vocabulary]`` for inputs."""


def require_same_tokens(student: Any, teacher: Any, source: str) -> None:
    """Check that two tokenizers give every token the same number.

    Raises:
        DataError: If they do not.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if differing := sorted({*ours.items()} ^ {*theirs.items()}):
        token, number = differing[0]
        raise DataError(
            f"the teacher {source} has other tokens than the model ({len(ours):,} in the model,"
            f" {len(theirs):,} in the teacher; {token!r}, number {number}, is of one of them only);"
            " take a teacher with the model's own tokenizer"
        )


@dataclass(frozen=True)
class StoredLogits:
    """What decides the logits that are stored of a stage's text.

    Attributes:
        teacher: Whose logits they are: a folder or a name on the Hugging Face hub.
        top_k: How many of each token's.
        data: The text.
        length: Tokens per sequence.
        seed: Seed of the order of the text.
        count: Number of sequences.
    """

    teacher: str
    top_k: int
    data: Data
    length: int
    seed: int
    count: int

    @property
    def files(self) -> range:
        """The numbers of the files, of `SEQUENCES` sequences each."""
        return range(-(-self.count // SEQUENCES))


def open_store(out: Path, stored: StoredLogits, processes: Processes, reporter: Reporter) -> bool:
    """Open the folder of stored logits, or make it; whether all of them are there, undamaged.

    Raises:
        CheckpointError: If it holds others.
    """
    with processes.first_then_others():
        is_run(out, stored)
        if processes.is_first:
            create_run(out, stored)
            remove_partials(out)
            for path in remove_damaged(out, [_file(out, number) for number in stored.files]):
                reporter.note(f"{path} is missing or damaged; writing it again.")
    return not _missing(out, stored)


def store_logits(
    out: Path,
    stored: StoredLogits,
    train: Batches,
    logits: Logits,
    processes: Processes,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Compute and store the logits that a folder lacks, file by file, each process its share.

    A file is there whole or not at all; once all are there, their hashes are recorded.

    Args:
        out: The folder, as `open_store` left it.
        stored: What is stored.
        train: The text.
        logits: The teacher.
        processes: The processes that share the work; they must see the same folder.
        stop: Called between files; once it returns True, the rest is left.

    Returns:
        Whether all logits are stored.
    """
    missing = _missing(out, stored)
    processes.wait()  # before one of them writes what another has not listed yet
    # a file per process and turn: all processes go through as many turns, in which they meet
    for turn in range(-(-len(missing) // processes.count)):
        if processes.any(stop()):
            return False
        for number in missing[turn * processes.count :][processes.index :][:1]:
            _write(out, number, stored, train, logits, processes.device)
    processes.wait()
    if processes.is_first:
        seal(out, [_file(out, number) for number in stored.files])
    processes.wait()
    return True


def _missing(out: Path, stored: StoredLogits) -> list[int]:
    return [number for number in stored.files if not _file(out, number).exists()]


def _write(
    out: Path,
    number: int,
    stored: StoredLogits,
    train: Batches,
    logits: Logits,
    device: torch.device,
) -> None:
    first = number * SEQUENCES
    parts = [
        largest(logits(inputs_of(train.batch(sequence, 1), device)), stored.top_k)
        for sequence in range(first, min(first + SEQUENCES, stored.count))
    ]
    tokens, log_shares = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
    with atomic_file(_file(out, number)) as new:
        save_file({"tokens": tokens, "log_shares": log_shares}, new)


def _file(out: Path, number: int) -> Path:
    return out / f"logits-{number:06d}.safetensors"


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the tokens ``[… k]`` of the largest logits, as int32, and ``[… k+1]``, the logarithms
    of their probabilities and of that of all other tokens together, in float32."""
    log_shares = logits.log_softmax(-1)
    top = log_shares.topk(count, dim=-1)
    both = torch.cat([top.values, _rest(log_shares, top.indices)], -1)
    return top.indices.int(), both.float()


def divergence_of_largest(logits: Tensor, tokens: Tensor, log_shares: Tensor) -> Tensor:
    """Compute the sum of KL(teacher ‖ student) over n of what `largest` keeps, in nats.

    Both have k + 1 classes: the k tokens, and all others as one. That is at most the divergence of
    all tokens, and equal to it where student and teacher share the rest out alike.

    Args:
        logits: The student's ``[n vocabulary]``.
        tokens: ``[n k]``.
        log_shares: ``[n k+1]``.
    """
    student, tokens = logits.log_softmax(-1), tokens.long()
    own = torch.cat([student.gather(-1, tokens), _rest(student, tokens)], -1)
    shares = log_shares.exp()
    # a class without a share adds nothing, though its logarithm is −inf
    terms = torch.where(shares > 0, shares * (log_shares - own), 0)
    return terms.sum(-1).sum()


def _rest(log_shares: Tensor, tokens: Tensor) -> Tensor:
    """``[… 1]``: the logarithm of the probability of all tokens but these."""
    return log_shares.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class TopLogits(LogitSource):
    """A teacher of whom the largest logits of every token are stored, and who is not in memory.

    Attributes:
        out: The folder.
    """

    out: Path

    def rows(
        self, inputs: Mapping[str, Tensor], learnt: Mask, first: int
    ) -> tuple[tuple[Tensor, ...], Divergence]:
        rows = [self._row(first + row) for row in range(len(learnt))]
        tokens, log_shares = (
            torch.stack(part).to(learnt.device)[learnt] for part in zip(*rows, strict=True)
        )
        return (tokens, log_shares), divergence_of_largest

    def _row(self, sequence: int) -> tuple[Tensor, Tensor]:
        file, place = self._open(sequence // SEQUENCES), sequence % SEQUENCES
        return file.get_slice("tokens")[place], file.get_slice("log_shares")[place]

    @cached_property
    def _open(self) -> Callable[[int], Any]:
        """Opens a file by its number; the last few stay mapped into memory."""
        return lru_cache(8)(lambda number: safe_open(_file(self.out, number), framework="pt"))
