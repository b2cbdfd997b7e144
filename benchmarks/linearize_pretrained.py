"""A pretrained model converted: ``python benchmarks/linearize_pretrained.py MODEL OUT --data DATA``

MODEL is what `make real` fetches, such as models/smollm2.gguf; DATA holds alpaca_5000.json,
wikitext2_raw_{valid,test}.txt, a book (moby_dick.txt) and lambada_openai_test.jsonl, gzipped or
not. Beside the model's own softmax stand conversions and StreamingLLM in as many bytes: nothing but
a window and four sinks, untrained. Every conversion is a run of its own in OUT, and can be
stopped and started again. All is computed in one dtype, softmax too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastweights.cli.progress import reporter
from fastweights.lab.bench.report import open_report
from fastweights.lab.evals.items import SOURCES
from fastweights.lab.evals.needles import NeedleGrid, measure_needles
from fastweights.lab.evals.score import score
from fastweights.linearize import Teacher, use_mode
from fastweights.linearize.distill.pipeline import Conversion, run_conversion
from fastweights.linearize.distill.plan import plan
from fastweights.linearize.distill.recipe import LinearizationRecipe
from fastweights.linearize.distill.recipes import RECIPES
from fastweights.linearize.evaluate.comparison import StreamingSoftmax
from fastweights.train import AdamW, Every, StopOnSignal, tokenize_sources
from fastweights.training.data.documents import Data
from fastweights.training.language.perplexity import nll_by_position
from fastweights.training.loop.checkpoint import model_source
from fastweights.training.loop.files import read_json, write_json
from measuring import options

SHORT, SHORT_TOKENS = 1024, 4 * 1024
LONG, LONG_TOKENS = 4096, 4096
BANDS = 1, 256, 1024, 4096
NEEDLES = NeedleGrid((512, 1024, 2048), depths=3, repeats=2)
ENDINGS = 60
EVERY = Every(log=10, evaluation=1 << 20, checkpoint=1 << 20)
Row = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """A way to convert.

    Attributes:
        recipe: The name of its recipe.
        window: Softmax's window, in place of the recipe's.
        kept: Every so many layers one stays softmax, the last of them; None for no layer.
    """

    recipe: str
    window: int | None = None
    kept: int | None = None


METHODS = {
    "landmarks": Method("landmarks"),
    "landmarks, longer windows": Method("landmarks", window=112),
    "landmarks, one softmax layer in four": Method("landmarks", kept=4),
    "LoLCATs": Method("lolcats"),
}


def main() -> None:
    parser = options(__doc__, "linearize_pretrained")
    parser.add_argument("model", help="folder, GGUF file, or name on the hub")
    parser.add_argument("folder", type=Path, help="where the conversions are kept")
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--method", choices=METHODS, action="append", help="this method alone")
    parser.add_argument("--tokens", type=int, default=0, help="of training, per conversion")
    parser.add_argument("--rates", type=float, nargs="*", default=[1e-3, 1e-4], help="of stages")
    parser.add_argument("--dtype", default="float32")
    chosen = parser.parse_args()
    report = open_report("linearize_pretrained", chosen.out, {"dtype": chosen.dtype})
    for name in chosen.method or METHODS:
        group = f"{Path(chosen.model).stem} {name} {chosen.tokens}"
        if not report.has(group):
            report.add(group, list(rows(chosen, name)))


def rows(chosen: argparse.Namespace, name: str) -> Iterator[Row]:
    """The conversion; if it is untrained StreamingLLM in as many bytes, and once softmax."""
    conversion, out = conversion_of(chosen, name), chosen.folder / _title(chosen, name)
    with reporter(Console(highlight=False)) as watch, StopOnSignal() as stop:
        start, clock = time.perf_counter(), out.with_suffix(".json")
        if not run_conversion(conversion, out, reporter=watch, stop=stop):
            raise SystemExit("stopped; the same command goes on from here")
    if not clock.exists():
        write_json(clock, time.perf_counter() - start)
    model = AutoModelForCausalLM.from_pretrained(out / "model", dtype=chosen.dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    caches = plan(conversion.model, conversion.recipe, layers=conversion.layers).caches
    states = {cache.layer: cache.state for cache in caches if cache.state}
    equal = {one.layer: max(2, states[one.layer] // one.token) for one in caches if one.state}
    common = {"model": Path(chosen.model).stem, "method": name, "tokens": chosen.tokens}
    attends: dict[str, AbstractContextManager[Any]] = {name: nullcontext()}
    if not chosen.tokens:
        attends["StreamingLLM"] = use_mode(model, StreamingSoftmax(equal))
        if name == next(iter(METHODS)):
            attends["softmax"] = use_mode(model, Teacher())
    for attention, mode in attends.items():
        with mode:
            found = measured(model, tokenizer, chosen.data)
        yield {
            **common,
            "attention": attention,
            "state": sum(states.values()),
            "softmax_layers": len(caches) - len(states),
            "seconds": read_json(clock),
            **found,
        }


def conversion_of(chosen: argparse.Namespace, name: str) -> Conversion:
    """One conversion as a value."""
    method = METHODS[name]
    text = str(_file(chosen.data, "alpaca_5000.json"))
    data = Data((text,), length=SHORT, held_out=1 << 13)
    recipe = RECIPES[method.recipe]
    if method.window is not None:
        recipe = replace(recipe, analog=replace(recipe.analog, window=method.window))
    model = str(model_source(chosen.model))
    layers = None
    if method.kept is not None:
        every = [one.layer for one in plan(model, recipe).converted]
        layers = tuple(layer for layer in every if (layer + 1) % method.kept)
    return Conversion(model, data, _trained(recipe, chosen), layers=layers, dtype=chosen.dtype)


def _trained(recipe: LinearizationRecipe, chosen: argparse.Namespace) -> LinearizationRecipe:
    """The recipe with its share of the tokens for each stage, or with no stage at all."""
    if not chosen.tokens:
        return replace(recipe, stages=())
    steps = chosen.tokens // SHORT // len(recipe.stages)
    stages = (
        stage.with_fit(
            replace(
                stage.fit,
                steps=steps,
                batch=1,
                every=EVERY,
                optimizer=AdamW(lr=lr, betas=(0.9, 0.999), weight_decay=0.0),
            )
        )
        for stage, lr in zip(recipe.stages, chosen.rates, strict=True)
    )
    return replace(recipe, stages=tuple(stages))


@torch.no_grad()
def measured(model: Any, tokenizer: Any, folder: Path) -> Row:
    """Perplexities, last words and hidden numbers."""
    texts = {
        "wikitext": ("wikitext2_raw_valid.txt", SHORT, SHORT_TOKENS),
        "book": ("moby_dick.txt", LONG, LONG_TOKENS),
    }
    found: Row = {}
    for name, (file, length, count) in texts.items():
        tokens, _ = tokenize_sources([str(_file(folder, file))], tokenizer, None, count)
        loss = nll_by_position(model, tokens, length, batch=1, chunk=None)
        found[name] = loss.perplexity
        if name == "book":
            found["book_by_position"] = loss.mean_between(np.array(BANDS)).tolist()
    words = SOURCES["lambada"].items(_file(folder, "lambada_openai_test.jsonl").parent)[:ENDINGS]
    found["lambada"] = score(model, tokenizer, words, batch=8).metrics["accuracy"]
    return {**found, "needles": measure_needles(model, tokenizer, NEEDLES, batch=1).record()}


def _file(folder: Path, name: str) -> Path:
    """A file of a folder, or of the folders in it."""
    for path in sorted(folder.rglob(f"{name}*")):
        if path.name in (name, f"{name}.gz"):
            return path
    raise SystemExit(f"{folder} has no {name}, gzipped or not")


def _title(chosen: argparse.Namespace, name: str) -> str:
    plain = "".join(c if c.isalnum() else "-" for c in name)
    return f"{Path(chosen.model).stem}-{plain}-{chosen.tokens}"


if __name__ == "__main__":
    main()
