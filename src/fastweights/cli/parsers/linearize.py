"""fastweights linearize"""

from __future__ import annotations

from argparse import ArgumentTypeError, _ArgumentGroup
from pathlib import Path

from fastweights.cli.argument_types import (
    fraction,
    given,
    non_negative_integer,
    non_negative_integers,
    non_negative_number,
    path,
    positive_integer,
    positive_integers,
    positive_number,
    sequence_length,
    size,
    utf8,
)
from fastweights.cli.parser import (
    TEXT_SOURCES,
    Declare,
    Deferred,
    Parser,
    add_across,
    add_device,
    add_dtype,
    add_field,
    add_int8,
    add_order,
    add_patience,
    add_seed,
    add_validation,
    add_verbs,
)
from fastweights.cli.parsers.generate import add_temperature
from fastweights.cli.parsers.train import add_division, add_intervals, add_trackers

RECIPES = {
    "lolcats": "a window of 64, transfer of outputs, LoRA",
    "lolcats-linear": "the same without a window",
    "workshop": "a window of 16, transfer of attention weights, LoRA",
    "hedgehog": "no window, transfer of attention weights, LoRA",
    "no-transfer": "a window of 64, LoRA alone",
    "t2r": "ReLU features, all weights",
    "supra": "ReLU features and decays, all weights",
    "hedgecats": "transfer of the linear side's weights without the window, a short LoRA with it",
    "window-last": "transfer and LoRA without the window, which is added in the end",
    "window-dropout": "LoLCATs with the window dropped less and less often",
    "liger": "GLA with gates pooled from keys, a window of 64, LoRA alone",
    "landmarks": "a window of 64 and landmarks placed among the keys, transfer of outputs, KL of"
    " logits by LoRA",
    "lawcat": "GLA of convolved queries and keys, transfer of outputs, LoRA",
    "mohawk": "maps, hidden states of blocks, KL of logits",
    "mamba-in-llama": "50, 25, 12.5, 0 %% of the layers softmax, MLPs frozen, cross-entropy and KL",
    "radlads": "hidden states, KL of logits, long texts",
    "halo": "hidden states, KL of logits, a few steps of long texts",
    "kl-guided": "hidden states, KL of logits with a higher rate for linear attentions",
}
"""Recipes, and what each does."""
FEATURE_MAPS = ("hedgehog", "exp", "elu", "relu", "landmarks")
RULES = (
    "windowed",
    "gla",
    "metala",
    "lightning",
    "gated_deltanet",
    "kda",
    "mesa",
    "supra",
)
GATES = ("learnt", "pooled")
POSITIONS = ("everywhere", "linear")
READERS = ("linear", "softmax")
CRITERIA = ("damage", "restored", "greedy", "recall")
STEPS = 400
"""Updates of each of the two stages, of the recipe that is meant unless told otherwise."""
TOKENS = (128, 512, 2048, 8192, 32768)
"""After which generation is measured."""


def linearize(parser: Parser) -> Deferred:
    """Convert a pretrained softmax model to linear attention: attention transfer, LoRA, and
    generation in constant memory.
    """
    parser.implied = "run"
    for subparser, act in add_verbs(parser, "VERB", _VERBS).values():
        subparser.set_defaults(act=act)
    return Deferred("linearize", "linearize")


def _plan(parser: Parser) -> Deferred:
    """Tell what a conversion would do and what it would take, without reading the weights."""
    _add_pretrained(parser)
    _add_length(parser)
    add_dtype(parser)
    _add_recipe(parser.add_argument_group("recipe"))
    return Deferred("linearize", "print_plan")


def _stage(verb: str, description: str) -> Declare:
    """A verb that runs a conversion up to one of its stages."""

    def declare(parser: Parser) -> Deferred:
        _add_pretrained(parser)
        parser.add_argument(
            "--out",
            type=path,
            required=True,
            help="Folder of the conversion; one that was stopped is resumed",
        )
        _add_data(parser.add_argument_group("text"))
        recipe = parser.add_argument_group("recipe")
        _add_recipe(recipe)
        _add_ranking(recipe)
        _add_training(parser.add_argument_group("training"))
        add_division(parser.add_argument_group("memory (a run may go on under other ones)"))
        add_dtype(parser)
        parser.add_argument(
            "--bits",
            type=int,
            choices=(4, 8),
            help="Bits of each frozen weight while training, to save memory; needs bitsandbytes"
            " (default: those of --dtype)",
        )
        add_device(parser)
        parser.set_defaults(until="export" if verb == "run" else verb)
        return Deferred("linearize", "run")

    declare.__doc__ = description
    return declare


