"""fastweights train"""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path

from accelerate import PartialState
from rich.console import Console

from fastweights.cli.progress import STOPPING, reporter
from fastweights.cli.verbs.generate import Request, load_model, write_continuation
from fastweights.runs.optimizers import AdamW
from fastweights.runs.report import Result
from fastweights.runs.schedules import Cosine
from fastweights.runs.signals import StopOnSignal
from fastweights.text.corpus import Text
from fastweights.text.tokenizers import BPE, Bytes, ExistingTokenizer, Tokenization
from fastweights.train.architectures import Architecture, PresetArchitecture
from fastweights.train.loop import Every, TrainConfig
from fastweights.train.loop import train as run_training


def _model(chosen: Namespace) -> Architecture | PresetArchitecture:
    parts = {name: getattr(chosen, name) for name in ("mixers", "layers", "width")}
    given = {name: part for name, part in parts.items() if part is not None}
    if chosen.preset is None:
        return Architecture(**given)
    if given:
        raise ValueError(
            f"--preset {chosen.preset} is a whole architecture; leave out --{', --'.join(given)}"
        )
    return PresetArchitecture(chosen.preset)


def _tokenization(name: str) -> Tokenization:
    if name == "byte":
        return Bytes()
    return BPE(int(name[4:])) if name.startswith("bpe:") else ExistingTokenizer(name)


def train_config(chosen: Namespace) -> TrainConfig:
    """The run that the options ask for."""
    return TrainConfig(
        text=Text(
            tuple(chosen.data),
            tuple(chosen.validation),
            _tokenization(chosen.tokenizer),
            boundaries=not chosen.across,
            field=chosen.field,
        ),
        model=_model(chosen),
        optimizer=AdamW(lr=chosen.lr, weight_decay=chosen.weight_decay),
        schedule=Cosine(warmup=chosen.warmup),
        every=Every(chosen.log_every, chosen.eval_every, chosen.checkpoint_every),
        steps=chosen.steps,
        batch=chosen.batch,
        length=chosen.length,
        accumulate=chosen.accumulate,
        clip=chosen.clip,
        bf16=chosen.bf16,
        seed=chosen.seed,
    )


def _folder(config: TrainConfig) -> Path:
    """runs/shakespeare-metala, or what the data and the model are called."""
    data = Path(config.text.sources[0]).name.split(".")[0] or "text"
    return Path("runs") / f"{data}-{config.model.name}"


def train(chosen: Namespace, console: Console) -> None:
    """Train a model, and let it write a sample."""
    config = train_config(chosen)
    out = chosen.out or _folder(config)
    with reporter(console) as watch, StopOnSignal(lambda: watch.note(STOPPING)) as stop:
        result = run_training(config, out, cpu=chosen.device.cpu, reporter=watch, stop=stop)
    _conclude(result, console)
    if result.complete and chosen.sample and PartialState().is_main_process:
        console.print("\na sample:", markup=False)
        model, tokenizer = load_model(result.folder / "model", chosen.device.torch())
        write_continuation(model, tokenizer, Request("\n", chosen.sample, 0.8, None, 0))


def _conclude(result: Result, console: Console) -> None:
    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    nats, per_byte = result.nats_per_token, result.nats_per_byte
    if nats is not None and per_byte is not None:
        bits = per_byte / math.log(2)
        say(
            f"validation  {per_byte:.4f} nats/byte ({bits:.4f} bits/byte), perplexity"
            f" {math.exp(nats):.3f} per token"
        )
    if result.complete:
        say(f"model       {result.folder / 'model'}")
        say(f"curves      {result.folder / 'curves.png'}")
    else:
        say(
            f"Stopped after step {result.step:,} of {result.steps:,}. Run the same command again to"
            " resume."
        )
