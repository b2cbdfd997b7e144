"""Every decoded token of imported models beside that of the models they come from.

    python benchmarks/decoding.py --out benchmarks/results/decoding.json
    python benchmarks/decoding.py --only llama,rwkv --repeats 3

    python benchmarks/decoding.py --only llama,mamba2 --width 1024 --layers 24 --batch 32 --out F

Each family of transformers that this library imports, of one width and depth, with random weights:
64 tokens by ``generate`` of both models in turn (A B A B), by `fastweights.stream`, and one step of
our model alone, after a prompt. Beside them the floor, which is the larger of two: the seconds in
which the machine's bandwidth reads all weights and reads and writes all states once, and those in
which its best rate multiplies the batch with all weights. Run it alone on the machine.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from fastweights.generate import stream
from fastweights.importers import import_model
from fastweights.lab.bench.machine import Ceilings, Machine, commit, versions
from fastweights.lab.bench.report import Header, Report
from fastweights.lab.bench.timing import Budget, Times, clock_of, time_in_turn
from fastweights.linearize import LinearAttentionConfig, linearize
from fastweights.models.cache_names import CACHE, cache_argument
from fastweights.models.graph import states_of

VOCABULARY = 1024
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1408}
HYBRID = {
    "head_dim": 64,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": ATTENTION,
    "mistral": {**ATTENTION, "sliding_window": 128},
    "qwen2": ATTENTION,
    "qwen3": {**ATTENTION, "head_dim": 64},
    "qwen3_next": {**ATTENTION, **HYBRID},
    "mamba": {"state_size": 16},
    "mamba2": {"num_heads": 16, "head_dim": 64, "state_size": 64, "n_groups": 1},
    "recurrent_gemma": {**ATTENTION, "num_key_value_heads": 1, "attention_window_size": 128},
    "rwkv": {"intermediate_size": 2048, "rescale_every": 0},
    "xlstm": {"num_heads": 4, "chunk_size": 16},
}
"""What differs from transformers' defaults at width 512."""
SCALED = {
    "intermediate_size",
    "num_attention_heads",
    "num_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
}
"""Sizes that grow with the width."""


@dataclass(frozen=True)
class DecodedToken:
    """The time of one token of a family, in seconds.

    Attributes:
        theirs, ours: by ``generate``, of transformers' model and of ours with its weights.
        streamed: by `fastweights.stream`.
        step: one call of our model alone, after the prompt.
        ratio: theirs / ours.
        memory: reading the weights, and reading and writing the states, once.
        arithmetic: the products of the batch with the weights (embeddings are looked up).
        over_floor: step / the larger of the two.
    """

    family: str
    batch: int
    parameters: int
    theirs: Times
    ours: Times
    streamed: Times
    step: Times
    ratio: float
    memory: float
    arithmetic: float
    over_floor: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/decoding.json"))
    parser.add_argument("--only", default=",".join([*FAMILIES, LINEARIZED]), help="families, by ,")
    parser.add_argument("--batch", type=int, default=1, help="sequences at once")
    parser.add_argument("--width", type=int, default=512, help="width of the models")
    parser.add_argument("--layers", type=int, default=4, help="layers of the models")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that are generated")
    parser.add_argument("--repeats", type=int, default=15, help="runs of every contender")
    chosen = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    report = _report(chosen)
    for family in chosen.only.split(","):
        if not report.has(family):
            report.add(family, [measure(family, chosen, Ceilings.of(report.ceilings))])


def _report(chosen: argparse.Namespace) -> Report:
    device = torch.device("cpu")
    settings = {
        name: getattr(chosen, name)
        for name in ("batch", "width", "layers", "prompt", "tokens", "repeats")
    } | COMMON
    header = Header("decoding", commit(), asdict(Machine.here(device)), versions(), settings)
    return Report.open(
        chosen.out,
        header,
        lambda: asdict(Ceilings.measure_now(device, quick=False)),
        lambda row: print(_line(row), flush=True),
    )


