"""fastweights linearize"""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path
from typing import Annotated, ClassVar

from fastweights.cli.argument_types import (
    Count,
    CountOrZero,
    Counts,
    CountsOrZero,
    Fraction,
    Given,
    Length,
    ModelName,
    NonNegative,
    Place,
    Positive,
    path,
    size,
    utf8,
)
from fastweights.cli.options import PLACE, REPEATED, Options
from fastweights.cli.parser import Deferred, Verb
from fastweights.cli.parsers.models import PromptOptions, SamplingOptions
from fastweights.cli.parsers.shared import (
    DeviceOptions,
    DivisionOptions,
    DtypeOptions,
    ProgressOptions,
    RoundedOptions,
    SeedOptions,
    TrainingTextOptions,
)
from fastweights.cli.settings import fields_of, names_in, value_of

DATA = fields_of("training.data.documents:Data")
SOURCES = fields_of("training.data.request:Sources")
CONVERSION = fields_of("linearize.distill.conversion:Conversion")
RECIPES = names_in("linearize.distill.recipes:RECIPES")
PUBLISHED = ", ".join(RECIPES)
FEATURES, RULES, GATES, POSITIONS = (
    names_in(f"linearize.convert.config:{table}")
    for table in ("FEATURE_MAPS", "RULE_PAPERS", "GATES", "POSITIONS")
)
CRITERIA = names_in("linearize.evaluate.criteria:CRITERIA")
TOKENS = value_of("linearize.evaluate.generation:TOKENS")


def recipe_name(text: str) -> str | Path:
    """The name of a published recipe, or the path of a file with one."""
    if text in RECIPES:
        return text
    if (found := path(text)).suffix in (".toml", ".json"):
        return found
    raise ArgumentTypeError(
        f"{text!r} is no recipe; take one of {PUBLISHED}, or a file of your own, .toml or .json"
    )


class PretrainedOptions(Options):
    """The softmax model to convert: $MODEL_SOURCE."""

    model: Annotated[ModelName, PLACE]


class SequencesOptions(Options):
    """Number of tokens per training sequence."""

    length: int = DATA("length")


class ConversionTextOptions(TrainingTextOptions, SequencesOptions):
    """The text of a conversion.

    Attributes:
        data: Text to train on: $TEXT_SOURCES.
        responses: Learn only the responses of instruction data, not the instructions.
    """

    data: Annotated[tuple[Given, ...], "SOURCE"]
    validation_tokens: Annotated[Length, "TOKENS"] = SOURCES("held_out")
    responses: bool = False


