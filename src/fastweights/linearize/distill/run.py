"""The run of a conversion: what it is and where, and its text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from fastweights.errors import DataError
from fastweights.linearize.distill.conversion import Conversion
from fastweights.linearize.distill.plan import ConversionPlan, plan
from fastweights.linearize.distill.recipe import StageConfig
from fastweights.linearize.evaluate.known import KnownText
from fastweights.training.data.corpus import Corpus
from fastweights.training.data.documents import Batches, Stream
from fastweights.training.data.folder import TextFolder
from fastweights.training.data.tokenizers import require_embeddings
from fastweights.training.data.tokens import Ranges
from fastweights.training.loop.files import read_json, write_json
from fastweights.training.loop.loop import Session
from fastweights.training.loop.report import follow

Item = TypeVar("Item")

FEWEST_SEQUENCES = 2
"""Of validation text that anything is measured on."""
COMPARISON_SEQUENCES = 16
"""Sequences of validation text that layers are ranked and measured by, at most."""


@dataclass(frozen=True, eq=False)
class ConversionRun(Session):
    """What stays the same during a run.

    Attributes:
        conversion: The conversion.
        out: The run's folder.
        known: What is known of the text that is held out.
    """

    conversion: Conversion
    out: Path
    known: KnownText = field(default_factory=KnownText)

    @property
    def device(self) -> torch.device:
        """The device on which the model of this process computes."""
        return self.processes.device

    @cached_property
    def plan(self) -> ConversionPlan:
        """The numbers of the conversion.

        Raises:
            CannotLinearize: If the conversion is not possible.
        """
        conversion = self.conversion
        return plan(
            conversion.model,
            conversion.recipe,
            layers=conversion.layers,
            length=conversion.data.length,
            dtype=None if conversion.dtype == "auto" else getattr(torch, conversion.dtype),
        )

    @property
    def is_divided(self) -> bool:
        """Whether the processes divide the model while it is trained, and make it anew then."""
        return self.layout.shard and self.processes.count > 1

    def follow(self, pieces: Collection[Item], what: str) -> Iterator[Item]:
        """Yield pieces of work beside the training, and tell the reporter of each.

        Raises:
            Stopped: If the run should end, and no other process waits for this work.
        """
        alone = self.processes.count == 1
        return follow(pieces, what, self.reporter, self.stop if alone else lambda: False)

    def read(self, name: str) -> Any:
        """Read the numbers in ``<name>.json``."""
        return read_json(self.out / f"{name}.json")

    def write(self, name: str, numbers: Mapping[str, Any]) -> None:
        """Write numbers to ``<name>.json``."""
        write_json(self.out / f"{name}.json", numbers)


@dataclass(frozen=True, eq=False)
class ConversionText:
    """The text of a run, and the tokenizer that reads it.

    Attributes:
        run: The run.
    """

    run: ConversionRun

    @cached_property
    def tokenizer(self) -> Any:
        """The model's own tokenizer, with the chat template that is asked for.

        Raises:
            DataError: If it gives texts tokens for which the model has no embeddings.
        """
        source = self.run.conversion.model
        tokenizer: Any = AutoTokenizer.from_pretrained(source)
        require_embeddings(tokenizer, logit_count(source), source)
        return self.run.conversion.data.set_template(tokenizer)

    def train(self, length: int | None = None) -> Batches:
        """Return the text to train on, in an order that the seed decides.

        Args:
            length: Tokens per sequence; None for the conversion's.
        """
        data = self.run.conversion.data
        return self._corpus.batches(
            length or data.length, self.run.conversion.seed, data.responses, data.boundaries
        )

    @property
    def validation(self) -> Stream:
        """The text to validate on."""
        return self.validation_of(None)

    def validation_of(self, length: int | None) -> Stream:
        """Return the text to validate on, as `train` the one to train on."""
        data, text = self.run.conversion.data, self._corpus.validation
        return Stream(
            text, min(length or data.length, len(text)), 0, data.responses, data.boundaries
        )

    def validation_beside(self, stage: StageConfig, length: int | None = None) -> Stream:
        """Return the beginning of the text to validate on: no more tokens than a stage trains on
        between two validations, so that these take a share of its time, but two sequences.

        Args:
            stage: The stage.
            length: Tokens per sequence; None for the conversion's.
        """
        whole, sequence = self.validation_of(length), length or self.run.conversion.data.length
        count = sequences_beside(stage, self.run.conversion.data.length, sequence)
        # each but the first begins with the last token of the one before
        most = count * (sequence - 1) + 1
        if most >= whole.tokens:
            return whole
        begin = Ranges(whole.text, np.array([[0, most]]), whole.text.begins_are_targets)
        return replace(whole, text=begin)

    def require(self) -> None:
        """Read the text, which must be long enough to be trained and measured on.

        Raises:
            DataError: If it cannot be read, or is too short.
            Stopped: If reading was stopped.
        """
        for length in self.run.conversion.lengths:
            self.train(length)
        analog, validation = self.run.conversion.recipe.analog, self._corpus.validation
        if analog.has_window and len(validation) <= analog.window:
            raise DataError(
                f"the validation text has {len(validation)} tokens, all within the window of"
                f" {analog.window}; give more text, or take a smaller window"
            )

    def comparison_batches(self) -> list[dict[str, Tensor]]:
        """A few sequences of validation text, one by one."""
        return list(self.validation.sequential_batches(1)[:COMPARISON_SEQUENCES])

    @cached_property
    def _corpus(self) -> Corpus:
        """Read once, and kept in the run's folder: sources may change."""
        folder = TextFolder(
            self.run.out,
            self.run.conversion.data,
            self.run.conversion.data.length,
            lambda: self.tokenizer,
        )
        return folder.open(self.run.processes.is_first, self.run.reporter, self.run.stop)


def sequences_beside(stage: StageConfig, length: int, sequence: int) -> int:
    """Return how many sequences of `sequence` tokens a measure beside a stage reads, at most, in a
    conversion whose own sequences have `length` tokens."""
    return max(FEWEST_SEQUENCES, stage.tokens_between_validations(length) // sequence)


def logit_count(source: str) -> int:
    """Return how many logits a model has, of which only the configuration is read."""
    return AutoConfig.from_pretrained(source).get_text_config().vocab_size
