"""Verbs that work on a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from fastweights.cli.argument_types import (
    Count,
    CountOrZero,
    Counts,
    CountsOrZero,
    Depths,
    Given,
    Length,
    ModelName,
    ModelPath,
    NonNegative,
    Place,
    Positive,
    utf8,
)
from fastweights.cli.options import PLACE, REST, Named, Options
from fastweights.cli.parser import Deferred, Verb
from fastweights.cli.parsers.shared import (
    DeviceOptions,
    DtypeOptions,
    PluginsOptions,
    RecordsOptions,
    RoundedOptions,
    SeedOptions,
)
from fastweights.cli.settings import fields_of, names_in

READ = ", ".join(sorted(names_in("importers:FAMILIES")))
WRITTEN = tuple(sorted(names_in("importers.settings:SETTINGS")))
FAMILIES = ", ".join(WRITTEN)
LIMITS = fields_of("analysis.profile:ProfileLimits")


class SamplingOptions(Options):
    """Divides the logits before a token is drawn; 0 takes the likeliest token."""

    temperature: NonNegative = 0.8


class PromptOptions(Options):
    """Continue the prompt as it is, too, where the tokenizer has a chat template; else it is a
    user's message, and the model answers.
    """

    raw: bool = False


class GenerateVerb(
    Verb, PromptOptions, SamplingOptions, SeedOptions, RoundedOptions, PluginsOptions, DeviceOptions
):
    """Continue a text with a model, token by token, in constant memory where its layers have that.

    Attributes:
        checkpoint: The model: $MODEL_SOURCE.
        prompt: Text that the model continues, or answers; an empty one begins a text (default: a
            new line).
        tokens: Number of tokens to generate, fewer where the text ends.
        top_k: Draw each token among the K likeliest only (default: among all).
        tol: Relative residual at which Mesa layers stop solving, such as 1e-4 (default: they use
            all their steps).
    """

    run = Deferred("generate", "generate")
    checkpoint: Annotated[ModelName, PLACE]
    prompt: Annotated[str, utf8] = "\n"
    tokens: Count = 300
    top_k: Annotated[Count | None, "K"] = None
    tol: Positive | None = None


class ChatVerb(Verb, SamplingOptions, SeedOptions, RoundedOptions, PluginsOptions, DeviceOptions):
    """Talk with a model: of every turn it reads only what is new. Between turns, /save FILE writes
    the conversation and its state, /load FILE goes on with one, /exit ends; Ctrl-C stops an answer.

    Attributes:
        checkpoint: The model: $MODEL_SOURCE; its tokenizer has a chat template.
        system: What the model is told before the conversation (default: what the template says).
        tokens: Number of tokens of an answer, at most.
        top_k: Draw each token among the K likeliest only (default: among all).
        load: File of a conversation to go on with.
    """

    run = Deferred("chat", "chat")
    checkpoint: Annotated[ModelName, PLACE]
    system: Annotated[Given | None, "TEXT"] = None
    tokens: Count = 1000
    top_k: Annotated[Count | None, "K"] = None
    load: Annotated[Place | None, "FILE"] = None


class ImportVerb(Verb, DtypeOptions):
    """Turn a model that another library has trained into one of this library, with its
    tokenizer.

    Attributes:
        model: The model to read: a folder, a GGUF file, or a name on the Hugging Face hub; its type
            is one of $READ.
        out: Folder to write to, which must not exist yet.
    """

    run = Deferred("folders", "import_model_folder")
    model: Annotated[ModelName, PLACE]
    out: Place


class ExportVerb(Verb):
    """Turn a model of this library into one of transformers that computes the same, with its
    tokenizer; into an ONNX graph (needs the extra onnx); or into programs that torch has compiled
    ahead of time (needs a C++ compiler).

    Attributes:
        checkpoint: The model: a folder of a run, a checkpoint or a model.
        out: Folder to write to, or a file that ends in .onnx or .pt2; it must not exist yet.
        family: The model type of transformers that it is written as (default: the first that has
            such models): $FAMILIES.
        domain: Whose LinearAttention and CausalConvWithState an ONNX graph has (default:
            com.microsoft, which ONNX Runtime runs today).
    """

    run = Deferred("export", "export_model_folder")
    checkpoint: Annotated[ModelPath, PLACE]
    out: Annotated[Place, PLACE]
    family: Annotated[str | None, WRITTEN, "FAMILY"] = None
    domain: Annotated[str | None, names_in("engines.onnx.domains:DOMAINS")] = None


class QuantizeVerb(Verb, RoundedOptions, PluginsOptions):
    """Write a model with weights of 8 or 4 bits, which takes that much less memory to load, too;
    every verb that decodes reads it, and so does transformers once fastweights is imported.

    Attributes:
        model: The model: $MODEL_SOURCE.
        out: Folder to write to, which must not exist yet.
    """

    run = Deferred("folders", "quantize_model_folder")
    model: Annotated[ModelName, PLACE]
    out: Annotated[Place, PLACE]


class PatchVerb(Verb):
    """Run a Python script as it is, with transformers' own linear models computed by fastweights'
    kernels.

    Attributes:
        module: Run a module, as python -m does.
        quiet: Do not say at the end which functions were replaced.
        script: Script to run, or with -m the name of a module.
        arguments: What the script is given, options included.
    """

    run = Deferred("patch", "run_patched")
    usage = "fastweights patch [--quiet] [-m] SCRIPT [ARGUMENT ...]"
    module: Annotated[bool, Named(("-m",))] = False
    quiet: bool = False
    script: Annotated[Given, PLACE, "SCRIPT"]
    arguments: Annotated[str, PLACE, REST]


class TransformersVerb(Verb):
    """Run transformers' own server, or its chat, with our models and linearized ones among those
    that it knows.

    Attributes:
        program: Program of transformers.
        arguments: What the program is given, options included; of ours, serve takes --int8
            and --int4. $INT8; $INT4.
    """

    run = Deferred("transformers", "run_transformers")
    usage = "fastweights transformers {serve,chat} [--int8 | --int4] [ARGUMENT ...]"
    program: Annotated[str, PLACE, ("serve", "chat")]
    arguments: Annotated[str, PLACE, REST]


class CheckVerb(Verb, DtypeOptions, PluginsOptions, DeviceOptions):
    """Try on any causal language model what holds whatever its weights are: that padding, packing,
    caches, batches and saving change nothing; ends with status 1 if something does.

    Attributes:
        checkpoint: The model: $MODEL_SOURCE.
        only: Try only the laws in whose names these words, separated by commas, occur.
        length: Leave out examples with longer rows (default: 130; the longest has 300).
        tolerance: Difference over the largest logit that counts as rounding (default: 1e-9 in
            float64, 1e-4 in float32, 0.1 in narrower types).
        json: Write what was found into this file, too.
    """

    run = Deferred("check", "check")
    checkpoint: Annotated[ModelName, PLACE]
    only: Annotated[Given | None, "WORDS"] = None
    length: Annotated[Length, "TOKENS"] = 130
    tolerance: Annotated[Positive | None, "X"] = None
    json: Annotated[Place | None, "FILE"] = None


class AnalyzeVerb(Verb, RecordsOptions, PluginsOptions):
    """Draw models as dynamical systems and as attention maps, side by side; without a model, check
    the theorems of the papers.

    Attributes:
        models: The models to compare, each $MODEL_SOURCE.
        text: Text that the models read, needed by them: $TEXT_SOURCES.
        out: Folder that the report is written to.
        tokens: Number of tokens of the text to read, at most.
        window: Number of tokens that an attention map shows.
        heads: Number of heads of a layer to show, at most.
    """

    run = Deferred("analyze", "analyze")
    models: Annotated[tuple[ModelName, ...], PLACE, "MODEL", {"nargs": "*"}] = ()
    text: Annotated[tuple[Given, ...] | None, "SOURCE"] = None
    out: Place = Path("runs/analysis")
    tokens: Length = 1024
    window: Count = LIMITS("window")
    heads: Count = LIMITS("heads")


class ModelsOptions(PluginsOptions, RoundedOptions, DeviceOptions):
    """Models that are measured.

    Attributes:
        models: The models to measure, each $MODEL_SOURCE.
        batch: Number of sequences computed at once.
    """

    models: Annotated[tuple[ModelName, ...], PLACE, "MODEL"]
    batch: Count = 8


class EvalPerplexityVerb(Verb, ModelsOptions, RecordsOptions):
    """Measure the loss by token position on text, with the state carried past the length of
    training.

    Attributes:
        out: Folder that the results are written to.
        text: Text to read: $TEXT_SOURCES.
        length: Number of tokens of a sequence.
        chunk: Number of tokens of a sequence computed at once; 0 for all.
        tokens: Number of tokens of the text to read, at most (default: all).
        trained: Length of the sequences in training, to mark in the picture (default: no mark).
        reference: One of the models, to which the picture shows the others' differences.
    """

    run = Deferred("eval", "measure_perplexity")
    out: Place = Path("runs/eval/perplexity")
    text: Annotated[tuple[Given, ...], "SOURCE"]
    length: Length = 1024
    chunk: CountOrZero = 512
    tokens: Length | None = None
    trained: Annotated[Count | None, "LENGTH"] = None
    reference: Annotated[ModelName | None, "MODEL"] = None


TASKS = ", ".join(names_in("lab.evals.items:SOURCES"))


class EvalTasksVerb(Verb, ModelsOptions):
    """Score multiple choice, last words, word scrambling and recall, on published files.

    Attributes:
        out: Folder that the results are written to.
        data: Folder with the evaluation files, which docs/evals.md lists.
        tasks: Tasks to score: $TASKS, or a .jsonl file of recall prompts (default: all that have a
            name).
        limit: Number of items per task, the first ones (default: all).
        shots: Number of solved words before a scrambled one.
    """

    run = Deferred("eval", "measure_tasks")
    out: Place = Path("runs/eval/tasks")
    data: Annotated[Place, "FOLDER"]
    tasks: Annotated[tuple[Given, ...] | None, "NAME"] = None
    limit: Annotated[Count | None, "N"] = None
    shots: Annotated[CountOrZero, "N"] = 0


SUITES = names_in("lab.evals.suites:SUITES")


class EvalHarnessVerb(Verb, ModelsOptions, SeedOptions):
    """Score a paper's suite by lm-evaluation-harness: its own prompts and metrics, with the paper's
    numbers of solved examples and averages.

    Attributes:
        out: Folder that the results are written to.
        suite: The paper's table.
        tasks: Names that lm-evaluation-harness has for what is scored: of the suite (default: all),
            or without --suite any.
        data: Folder with evaluation files, which docs/evals.md lists; each takes the place of a
            data set that would be downloaded (default: none).
        limit: Number of items per task, the first ones (default: all).
        shots: Numbers of solved examples before an item (default: the suite's).
        prefixes: Random choices of solved examples, each of which all items share (default: the
            suite's; else examples are drawn anew for each item).
    """

    run = Deferred("eval", "measure_harness")
    out: Place = Path("runs/eval/harness")
    suite: Annotated[str | None, SUITES] = None
    tasks: Annotated[tuple[Given, ...] | None, "NAME"] = None
    data: Annotated[Place | None, "FOLDER"] = None
    limit: Annotated[Count | None, "N"] = None
    shots: Annotated[CountsOrZero | None, "N,N,…"] = None
    prefixes: Annotated[Count | None, "N"] = None


NEEDLES = fields_of("lab.evals.needles:NeedleGrid")


class EvalNeedlesVerb(Verb, ModelsOptions, RecordsOptions, SeedOptions):
    """Ask models for numbers hidden in long texts, by the length of the text and where the number
    stands (RULER's niah_single).

    Attributes:
        out: Folder that the results are written to.
        text: Text whose sentences numbers are hidden among, as far as its first 16 million
            characters: $TEXT_SOURCES (default: RULER's five short sentences, repeated).
        lengths: Tokens of a text with its question, ascending.
        depths: Number of places of a number, evenly from a text's beginning to its end.
        repeats: Numbers asked for at each length and depth.
    """

    run = Deferred("eval", "measure_needles")
    out: Place = Path("runs/eval/needles")
    text: Annotated[tuple[Given, ...] | None, "SOURCE"] = None
    lengths: Annotated[Counts, "N,N,…"] = NEEDLES("lengths")
    depths: Annotated[Depths, "N"] = NEEDLES("depths")
    repeats: Annotated[Count, "N"] = NEEDLES("repeats")


class EvalVerb(Verb):
    """Measure language models: loss by position, multiple choice, last words, in-context recall,
    numbers hidden in long texts."""

    metavar = "KIND"
    verbs: ClassVar = {
        "perplexity": EvalPerplexityVerb,
        "tasks": EvalTasksVerb,
        "needles": EvalNeedlesVerb,
        "harness": EvalHarnessVerb,
    }