def _line(row: dict[str, Any]) -> str:
    names = ("theirs", "ours", "streamed", "step")
    times = " ".join(f"{name} {1e3 * row[name]['median']:6.2f}" for name in names)
    return (
        f"{row['family']:16} {times} ms  ratio {row['ratio']:.2f}"
        f"  floors {1e3 * row['memory']:.2f}, {1e3 * row['arithmetic']:.2f} ms"
        f", × {row['over_floor']:.2f}"
    )


@torch.no_grad()
def measure(family: str, chosen: argparse.Namespace, ceilings: Ceilings) -> DecodedToken:
    """One family's tokens, all contenders in turn."""
    theirs, ours = models_of(family, chosen.width, chosen.layers)
    ids = torch.randint(VOCABULARY, (chosen.batch, chosen.prompt))
    step, cache = step_of(ours, ids)
    functions: dict[str, Callable[[], object]] = {
        "theirs": lambda: generated(theirs, ids, chosen.tokens),
        "ours": lambda: generated(ours, ids, chosen.tokens),
        "streamed": lambda: list(islice(stream(ours, ids, temperature=0), chosen.tokens)),
        "step": step,
    }
    budget = Budget(seconds=1e9, runs=chosen.repeats)
    times = dict(_required(time_in_turn(functions, clock_of(torch.device("cpu")), budget)))
    for name in ("theirs", "ours", "streamed"):
        times[name] = _per_token(times[name], chosen.tokens)
    weights = {id(p): p for p in ours.parameters()}.values()
    moved = sum(p.nbytes for p in weights) + 2 * sum(s.nbytes for s in states_of(cache))
    memory = moved / ceilings.bandwidth
    table = ours.get_input_embeddings().weight
    multiplied = sum(p.numel() for p in weights if p is not table)
    multiplied += table.numel() if ours.get_output_embeddings().weight is table else 0
    arithmetic = 2 * chosen.batch * multiplied / ceilings.gemm(torch.float32)
    return DecodedToken(
        family,
        chosen.batch,
        sum(p.numel() for p in weights),
        **times,
        ratio=times["theirs"].median / times["ours"].median,
        memory=memory,
        arithmetic=arithmetic,
        over_floor=times["step"].median / max(memory, arithmetic),
    )


LINEARIZED = "linearized llama"
"""A Llama and its linearization: not the same function, but the same sizes."""


def models_of(family: str, width: int, layers: int) -> tuple[Any, Any]:
    """(transformers' model with random weights, ours with the same)."""
    kind = "llama" if family == LINEARIZED else family
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "num_hidden_layers": layers}
    settings = {**COMMON, **sizes, **FAMILIES[kind]}
    scaled = {name: settings[name] * width // 512 for name in SCALED & settings.keys()}
    if "layer_types" in settings:
        scaled["layer_types"] = (layers * settings["layer_types"])[:layers]
    settings |= scaled
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).eval()
    if family == LINEARIZED:
        return theirs, linearize(copy.deepcopy(theirs), LinearAttentionConfig(window=64)).eval()
    return theirs, import_model(theirs).eval()


def generated(model: Any, ids: Tensor, tokens: int) -> Tensor:
    """The prompt and its likeliest continuation."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        use_cache=True,
    )


def step_of(model: Any, ids: Tensor) -> tuple[Callable[[], object], Any]:
    """One call of the model with one token; and the cache, after the prompt, which it advances."""
    cache = getattr(model(ids, use_cache=True), CACHE)
    return lambda: model(ids[:, -1:], use_cache=True, **cache_argument(cache)), cache


def _required(times: dict[str, Any]) -> Iterator[tuple[str, Times]]:
    for name, taken in times.items():
        if not isinstance(taken, Times):
            raise RuntimeError(f"{name} was not timed: {taken.reason}")
        yield name, taken


def _per_token(times: Times, tokens: int) -> Times:
    return Times(times.median / tokens, times.low / tokens, times.high / tokens, times.runs)


if __name__ == "__main__":
    main()
