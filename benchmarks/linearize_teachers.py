"""The softmax models that docs/linearize.md converts: ``python benchmarks/linearize_teachers.py
DATA --out FOLDER``.

FOLDER/text becomes a Llama of text, and FOLDER/recall one that repeats what it has read 40 tokens
before. DATA is a folder with English books and other text (.txt, .jsonl with a field "text"; also
.gz), of which the last twentieth of every document is held out. A run can be stopped and started
again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fastweights.cli.progress import reporter
from fastweights.linearize.distill.fit import Fit, fit
from fastweights.linearize.distill.stages import AdaptStage
from fastweights.runs.files import atomic_folder
from fastweights.runs.seeds import random_seed_from
from fastweights.text import IGNORE_INDEX
from fastweights.text.documents import Batches
from fastweights.train import (
    BPE,
    AdamW,
    Cosine,
    Every,
    HuggingFace,
    Reporter,
    StopOnSignal,
    Text,
    TrainConfig,
    train,
)

LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
HELD_OUT = 20
_LICENCE = re.compile(
    r"\A.*?\*\*\* ?START OF[^\n]*\n|(?:\*\*\* ?END OF|End of the Project Gutenberg).*\Z", re.DOTALL
)
_WRAPPED = re.compile(r"(?<=\S)[ ]*\n[ ]*(?=\S)")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=("text", "recall"))
    parser.add_argument("--steps", type=int, default=2200, help="of the model of text")
    chosen = parser.parse_args()
    console = Console(highlight=False)
    with reporter(console) as watch, StopOnSignal() as stop:
        if chosen.only != "text":
            train_recall(chosen.out / "recall", watch, stop)
        if chosen.only != "recall" and not stop():
            corpus = chosen.out / "corpus"
            if not corpus.exists():
                write_corpus(chosen.data, corpus)
            train(
                recipe(corpus, chosen.steps),
                chosen.out / "text",
                cpu=True,
                reporter=watch,
                stop=stop,
            )


def recipe(corpus: Path, steps: int) -> TrainConfig:
    """A Llama of 3.4 million parameters on sequences of 256 tokens."""
    return TrainConfig(
        text=Text((str(corpus / "train.jsonl"),), (str(corpus / "validation.jsonl"),), BPE(4096)),
        model=HuggingFace("llama", LLAMA),
        optimizer=AdamW(lr=3e-3),
        schedule=Cosine(warmup=100, floor=0.02),
        every=Every(log=10, evaluation=300, checkpoint=100),
        steps=steps,
        batch=8,
        length=256,
    )


@dataclass(frozen=True)
class Repeats(Batches):
    """Random symbols, and the same again: every token of the second half stands `distance` tokens
    after its twin.
    """

    distance: int = 40
    symbols: int = 64
    count: int = 1 << 20

    @property
    def length(self) -> int:
        return 2 * self.distance

    @property
    def tokens(self) -> int:
        return self.count * self.length

    def batch(self, first: int, count: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(random_seed_from(abs(first), count, first < 0))
        half = torch.randint(0, self.symbols, (count, self.distance), generator=generator)
        ids = torch.cat([half, half], 1)
        labels = ids.clone()
        labels[:, : self.distance + 1] = IGNORE_INDEX
        return {"input_ids": ids, "labels": labels}

    def sequential_batches(self, count: int) -> Iterator[dict[str, Tensor]]:
        """Of sequences that `batch` does not get to."""
        for first in range(0, self.count, count):
            yield self.batch(-1 - first, count)


def train_recall(out: Path, watch: Reporter, stop: StopOnSignal) -> None:
    """A Llama of two layers: one finds what stood before, the other what came after it."""
    torch.manual_seed(0)
    fields = {
        "vocab_size": Repeats.symbols,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    special = {"bos_token_id": None, "eos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**fields, **heads, **special))
    settings = Fit(
        steps=2000,
        batch=32,
        optimizer=AdamW(lr=1e-3),
        schedule=Cosine(warmup=100),
        every=Every(log=50, evaluation=250, checkpoint=250),
    )
    if fit(
        AdaptStage(model, Repeats(), Repeats(count=256)), settings, out, reporter=watch, stop=stop
    ):
        model.save_pretrained(out / "model")


def write_corpus(data: Path, folder: Path) -> None:
    """train.jsonl and validation.jsonl of `folder`, from all documents in `data` that are no test
    set.
    """
    documents = [
        document
        for path in sorted(data.rglob("*.*"))
        if _usable(path)
        for document in _documents(path)
    ]
    with atomic_folder(folder) as new:
        cuts = [len(document) - len(document) // HELD_OUT for document in documents]
        _write(new / "train.jsonl", [text[:cut] for text, cut in zip(documents, cuts, strict=True)])
        _write(
            new / "validation.jsonl",
            [text[cut:] for text, cut in zip(documents, cuts, strict=True)],
        )


def _usable(path: Path) -> bool:
    name = path.name.removesuffix(".gz")
    return name.endswith((".txt", ".jsonl")) and "_test" not in name and "_tokenised" not in name


def _documents(path: Path) -> Iterator[str]:
    text = (
        gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    ).decode()
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        yield from (json.loads(line)["text"] for line in text.splitlines() if line.strip())
    elif "Project Gutenberg" in text[:4000]:
        yield _WRAPPED.sub(" ", _LICENCE.sub("", text)).strip()
    else:
        yield text


def _write(path: Path, documents: list[str]) -> None:
    path.write_text(
        "".join(json.dumps({"text": document}) + "\n" for document in documents if document.strip())
    )


if __name__ == "__main__":
    main()
