"""Train MesaNet and its baselines on the same text with the same budget: ``python
benchmarks/mesa/train.py FOLDER``.

The argument is a folder of Project Gutenberg books (.txt.gz). The models are trained on some of
them and read another, by an author of whom they have seen nothing. Every run goes on where it was
stopped, and is left alone once complete.
"""

from __future__ import annotations

import argparse
import gzip
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.train import (
    BPE,
    AdamW,
    Architecture,
    Cosine,
    Every,
    ExistingTokenizer,
    Reporter,
    Text,
    TrainConfig,
    train,
)

BOOKS = {
    "train": ("david_copperfield", "great_expectations", "moby_dick"),
    "held_out": ("pride_and_prejudice",),
}
VOCABULARY = 1024
HEADS = 4
RATES = (6e-3, 3e-3)
STEPS, BATCH, LENGTH = 300, 4, 512
HAWK = {"name": "rglru", "heads": HEADS, "expand": 1.125}
"""RG-LRU layers with which Hawk has the 4 d² parameters of the others."""


@dataclass(frozen=True)
class Backbone(Architecture):
    """MesaNet's (appendix D): SwiGLU of width 3 d, tied embeddings, capped logits.

    Attributes:
        start: b_γ of the first and of the last head before training, those between evenly
            spaced; None: the mixer's own
    """

    start: tuple[float, float] | None = None

    def build(self, tokenizer: PreTrainedTokenizerBase) -> FastWeightsForCausalLM:
        model = FastWeightsForCausalLM(
            FastWeightsConfig(
                vocab_size=len(tokenizer),
                hidden_size=self.width,
                num_hidden_layers=self.layers,
                mixers=[dict(mixer) for mixer in self.mixers],
                intermediate_size=3 * self.width,
                tie_word_embeddings=True,
                logit_cap=30.0,
            )
        )
        if self.start is not None:
            for name, bias in model.named_parameters():
                if name.endswith("W_gamma.bias"):
                    bias.data.copy_(torch.linspace(*self.start, len(bias)))
        return model


def backbone(name: str, start: tuple[float, float] | None = None, **arguments: object) -> Backbone:
    return Backbone(({"name": name, "heads": HEADS, **arguments},), start=start)


START = (4.0, 4.0)
"""γ = 0.98 in all heads; None in the rules without γ."""

CONTENDERS: Mapping[str, Backbone] = {
    "mesa": backbone("mesa", START),
    "gla": backbone("mesanet", START, rule="gla"),
    "transformer": backbone("softmax"),
    "deltanet": backbone("mesanet", rule="deltanet"),
    "gated_deltanet": backbone("mesanet", START, rule="gated_deltanet"),
    "mamba2": backbone("mesanet", START, rule="mamba2"),
    "mlstm": backbone("mesanet", START, rule="mlstm"),
    "hawk": Backbone((HAWK,)),
    "swa-64": backbone("swa", window=64),
}
STARTS: Mapping[str, Backbone] = {
    f"mesa, b_γ {first:g} to {last:g}": backbone("mesa", (first, last))
    for first, last in ((0, 0), (2, 6))
}
RANDOM: Mapping[str, Backbone] = {"mesa, random steps": backbone("mesa", START, random_steps=True)}


def configuration(model: Backbone, rate: float, work: Path) -> TrainConfig:
    """The run of one model: all of them differ in the model and in the learning rate alone."""
    return TrainConfig(
        text=Text(
            (str(work / "train"),),
            (str(work / "held_out"),),
            ExistingTokenizer(str(work / "tokenizer")),
        ),
        model=model,
        optimizer=AdamW(lr=rate),
        schedule=Cosine(warmup=30),
        every=Every(log=20, evaluation=STEPS, checkpoint=100),
        steps=STEPS,
        batch=BATCH,
        length=LENGTH,
    )


def prepare(books: Path, work: Path) -> None:
    """The text of the books without the licence around it, and a tokenizer learned from the
    training part.
    """
    if (work / "tokenizer").exists():
        return
    for part, names in BOOKS.items():
        (work / part).mkdir(parents=True, exist_ok=True)
        for name in names:
            book = gzip.decompress((books / f"{name}.txt.gz").read_bytes()).decode()
            (work / part / f"{name}.txt").write_text(body(book))
    texts = [path.read_text() for path in sorted((work / "train").iterdir())]
    BPE(VOCABULARY).build(texts).save_pretrained(work / "tokenizer")


def body(book: str) -> str:
    """What stands between the lines with which Project Gutenberg opens and closes a book."""
    return re.split(
        r"\*\*\* *END OF|End of (?:the )?Project Gutenberg",
        re.split(r"\*\*\* *START OF.*\n", book)[1],
    )[0]


def runs(pattern: str, rates: tuple[float, ...]) -> Iterator[tuple[str, Backbone, float]]:
    models = {**CONTENDERS, **STARTS, **RANDOM}
    for rate in rates:
        for name, model in models.items():
            if fnmatch(name, pattern):
                yield name, model, rate


def folder(work: Path, name: str, rate: float) -> Path:
    return work / "runs" / f"{name.replace(', ', '-').replace(' ', '')}-{rate:g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("books", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/mesa"))
    parser.add_argument("--only", default="*", help="models whose name matches")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    chosen = parser.parse_args()
    prepare(chosen.books, chosen.work)
    for name, model, rate in runs(chosen.only, tuple(chosen.rates)):
        out = folder(chosen.work, name, rate)
        if not (out / "model").exists():
            result = train(
                configuration(model, rate, chosen.work), out, cpu=True, reporter=Reporter()
            )
            print(f"{name:24} lr {rate:g}: {result.nats_per_token:.4f} nats/token", flush=True)


if __name__ == "__main__":
    main()
