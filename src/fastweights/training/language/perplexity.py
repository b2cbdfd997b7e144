"""The loss of a language model by token position (MesaNet appendix J.1), for sequences of any
length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from fastweights.layers import upcast
from fastweights.models.continuation import Continuation, continuation_of, read_pieces
from fastweights.models.evaluation import evaluation_mode
from fastweights.ranges import POSITIVE_INTEGER
from fastweights.render.plots import PALETTE, canvas, label, legend
from fastweights.training.data.windows import sequential_windows
from fastweights.training.loop.files import read_json, write_json
from fastweights.training.loop.report import Follow, unfollowed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class PositionLoss:
    """The loss of a language model by position: sums and counts of -log p(s_k | s_<k), in nats.

    k = 1 … n is the number of tokens read before.

    Attributes:
        sums: ``[n]`` float64, over all sequences that long.
        counts: ``[n]`` int64.
        tokens_per_byte: Tokens per byte of the text; None if it is not text.
    """

    sums: np.ndarray
    counts: np.ndarray
    tokens_per_byte: float | None = None

    def __post_init__(self) -> None:
        if (
            self.sums.shape != self.counts.shape
            or self.sums.ndim != 1
            or not (self.counts > 0).all()
        ):
            raise ValueError(
                f"sums {self.sums.shape} and counts {self.counts.shape} are one number per"
                " position, and every position is counted; leave out those that no sequence"
                " reaches"
            )

    @property
    def nll(self) -> np.ndarray:
        """The mean loss NLL_k ``[n]`` of the sequences that reach position k, in nats per token."""
        return self.sums / self.counts

    @property
    def mean_so_far(self) -> np.ndarray:
        """The mean loss Mean-so-far-NLL_{:k} ``[n]`` of all tokens up to position k."""
        return self.sums.cumsum() / self.counts.cumsum()

    @property
    def mean(self) -> float:
        """The mean loss over all tokens, in nats per token."""
        return float(self.sums.sum() / self.counts.sum())

    @property
    def perplexity(self) -> float:
        """The perplexity, exp of `mean`."""
        return float(np.exp(self.mean))

    @property
    def bits_per_byte(self) -> float | None:
        """The mean loss in bits per byte; None if `tokens_per_byte` is not known."""
        return (
            None if self.tokens_per_byte is None else self.mean * self.tokens_per_byte / np.log(2)
        )

    def minus(self, reference: PositionLoss) -> np.ndarray:
        """Return the difference ΔNLL_k ``[n]`` to a reference on the same tokens.

        Raises:
            ValueError: If the reference was measured on other tokens.
        """
        self._check_same(reference)
        return (self.sums - reference.sums) / self.counts

    def mean_between(self, edges: np.ndarray) -> np.ndarray:
        """Average the loss from each of `edges` (ascending positions) up to, and without, the next
        one."""
        spans = [slice(first - 1, last - 1) for first, last in pairwise(edges)]
        return np.array([self.sums[span].sum() / self.counts[span].sum() for span in spans])

    def _check_same(self, reference: PositionLoss) -> None:
        if not np.array_equal(self.counts, reference.counts):
            raise ValueError(
                f"the reference was measured on {reference.counts.sum()} tokens in"
                f" {len(reference.counts)}"
                f" positions, this model {self.counts.sum()} in {len(self.counts)}; compare them on"
                " the same sequences"
            )

    def save(self, path: Path) -> None:
        """Write to a JSON file, without loss of precision."""
        content = {
            "sums": self.sums.tolist(),
            "counts": self.counts.tolist(),
            "tokens_per_byte": self.tokens_per_byte,
        }
        write_json(path, content)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            CheckpointError: If the file is damaged.
        """
        content = read_json(path)
        return cls(
            np.array(content["sums"]), np.array(content["counts"]), content["tokens_per_byte"]
        )


def nll_by_position(
    model: PreTrainedModel,
    tokens: np.ndarray,
    length: int,
    *,
    batch: int = 4,
    chunk: int | None = 512,
    tokens_per_byte: float | None = None,
    follow: Follow = unfollowed,
) -> PositionLoss:
    """Measure the loss by position of a causal language model, ours or transformers', on a text.

    Every token but the first is predicted once, in one of the sequences, which share their ends.
    Losses are float32 (or the model's own dtype if that is wider), their sums float64.

    Args:
        model: The language model.
        tokens: ``[n]`` token ids, cut into sequences.
        length: Tokens per sequence.
        batch: Sequences read at once.
        chunk: Tokens fed at a time, after the state (or cache) of those before. It bounds the
            memory of the logits, and lets a sequence be longer than those of training; None for
            whole sequences, as which models are read that do not go on from their cache so.
        tokens_per_byte: Tokens per byte of the text, to state losses per byte too.
        follow: Told of every batch.

    Returns:
        The loss at positions 1 … length.

    Raises:
        ValueError: If there are fewer than two tokens, or a number lies outside of its range.
    """
    POSITIVE_INTEGER.require(length=length, batch=batch)
    if chunk is not None:
        POSITIVE_INTEGER.require(chunk=chunk)
    if min(len(tokens), length) < 2:
        raise ValueError(
            f"{len(tokens)} tokens in sequences of {length}: give at least two tokens, since one"
            " predicts the next"
        )
    windows = sequential_windows(tokens, min(length, len(tokens)), batch, follow)
    return losses_by_position(model, windows, chunk, tokens_per_byte)


