"""Verbs that train, or plan a training."""

from __future__ import annotations

from typing import Annotated

from fastweights.cli.argument_types import (
    Count,
    CountOrZero,
    Fraction,
    Given,
    Length,
    ModelName,
    Place,
    Positive,
    mixer_name,
    tokenizer_name,
)
from fastweights.cli.options import PLACE, REPEATED, Named, Options
from fastweights.cli.parser import Deferred, Verb
from fastweights.cli.parsers.shared import (
    LAYOUT,
    ArchitectureOptions,
    DeviceOptions,
    DivisionOptions,
    ProgressOptions,
    SeedOptions,
    TrainingTextOptions,
)
from fastweights.cli.settings import fields_of, names_in

ADAMW = fields_of("training.loop.optimizers:AdamW")
OPTIMIZATION = fields_of("training.loop.stage:Optimization")
TRAINING = fields_of("training.language.language_model:TrainConfig")
WORKLOAD = fields_of("budget.training:Workload")
LR, FULL_LR, LORA_LR = ADAMW("lr"), 1e-4, 2e-4
"""Learning rates unless told otherwise: of new models, of existing ones, of their adapters."""
RANK = fields_of("training.language.adapters:LoRA")("rank")
SCHEDULES = names_in("training.loop.schedules:SCHEDULES")
SHAPES = names_in("training.loop.schedules:DECAY_SHAPES")
DECAY = 0.2
"""Fraction of the steps in which `wsd` decays unless told otherwise."""
OPTIMIZERS = ("adamw", "muon")
DEVICE = "h100"
VOCABULARY = 32_000
PLANNED_LENGTH, PLANNED_BATCH = 2048, 256


class NewTextOptions(TrainingTextOptions):
    """The text of a training, and its tokenizer.

    Attributes:
        data: Text to train on: $TEXT_SOURCES (default: shakespeare).
        tokenizer: What a token is: a byte, one of N pieces learned from the first 16 million
            characters of the text, or what a saved tokenizer makes of it (default: byte; with
            --from, the model's own tokenizer).
    """

    data: Annotated[tuple[Given, ...], "SOURCE"] = ("shakespeare",)
    tokenizer: Annotated[str | None, tokenizer_name, "byte|bpe:N|PATH"] = None


class ExistingModelOptions(Options):
    """The model to go on from.

    Attributes:
        start: Go on training this model instead of a new one, linearized ones too: $MODEL_SOURCE.
            Its weights are trained and saved in float32, whatever they are stored in.
        lora: Train adapters of this rank on all linear layers but the head, and keep the model's
            own weights; needs peft (default: train all weights; without a RANK: $RANK).
    """

    title = "existing model"
    start: Annotated[ModelName | None, "MODEL", Named(("--from",))] = None
    lora: Annotated[Count | None, "RANK", {"nargs": "?", "const": RANK.default}] = None


class UpdatesOptions(SeedOptions):
    """The updates of the weights.

    Attributes:
        steps: Number of updates of the weights.
        batch: Number of sequences per update.
        length: Number of tokens per sequence.
        accumulate: Number of parts that a batch is computed in, to save memory.
        lr: Peak learning rate (default: $LR; with --from $FULL_LR, with --lora $LORA_LR).
        optimizer: How weights are updated; muon makes the updates of hidden matrices orthogonal, at
            the size of those of adamw, which updates the rest.
        matrix_lr: Peak learning rate of hidden matrices with --optimizer muon (default: as --lr).
        schedule: How the learning rate changes after the warm-up; with constant, and with wsd
            before its decay, the same command with more --steps goes on.
        decay: Fraction of the steps, the last ones, in which --schedule wsd lets the learning rate
            fall to zero; 0 for none yet (default: $DECAY).
        decay_shape: How it falls: by 1 - sqrt, a straight line or half a cosine (default: sqrt).
        weight_decay: Weight decay of matrices.
        beta2: Coefficient of the running mean of squared gradients.
        warmup: Number of steps over which the learning rate rises.
        clip: Largest norm of the gradient; a larger one is scaled down.
        z_loss: Weight of the mean of log^2 Z beside the loss, where Z normalises a token's
            probabilities; keeps logits from drifting, with 1e-4 in PaLM.
        bf16: Compute matrix products in bfloat16.
    """

    title = "training"
    steps: int = OPTIMIZATION("steps")
    batch: int = OPTIMIZATION("batch")
    length: Length = TRAINING("length")
    accumulate: int = OPTIMIZATION("accumulate")
    lr: Positive | None = None
    optimizer: Annotated[str, OPTIMIZERS] = OPTIMIZERS[0]
    matrix_lr: Annotated[Positive | None, "LR"] = None
    schedule: Annotated[str, SCHEDULES] = SCHEDULES[0]
    decay: Annotated[Fraction | None, "FRACTION"] = None
    decay_shape: Annotated[str | None, SHAPES] = None
    weight_decay: float = ADAMW("weight_decay")
    beta2: Annotated[Fraction, "FRACTION"] = ADAMW("betas").default[1]
    warmup: Annotated[int, "STEPS"] = fields_of("training.loop.schedules:Cosine")("warmup")
    clip: float = OPTIMIZATION("clip")
    z_loss: Annotated[float, "WEIGHT"] = TRAINING("z_loss")
    bf16: bool = False


