"""fastweights train"""

from __future__ import annotations

from argparse import _ArgumentGroup

from fastweights.cli.argument_types import (
    fraction,
    given,
    mixer_list,
    non_negative_integer,
    non_negative_number,
    path,
    positive_integer,
    positive_number,
    sequence_length,
    tokenizer,
)
from fastweights.cli.parser import (
    TEXT_SOURCES,
    Deferred,
    Parser,
    add_across,
    add_device,
    add_field,
    add_order,
    add_patience,
    add_seed,
    add_validation,
)

LAYERS, WIDTH = 4, 128
"""Of the architecture that is trained unless told otherwise."""
LR, FULL_LR, LORA_LR = 3e-3, 1e-4, 2e-4
"""Learning rates unless told otherwise: of new models, of existing ones, of their adapters."""
RANK = 8
"""Of adapters unless told otherwise."""
SCHEDULES = ("cosine", "linear", "constant", "wsd")
SHAPES = ("sqrt", "linear", "cosine")
"""Of the decay of `wsd`."""
DECAY = 0.2
"""Fraction of the steps in which `wsd` decays unless told otherwise."""
OPTIMIZERS = ("adamw", "muon")
TRACKERS = ("tensorboard", "wandb")


def train(parser: Parser) -> Deferred:
    """Train a language model on text, a new one or an existing one; run the same command again to
    resume.
    """
    _add_text(parser.add_argument_group("text"))
    _add_start(parser.add_argument_group("existing model"))
    add_model(parser.add_argument_group("new model"))
    _add_training(parser.add_argument_group("training"))
    memory = parser.add_argument_group("memory and speed (a run may go on under other ones)")
    add_division(memory)
    memory.add_argument(
        "--slices",
        type=positive_integer,
        default=1,
        metavar="N",
        help="Number of processes, one after another, that divide every sequence among them in"
        " time, for sequences that one alone cannot hold (default: %(default)s)",
    )
    memory.add_argument(
        "--compile", action="store_true", help="Compile every block by torch.compile"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out", type=path, help="Folder of the run (default: runs/<data>-<mixers>)"
    )
    add_intervals(output)
    add_trackers(output)
    add_patience(output)
    output.add_argument(
        "--sample",
        type=non_negative_integer,
        default=300,
        metavar="TOKENS",
        help="Number of tokens that the trained model writes at the end; 0 for none"
        " (default: %(default)s)",
    )
    add_device(parser)
    return Deferred("train", "train")


def add_intervals(group: _ArgumentGroup) -> None:
    """How often a training logs, validates and saves."""
    group.add_argument(
        "--log-every",
        type=positive_integer,
        default=10,
        metavar="STEPS",
        help="Number of steps between two lines of metrics (default: %(default)s)",
    )
    group.add_argument(
        "--eval-every",
        type=positive_integer,
        default=100,
        metavar="STEPS",
        help="Number of steps between two validations (default: %(default)s)",
    )
    group.add_argument(
        "--checkpoint-every",
        type=positive_integer,
        default=100,
        metavar="STEPS",
        help="Number of steps between two checkpoints (default: %(default)s)",
    )


def add_trackers(group: _ArgumentGroup) -> None:
    """Where a training's metrics go besides the run's folder."""
    group.add_argument(
        "--track",
        action="append",
        choices=TRACKERS,
        default=[],
        help="Show the metrics live in this tracker, too, whose package has to be installed; may be"
        " given for both (default: in none)",
    )


def _add_text(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--data",
        type=given,
        nargs="+",
        default=("shakespeare",),
        metavar="SOURCE",
        help=f"Text to train on: {TEXT_SOURCES} (default: shakespeare)",
    )
    add_order(group)
    add_validation(group, 1 << 17)
    group.add_argument(
        "--tokenizer",
        type=tokenizer,
        metavar="byte|bpe:N|PATH",
        help="What a token is: a byte, one of N pieces learned from the first 16 million"
        " characters of the text, or what a saved tokenizer makes of it (default: byte; with"
        " --from, the model's own tokenizer)",
    )
    add_field(group)
    add_across(group)


def _add_start(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--from",
        dest="start",
        type=given,
        metavar="MODEL",
        help="Go on training this model instead of a new one: a folder of a run, a checkpoint or a"
        " model, linearized ones too, or a name of a causal language model on the Hugging Face hub."
        " Its weights are trained and saved in float32, whatever they are stored in",
    )
    group.add_argument(
        "--lora",
        type=positive_integer,
        nargs="?",
        const=RANK,
        metavar="RANK",
        help="Train adapters of this rank on all linear layers but the head, and keep the model's"
        f" own weights; needs peft (default: train all weights; without a RANK: {RANK})",
    )


