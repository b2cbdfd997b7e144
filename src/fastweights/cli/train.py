"""fastweights train"""

from __future__ import annotations

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace, _ArgumentGroup
from collections.abc import Callable
from pathlib import Path

from accelerate import PartialState
from rich.console import Console

from fastweights.cli.arguments import add_device, mixer_list
from fastweights.cli.generate import Request, write_continuation
from fastweights.cli.progress import reporter
from fastweights.runs.optimizers import AdamW
from fastweights.runs.report import Result
from fastweights.runs.schedules import Cosine
from fastweights.runs.signals import StopOnSignal
from fastweights.text.corpus import Text
from fastweights.text.tokenizers import BPE, Bytes, ExistingTokenizer, Tokenization
from fastweights.train.loop import Architecture, Every, PresetArchitecture, TrainConfig
from fastweights.train.loop import train as run

_DEFAULT = TrainConfig()


def train(parser: ArgumentParser) -> Callable[[Namespace, Console], None]:
    """Train a language model on text; the same command again goes on where it was stopped."""
    _add_text(parser.add_argument_group("text"))
    _add_model(parser.add_argument_group("model"))
    _add_training(parser.add_argument_group("training"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out", type=Path, help="folder of the run (default: runs/<data>-<mixers>)"
    )
    output.add_argument("--log-every", type=int, default=10, metavar="STEPS")
    output.add_argument("--eval-every", type=int, default=100, metavar="STEPS")
    output.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    output.add_argument(
        "--sample",
        type=int,
        default=300,
        metavar="TOKENS",
        help="of a sample at the end; 0 for none",
    )
    add_device(parser)
    return _train


def _add_text(group: _ArgumentGroup) -> None:
    default = _DEFAULT.text
    group.add_argument(
        "--data",
        nargs="+",
        default=default.sources,
        metavar="SOURCE",
        help=(
            "files (.txt, .jsonl, also .gz), folders, globs, or the bundled text: shakespeare"
            " (default)"
        ),
    )
    group.add_argument(
        "--validation",
        nargs="+",
        default=default.validation,
        metavar="SOURCE",
        help="text to validate on (default: the last tenth of the data)",
    )
    group.add_argument(
        "--tokenizer",
        type=_tokenization,
        default=default.tokenization,
        metavar="byte|bpe:N|PATH",
        help="bytes (default), N tokens learned from the text, or a saved tokenizer",
    )


def _add_model(group: _ArgumentGroup) -> None:
    default = Architecture()
    group.add_argument(
        "--mixers",
        "--mixer",
        type=mixer_list,
        metavar="NAMES|JSON",
        help=(
            'metala,softmax or [{"name": "metala", "heads": 2}], repeated over the layers (default:'
            " metala); package.module:Class is one of your own"
        ),
    )
    group.add_argument("--layers", type=int, help=f"default: {default.layers}")
    group.add_argument("--width", type=int, help=f"channels; default: {default.width}")
    group.add_argument(
        "--preset", metavar="NAME", help="instead: an architecture of `fastweights list --presets`"
    )


def _add_training(group: _ArgumentGroup) -> None:
    default, adamw = _DEFAULT, AdamW()
    add = group.add_argument
    add("--steps", type=int, default=default.steps, help="updates; default: %(default)s")
    add(
        "--batch",
        type=int,
        default=default.batch,
        help="sequences per update; default: %(default)s",
    )
    add(
        "--length",
        type=int,
        default=default.length,
        help="tokens per sequence; default: %(default)s",
    )
    add(
        "--accumulate",
        type=int,
        default=default.accumulate,
        help="parts of a batch, to save memory; default: 1",
    )
    add("--lr", type=float, default=adamw.lr, help="peak learning rate; default: %(default)s")
    add(
        "--weight-decay",
        type=float,
        default=adamw.weight_decay,
        help="of matrices; default: %(default)s",
    )
    add("--warmup", type=int, default=Cosine().warmup, metavar="STEPS", help="default: %(default)s")
    add(
        "--clip",
        type=float,
        default=default.clip,
        help="largest gradient norm; default: %(default)s",
    )
    add("--seed", type=int, default=default.seed, help="default: %(default)s")
    add("--bf16", action="store_true", help="matrix products in bfloat16")


def _tokenization(name: str) -> Tokenization:
    if name == "byte":
        return Bytes()
    if not name.startswith("bpe:"):
        return ExistingTokenizer(name)
    if not name[4:].isdecimal():
        raise ArgumentTypeError(
            f"{name!r}: after bpe: comes the number of tokens, such as bpe:1024"
        )
    return BPE(int(name[4:]))


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


def _config(chosen: Namespace) -> TrainConfig:
    return TrainConfig(
        text=Text(tuple(chosen.data), tuple(chosen.validation), chosen.tokenizer),
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


def _train(chosen: Namespace, console: Console) -> None:
    config = _config(chosen)
    out = chosen.out or _folder(config)
    told = "finishing the step and saving; once more to stop at once"
    with reporter(console) as watch, StopOnSignal(lambda: watch.note(told)) as stop:
        result = run(config, out, cpu=chosen.device.cpu, reporter=watch, stop=stop)
    _conclude(result, console)
    if result.complete and chosen.sample and PartialState().is_main_process:
        console.print("\na sample:", markup=False)
        write_continuation(
            result.folder / "model",
            Request("\n", chosen.sample, 0.8, None, 0),
            chosen.device.torch(),
        )


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
            f"stopped after step {result.step:,} of {result.steps:,}; the same command goes on from"
            " there"
        )
