"""Options that verbs share."""

from __future__ import annotations

from typing import Annotated

from fastweights.cli import argument_types
from fastweights.cli.argument_types import (
    DTYPES,
    Count,
    CountOrZero,
    Given,
    Length,
    Positive,
    chat_template,
    dtype_name,
    own_mixer,
)
from fastweights.cli.options import REPEATED, Named, Options
from fastweights.cli.settings import fields_of, names_in, value_of

EVERY = fields_of("training.loop.stage:Every")
LAYOUT = fields_of("training.loop.layout:Layout")
TEXT = fields_of("training.data.corpus:Text")
TRACKERS = names_in("training.loop.tracking:TRACKERS")
BLOCK = 1 << 27
"""Tokens of a block of streamed text unless told otherwise."""


class DeviceOptions(Options):
    """Where to compute: auto takes a GPU if there is one (default: auto)."""

    device: Annotated[argument_types.Device, argument_types.device, "auto|cpu"] = (
        argument_types.Device(cpu=False)
    )


class DtypeOptions(Options):
    """Type of the model's weights (default: as they are stored)."""

    dtype: Annotated[str | None, dtype_name, "|".join(DTYPES)] = None


class RoundedOptions(Options):
    """How weights are rounded.

    Attributes:
        int8: $INT8.
        int4: $INT4.
    """

    int8: bool = False
    int4: bool = False


class PluginsOptions(Options):
    """A mixer class of your own that the model uses; may be given several times."""

    mixer: Annotated[tuple[str, ...], own_mixer, "PACKAGE.MODULE:CLASS", REPEATED] = ()


class SeedOptions(Options):
    """Seed of everything random: the same seed gives the same result."""

    seed: CountOrZero = 0


class RecordsOptions(Options):
    """Column of the text in records, or of a chat's messages (default: text, or instruction and
    output, prompt and response, messages).
    """

    field: Annotated[Given | None, "NAME"] = None


class TrainingTextOptions(RecordsOptions):
    """What is trained and validated on.

    Attributes:
        data_weights: Share of training of each source of --data, in any unit: 0.7 0.2 0.1 (default:
            the sources are one text).
        stream: Tokenize the text in the background while it is trained on, in blocks of so many
            tokens that are shuffled one after the other (default: tokenize all of it before, and
            shuffle all of it; without TOKENS: $BLOCK).
        validation: Text to validate on (default: at most a tenth of the data: documents from all
            over it, or its end if there are few).
        validation_tokens: Most tokens to validate on, from all over that text.
        across: Let tokens see earlier documents that share their sequence.
        template: What writes chats and instructions, and is saved with the model: no chat template,
            or the one in a file (default: the tokenizer's own, if it has one).
    """

    title = "text"
    data_weights: Annotated[tuple[Positive, ...], "WEIGHT"] = ()
    stream: Annotated[Count | None, "TOKENS", {"nargs": "?", "const": BLOCK}] = None
    validation: Annotated[tuple[Given, ...], "SOURCE"] = ()
    validation_tokens: Annotated[Length, "TOKENS"] = TEXT("held_out")
    across: bool = False
    template: Annotated[str | None, chat_template, "none|FILE"] = None


class DivisionOptions(Options):
    """How several processes divide a model.

    Attributes:
        shard: Divide weights, gradients and the optimiser's memory over the processes that torchrun
            or accelerate launch has started (FSDP2), and write checkpoints in the background
            (default: each process has all of them, and they average gradients).
        offload: With --shard: keep the parts in the main memory, and bring each block to the
            accelerator when it is computed.
        recompute: Keep only what goes from block to block, and compute the inside of each block
            again in the backward pass: less memory, a third more time.
    """

    title = "memory (a run may go on under other ones)"
    shard: bool = False
    offload: bool = False
    recompute: bool = False


class ProgressOptions(Options):
    """How often a training logs, validates and saves, and where its metrics go.

    Attributes:
        log_every: Number of steps between two lines of metrics.
        eval_every: Number of steps between two validations.
        checkpoint_every: Number of steps between two checkpoints.
        track: Show the metrics live in this tracker, too, whose package has to be installed; may be
            given for both (default: in none).
        patience: Seconds that one of several processes waits for another in an exchange of numbers,
            before it ends, to be started again by torchrun --max-restarts.
    """

    log_every: Annotated[Count, "STEPS"] = EVERY("log")
    eval_every: Annotated[Count, "STEPS"] = EVERY("evaluation")
    checkpoint_every: Annotated[Count, "STEPS"] = EVERY("checkpoint")
    track: Annotated[tuple[str, ...], TRACKERS, REPEATED] = ()
    patience: Annotated[Positive, "SECONDS"] = value_of("training.loop.processes:PATIENCE")


class ArchitectureOptions(Options):
    """The architecture of a new model.

    Attributes:
        mixers: Mixers of the layers, repeated over them: metala,softmax or [{"name": "metala",
            "heads": 2}] or package.module:Class of your own (default: metala).
        layers: Number of layers (default: $LAYERS).
        width: Number of channels of a layer (default: $WIDTH).
        preset: A whole architecture instead, one that `fastweights list --presets` names.
    """

    title = "new model"
    mixers: Annotated[
        tuple[dict[str, object], ...] | None,
        argument_types.mixer_list,
        "NAMES|JSON",
        Named(("--mixers", "--mixer")),
    ] = None
    layers: Count | None = None
    width: Count | None = None
    preset: Annotated[Given | None, "NAME"] = None


LAYERS, WIDTH = (
    fields_of("training.language.architectures:Architecture")(name) for name in ("layers", "width")
)
