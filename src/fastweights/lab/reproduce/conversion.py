"""Claims about linearizing: a softmax model converted by several methods, each from several
seeds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from fastweights.lab.reproduce.claim import Recipe, Site, Trial
from fastweights.lab.reproduce.measures import Measure
from fastweights.lab.reproduce.text import FIVE, key, tokenized
from fastweights.linearize.distill.baselines import Method
from fastweights.linearize.distill.fit import Fit
from fastweights.linearize.distill.pipeline import Conversion, run
from fastweights.runs.optimizers import AdamW, Cosine
from fastweights.text.corpus import Text
from fastweights.text.documents import Data
from fastweights.train.loop import Every, HuggingFace, TrainConfig, train

AFTER, BEFORE = "PPL@2", "PPL@0"
APART, ERROR = "KL of weights", "error of outputs"


@dataclass(frozen=True)
class Made:
    """A small softmax model of transformers, trained here if nobody has done so before, and the
    text it has read.
    """

    kind: str
    fields: Mapping[str, Any]
    text: Text
    rate: float
    steps: int
    batch: int
    length: int

    def folder(self, site: Site) -> Path:
        out = site.shared / "models" / key(self)
        if not (out / "model").exists():
            train(self._config(site), out, cpu=site.device.type == "cpu")
        return out / "model"

    def _config(self, site: Site) -> TrainConfig:
        return TrainConfig(
            text=tokenized(self.text, site),
            model=HuggingFace(self.kind, self.fields),
            optimizer=AdamW(lr=self.rate),
            schedule=Cosine(warmup=self.steps // 10),
            every=Every(log=self.steps, evaluation=self.steps, checkpoint=100),
            steps=self.steps,
            batch=self.batch,
            length=self.length,
        )

    def sources(self, site: Site) -> tuple[str, ...]:
        return self.text.sources


@dataclass(frozen=True)
class Given:
    """The model in the folder `model` of the user's data, such as Llama 3 8B, and its file `text`,
    such as Alpaca.
    """

    model: str
    text: str

    def folder(self, site: Site) -> Path:
        return site.file(self.model)

    def sources(self, site: Site) -> tuple[str, ...]:
        return (str(site.file(self.text)),)


@dataclass(frozen=True)
class Converted(Trial):
    """One conversion: perplexities after the swap (PPL@0) and after stage two (PPL@2), and how far
    the layers are from softmax before stage two. Its report, with attention maps, stays among what
    claims share.
    """

    series: str
    method: Method
    seed: int
    teacher: Made | Given
    length: int
    held_out: int

    @property
    def name(self) -> str:
        return f"{self.series}, seed {self.seed}"

    def run(self, site: Site) -> list[Measure]:
        data = Data(
            self.teacher.sources(site), length=self.length, boundaries=False, held_out=self.held_out
        )
        conversion = Conversion(str(self.teacher.folder(site)), data, self.method, seed=self.seed)
        out = site.shared / "conversions" / key(self)
        run(conversion, out, until="report", device=site.device)
        first = _read(out, "convert" if self.method.transfer is None else "transfer")
        found = {
            AFTER: _read(out, "evaluation")["linear"]["perplexity"],
            BEFORE: first["linear"]["perplexity"],
            ERROR: first["error"],
        }
        if "divergence" in first:  # of weights, which SUPRA's norm does not leave
            found[APART] = first["divergence"]
        return [
            Measure(self.series, value, quantity=name, seed=self.seed)
            for name, value in found.items()
        ]


@dataclass(frozen=True)
class Conversions(Recipe):
    """Every method from every seed."""

    methods: Mapping[str, Method]
    teacher: Made | Given
    length: int
    held_out: int
    seeds: tuple[int, ...] = field(default=FIVE)

    def trials(self) -> Sequence[Trial]:
        return [
            Converted(series, method, seed, self.teacher, self.length, self.held_out)
            for seed in self.seeds
            for series, method in self.methods.items()
        ]


class Updates(NamedTuple):
    """Of a stage: how many, at which learning rate to begin with."""

    steps: int
    rate: float

    def of(self, fit: Fit, batch: int) -> Fit:
        """`fit` with these, on so many sequences each."""
        return replace(
            fit,
            steps=self.steps,
            batch=batch,
            optimizer=AdamW(lr=self.rate, betas=(0.9, 0.999), weight_decay=0.0),
            every=Every(log=self.steps, evaluation=self.steps, checkpoint=100),
        )


def shortened(method: Method, transfer: Updates, adapt: Updates, batch: int) -> Method:
    """A method with so many updates in those of its two stages that it has."""
    first = method.transfer and replace(
        method.transfer, fit=transfer.of(method.transfer.fit, batch)
    )
    second = method.adapt and replace(method.adapt, fit=adapt.of(method.adapt.fit, batch))
    return replace(method, transfer=first, adapt=second)


def _read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
