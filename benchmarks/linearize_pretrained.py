"""A pretrained model converted: ``python benchmarks/linearize_pretrained.py MODEL OUT --data DATA``

MODEL is what `make real` fetches, such as models/smollm2.gguf; DATA holds alpaca_5000.json,
wikitext2_raw_{valid,test}.txt, books (moby_dick.txt, to be read alone, and those of `BOOKS`) and
lambada_openai_test.jsonl, gzipped or not. Beside the model's own softmax stand conversions and
StreamingLLM in as many bytes: nothing but a window and four sinks, untrained; with ``--authors
CHECKOUT`` LoLCATs by its authors' code too. Every conversion is a run of its own in OUT, and can be
stopped and started again. All is computed in one dtype, softmax too. ``--answers`` has them, and
those that are in OUT already, answer questions of SQuAD (data: squad_xquad_en.json) instead,
``--chats`` those of a chat of five turns.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastweights.cli.chat_session import ChatSession
from fastweights.cli.progress import reporter
from fastweights.generate import Sampler
from fastweights.lab.bench.report import open_report
from fastweights.lab.evals.items import SOURCES, Prompt
from fastweights.lab.evals.needles import NeedleGrid, measure_needles
from fastweights.lab.evals.score import score
from fastweights.linearize import LinearAttentionConfig, Teacher, branches, use_mode
from fastweights.linearize.distill.pipeline import Conversion, run_conversion
from fastweights.linearize.distill.plan import plan
from fastweights.linearize.distill.recipe import LinearizationRecipe
from fastweights.linearize.distill.recipes import RECIPES
from fastweights.linearize.evaluate.comparison import StreamingSoftmax
from fastweights.linearize.evaluate.criteria import CRITERIA
from fastweights.linearize.evaluate.ranking import read_ranking
from fastweights.train import AdamW, Every, StopOnSignal, tokenize_sources
from fastweights.training.data.documents import Data
from fastweights.training.language.perplexity import nll_by_position
from fastweights.training.loop.checkpoint import model_source
from fastweights.training.loop.files import read_json, write_json
from lolcats_authors import MODEL, TEXTS, authors_model, train_there
from measuring import options

SHORT, SHORT_TOKENS = 1024, 4 * 1024
LONG, LONG_TOKENS = 4096, 4096
BANDS = 1, 256, 1024, 4096
NEEDLES = NeedleGrid((512, 1024, 2048), depths=3, repeats=2)
ENDINGS = QUESTIONS = 60
MOST = 100
"""Tokens of an answer in a chat."""
CHAT = (
    "My name is Ada, and my cat is called Turing. What do cats like to eat?",
    "How much should it eat in a day?",
    "Explain in three sentences how a sailing boat moves against the wind.",
    "Write a short poem about the sea.",
    "What is my name, and what is my cat called?",
)
EVERY = Every(log=10, evaluation=1 << 20, checkpoint=100)
Row = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """A way to convert.

    Attributes:
        recipe: The name of its recipe.
        rates: Peak learning rates of its stages; the recipe ends with the last that has one.
        analog: Fields of the linear attention, in place of the recipe's.
        kept: Every so many layers one stays softmax, the last of them; None for no layer.
        ranked: The name of the criterion that chooses as many layers in their place; None: none.
        like: The method whose untrained conversion, in the same folder, has ranked the layers.
        texts: The files that it is placed and trained on.
        state: Bytes of the linear layers' states, which the windows of all heads share; of all
            layers that can be converted, before some of them stay softmax; None: by the window.
    """

    recipe: str
    rates: tuple[float, ...] = (1e-3, 1e-4)
    analog: Mapping[str, Any] = field(default_factory=dict)
    kept: int | None = None
    ranked: str | None = None
    like: str | None = None
    texts: tuple[str, ...] = ("alpaca_5000.json",)
    state: int | None = None


BY_RECALL = "landmarks in 8 MB, one softmax layer in four, by recall"
BOOKS = "anna_karenina.txt", "bleak_house.txt", "don_quixote.txt", "war_and_peace.txt"
PAPER = 1e-2, 1e-4
METHODS = {
    "landmarks": Method("landmarks"),
    "landmarks, longer windows": Method("landmarks", analog={"window": 112}),
    "landmarks, windows of 136": Method("landmarks", analog={"window": 136}),
    "landmarks, windows of 448": Method("landmarks", analog={"window": 448}),
    "landmarks, one softmax layer in four": Method("landmarks", kept=4),
    "landmarks, one softmax layer in four, by recall": Method("landmarks", kept=4, ranked="recall"),
    "landmarks, one softmax layer in four, by damage": Method("landmarks", kept=4, ranked="damage"),
    "landmarks, one softmax layer in 15, by recall": Method("landmarks", kept=15, ranked="recall"),
    "landmarks in 6 MB": Method("landmarks", state=6_000_000),
    "landmarks in 6 MB, transfer alone": Method("landmarks", (1e-3,), state=6_000_000),
    "landmarks in 8 MB": Method("landmarks", state=8_000_000),
    "landmarks in 16 MB": Method("landmarks", state=16_000_000),
    "landmarks in 32 MB": Method("landmarks", state=32_000_000),
    BY_RECALL: Method("landmarks", kept=4, ranked="recall", state=8_000_000),
    "landmarks in 8 MB, the same softmax layers": Method(
        "landmarks", kept=4, like=BY_RECALL, state=8_000_000
    ),
    "landmarks, from books": Method("landmarks", texts=BOOKS),
    "LoLCATs": Method("lolcats", rates=PAPER),
    "LoLCATs, features as its authors'": Method(
        "lolcats", rates=PAPER, analog={"feature_dim": 64, "per_query_head": True}
    ),
    "gated DeltaNet": Method("lolcats", rates=PAPER, analog={"rule": "gated_deltanet"}),
    "KDA": Method("lolcats", rates=PAPER, analog={"rule": "kda"}),
    "GLA": Method("lolcats", rates=PAPER, analog={"rule": "gla"}),
    "MetaLA": Method("lolcats", rates=PAPER, analog={"rule": "metala"}),
    "MesaNet": Method("lolcats", rates=PAPER, analog={"rule": "mesa"}),
    "T2R": Method("t2r", rates=(1e-4,)),
    "SUPRA": Method("supra", rates=(1e-4,)),
}
AUTHORS = "LoLCATs by its authors"


def main() -> None:
    parser = options(__doc__, "linearize_pretrained")
    parser.add_argument("model", help="folder, GGUF file, or name on the hub")
    parser.add_argument("folder", type=Path, help="where the conversions are kept")
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument(
        "--method", choices=(*METHODS, AUTHORS), action="append", help="this method alone"
    )
    parser.add_argument("--tokens", type=int, default=0, help="of training, per conversion")
    parser.add_argument("--authors", type=Path, help="LoLCATs' own code: see lolcats_authors.py")
    parser.set_defaults(measure=measured)
    for name, measure, help in (
        ("--answers", answered, "measure answers to SQuAD alone"),
        ("--chats", talked, "write down a chat of five turns alone"),
    ):
        parser.add_argument(name, dest="measure", action="store_const", const=measure, help=help)
    parser.add_argument("--dtype", default="float32")
    chosen = parser.parse_args()
    names = chosen.method or [*METHODS, *([AUTHORS] if chosen.authors else [])]
    if AUTHORS in names and not (chosen.authors and chosen.tokens >= 2 * SHORT):
        parser.error(f"{AUTHORS}: takes --authors CHECKOUT, and --tokens from {2 * SHORT} on")
    report = open_report("linearize_pretrained", chosen.out, {"dtype": chosen.dtype})
    for name in names:
        group = f"{Path(chosen.model).stem} {name} {chosen.tokens}"
        if not report.has(group):
            report.add(group, list((authors_rows if name == AUTHORS else rows)(chosen, name)))


def authors_rows(chosen: argparse.Namespace, name: str) -> Iterator[Row]:
    """LoLCATs by its authors' code: same model, texts and number of tokens, its own template."""
    code, out = chosen.authors.resolve(), (chosen.folder / _title(chosen, name)).resolve()
    tokenizer = AutoTokenizer.from_pretrained(model_source(chosen.model))
    clock = out / "seconds.json"
    if not clock.exists():
        _prepare_for_authors(chosen, out)
        start = time.perf_counter()
        train_there(code, out, chosen.tokens // SHORT // 2)
        write_json(clock, time.perf_counter() - start)
    config = read_json(out / MODEL / "config.json")
    with authors_model(code, out) as model:
        found = chosen.measure(model, tokenizer, chosen.data)
    yield {
        "model": Path(chosen.model).stem,
        "method": name,
        "tokens": chosen.tokens,
        "attention": name,
        "state": state_of_authors(config),
        "softmax_layers": 0,
        "seconds": read_json(clock),
        **found,
    }


def _prepare_for_authors(chosen: argparse.Namespace, out: Path) -> None:
    """Write the model as their transformers reads it, and the texts unpacked."""
    source, llama = Path(model_source(chosen.model)), out / MODEL
    shutil.copytree(source, llama, dirs_exist_ok=True)
    config, words, tokenizer = (
        read_json(llama / f"{name}.json") for name in ("config", "tokenizer_config", "tokenizer")
    )
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    words["tokenizer_class"] = "PreTrainedTokenizerFast"
    tokenizer["model"]["merges"] = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    write_json(llama / "config.json", config)
    write_json(llama / "tokenizer_config.json", words)
    write_json(llama / "tokenizer.json", tokenizer)
    file = _file(chosen.data, "alpaca_5000.json")
    packed = file.read_bytes()
    unpacked = gzip.decompress(packed) if file.suffix == ".gz" else packed
    (out / TEXTS).write_bytes(unpacked)


def state_of_authors(config: dict[str, Any]) -> int:
    """Bytes in float32: per query head φᵀ(v ‖ 1) of 2 × 64 features, and 64 keys and values."""
    head = config["hidden_size"] // config["num_attention_heads"]
    per_head = 2 * 64 * (head + 1) + 64 * 2 * head
    return 4 * config["num_hidden_layers"] * config["num_attention_heads"] * per_head


def rows(chosen: argparse.Namespace, name: str) -> Iterator[Row]:
    """The conversion; if it is untrained StreamingLLM in as many bytes, and once softmax."""
    conversion, out = conversion_of(chosen, name), chosen.folder / _title(chosen, name)
    clock = out.with_suffix(".json")
    if chosen.measure is measured or not clock.exists():
        _convert(conversion, out, clock)
    model = AutoModelForCausalLM.from_pretrained(out / "model", dtype=chosen.dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    divided = LinearAttentionConfig.from_stored(model.config.linearize["analog"])
    recipe = replace(conversion.recipe, analog=divided)
    caches = plan(conversion.model, recipe, layers=tuple(branches(model))).caches
    linear = [cache for cache in caches if cache.state]
    state = sum(cache.state for cache in linear)
    equal = {one.layer: max(2, state // len(linear) // one.token) for one in linear}
    common = {"model": Path(chosen.model).stem, "method": name, "tokens": chosen.tokens}
    attends: dict[str, AbstractContextManager[Any]] = {name: nullcontext()}
    if not chosen.tokens:
        attends["StreamingLLM"] = use_mode(model, StreamingSoftmax(equal))
        if name == next(iter(METHODS)):
            attends["softmax"] = use_mode(model, Teacher())
    for attention, mode in attends.items():
        with mode:
            found = chosen.measure(model, tokenizer, chosen.data)
        yield {
            **common,
            "attention": attention,
            "state": state,
            "softmax_layers": len(caches) - len(linear),
            "seconds": read_json(clock),
            **found,
        }


def _convert(conversion: Conversion, out: Path, clock: Path) -> None:
    """Run the conversion, or go on with it, and write down the seconds of what ran at once."""
    start = time.perf_counter()
    with reporter(Console(highlight=False)) as watch, StopOnSignal() as stop:
        if not run_conversion(conversion, out, reporter=watch, stop=stop):
            raise SystemExit("stopped; the same command goes on from here")
    if not clock.exists():
        write_json(clock, time.perf_counter() - start)


def conversion_of(chosen: argparse.Namespace, name: str) -> Conversion:
    """One conversion as a value."""
    method = METHODS[name]
    texts = tuple(str(_file(chosen.data, name)) for name in method.texts)
    data = Data(texts, length=SHORT, held_out=1 << 13)
    recipe = RECIPES[method.recipe]
    recipe = replace(recipe, analog=replace(recipe.analog, **method.analog))
    model = str(model_source(chosen.model))
    kept = _kept(chosen, method, [one.layer for one in plan(model, recipe).converted])
    trained = _trained(recipe, method, chosen.tokens)
    return Conversion(model, data, trained, dtype=chosen.dtype, state_budget=method.state, **kept)


def _kept(chosen: argparse.Namespace, method: Method, layers: list[int]) -> dict[str, Any]:
    """What a conversion is told of the layers that stay softmax."""
    if method.kept is None:
        return {}
    count = len(layers) // method.kept
    if method.ranked is not None:
        return {"softmax_layers": count, "rank_by": CRITERIA[method.ranked]}
    if method.like is not None:
        untrained = argparse.Namespace(model=chosen.model, tokens=0)
        ranking = chosen.folder / _title(untrained, method.like) / "ranking.json"
        return {"softmax_layers": count, "ranking": read_ranking(ranking)}
    return {"layers": tuple(layer for layer in layers if (layer + 1) % method.kept)}


def _trained(recipe: LinearizationRecipe, method: Method, tokens: int) -> LinearizationRecipe:
    """The recipe with its share of the tokens for each stage, or with no stage at all."""
    if not tokens:
        return replace(recipe, stages=())
    steps = tokens // SHORT // 2 * 2 // len(method.rates)
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
        for stage, lr in zip(recipe.stages, method.rates, strict=False)
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


def answered(model: Any, tokenizer: Any, folder: Path) -> Row:
    """How many questions of SQuAD, asked in a chat of its passage, have an answer in the reply."""
    items = SOURCES["squad"].items(_file(folder, "squad_xquad_en.json").parent)
    prompts = [item for item in items[:: len(items) // QUESTIONS] if isinstance(item, Prompt)]
    chats = [_chat(tokenizer, prompt) for prompt in prompts[:QUESTIONS]]
    return {"squad": score(model, tokenizer, chats, batch=1).metrics["accuracy"]}


def talked(model: Any, tokenizer: Any, _: Path) -> Row:
    """The answers to the questions of `CHAT`, one after the other, by the likeliest tokens."""
    session = ChatSession(model, tokenizer, Sampler(temperature=0.0))
    answers = ["".join(session.ask(question, MOST)) for question in CHAT]
    return {"chat": [{"question": q, "answer": a} for q, a in zip(CHAT, answers, strict=True)]}


def _chat(tokenizer: Any, prompt: Prompt) -> Prompt:
    asked = [{"role": "user", "content": prompt.question.text.removesuffix("\nAnswer:")}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    answering = replace(prompt.answering, stop=tokenizer.eos_token)
    return replace(prompt, question=replace(prompt.question, text=text), answering=answering)


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
