"""LoLCATs' Table 1, published methods, recall, the cost of transfer: ``python
benchmarks/linearize.py TEACHERS``.

TEACHERS is the folder that benchmarks/linearize_teachers.py has written. Every conversion is a run
of its own in TEACHERS/runs, which can be stopped and started again; the figures go to
benchmarks/results/linearize.json, and from there into docs/linearize.md by `make pages`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fastweights.cli.progress import reporter
from fastweights.lab.bench.machine import provenance
from fastweights.linearize import LinearAttentionConfig, Student, branches, linearize, use_mode
from fastweights.linearize.convert.attention import attend_all
from fastweights.linearize.distill.adapt import TokenLoss, prepare_adaptation
from fastweights.linearize.distill.fit import Fit, copy_parameters, fit
from fastweights.linearize.distill.pipeline import Conversion, run_conversion
from fastweights.linearize.distill.recipe import (
    ADAPT,
    TRANSFER,
    AdaptationConfig,
    LinearizationRecipe,
    StageConfig,
    TransferConfig,
)
from fastweights.linearize.distill.stages import AdaptStage, TransferStage
from fastweights.linearize.distill.trained import AllWeights
from fastweights.linearize.distill.transfer import BackwardInForward, KeepGraphs, only_branches
from fastweights.linearize.evaluate.comparison import modes_in
from fastweights.linearize.evaluate.criteria import CRITERIA
from fastweights.linearize.evaluate.logits import next_logits
from fastweights.models.loss import IGNORE_INDEX
from fastweights.train import AdamW, Every, LoRA, StopOnSignal
from fastweights.training.data.documents import Data
from fastweights.training.language.adapters import merge_adapters
from fastweights.training.loop.files import atomic_file
from linearize_teachers import Repeats

RESULTS = Path(__file__).parent / "results" / "linearize.json"
PICTURE = Path(__file__).parents[1] / "docs" / "measured" / "linearize-maps.png"
WINDOW = 16
LENGTH = 256
FEATURES = ("elu", "relu", "exp", "hedgehog")
RATES = {"elu": 1e-1, "relu": 1e-1, "exp": 1e-2, "hedgehog": 1e-1}
"""Of transfer; exp overflows at the rate that suits the others."""
LENGTHS = (256, 1024, 4096)
_FORKS = multiprocessing.get_context("forkserver")
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("teachers", type=Path)
    parser.add_argument("--transfer-steps", type=int, default=200)
    parser.add_argument("--finetune-steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--only", choices=("text", "recall", "scaling"), help="measure this part anew"
    )
    chosen = parser.parse_args()
    parts = {
        "text": lambda: text(
            chosen.teachers, chosen.transfer_steps, chosen.finetune_steps, chosen.batch
        ),
        "recall": lambda: recall(chosen.teachers),
        "scaling": scaling,
    }
    for name, measure in parts.items():
        found: list[Row] = []
        for row in measure() if chosen.only in (None, name) else ():
            found.append(row)
            _record(name, found)


def _record(name: str, found: Any) -> None:
    """Put a part into the file of results, beside what was measured before."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with atomic_file(RESULTS) as new:
        new.write_text(
            json.dumps({**results, name: {**provenance(), "rows": found}}, indent=1) + "\n"
        )


def recipes(transfer_steps: int, finetune_steps: int, batch: int) -> dict[str, LinearizationRecipe]:
    """What is compared on text; all with the same steps."""
    every = Every(log=10, evaluation=1000, checkpoint=25)
    settings = replace(TRANSFER, steps=transfer_steps, batch=batch, every=every)
    transfers = {
        name: TransferConfig(fit=replace(settings, optimizer=_adam(RATES[name])))
        for name in FEATURES
    }
    first = transfers["hedgehog"]
    settings = replace(ADAPT, steps=finetune_steps, batch=batch, every=every)
    second = AdaptationConfig(fit=replace(settings, optimizer=_adam(1e-3)))
    everything = AdaptationConfig(AllWeights(), fit=replace(settings, optimizer=_adam(3e-4)))
    table = {
        f"{name}, {'transfer' if transfer else 'no transfer'}": _recipe(
            LinearAttentionConfig(name, window=0), *transfer, second
        )
        for name in FEATURES
        for transfer in ((), (transfers[name],))
    }
    windowed = LinearAttentionConfig(window=WINDOW)
    return {
        f"window {WINDOW}, transfer": _recipe(windowed, first, second),
        f"window {WINDOW}, no transfer": _recipe(windowed, second),
        **dict(reversed(table.items())),
        "T2R, all weights": _recipe(LinearAttentionConfig("relu", window=0), everything),
        "SUPRA, all weights": _recipe(
            LinearAttentionConfig("relu", window=0, rule="supra"), everything
        ),
        f"window {WINDOW}, dropout 0.5": _recipe(windowed, replace(first, dropout=0.5), second),
    }


def _recipe(analog: LinearAttentionConfig, *stages: StageConfig) -> LinearizationRecipe:
    return LinearizationRecipe(analog, stages)


def _adam(lr: float) -> AdamW:
    return AdamW(lr=lr, betas=(0.9, 0.999), weight_decay=0.0)