def _generate(parser: Parser) -> Deferred:
    """Continue a text with a linearized model, in constant memory."""
    _add_linearized(parser)
    parser.add_argument("prompt", type=utf8, help="Text that the model continues")
    parser.add_argument(
        "--tokens",
        type=positive_integer,
        default=200,
        help="Number of tokens to generate (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt-by",
        choices=READERS,
        default="linear",
        help="Which attention reads the prompt; softmax hands its keys and values over to the"
        " linear layers (default: %(default)s)",
    )
    add_temperature(parser)
    add_seed(parser)
    add_int8(parser)
    add_device(parser)
    return Deferred("linearize", "generate")


def _bench(parser: Parser) -> Deferred:
    """Measure the time and memory of generation beside the same model with softmax."""
    _add_linearized(parser)
    add = parser.add_argument
    add(
        "--batches",
        type=positive_integers,
        default=(1, 4, 16),
        metavar="1,4,…",
        help="Numbers of sequences generated at a time (default: 1,4,16)",
    )
    add(
        "--tokens",
        type=positive_integers,
        default=TOKENS,
        metavar="N,N,…",
        help="Numbers of generated tokens to measure after"
        f" (default: {','.join(map(str, TOKENS))})",
    )
    add(
        "--prompt",
        type=positive_integer,
        default=64,
        metavar="N",
        help="Number of random tokens in a prompt (default: %(default)s)",
    )
    add(
        "--seconds",
        type=positive_number,
        default=600.0,
        help="Seconds of generation after which a batch is not continued (default: %(default)s)",
    )
    add(
        "--out",
        type=path,
        help="JSON file of the rows, with a picture beside it (default: bench.json in the folder)",
    )
    add_device(parser)
    return Deferred("linearize", "bench")


_STAGES = {
    "convert": "Attach the linear attentions, and test that a window over the whole text changes"
    " nothing.",
    "transfer": "Convert, then train the linear attentions layer by layer on what softmax gives.",
    "rank-layers": "Convert and transfer, then measure how much damage each linear layer does.",
    "finetune": "Convert and train through the recipe's last stage, in which the whole model has"
    " adapted to its linear attentions.",
    "eval": "Convert, train, then compare the model with its softmax, and with each side of its"
    " attention alone.",
    "report": "Convert, train and compare, then draw the report.",
    "export": "Convert, train, compare and report, then write the model: the same as run.",
    "run": "Do all of it; `fastweights linearize MODEL` without a verb means this. Run the same"
    " command again to resume.",
}
_VERBS: dict[str, Declare] = {
    "plan": _plan,
    **{verb: _stage(verb, description) for verb, description in _STAGES.items()},
    "generate": _generate,
    "bench": _bench,
}


def _add_pretrained(parser: Parser) -> None:
    parser.add_argument(
        "model",
        type=given,
        help="The softmax model to convert: a folder, or a name on the Hugging Face hub",
    )


def _add_linearized(parser: Parser) -> None:
    parser.add_argument(
        "model", type=path, help="The linearized model: the folder of its conversion, or of itself"
    )


def _add_length(group: Parser | _ArgumentGroup) -> None:
    group.add_argument(
        "--length",
        type=sequence_length,
        default=1024,
        help="Number of tokens per training sequence (default: %(default)s)",
    )


def _add_data(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--data",
        type=given,
        nargs="+",
        required=True,
        metavar="SOURCE",
        help=f"Text to train on: {TEXT_SOURCES}",
    )
    add_order(group)
    add_validation(group, 1 << 16)
    _add_length(group)
    group.add_argument(
        "--responses",
        action="store_true",
        help="Learn only the responses of instruction data, not the instructions",
    )
    add_field(group)
    add_across(group)


def recipe(text: str) -> str | Path:
    """The name of a published recipe, or the path of a file with one."""
    if text in RECIPES:
        return text
    if (found := path(text)).suffix in (".toml", ".json"):
        return found
    raise ArgumentTypeError(
        f"{text!r} is no recipe; take one of {', '.join(RECIPES)}, or a file of your own, .toml or"
        " .json"
    )


