"""What the scripts of this folder have in common: their options, files, models and times."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fastweights.lab.bench.report import Report, open_report
from fastweights.lab.bench.timing import Budget, WallClock, require_all, time_in_turn
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.models.cache_names import CACHE, cache_argument

RESULTS = Path(__file__).parent / "results"
Act = Callable[[], object]


def options(text: str | None, name: str, rounds: int = 0) -> ArgumentParser:
    """A parser that knows --out, by default results/`name`.json, and --rounds, if there are any."""
    parser = ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="JSON file")
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help="turns of each contender")
    return parser


def begin(name: str, chosen: Namespace, **settings: Any) -> Report:
    """The report of a script on one thread of the CPU, which goes on where it was stopped."""
    torch.set_num_threads(1)
    rounds = {"rounds": chosen.rounds} if hasattr(chosen, "rounds") else {}
    return open_report(name, chosen.out, rounds | settings)


def build(name: str, width: int, layers: int) -> Any:
    """A language model of bytes with random weights: of a mixer, or a Llama of transformers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": width, "num_hidden_layers": layers}
    if "llama" in name:
        heads = {"num_attention_heads": width // 64, "intermediate_size": 2 * width}
        return LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    return FastWeightsForCausalLM(FastWeightsConfig(**sizes, mixers=[{"name": name}]))


@torch.no_grad()
def decode(model: Any, ids: Tensor) -> Tensor:
    """The logits ``[b t vocabulary]`` of ``ids [b t]``, which are read one by one."""
    cache, found = None, []
    for token in ids.split(1, 1):
        output = model(input_ids=token, use_cache=True, **cache_argument(cache))
        cache, found = getattr(output, CACHE), [*found, output.logits]
    return torch.cat(found, dim=1)


def milliseconds(acts: Mapping[str, Act], rounds: int) -> dict[str, float]:
    """The median of each, called in turn."""
    found = time_in_turn(acts, WallClock(), Budget(seconds=1e9, runs=rounds))
    return {name: 1e3 * times.median for name, times in require_all(found).items()}
