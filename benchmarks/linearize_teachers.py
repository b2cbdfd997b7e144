"""The softmax models that docs/linearize.md converts: ``python benchmarks/linearize_teachers.py
DATA --out FOLDER``.

FOLDER/text becomes a Llama of text, and FOLDER/llama and FOLDER/qwen3 models of text that cannot be
predicted without what stands far back; FOLDER/far is that text, held_out.safetensors some that they
have not seen, with distances. FOLDER/llama-long and FOLDER/qwen3-long go on from these on sequences
four times as long, of the text FOLDER/far-long. DATA is a folder with English books and other text
(.txt, .jsonl with a field "text"; also .gz), of which the last twentieth of every document is held
out. A run can be stopped and started again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from fastweights.cli import plain_console
from fastweights.cli.progress import reporter
from fastweights.linearize.evaluate.far_text import far_documents, far_text
from fastweights.train import (
    BPE,
    AdamW,
    Cosine,
    Every,
    ExistingModel,
    HuggingFace,
    StopOnSignal,
    Text,
    TrainConfig,
    WarmupStableDecay,
    train,
)
from fastweights.training.loop.files import atomic_file, atomic_folder
from induction import set_induction_heads

LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
FAR_FIELDS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "tie_word_embeddings": False,
}
FAR_TOKENS, FAR_SEQUENCES = 1024, 16
LONG = 1 << 14
HELD_OUT = 20
_LICENCE = re.compile(
    r"\A.*?\*\*\* ?START OF[^\n]*\n|(?:\*\*\* ?END OF|End of the Project Gutenberg).*\Z", re.DOTALL
)
_WRAPPED = re.compile(r"(?<=\S)[ ]*\n[ ]*(?=\S)")


@dataclass(frozen=True)
class CopiedText:
    """Text with copies, and the training on it.

    Attributes:
        folder: Its name.
        documents: How many of them.
        characters: Of a document.
        reach: How far back copies stand, in characters, at most.
        length: Tokens of a sequence.
        batch: Sequences per update.
        steps: Updates.
    """

    folder: str
    documents: int
    characters: int
    reach: int
    length: int
    batch: int
    steps: int


SHORT_TEXT = CopiedText(
    "far", documents=4000, characters=6000, reach=1500, length=512, batch=2, steps=400
)
LONG_TEXT = CopiedText(
    "far-long", documents=1000, characters=24_000, reach=6000, length=2048, batch=1, steps=300
)
FAR = {
    "llama": SHORT_TEXT,
    "qwen3": SHORT_TEXT,
    "llama-long": LONG_TEXT,
    "qwen3-long": LONG_TEXT,
}
"""The models that look far; Qwen3 has QK norm. The long ones begin as the others have ended."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=("text", *FAR))
    parser.add_argument("--steps", type=int, default=2200, help="of the model of text")
    chosen = parser.parse_args()
    console = plain_console()
    with reporter(console) as watch, StopOnSignal() as stop:
        for name, config in _runs(chosen):
            if not stop():
                train(config, chosen.out / name, cpu=True, reporter=watch, stop=stop)
            if stop():
                break  # before the next one, which may begin as this one ends
            if name in FAR:
                write_held_out(
                    chosen.out / name, chosen.out / "corpus" / "validation.jsonl", FAR[name].length
                )


def _runs(chosen: argparse.Namespace) -> Iterator[tuple[str, TrainConfig]]:
    """The models of text, by name, with the corpora that they need."""
    corpus = chosen.out / "corpus"
    if not corpus.exists():
        write_corpus(chosen.data, corpus)
    if chosen.only in (None, "text"):
        yield "text", recipe(corpus, chosen.steps)
    for name, text in FAR.items():
        if chosen.only in (None, name):
            if not (chosen.out / text.folder).exists():
                write_far_corpus(corpus, text, chosen.out / text.folder)
            yield name, far_recipe(chosen.out / text.folder, text, _start(name, chosen.out))


def _start(name: str, out: Path) -> Path:
    """What a model that looks far is before it is trained on its text."""
    before = name.removesuffix("-long")
    if before != name:
        return out / before / "model"
    start = out / f"{name}-start"
    if not start.exists():
        write_start(name, out / FAR[name].folder, start)
    return start


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


def write_start(name: str, corpus: Path, folder: Path) -> None:
    """A tokenizer of the corpus, and a model that has never been trained, with induction heads."""
    texts = (json.loads(line)["text"] for line in (corpus / "train.jsonl").open())
    tokenizer = BPE(FAR_TOKENS).build(islice(texts, SHORT_TEXT.documents // 4))
    torch.manual_seed(0)
    model = set_induction_heads(HuggingFace(name, FAR_FIELDS).build(tokenizer))
    with atomic_folder(folder) as new:
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)


def far_recipe(corpus: Path, text: CopiedText, start: Path) -> TrainConfig:
    """A model of 2.9 million parameters on sequences of which two fifths are copied."""
    model = ExistingModel(str(start))
    sources = (str(corpus / "train.jsonl"),), (str(corpus / "validation.jsonl"),)
    return TrainConfig(
        text=Text(*sources, model.tokenization),
        model=model,
        optimizer=AdamW(lr=1e-3),
        schedule=WarmupStableDecay(warmup=20, decay=0.3),
        every=Every(log=10, evaluation=1000, checkpoint=25),
        steps=text.steps,
        batch=text.batch,
        length=text.length,
    )


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


def write_far_corpus(corpus: Path, text: CopiedText, folder: Path) -> None:
    """train.jsonl and validation.jsonl of `folder`: copies, far from what they repeat, set in the
    longer texts of `corpus`.
    """
    counts = {"train": text.documents, "validation": text.documents // 200}
    with atomic_folder(folder) as new:
        for name, count in counts.items():
            texts = long_texts(corpus / f"{name}.jsonl")
            made = far_documents(texts, characters=text.characters, reach=text.reach)
            _write(new / f"{name}.jsonl", [document.text for document in islice(made, count)])


def write_held_out(run: Path, texts: Path, length: int) -> None:
    """held_out.safetensors of a model's run: `far_text` in its tokens, of text that no training has
    seen.
    """
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    found = far_text(tokenizer, long_texts(texts), count=FAR_SEQUENCES, length=length, seed=1)
    with atomic_file(run / "held_out.safetensors") as new:
        save_file({"tokens": found.tokens, "distance": found.distance}, new)


def long_texts(path: Path) -> list[str]:
    """The documents of a corpus that copies can be set in."""
    texts = (json.loads(line)["text"] for line in path.read_text().splitlines())
    return [text for text in texts if len(text) >= LONG]


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