def _add_recipe(group: _ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--recipe",
        type=recipe,
        metavar="NAME",
        help="Published recipe, whose settings the other options change: "
        + "; ".join(f"{name}, {what}" for name, what in RECIPES.items())
        + "; or a file of your own, .toml or .json (default: landmarks, or lolcats where"
        " --features, --rule, --sinks, --gates or --convolution ask for what landmarks exclude)",
    )
    add(
        "--features",
        choices=FEATURE_MAPS,
        help="Feature map φ of the linear attention (default: the recipe's)",
    )
    add(
        "--feature-dim",
        type=positive_integer,
        metavar="COLUMNS",
        help="Columns of every feature map, which has twice as many channels, or makes twice as"
        " many landmarks (default: the recipe's, or half a head's width)",
    )
    add(
        "--rule",
        choices=RULES,
        help="Recurrence that takes a softmax layer's place, behind its window (default: the"
        " recipe's)",
    )
    add(
        "--window",
        type=non_negative_integer,
        metavar="TOKENS",
        help="Number of tokens that softmax attends to beside the linear attention; 0 for none"
        " (default: the recipe's)",
    )
    add(
        "--sinks",
        type=non_negative_integer,
        metavar="TOKENS",
        help="Number of tokens at the beginning that softmax attends to for ever (default: the"
        " recipe's)",
    )
    add(
        "--gates",
        choices=GATES,
        help="What the gates of a rule are made of: learnt, or pooled from the keys without new"
        " parameters (default: the recipe's)",
    )
    add(
        "--convolution",
        type=non_negative_integer,
        metavar="TAPS",
        help="Taps of causal convolutions of queries and keys in front of the rule, without a"
        " window; 0 for none (default: the recipe's)",
    )
    add(
        "--positions",
        choices=POSITIONS,
        help="Where rotary positions are: everywhere, or in linear layers alone, and not in those"
        " that stay softmax (default: the recipe's)",
    )
    add(
        "--layers",
        type=non_negative_integers,
        metavar="0,1,…",
        help="Numbers of the layers to convert (default: all that can be converted)",
    )
    add(
        "--softmax-layers",
        type=non_negative_integer,
        default=0,
        metavar="K",
        help="Number of layers that stay softmax, the first of the ranking (default: %(default)s)",
    )
    add(
        "--cache-budget",
        type=size,
        metavar="SIZE",
        help="Bytes that the cache of a sequence may take, such as 64MiB: as many layers stay"
        " softmax as fit (default: what --softmax-layers says)",
    )
    add(
        "--cache-length",
        type=positive_integer,
        metavar="TOKENS",
        help="Number of tokens after which --cache-budget counts (default: --length)",
    )
    _add_stages(group)


def _add_ranking(group: _ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--rank-by",
        choices=CRITERIA,
        default="damage",
        help="What layers are ranked by: KL from softmax where a layer alone is linear (damage),"
        " what KL falls by where it alone is softmax (restored), the same one layer after the other"
        " (greedy), or recall lost where it alone is linear (default: %(default)s)",
    )
    add(
        "--ranking",
        type=path,
        metavar="FILE",
        help="Ranking to choose by: the ranking.json of another run of the same model (default: the"
        " run's own)",
    )


def _add_stages(group: _ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--scale",
        type=positive_number,
        default=1.0,
        metavar="FACTOR",
        help="What the updates of every stage are multiplied by: published ones are for models of"
        " billions of parameters (default: 1)",
    )
    add(
        "--stage",
        type=given,
        action="append",
        default=[],
        metavar="STAGE.FIELD=VALUE",
        help="Setting of one stage, such as kl.steps=100, hidden.lr=1e-3 or long.length=2048; 0"
        " steps leave it out; repeat it for more (default: the recipe's)",
    )
    for stage, what in {"transfer": "attention transfer", "finetune": "adaptation"}.items():
        add(
            f"--{stage}-steps",
            type=non_negative_integer,
            metavar="N",
            help=f"Number of updates in {what}; 0 leaves it out (default: the recipe's, {STEPS}"
            " if none is named)",
        )
    add(
        "--transfer-lr",
        type=positive_number,
        metavar="RATE",
        help="Learning rate of attention transfer; short runs need a higher one"
        " (default: the recipe's, 0.01 if none is named)",
    )
    add(
        "--finetune-lr",
        type=positive_number,
        metavar="RATE",
        help="Learning rate of adaptation (default: the recipe's, 0.0001 if none is named)",
    )
    add(
        "--batch",
        type=positive_integer,
        help="Number of sequences per update (default: the recipe's, 8 if none is named)",
    )
    add(
        "--dropout",
        type=fraction,
        metavar="P",
        help="Probability that attention transfer hides a layer's window (default: the recipe's,"
        " 0 if none is named)",
    )
    add(
        "--kl",
        type=non_negative_number,
        metavar="FACTOR",
        help="Weight of the KL divergence to the teacher in adaptation (default: the recipe's,"
        " 1 for landmarks, 0 for lolcats)",
    )
    add(
        "--teacher",
        type=given,
        metavar="MODEL",
        help="Model that KL is computed to, with the same tokenizer: a folder, or a name on the"
        " Hugging Face hub (default: the softmax model itself)",
    )
    add(
        "--top-logits",
        type=positive_integer,
        metavar="K",
        help="Number of the teacher's largest logits per token that are stored once, before the"
        " training, instead of keeping the teacher in memory (default: none)",
    )


def _add_training(group: _ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--accumulate",
        type=positive_integer,
        help="Number of parts that a batch is computed in, to save memory (default: 1)",
    )
    add(
        "--blockwise",
        action="store_true",
        help="Transfer block by block, with hidden states on disk: for large models",
    )
    add("--bf16", action="store_true", help="Compute matrix products of the training in bfloat16")
    add_intervals(group)
    add_trackers(group)
    add_patience(group)
    add_seed(group)