class MemoryOptions(DivisionOptions):
    """How a model lies in memory, and what is compiled.

    Attributes:
        slices: Number of processes, one after another, that divide every sequence among them in
            time, for sequences that one alone cannot hold.
        compile: Compile every block by torch.compile.
    """

    title = "memory and speed (a run may go on under other ones)"
    slices: Annotated[int, "N"] = LAYOUT("slices")
    compile: bool = False


class OutputOptions(ProgressOptions):
    """What a training writes.

    Attributes:
        out: Folder of the run (default: runs/<data>-<mixers>).
        sample: Number of tokens that the trained model writes at the end; 0 for none.
    """

    title = "output"
    out: Place | None = None
    sample: Annotated[CountOrZero, "TOKENS"] = 300


class TrainVerb(Verb, DeviceOptions):
    """Train a language model on text, a new one or an existing one; run the same command again to
    resume.
    """

    run = Deferred("train", "train")
    groups = (
        NewTextOptions,
        ExistingModelOptions,
        ArchitectureOptions,
        UpdatesOptions,
        MemoryOptions,
        OutputOptions,
    )


class PlannedModelOptions(ArchitectureOptions):
    """The model of a planned training.

    Attributes:
        start: A folder of a run, a checkpoint or a model of this library, of which only the
            configuration is read.
        vocabulary: Number of tokens that there are (default: the model's, or $VOCABULARY).
    """

    title = "model"
    start: Annotated[ModelName | None, "MODEL", Named(("--from",))] = None
    vocabulary: Annotated[Count | None, "N"] = None


class PlannedWorkOptions(Options):
    """What is trained on.

    Attributes:
        tokens: Number of tokens to train on, such as 15e9 (default: the recipe's).
        length: Number of tokens per sequence (default: the recipe's, or $PLANNED_LENGTH).
        batch: Number of sequences per update (default: the recipe's, or $PLANNED_BATCH).
        accumulate: Number of parts that a device's share of a batch is computed in (default: the
            fewest that fit).
        bf16: Compute matrix products in bfloat16, as recipes do.
    """

    title = "training"
    tokens: Annotated[Positive | None, "N"] = None
    length: Length | None = None
    batch: Count | None = None
    accumulate: Count | None = None
    bf16: bool = False


class PlannedDevicesOptions(Options):
    """What it is trained by.

    Attributes:
        device: Which accelerator: a100, a100-40gb, rtx4090, l40s, h100, h200 or b200 (default: the
            recipe's, or $DEVICE).
        devices: Number of them (default: the recipe's, or 1).
        shard: Divide weights, gradients and the optimiser's numbers among the devices (FSDP2).
        recompute: Compute the inside of every block again in the backward pass, to save memory.
        mfu: Share of the devices' peak at which operations run, at most 1.
        price: Price of a device for an hour, in any currency (default: none, and no cost).
    """

    title = "devices"
    device: Annotated[Given | None, "NAME"] = None
    devices: Annotated[Count | None, "N"] = None
    shard: bool = False
    recompute: bool = False
    mfu: Annotated[Positive, "SHARE"] = WORKLOAD("utilization")
    price: Annotated[Positive | None, "PRICE"] = None


class PlanVerb(Verb):
    """Tell what a training takes before it begins, a published one or one of your own: operations,
    memory per device, hours and cost; and the command that starts it.

    Attributes:
        recipe: A published training, one that `fastweights recipes` names; options change it.
        json: Write the numbers into this file, too.
    """

    run = Deferred("plan", "plan")
    groups = (PlannedModelOptions, PlannedWorkOptions, PlannedDevicesOptions)
    recipe: Annotated[Given | None, PLACE, "RECIPE", {"nargs": "?"}] = None
    json: Annotated[Place | None, "FILE"] = None


class SweepVerb(Verb, DeviceOptions):
    """Train small models over tasks × mixers × learning rates × seeds; run the same command again
    to resume.

    Attributes:
        plan: TOML file with the plan of the sweep; docs/sweeps.md explains it.
        out: Folder of the sweep (default: runs/sweeps/ and the plan's name).
        mixer: A mixer to add to the plan's, of the library or your own; may be given several times.
        workers: Number of processes (default: one per core; 0: everything in this process).
        ray: Run on the Ray cluster at ADDRESS, or without it on a Ray of this machine's own.
    """

    run = Deferred("sweep", "sweep")
    plan: Annotated[Place, PLACE]
    out: Place | None = None
    mixer: Annotated[tuple[str, ...], mixer_name, "NAME|PACKAGE.MODULE:CLASS", REPEATED] = ()
    workers: Annotated[CountOrZero | None, "N"] = None
    ray: Annotated[Given | None, "ADDRESS", {"nargs": "?", "const": True}] = None
