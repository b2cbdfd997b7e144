"""transformers' own linear models: as they are, patched, and imported as ours.

    python benchmarks/transformers_models.py [FAMILY …]

A row per family as soon as it is measured. Alone on the machine: 10 minutes on 2 cores. Models of
width 512 with 4 layers, float32, the same weights for all; times are medians of calls in turn,
within one process.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening, PreTrainedModel

from fastweights.engines.transformers import patch_transformers
from fastweights.importers import FAMILIES as IMPORTED
from fastweights.importers import import_model
from fastweights.lab.bench.memory import peak_growth
from fastweights.lab.bench.report import open_report
from fastweights.lab.bench.timing import Budget, Failure, Function, WallClock, time_in_turn
from measuring import options
from transformers_families import LAYERS, VOCABULARY, WIDTH, build_family, present_families

TOKENS, PROMPT, DECODED = 1024, 512, 64
DOCUMENTS = (100, 412, 37, 475)
"""Lengths of the documents that are packed into a row."""
WARM_TOKENS = 64
BUDGET = Budget(seconds=0.8, runs=5)
SHAPES = {
    "width": WIDTH,
    "layers": LAYERS,
    "vocabulary": VOCABULARY,
    "tokens": TOKENS,
    "prompt": PROMPT,
    "decoded": DECODED,
    "documents": DOCUMENTS,
}
CONTENDERS = ("transformers", "patched", "ours")

Row = dict[str, Any]


@dataclass(frozen=True)
class Patched:
    """A function that is called while its model is patched."""

    function: Function
    model: PreTrainedModel

    def __call__(self) -> object:
        return self.function()


class PatchingClock(WallClock):
    """The clock that patches before it starts, and undoes after it has stopped."""

    def sample(self, function: Function, calls: int) -> float:
        with _around(function):
            return super().sample(function, calls)


def _around(function: Function) -> AbstractContextManager[object]:
    if isinstance(function, Patched):
        return patch_transformers(function.model)
    return contextlib.nullcontext()


def prefill(model: nn.Module, ids: Tensor) -> Function:
    def call() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)

    return call


def train(model: nn.Module, ids: Tensor) -> Function:
    return lambda: _go_back(model, input_ids=ids, labels=ids)


def _go_back(model: nn.Module, **batch: Any) -> None:
    model.zero_grad()
    model(**batch, use_cache=False).loss.backward()


def generate(model: Any, ids: Tensor) -> Function:
    length = {"max_new_tokens": DECODED, "min_new_tokens": DECODED}
    return lambda: model.generate(ids[:, :PROMPT], do_sample=False, pad_token_id=0, **length)


MEASURED: dict[str, Callable[[nn.Module, Tensor], Function]] = {
    "prefill": prefill,
    "training": train,
    "decode": generate,
}


def draw_ids(tokens: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(3, VOCABULARY, (1, tokens))


def build(family: str) -> dict[str, PreTrainedModel]:
    """The models of one set of weights, by contender; patching takes place around the calls."""
    model = build_family(family)
    found = {"transformers": model, "patched": model}
    if model.config.model_type in IMPORTED:
        found["ours"] = import_model(model).eval()
    return found


def bind(
    models: Mapping[str, PreTrainedModel], make: Callable[[nn.Module, Tensor], Function]
) -> dict[str, Function]:
    ids = draw_ids(TOKENS)
    calls = {name: make(model, ids) for name, model in models.items()}
    calls["patched"] = Patched(calls["patched"], models["patched"])
    return calls


def time_calls(calls: Mapping[str, Function]) -> dict[str, float | str]:
    """Milliseconds of each, or why it cannot be called."""
    found = time_in_turn(calls, PatchingClock(), BUDGET)
    return {
        name: times.reason if isinstance(times, Failure) else 1e3 * times.median
        for name, times in found.items()
    }


def measure(family: str) -> Row:
    models = build(family)
    with patch_transformers(models["patched"]) as patch:
        replaced = patch.replaced
    times = {name: time_calls(bind(models, make)) for name, make in MEASURED.items()}
    packing = measure_packing(models["patched"])
    known = [name for name in CONTENDERS if name in models]
    del models
    gc.collect()
    threads = torch.get_num_threads()
    memory = {name: peak_growth(partial(ready, family, name, threads)) for name in known}
    return {"family": family, "replaced": replaced, **times, "packing": packing, "memory": memory}


def measure_packing(model: PreTrainedModel) -> dict[str, float | str]:
    """Forward and backward of documents packed into a row, and one by one; both patched, and what
    transformers says of the row as it is.
    """
    documents = draw_ids(sum(DOCUMENTS)).split(DOCUMENTS, 1)
    collate = DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": document[0].tolist()} for document in documents])

    def read_packed() -> None:
        _go_back(model, **batch)

    def read_one_by_one() -> None:
        for document in documents:
            _go_back(model, input_ids=document, labels=document)

    calls = {"packed": Patched(read_packed, model), "alone": Patched(read_one_by_one, model)}
    return {**time_calls(calls), "before": read_unpatched(model, batch, documents)}


@torch.no_grad()
def read_unpatched(model: PreTrainedModel, batch: Row, documents: Sequence[Tensor]) -> str:
    """What transformers does with packed documents: refused, mixed or kept apart."""
    alone = torch.cat([model(input_ids=d, use_cache=False).logits for d in documents], 1)
    try:
        packed = model(**batch, use_cache=False).logits
    except Exception:
        return "refused"
    return "mixed" if (packed - alone).abs().max() > 1e-3 * alone.abs().max() else "kept apart"


def ready(family: str, contender: str, threads: int) -> Function:
    """A forward and backward in this process, which has done a short one."""
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    model = build(family)[contender]
    if contender == "patched":
        patch_transformers(model)
    train(model, draw_ids(WARM_TOKENS))()
    return train(model, draw_ids(TOKENS))


def main() -> None:
    parser = options(__doc__, "transformers_models")
    parser.add_argument("families", nargs="*", default=present_families())
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    report = open_report("transformers_models", chosen.out, SHAPES)
    for family in chosen.families:
        if not report.has(family):
            report.add(family, [measure(family)])


if __name__ == "__main__":
    main()