class RecipeOptions(Options):
    """What replaces softmax attention, and how it is trained.

    Attributes:
        recipe: Published recipe, whose settings the other options change: $PUBLISHED; or a file of
            your own, .toml or .json. `fastweights linearize recipes` tells what each does (default:
            landmarks, or lolcats where --features, --rule, --gates or --convolution ask for what
            landmarks exclude).
        features: Feature map φ of the linear attention (default: the recipe's).
        feature_dim: Columns of every feature map, which has twice as many channels, or makes twice
            as many landmarks (default: the recipe's, or half a head's width).
        rule: Recurrence that takes a softmax layer's place, behind its window (default: the
            recipe's).
        window: Number of tokens that softmax attends to beside the linear attention; 0 for none
            (default: the recipe's).
        one_window: Give all heads one window. Else the recipe with landmarks gives each key head a
            window of its own, longer where softmax looks farther back, at the same bytes together.
        sinks: Number of tokens at the beginning that softmax attends to for ever (default: the
            recipe's).
        gates: What the gates of a rule are made of: learnt, or pooled from the keys without new
            parameters (default: the recipe's).
        convolution: Taps of causal convolutions of queries and keys in front of the rule, without a
            window; 0 for none (default: the recipe's).
        positions: Where rotary positions are: everywhere, or in linear layers alone, and not in
            those that stay softmax (default: the recipe's).
        layers: Numbers of the layers to convert (default: all that can be converted).
        softmax_layers: Number of layers that stay softmax, the first of the ranking.
        cache_budget: Bytes that the cache of a sequence may take, such as 64MiB: as many layers
            stay softmax as fit (default: what --softmax-layers says).
        cache_length: Number of tokens after which --cache-budget counts (default: --length).
        state_budget: Bytes of the linear layers' states, per sequence, such as 6MB, which the
            windows of all key heads share, up to 2048 tokens each (default: those of --window).
        scale: What the updates of every stage are multiplied by: published ones are for models of
            billions of parameters.
        stage: Setting of one stage, such as kl.steps=100, hidden.lr=1e-3 or long.length=2048; 0
            steps leave it out; repeat it for more (default: the recipe's).
        transfer_steps: Number of updates in attention transfer; 0 leaves it out (default: the
            recipe's, 400 if none is named).
        finetune_steps: Number of updates in adaptation; 0 leaves it out (default: the recipe's, 400
            if none is named).
        transfer_lr: Learning rate of attention transfer; short runs need a higher one (default: the
            recipe's, 0.01 if none is named).
        finetune_lr: Learning rate of adaptation (default: the recipe's, 0.0001 if none is named).
        batch: Number of sequences per update (default: the recipe's, 8 if none is named).
        dropout: Probability that attention transfer hides a layer's window (default: the recipe's,
            0 if none is named).
        kl: Weight of the KL divergence to the teacher in adaptation (default: the recipe's, 1 for
            landmarks, 0 for lolcats).
        teacher: Model that KL is computed to, with the same tokenizer: $MODEL_SOURCE (default: the
            softmax model itself).
        top_logits: Number of the teacher's largest logits per token that are stored once, before
            the training, instead of keeping the teacher in memory (default: none).
    """

    title = "recipe"
    recipe: Annotated[str | Path | None, recipe_name, "NAME"] = None
    features: Annotated[str | None, FEATURES] = None
    feature_dim: Annotated[Count | None, "COLUMNS"] = None
    rule: Annotated[str | None, RULES] = None
    window: Annotated[CountOrZero | None, "TOKENS"] = None
    one_window: bool = False
    sinks: Annotated[CountOrZero | None, "TOKENS"] = None
    gates: Annotated[str | None, GATES] = None
    convolution: Annotated[CountOrZero | None, "TAPS"] = None
    positions: Annotated[str | None, POSITIONS] = None
    layers: Annotated[CountsOrZero | None, "0,1,…"] = None
    softmax_layers: Annotated[int, "K"] = CONVERSION("softmax_layers")
    cache_budget: Annotated[int | None, size, "SIZE"] = None
    state_budget: Annotated[int | None, size, "SIZE"] = None
    cache_length: Annotated[Count | None, "TOKENS"] = None
    scale: Annotated[Positive, "FACTOR"] = 1.0
    stage: Annotated[tuple[Given, ...], "STAGE.FIELD=VALUE", REPEATED] = ()
    transfer_steps: Annotated[CountOrZero | None, "N"] = None
    finetune_steps: Annotated[CountOrZero | None, "N"] = None
    transfer_lr: Annotated[Positive | None, "RATE"] = None
    finetune_lr: Annotated[Positive | None, "RATE"] = None
    batch: Count | None = None
    dropout: Annotated[Fraction | None, "P"] = None
    kl: Annotated[NonNegative | None, "FACTOR"] = None
    teacher: Annotated[ModelName | None, "MODEL"] = None
    top_logits: Annotated[Count | None, "K"] = None


class RankedRecipeOptions(RecipeOptions):
    """A recipe, and how layers are ranked.

    Attributes:
        rank_by: What layers are ranked by: KL from softmax where a layer alone is linear (damage),
            what KL falls by where it alone is softmax (restored), the same one layer after the
            other (greedy), or recall lost where it alone is linear (recall) (default: recall where
            the text can show it, damage where it cannot).
        ranking: Ranking to choose by: the ranking.json of another run of the same model (default:
            the run's own).
    """

    rank_by: Annotated[str | None, CRITERIA] = None
    ranking: Annotated[Place | None, "FILE"] = None


