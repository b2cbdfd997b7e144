"""fastweights eval"""

from __future__ import annotations

from pathlib import Path

from fastweights.cli.parser import (
    MODEL_SOURCE,
    Declare,
    Deferred,
    Parser,
    add_device,
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
        "models", nargs="+", metavar="MODEL", help=f"The models to measure, each {MODEL_SOURCE}"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/eval") / kind,
        help="Folder that the results are written to (default: %(default)s)",
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=8,
        help="Number of sequences computed at once (default: %(default)s)",
    )
    add_plugins(parser)
    add_device(parser)


def _perplexity(parser: Parser) -> Deferred:
    """Measure the loss by token position on text, with the state carried past the length of
    training.
    """
    parser.add_argument(
        "--text",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help="Text to read, named as for `fastweights train --data`",
    )
    parser.add_argument(
        "--length",
        type=int,
        default=1024,
        help="Number of tokens of a sequence (default: %(default)s)",
    )
    parser.add_argument(
        "--chunk",
        type=int,
        default=512,
        help="Number of tokens of a sequence computed at once; 0 for all (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens", type=int, help="Number of tokens of the text to read, at most (default: all)"
    )
    parser.add_argument(
        "--trained",
        type=int,
        metavar="LENGTH",
        help="Length of the sequences in training, to mark in the picture (default: no mark)",
    )
    parser.add_argument(
        "--reference",
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
        type=Path,
        required=True,
        metavar="FOLDER",
        help="Folder with the evaluation files, which docs/evals.md lists",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        metavar="NAME",
        help=f"Tasks to score: {', '.join(TASKS)}, or a .jsonl file of recall prompts"
        " (default: all that have a name)",
    )
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="Number of items per task, the first ones (default: all)",
    )
    parser.add_argument(
        "--shots",
        type=int,
        default=0,
        metavar="N",
        help="Number of solved words before a scrambled one (default: %(default)s)",
    )


_KINDS: dict[str, Declare] = {"perplexity": _perplexity, "tasks": _tasks, "harness": _harness}
