"""fastweights analyze"""

from __future__ import annotations

from pathlib import Path

from fastweights.cli.argument_types import given, path, positive_integer, sequence_length
from fastweights.cli.parser import (
    MODEL_SOURCE,
    TEXT_SOURCES,
    Deferred,
    Parser,
    add_field,
    add_plugins,
)


def analyze(parser: Parser) -> Deferred:
    """Draw models as dynamical systems and as attention maps, side by side; without a model, check
    the theorems of the papers.
    """
    parser.add_argument(
        "models",
        type=given,
        nargs="*",
        metavar="MODEL",
        help=f"The models to compare, each {MODEL_SOURCE}",
    )
    parser.add_argument(
        "--text",
        type=given,
        nargs="+",
        metavar="SOURCE",
        help=f"Text that the models read, needed by them: {TEXT_SOURCES}",
    )
    add_field(parser)
    parser.add_argument(
        "--out",
        type=path,
        default=Path("runs/analysis"),
        help="Folder that the report is written to (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=sequence_length,
        default=1024,
        help="Number of tokens of the text to read, at most (default: %(default)s)",
    )
    parser.add_argument(
        "--window",
        type=positive_integer,
        default=128,
        help="Number of tokens that an attention map shows (default: %(default)s)",
    )
    parser.add_argument(
        "--heads",
        type=positive_integer,
        default=16,
        help="Number of heads of a layer to show, at most (default: %(default)s)",
    )
    add_plugins(parser)
    return Deferred("analyze", "analyze")
