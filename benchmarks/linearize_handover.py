"""What it is worth that softmax reads a linearized model's prompts: ``python
benchmarks/linearize_handover.py FOLDER TEXT``.

FOLDER is a linearized model, or the run that made it, and TEXT a file. For every reader of the
prompts it prints the loss of the tokens behind them, in nats, the seconds that reading took and the
bytes that the cache has then.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from fastweights.cli.load import load_model
from fastweights.linearize import Mode, Student, Teacher, cache_bytes, read_by_softmax, use_mode


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens behind it")
    parser.add_argument("--sequences", type=int, default=32)
    chosen = parser.parse_args()
    model, tokenizer = load_model(chosen.folder, torch.device("cpu"))
    ids = torch.tensor(tokenizer.encode(chosen.text.read_text(), add_special_tokens=False))
    length = chosen.prompt + chosen.tokens
    rows = ids[: len(ids) // length * length].view(-1, length)[: chosen.sequences]
    console = Console(highlight=False)
    for name, (read, mode) in READERS.items():
        start = time.perf_counter()
        cache = read(model, rows[:, : chosen.prompt])
        seconds, size = time.perf_counter() - start, cache_bytes(cache)
        loss = continuation_loss(model, rows[:, chosen.prompt :], cache, mode)
        console.print(f"{name:<28}{loss:.4f} nats  {seconds:.2f} s  {size:,} bytes")


def read_by(mode: Mode) -> Callable[[Any, Tensor], DynamicCache]:
    """A reader of prompts ``[b t]``, by the layers in this mode."""

    def read(model: Any, ids: Tensor) -> DynamicCache:
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), use_mode(model, mode):
            model(ids, past_key_values=cache, logits_to_keep=1)
        return cache

    return read


READERS: dict[str, tuple[Callable[[Any, Tensor], DynamicCache], Mode]] = {
    "softmax alone": (read_by(Teacher()), Teacher()),
    "linear alone": (read_by(Student()), Student()),
    "softmax, then linear": (read_by_softmax, Student()),
}
"""What reads the prompts, and the mode that goes on."""


def continuation_loss(model: Any, ids: Tensor, cache: DynamicCache, mode: Mode) -> float:
    """The mean loss of tokens ``[b t]`` behind those in the cache, but the first, in nats."""
    with torch.no_grad(), use_mode(model, mode):
        logits = model(ids, past_key_values=cache).logits
    return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


if __name__ == "__main__":
    main()