def text(teachers: Path, transfer_steps: int, finetune_steps: int, batch: int) -> Iterator[Row]:
    """The Llama of text, by every recipe."""
    corpus = teachers / "corpus"
    data = Data(
        (str(corpus / "train.jsonl"),),
        (str(corpus / "validation.jsonl"),),
        length=LENGTH,
        boundaries=False,
        held_out=1 << 12,
    )
    tokens = {
        "transfer_tokens": transfer_steps * batch * LENGTH,
        "finetune_tokens": finetune_steps * batch * LENGTH,
    }
    for row in _rows(teachers, data, recipes(transfer_steps, finetune_steps, batch)):
        yield {**row, **tokens}


def _rows(teachers: Path, data: Data, compared: dict[str, LinearizationRecipe]) -> Iterator[Row]:
    console = Console(highlight=False)
    for name, recipe in compared.items():
        out = teachers / "runs" / "".join(c if c.isalnum() else "-" for c in name)
        conversion = Conversion(str(teachers / "text" / "model"), data, recipe)
        console.print(f"\n{name}", markup=False)
        with reporter(console) as watch, StopOnSignal() as stop:
            if not run_conversion(conversion, out, reporter=watch, stop=stop):
                raise SystemExit("stopped; the same command goes on from here")
        if name == f"window {WINDOW}, transfer":
            shutil.copyfile(out / "report" / "maps.png", PICTURE)
        yield {
            "method": name,
            **{part: _read(out, part) for part in ("convert", "transfer")},
            "evaluation": _judged(_read(out, "evaluation")),
        }


def _judged(evaluation: Row) -> Row:
    """What the page shows of a judgement."""
    parts = "share", "share_details", "recall"
    return {**modes_in(evaluation), **{part: evaluation[part] for part in parts}}


def _read(out: Path, name: str) -> Any:
    path = out / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def recall(teachers: Path) -> Iterator[Row]:
    """The Llama that repeats at a distance of 40: fully linear, and with the layers that matter
    kept.
    """
    source, work = teachers / "recall" / "model", teachers / "runs" / "recall"
    first = Fit(steps=200, batch=32, every=Every(50, 200, 100))
    second = Fit(
        steps=200,
        batch=32,
        every=Every(50, 200, 100),
        optimizer=AdamW(1e-3, betas=(0.9, 0.999), weight_decay=0.0),
    )
    model = _original(source)
    yield {"model": "softmax", "accuracy": accuracy(model)}
    model = linearize(model, LinearAttentionConfig(window=WINDOW))
    yield {"model": "swapped", "accuracy": accuracy(model)}
    fit(TransferStage(model, Repeats(), Repeats(count=64)), first, work / "transfer")
    yield {"model": "after transfer", "accuracy": accuracy(model)}
    batch = Repeats().batch(0, 64)
    by = CRITERIA["damage"]
    found = by.damage(
        list(branches(model)), lambda choices: by.measure.losses(model, [batch], choices)
    )
    kept = list(found)[:1]
    trained = {
        name: p.detach().clone() for name, p in model.named_parameters() if "linear_branch" in name
    }
    hybrid = linearize(
        _original(source),
        LinearAttentionConfig(window=WINDOW),
        [layer for layer in branches(model) if layer not in kept],
    )
    copy_parameters(hybrid, trained)
    yield {
        "model": f"layer {kept[0]} kept as softmax",
        "accuracy": accuracy(hybrid),
        "damage": found,
    }
    adapter = prepare_adaptation(model, LoRA())
    fit(AdaptStage(adapter, Repeats(), Repeats(count=64), TokenLoss()), second, work / "finetune")
    yield {"model": "all linear, after LoRA", "accuracy": accuracy(merge_adapters(adapter))}


def _original(source: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(source)


@torch.no_grad()
def accuracy(model: Any) -> float:
    """Of the second halves of 256 sequences that training has not seen."""
    right, count = 0, 0
    with use_mode(model.eval(), Student()):
        for batch in Repeats(count=256).sequential_batches(64):
            labels = batch["labels"][:, 1:]
            learnt = labels != IGNORE_INDEX
            right += int(
                (next_logits(model, {"input_ids": batch["input_ids"]}).argmax(-1) == labels)[
                    learnt
                ].sum()
            )
            count += int(learnt.sum())
    return right / count


def scaling() -> Iterator[Row]:
    """Seconds and peak memory of one transfer step against its length, backward inside the forward
    and after it.
    """
    for tokens in LENGTHS:
        for name in ("inside the forward", "after it"):
            yield {"tokens": tokens, "backward": name, **_measured(tokens, name)}


def _measured(tokens: int, name: str) -> Row:
    """In a process of its own, for its peak."""
    receiver, sender = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_step, args=(tokens, name, sender))
    process.start()
    found = receiver.recv()
    process.join()
    return found


def _step(tokens: int, name: str, sender: Any) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
    )
    model = only_branches(linearize(LlamaForCausalLM(config), LinearAttentionConfig(window=64)))
    _transfer_step(model, 64, name)
    before = _largest()
    seconds = min(_transfer_step(model, tokens, name) for _ in range(2))
    sender.send(
        {"seconds": seconds, "bytes": _largest() - before, "layers": config.num_hidden_layers}
    )


def _transfer_step(model: Any, tokens: int, name: str) -> float:
    start = time.perf_counter()
    mode = BackwardInForward() if name == "inside the forward" else KeepGraphs()
    attend_all(model, {"input_ids": torch.arange(tokens)[None] % 512}, mode)
    if isinstance(mode, KeepGraphs):
        torch.stack(list(mode.losses.values())).sum().backward()
    model.zero_grad()
    return time.perf_counter() - start


def _largest() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
