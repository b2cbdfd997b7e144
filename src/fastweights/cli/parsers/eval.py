"""fastweights eval"""

from __future__ import annotations

from pathlib import Path

from fastweights.cli.argument_types import (
    given,
    non_negative_integer,
    path,
    positive_integer,
    sequence_length,
)
from fastweights.cli.parser import (
    MODEL_SOURCE,
    TEXT_SOURCES,
    Declare,
    Deferred,
    Parser,
    add_device,
    add_field,
    add_int8,
    add_plugins,
    add_verbs,
)

TASKS = (
    *("hellaswag", "piqa", "arc_easy", "arc_challenge", "openbookqa", "boolq", "copa"),
    *("winogrande", "winograd", "lambada", "anagrams1", "anagrams2", "cycle_letters"),
    *("random_insertion", "reversed_words", "squad", "nq_open"),
)
"""The tasks of `fastweights.lab.evals.items`."""


def eval_(parser: Parser) -> Deferred:
    """Measure language models: loss by position, multiple choice, last words, in-context recall."""
    for name, (kind, evaluate) in add_verbs(parser, "KIND", _KINDS).items():
        _add_models(kind, name)
        kind.set_defaults(evaluate=evaluate)
    return Deferred("eval", "evaluate")


def _add_models(parser: Parser, kind: str) -> None:
    parser.add_argument(
        "models",
        type=given,
        nargs="+",
        metavar="MODEL",
        help=f"The models to measure, each {MODEL_SOURCE}",
    )
    parser.add_argument(
        "--out",
        type=path,
        default=Path("runs/eval") / kind,
        help="Folder that the results are written to (default: %(default)s)",
    )
    parser.add_argument(
        "--batch",
        type=positive_integer,
        default=8,
        help="Number of sequences computed at once (default: %(default)s)",
    )
    add_int8(parser)
    add_plugins(parser)
    add_device(parser)


def _perplexity(parser: Parser) -> Deferred:
    """Measure the loss by token position on text, with the state carried past the length of
    training.
    """
    parser.add_argument(
        "--text",
        type=given,
        nargs="+",
        required=True,
        metavar="SOURCE",
        help=f"Text to read: {TEXT_SOURCES}",
    )
    add_field(parser)
    parser.add_argument(
        "--length",
        type=sequence_length,
        default=1024,
        help="Number of tokens of a sequence (default: %(default)s)",
    )
    parser.add_argument(
        "--chunk",
        type=non_negative_integer,
        default=512,
        help="Number of tokens of a sequence computed at once; 0 for all (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=sequence_length,
        help="Number of tokens of the text to read, at most (default: all)",
    )
    parser.add_argument(
        "--trained",
        type=positive_integer,
        metavar="LENGTH",
        help="Length of the sequences in training, to mark in the picture (default: no mark)",
    )
    parser.add_argument(
        "--reference",
        type=given,
        metavar="MODEL",
        help="One of the models, to which the picture shows the others' differences",
    )
    return Deferred("eval", "measure_perplexity")


def _tasks(parser: Parser) -> Deferred:
    """Score multiple choice, last words, word scrambling and recall, on published files."""
    _add_items(parser)
    return Deferred("eval", "measure_tasks")


def _harness(parser: Parser) -> Deferred:
    """Score the same tasks by lm-evaluation-harness, without a network."""
    _add_items(parser)
    return Deferred("eval", "measure_harness")


def _add_items(parser: Parser) -> None:
    parser.add_argument(
        "--data",
        type=path,
        required=True,
        metavar="FOLDER",
        help="Folder with the evaluation files, which docs/evals.md lists",
    )
    parser.add_argument(
        "--tasks",
        type=given,
        nargs="+",
        metavar="NAME",
        help=f"Tasks to score: {', '.join(TASKS)}, or a .jsonl file of recall prompts"
        " (default: all that have a name)",
    )
    parser.add_argument(
        "--limit",
        type=positive_integer,
        metavar="N",
        help="Number of items per task, the first ones (default: all)",
    )
    parser.add_argument(
        "--shots",
        type=non_negative_integer,
        default=0,
        metavar="N",
        help="Number of solved words before a scrambled one (default: %(default)s)",
    )


_KINDS: dict[str, Declare] = {"perplexity": _perplexity, "tasks": _tasks, "harness": _harness}
