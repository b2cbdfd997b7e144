"""fastweights train"""

from __future__ import annotations

import math
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from transformers import TextStreamer

from fastweights.cli.parsers.training import DECAY, FULL_LR, LORA_LR, LR, SHAPES
from fastweights.cli.progress import STOPPING, reporter
from fastweights.cli.verbs.generate import Request, load_model, write_continuation
from fastweights.linearize.convert.model_classes import LinearizedModel
from fastweights.models import FastWeightsForCausalLM
from fastweights.training.data.corpus import Text
from fastweights.training.data.tokenizers import BPE, Bytes, ExistingTokenizer, Tokenization
from fastweights.training.language.adapters import LoRA
from fastweights.training.language.architectures import Architecture, PresetArchitecture
from fastweights.training.language.existing import ExistingModel
from fastweights.training.language.language_model import Every, TrainConfig
from fastweights.training.language.language_model import train as run_training
from fastweights.training.loop.layout import Layout
from fastweights.training.loop.optimizers import AdamW, Muon, OptimizerConfig
from fastweights.training.loop.report import Result
from fastweights.training.loop.schedules import (
    DECAY_SHAPES,
    SCHEDULES,
    Schedule,
    WarmupStableDecay,
)
from fastweights.training.loop.signals import StopOnSignal
from fastweights.training.loop.tracking import track


def _model(chosen: Namespace) -> Architecture | PresetArchitecture | ExistingModel:
    if chosen.start is not None:
        return _existing_model(chosen)
    if chosen.lora is not None:
        raise ValueError(
            "--lora trains adapters of an existing model; name it by --from, or leave out --lora"
        )
    parts = {name: getattr(chosen, name) for name in ("mixers", "layers", "width")}
    given = {name: part for name, part in parts.items() if part is not None}
    if chosen.preset is None:
        return Architecture(**given)
    if given:
        raise ValueError(
            f"--preset {chosen.preset} is a whole architecture; leave out --{', --'.join(given)}"
        )
    return PresetArchitecture(chosen.preset)


def _existing_model(chosen: Namespace) -> ExistingModel:
    architecture = ("mixers", "layers", "width", "preset")
    if given := [name for name in architecture if getattr(chosen, name) is not None]:
        raise ValueError(
            f"--from {chosen.start} has an architecture already; leave out --{', --'.join(given)}"
        )
    lora = None if chosen.lora is None else LoRA(chosen.lora, 2.0 * chosen.lora)
    return ExistingModel(chosen.start, lora)


def _learning_rate(chosen: Namespace) -> float:
    if chosen.lr is not None:
        return chosen.lr
    return LR.default if chosen.start is None else FULL_LR if chosen.lora is None else LORA_LR


def _optimizer(chosen: Namespace) -> OptimizerConfig:
    betas = AdamW.betas[0], chosen.beta2
    adamw = AdamW(_learning_rate(chosen), betas, chosen.weight_decay)
    if chosen.optimizer == "muon":
        lr = adamw.lr if chosen.matrix_lr is None else chosen.matrix_lr
        return Muon(lr=lr, weight_decay=chosen.weight_decay, others=adamw)
    if chosen.matrix_lr is not None:
        raise ValueError("--matrix-lr is a learning rate of --optimizer muon; leave it out")
    return adamw


def _schedule(chosen: Namespace) -> Schedule:
    if chosen.schedule == "wsd":
        decay = DECAY if chosen.decay is None else chosen.decay
        shape = DECAY_SHAPES[chosen.decay_shape or SHAPES[0]]
        return WarmupStableDecay(chosen.warmup, decay, shape)
    if chosen.decay is not None or chosen.decay_shape is not None:
        raise ValueError(
            f"--decay and --decay-shape are of --schedule wsd, and this is {chosen.schedule}; leave"
            " them out"
        )
    return SCHEDULES[chosen.schedule](warmup=chosen.warmup)


def _tokenization(name: str | None, model: object) -> Tokenization:
    if name is None:
        return model.tokenization if isinstance(model, ExistingModel) else Bytes()
    if name == "byte":
        return Bytes()
    return BPE(int(name[4:])) if name.startswith("bpe:") else ExistingTokenizer(name)


