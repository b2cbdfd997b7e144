"""Verbs that list, measure and reproduce."""

from __future__ import annotations

from argparse import SUPPRESS
from typing import Annotated, ClassVar

from fastweights.cli.argument_types import (
    Count,
    CountOrZero,
    CountsOrZero,
    Given,
    Length,
    ModelPath,
    Place,
    Positive,
    Positives,
    own_mixer,
)
from fastweights.cli.options import PLACE, Options
from fastweights.cli.parser import Deferred, Verb
from fastweights.cli.parsers.shared import DeviceOptions
from fastweights.cli.settings import fields_of, names_in

TABLES = ", ".join(names_in("analysis.tables:TABLES"))
MESA = fields_of("lab.bench.mesa:MesaPlan")


class ListVerb(Verb):
    """List the mixers with their papers, what they compute and their arguments; or the named
    architectures, the tasks of the benchmarks or the papers' trainings.

    Attributes:
        names: Names of those to list (default: all).
        presets: List named architectures instead; NAME is then how their names begin.
        tasks: List the benchmarks' tasks instead; NAME is then how their names begin, and a single
            task is shown with an example.
        recipes: As `fastweights recipes`.
    """

    run = Deferred("list", "list_")
    names: Annotated[tuple[Given, ...], PLACE, "NAME", {"nargs": "*"}] = ()
    presets: bool = False
    tasks: bool = False
    recipes: bool = False


class RecipesVerb(Verb):
    """List the rows of the papers' tables: the recipe or command that starts each, or why none
    does.

    Attributes:
        names: How recipes' names, or tables, begin: mesanet-940m, "MetaLA, Table 5" (default: all).
    """

    run = Deferred("recipes", "recipes")
    names: Annotated[tuple[Given, ...], PLACE, "NAME", {"nargs": "*"}] = ()


class TableVerb(Verb):
    """Print the papers' tables, computed from the code: parameter functions, groups, conditions,
    states and costs.

    Attributes:
        tables: Tables to print (default: all): $TABLES.
        markdown: Print Markdown, as docs/tables.md has it.
        json: Print JSON, one record per row; not with --markdown.
    """

    run = Deferred("table", "table")
    tables: Annotated[tuple[Given, ...], PLACE, "TABLE", {"nargs": "*"}] = ()
    markdown: bool = False
    json: bool = False


class ReproduceVerb(Verb, DeviceOptions):
    """Test a claim of the papers, or all, at a size that this machine can run; without a claim,
    list them.

    Attributes:
        claim: Name of the claim to test; all for every one, the shortest first (default: list
            them).
        size: How large the experiment is.
        out: Folder of the experiment (default: runs/reproduce/CLAIM-SIZE), or of the folders of
            all; what was stopped is resumed.
        data: Folder of data files that some sizes need.
        workers: Number of processes that train independent models (default: one per core).
        rates: Learning rates to choose from, in place of the claim's own.
        seeds: Seeds of the models that are judged, in place of the claim's own.
        steps: Updates of every training (default: the claim's own).
    """

    run = Deferred("reproduce", "reproduce")
    claim: Annotated[Given | None, PLACE, "CLAIM|all", {"nargs": "?"}] = None
    size: Annotated[Given, "cpu|gpu|paper"] = "cpu"
    out: Place | None = None
    data: Place | None = None
    workers: Annotated[Count | None, "N"] = None
    rates: Annotated[Positives, "R,R,…"] = ()
    seeds: Annotated[CountsOrZero, "N,N,…"] = ()
    steps: Count | None = None


class TargetOptions(Options):
    """A benchmark.

    Attributes:
        quick: Use small shapes and short times: a check that it runs, not a measurement.
        out: JSON file of the rows (default: runs/bench/TARGET-<commit>.json).
    """

    quick: bool = False
    out: Place | None = None


class ChoiceOptions(Options):
    """Measure only what this matches, such as 'decay*' or mesa (default: all)."""

    only: Annotated[Given, "PATTERN"] = "*"


class OwnMixerOptions(Options):
    """Measure only this mixer class of your own."""

    mixer: Annotated[str, own_mixer, "PACKAGE.MODULE:CLASS", {"dest": "only"}] = SUPPRESS


class ContendersOptions(Options):
    """Seconds for each contender after its warm-up."""

    seconds: Positive = fields_of("lab.bench.timing:Budget")("seconds")


class BenchOpsVerb(Verb, ChoiceOptions, ContendersOptions, TargetOptions):
    """Measure every recurrence, forward and with backward, beside other libraries.

    Attributes:
        scaling: Measure our time against the length instead, from 512 to 65,536 tokens.
        first: Measure only the first of each recurrence's sizes.
        no_memory: Do not measure the peak of memory.
    """

    run = Deferred("bench", "bench_ops")
    scaling: bool = False
    first: bool = False
    no_memory: bool = False


class BenchDecodeVerb(Verb, ChoiceOptions, OwnMixerOptions, TargetOptions):
    """Measure one token of a rule, of a mixer and of a model, and how constant its time stays.

    Attributes:
        tokens: Number of tokens over which time and state are followed; 0 for none.
        compile: Decode models by torch.compile as well, which takes minutes.
    """

    run = Deferred("bench", "bench_decoding")
    tokens: Annotated[CountOrZero, "N"] = fields_of("lab.bench.decode:DecodePlan")("tokens")
    compile: bool = False


class BenchTrainVerb(Verb, ChoiceOptions, OwnMixerOptions, TargetOptions):
    """Measure training steps of small models of equal size, eager and compiled.

    Attributes:
        eager: Measure eager steps only, without torch.compile.
    """

    run = Deferred("bench", "bench_training")
    eager: bool = False


class BenchMesaVerb(Verb, ContendersOptions, TargetOptions):
    """Measure Mesa at fixed numbers of steps and at tolerances: time, steps and error; with a
    checkpoint, its loss by position.

    Attributes:
        checkpoint: Folder of a run, a checkpoint or a model with Mesa layers, whose loss is
            measured.
        text: Text whose last tenth the checkpoint reads.
        tokens: Number of tokens of the text to read.
        length: Number of tokens of a sequence.
    """

    run = Deferred("bench", "bench_mesa")
    checkpoint: ModelPath | None = None
    text: Given = MESA("text")
    tokens: Length = MESA("tokens")
    length: Length = MESA("length")


class BenchVerb(Verb):
    """Measure time, error and memory beside other libraries and beside this machine's limits."""

    metavar = "TARGET"
    verbs: ClassVar = {
        "ops": BenchOpsVerb,
        "decode": BenchDecodeVerb,
        "train": BenchTrainVerb,
        "mesa": BenchMesaVerb,
    }