class TrainingOptions(ProgressOptions, SeedOptions):
    """How every stage is trained.

    Attributes:
        accumulate: Number of parts that a batch is computed in, to save memory (default: 1).
        blockwise: Transfer block by block, with hidden states on disk: for large models.
        bf16: Compute matrix products of the training in bfloat16.
    """

    title = "training"
    accumulate: Count | None = None
    blockwise: bool = False
    bf16: bool = False


class LinearizePlanVerb(Verb, PretrainedOptions, SequencesOptions, DtypeOptions):
    """Tell what a conversion would do and what it would take, without reading the weights.

    Attributes:
        validation_tokens: Most tokens to validate on.
    """

    run = Deferred("linearize", "print_plan")
    groups = (RankedRecipeOptions,)
    validation_tokens: Annotated[Length, "TOKENS"] = SOURCES("held_out")


class LinearizeRunVerb(Verb, PretrainedOptions, DtypeOptions, DeviceOptions):
    """Convert a model, train it and write the result, or go as far as one stage; `fastweights
    linearize MODEL` without a verb means this. Run the same command again to resume.

    Attributes:
        out: Folder of the conversion; one that was stopped is resumed.
        until: Last stage: convert attaches the linear attentions and tests that a window over the
            whole text changes nothing, transfer trains them layer by layer on what softmax gives,
            rank-layers measures how much damage each of them does, finetune adapts the whole model
            to them, eval compares it with its softmax and with each side of its attention alone,
            report draws that, export writes the model; or the name of a stage of the recipe.
        bits: Bits of each frozen weight while training, to save memory; needs bitsandbytes
            (default: those of --dtype).
    """

    run = Deferred("linearize", "run")
    groups = (ConversionTextOptions, RankedRecipeOptions, TrainingOptions, DivisionOptions)
    out: Place
    until: Annotated[Given, "STAGE"] = "export"
    bits: Annotated[int | None, int, (4, 8)] = None


class LinearizedOptions(DeviceOptions):
    """The linearized model: the folder of its conversion, or of itself."""

    model: Annotated[Place, PLACE]


class LinearizeGenerateVerb(
    Verb, LinearizedOptions, PromptOptions, SamplingOptions, SeedOptions, RoundedOptions
):
    """Continue a text with a linearized model, in constant memory.

    Attributes:
        prompt: Text that the model continues, or answers.
        tokens: Number of tokens to generate.
        prompt_by: Which attention reads the prompt; softmax hands its keys and values over to the
            linear layers.
    """

    run = Deferred("linearize", "generate")
    model: Annotated[Place, PLACE]  # before the prompt
    prompt: Annotated[str, PLACE, utf8]
    tokens: Count = 200
    prompt_by: Annotated[str, ("linear", "softmax")] = "linear"


class LinearizeBenchVerb(Verb, LinearizedOptions):
    """Measure the time and memory of generation beside the same model with softmax.

    Attributes:
        batches: Numbers of sequences generated at a time.
        tokens: Numbers of generated tokens to measure after.
        prompt: Number of random tokens in a prompt.
        seconds: Seconds of generation after which a batch is not continued.
        out: JSON file of the rows, with a picture beside it (default: bench.json in the folder).
    """

    run = Deferred("linearize", "bench")
    batches: Annotated[Counts, "1,4,…"] = (1, 4, 16)
    tokens: Annotated[Counts, "N,N,…"] = TOKENS
    prompt: Annotated[Count, "N"] = 64
    seconds: Positive = 600.0
    out: Place | None = None


class LinearizeRecipesVerb(Verb):
    """List the published recipes: what each does, its linear attention and its stages."""

    run = Deferred("linearize", "print_recipes")


STAGES = ("convert", "transfer", "rank-layers", "finetune", "eval", "report", "export")


class LinearizeVerb(Verb):
    """Convert a pretrained softmax model to linear attention: attention transfer, LoRA, and
    generation in constant memory.
    """

    verbs: ClassVar = {
        "plan": LinearizePlanVerb,
        "run": LinearizeRunVerb,
        "recipes": LinearizeRecipesVerb,
        "generate": LinearizeGenerateVerb,
        "bench": LinearizeBenchVerb,
    }
    aliases: ClassVar = {"": ("run",), **{stage: ("run", "--until", stage) for stage in STAGES}}