def add_model(group: _ArgumentGroup) -> None:
    """The architecture of a new model."""
    group.add_argument(
        "--mixers",
        "--mixer",
        type=mixer_list,
        metavar="NAMES|JSON",
        help="Mixers of the layers, repeated over them: metala,softmax or"
        ' [{"name": "metala", "heads": 2}] or package.module:Class of your own (default: metala)',
    )
    group.add_argument(
        "--layers", type=positive_integer, help=f"Number of layers (default: {LAYERS})"
    )
    group.add_argument(
        "--width", type=positive_integer, help=f"Number of channels of a layer (default: {WIDTH})"
    )
    group.add_argument(
        "--preset",
        type=given,
        metavar="NAME",
        help="A whole architecture instead, one that `fastweights list --presets` names",
    )


def _add_training(group: _ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--steps",
        type=positive_integer,
        default=1000,
        help="Number of updates of the weights (default: %(default)s)",
    )
    add(
        "--batch",
        type=positive_integer,
        default=16,
        help="Number of sequences per update (default: %(default)s)",
    )
    add(
        "--length",
        type=sequence_length,
        default=256,
        help="Number of tokens per sequence (default: %(default)s)",
    )
    add(
        "--accumulate",
        type=positive_integer,
        default=1,
        help="Number of parts that a batch is computed in, to save memory (default: %(default)s)",
    )
    add(
        "--lr",
        type=positive_number,
        help=f"Peak learning rate (default: {LR}; with --from {FULL_LR}, with --lora {LORA_LR})",
    )
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        default=OPTIMIZERS[0],
        help="How weights are updated; muon makes the updates of hidden matrices orthogonal, at the"
        " size of those of adamw, which updates the rest (default: %(default)s)",
    )
    add(
        "--matrix-lr",
        type=positive_number,
        metavar="LR",
        help="Peak learning rate of hidden matrices with --optimizer muon (default: as --lr)",
    )
    add(
        "--schedule",
        choices=SCHEDULES,
        default=SCHEDULES[0],
        help="How the learning rate changes after the warm-up; with constant, and with wsd before"
        " its decay, the same command with more --steps goes on (default: %(default)s)",
    )
    add(
        "--decay",
        type=fraction,
        metavar="FRACTION",
        help="Fraction of the steps, the last ones, in which --schedule wsd lets the learning rate"
        f" fall to zero; 0 for none yet (default: {DECAY})",
    )
    add(
        "--decay-shape",
        choices=SHAPES,
        help=f"How it falls: by 1 - sqrt, a straight line or half a cosine (default: {SHAPES[0]})",
    )
    add(
        "--weight-decay",
        type=non_negative_number,
        default=0.1,
        help="Weight decay of matrices (default: %(default)s)",
    )
    add(
        "--warmup",
        type=non_negative_integer,
        default=50,
        metavar="STEPS",
        help="Number of steps over which the learning rate rises (default: %(default)s)",
    )
    add(
        "--clip",
        type=positive_number,
        default=1.0,
        help="Largest norm of the gradient; a larger one is scaled down (default: %(default)s)",
    )
    add(
        "--z-loss",
        type=non_negative_number,
        default=0.0,
        metavar="WEIGHT",
        help="Weight of the mean of log^2 Z beside the loss, where Z normalises a token's"
        " probabilities; keeps logits from drifting, with 1e-4 in PaLM (default: %(default)s)",
    )
    add_seed(group)
    add("--bf16", action="store_true", help="Compute matrix products in bfloat16")


def add_division(group: _ArgumentGroup) -> None:
    """How several processes divide a model."""
    group.add_argument(
        "--shard",
        action="store_true",
        help="Divide weights, gradients and the optimiser's memory over the processes that torchrun"
        " or accelerate launch has started (FSDP2), and write checkpoints in the background"
        " (default: each process has all of them, and they average gradients)",
    )
    group.add_argument(
        "--offload",
        action="store_true",
        help="With --shard: keep the parts in the main memory, and bring each block to the"
        " accelerator when it is computed",
    )
    group.add_argument(
        "--recompute",
        action="store_true",
        help="Keep only what goes from block to block, and compute the inside of each block again"
        " in the backward pass: less memory, a third more time",
    )
