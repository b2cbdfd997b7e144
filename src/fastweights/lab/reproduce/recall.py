"""Recall in context as a language: what its models are for is to remember, and they learn it in
seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fastweights.lab.reproduce.claim import TrialContext
from fastweights.lab.reproduce.small import small
from fastweights.lab.reproduce.text import (
    Fields,
    Language,
    LanguageTraining,
    PretrainedModel,
    load_model,
)
from fastweights.lab.sweep.plan import SweepModel, SweepRun
from fastweights.lab.sweep.trainer import train
from fastweights.lab.tasks import InContextRecall
from fastweights.lab.tasks.sampling import find_repeats
from fastweights.models import FastWeightsForCausalLM
from fastweights.training.data.tokens import Sequences, TokenText
from fastweights.training.loop.checkpoint import no_progress_bars
from fastweights.training.loop.files import atomic_folder
from fastweights.training.loop.folder import keyed_folder
from fastweights.training.loop.processes import Alone
from fastweights.training.loop.schedules import Cosine

COUNTED, MEASURED = 65_536, 32_768
"""Tokens that n-grams are counted in, and those that models are measured on."""


@dataclass(frozen=True)
class RecallTraining(LanguageTraining):
    """Settings of a training on episodes of pairs of a key and its value, in which every next token
    is predicted, `batch` of them at once.

    Half of the loss is that of the keys, which are random. A value can be told from the second time
    on that its key is seen in the episode. The task is without noise.
    """

    task: InContextRecall
    layers: int
    width: int
    rate: float
    steps: int
    batch: int = 64

    @property
    def length(self) -> int:
        """Tokens of an episode."""
        return self.task.length

    @property
    def least_loss(self) -> float:
        """Keys, and values of keys not seen before, are random; other values are known. The last
        key of an episode counts as any, though it was seen before."""
        episodes = np.asarray(self.language().validation[:]).reshape(-1, self.length)
        keys, values = self.task.vocabulary // 2, self.task.vocabulary - self.task.vocabulary // 2
        known = find_repeats(episodes[:, ::2])
        return float(np.log(keys) + np.log(values) * np.mean(~known)) / 2

    def run(self, mixers: Sequence[Fields], seed: int) -> SweepRun:
        """Return the training of one model."""
        protocol = small(
            self.task, self.task, self.steps, self.width, self.rate, num_hidden_layers=self.layers
        )
        training = replace(
            protocol.training,
            batch=self.batch,
            schedule=Cosine(warmup=self.steps // 10),
            stop=None,
            best=False,
        )
        fields: dict[str, Any] = {"mixers": [dict(mixer) for mixer in mixers]}
        return SweepRun(
            "recall",
            replace(protocol, training=training),
            SweepModel("", "softmax", fields),
            self.rate,
            0.1,
            seed,
            self.steps,
        )

    def train_or_load(
        self, mixers: Sequence[Fields], seed: int, context: TrialContext
    ) -> tuple[FastWeightsForCausalLM, Language]:
        folder = keyed_folder(context.shared / "models", PretrainedModel(self, mixers, seed))
        if not folder.exists():
            model = train(self.run(mixers, seed), processes=Alone(context.device)).model
            with no_progress_bars(), atomic_folder(folder) as new:
                model.save_pretrained(new)
        return load_model(folder, context), self.language()

    def language(self) -> Language:
        """Draw episodes that no model is trained on, one after the other."""
        return Language(
            self._episodes(4, COUNTED), self._episodes(2, MEASURED), self.task.vocabulary
        )

    def _episodes(self, stream: int, tokens: int) -> TokenText:
        drawn = self.task.draw(np.random.default_rng([0, stream]), tokens // self.length)
        return Sequences.plain(torch.cat([drawn.inputs, drawn.labels[:, -1:]], 1).flatten().numpy())