def losses_by_position(
    model: PreTrainedModel,
    batches: Iterable[Tensor],
    chunk: int | None,
    tokens_per_byte: float | None = None,
) -> PositionLoss:
    """Measure the loss by position, as `nll_by_position` does, on batches of sequences.

    Args:
        model: The language model.
        batches: Token ids ``[b t]``; lengths may differ from batch to batch.
        chunk: Tokens fed at a time; None for whole sequences.
        tokens_per_byte: Tokens per byte of the text; None if it is not text.
    """
    sums, counts = np.zeros(0), np.zeros(0, dtype=np.int64)
    for ids in batches:
        losses = token_losses(model, ids, chunk).double()
        sums = _add_arrays(sums, losses.sum(0).cpu().numpy())
        counts = _add_arrays(counts, np.full(losses.shape[1], len(losses)))
    return PositionLoss(sums, counts, tokens_per_byte)


def token_losses(model: PreTrainedModel, ids: Tensor, chunk: int | None = None) -> Tensor:
    """Return -log p(s_k | s_<k) ``[b t-1]`` of sequences ``ids [b t]``, in float32 or wider.

    Args:
        model: The language model.
        ids: The sequences.
        chunk: Tokens fed at a time; None for whole sequences.
    """
    ids = ids.to(model.device)
    with evaluation_mode(model):
        return torch.cat(list(_chunk_losses(model, ids, chunk)), dim=1)


def _chunk_losses(model: PreTrainedModel, ids: Tensor, chunk: int | None) -> Iterator[Tensor]:
    inputs, targets = ids[:, :-1], ids[:, 1:]
    size = inputs.shape[1] if chunk is None else min(chunk, inputs.shape[1])
    way = continuation_of(model) if size < inputs.shape[1] else Continuation()
    pieces = way.split(inputs, size)
    wanted = targets.split([piece.shape[1] for piece in pieces], 1)
    for logits, tokens in zip(
        read_pieces(model, pieces, way, return_dict=True), wanted, strict=True
    ):
        yield F.cross_entropy(
            upcast(logits).flatten(0, 1), tokens.flatten(), reduction="none"
        ).view_as(tokens)


def _add_arrays(total: np.ndarray, more: np.ndarray) -> np.ndarray:
    """The sum of two arrays, the shorter one filled with zeros."""
    size = max(len(total), len(more))
    return np.pad(total, (0, size - len(total))) + np.pad(more, (0, size - len(more)))


def draw(
    losses: Mapping[str, PositionLoss], reference: str | None = None, trained: int | None = None
) -> Figure:
    """Draw NLL_k of several models over a logarithmic position, pooled.

    Args:
        losses: The models' losses by name.
        reference: Name of a model; ΔNLL_k to it is drawn in a second panel.
        trained: Length of the training sequences, which is marked.
    """
    figure, axes = canvas(1, 1 if reference is None else 2, width=4.6)
    panels = axes[0]
    _curves(panels[0], {name: loss.nll for name, loss in losses.items()}, losses)
    label(panels[0], "loss by position", "position (tokens read before)", "NLL [nats / token]")
    if reference is not None:
        _curves(
            panels[1],
            {name: loss.minus(losses[reference]) for name, loss in losses.items()},
            losses,
        )
        label(
            panels[1],
            f"difference to {reference}",
            "position (tokens read before)",
            "ΔNLL [nats / token]",
        )
    for panel in panels:
        panel.set_xscale("log", base=2)
        if trained is not None:
            panel.axvline(trained, color="#767676", linestyle=":", linewidth=1)
    legend(panels[0])
    return figure


def _curves(
    axes: Axes, values: Mapping[str, np.ndarray], losses: Mapping[str, PositionLoss]
) -> None:
    for number, (name, value) in enumerate(values.items()):
        counts = losses[name].counts
        edges = octaves(len(value))
        pooled = PositionLoss(value * counts, counts).mean_between(edges)
        axes.plot(
            np.sqrt(edges[:-1] * (edges[1:] - 1)),
            pooled,
            color=PALETTE[number % len(PALETTE)],
            label=name,
        )


def octaves(n: int, parts: int = 4) -> np.ndarray:
    """Return `edges` for `mean_between` of positions 1 … n: `parts` to every doubling.

    At the start every position has its own interval.
    """
    edges = np.unique(np.round(2 ** (np.arange(0, parts * np.log2(n + 1)) / parts)).astype(int))
    return np.array([*chain(edges[edges <= n], [n + 1])])