def train_config(chosen: Namespace) -> TrainConfig:
    """The run that the options ask for."""
    model = _model(chosen)
    tokenization = _tokenization(chosen.tokenizer, model)
    return TrainConfig(
        text=Text(
            tuple(chosen.data),
            tuple(chosen.validation),
            tokenization,
            boundaries=not chosen.across,
            field=chosen.field,
            held_out=chosen.validation_tokens,
            weights=tuple(chosen.data_weights),
            stream=chosen.stream,
            template=chosen.template,
        ),
        model=model,
        optimizer=_optimizer(chosen),
        schedule=_schedule(chosen),
        every=Every(chosen.log_every, chosen.eval_every, chosen.checkpoint_every),
        steps=chosen.steps,
        batch=chosen.batch,
        length=chosen.length,
        accumulate=chosen.accumulate,
        clip=chosen.clip,
        bf16=chosen.bf16,
        z_loss=chosen.z_loss,
        seed=chosen.seed,
    )


def _folder(config: TrainConfig) -> Path:
    """runs/shakespeare-metala, or what the data and the model are called."""
    data = Path(config.text.sources[0]).name.split(".")[0] or "text"
    readable = os.fsencode(data).decode(errors="replace")
    return Path("runs") / f"{readable}-{config.model.name}"


def train(chosen: Namespace, console: Console) -> int:
    """Train a model, and let it write a sample; the exit status."""
    config = train_config(chosen)
    layout = Layout(chosen.shard, chosen.offload, chosen.recompute, chosen.compile, chosen.slices)
    out = chosen.out or _folder(config)
    _introduce(config.model, console)
    with (
        reporter(console) as shown,
        track(chosen.track, shown) as watch,
        StopOnSignal(lambda: watch.note(STOPPING)) as stop,
    ):
        result = run_training(
            config,
            out,
            cpu=chosen.device.cpu,
            layout=layout,
            reporter=watch,
            stop=stop,
            patience=chosen.patience,
        )
    _conclude(result, console)
    if result.complete and chosen.sample and PartialState().is_main_process:
        console.print("\na sample:")
        _write_sample(*load_model(result.folder / "model", chosen.device.torch()), chosen.sample)
    return 0 if result.complete else stop.exit_status


def _introduce(model: object, console: Console) -> None:
    """Say from what the training begins, if not from a new model."""
    if isinstance(model, ExistingModel) and PartialState().is_main_process:
        trained = "all weights are" if model.lora is None else f"LoRA of rank {model.lora.rank} is"
        console.print(
            f"begins with {model.folder}: {trained} trained in float32 (stored in"
            f" {model.stored_dtype})",
            soft_wrap=True,
        )


def _write_sample(model: Any, tokenizer: Any, tokens: int) -> None:
    """Write what the model makes of a new line; other libraries' models by their own generate."""
    if isinstance(model, FastWeightsForCausalLM | LinearizedModel):
        write_continuation(model, tokenizer, Request("\n", tokens, 0.8, None, 0))
        return
    torch.manual_seed(0)
    prompt = tokenizer("\n", return_tensors="pt").to(model.device)
    model.generate(
        prompt.input_ids,
        attention_mask=prompt.attention_mask,
        max_new_tokens=tokens,
        do_sample=True,
        temperature=0.8,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
    )


def _conclude(result: Result, console: Console) -> None:
    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    nats, per_byte = result.nats_per_token, result.nats_per_byte
    if nats is not None and per_byte is not None:
        bits = per_byte / math.log(2)
        say(
            f"validation  {per_byte:.4f} nats/byte ({bits:.4f} bits/byte), perplexity"
            f" {math.exp(nats):.3f} per token"
        )
    if result.complete:
        say(f"model       {result.folder / 'model'}")
        if (result.folder / "adapter").exists():
            say(f"adapter     {result.folder / 'adapter'}")
        say(f"curves      {result.folder / 'curves.png'}")
    else:
        say(
            f"Stopped after step {result.step:,} of {result.steps:,}. Run the same command again to"
            " resume."
        )
