"""fastweights analyze"""

from __future__ import annotations

from pathlib import Path

from fastweights.cli.parser import MODEL_SOURCE, Deferred, Parser, add_plugins


def analyze(parser: Parser) -> Deferred:
    """Draw models as dynamical systems and as attention maps, side by side; without a model, check
    the theorems of the papers.
    """
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"The models to compare, each {MODEL_SOURCE}"
    )
    parser.add_argument("--text", type=Path, help="Text file that the models read; needed by them")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/analysis"),
        help="Folder that the report is written to (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=1024,
        help="Number of tokens of the text to read, at most (default: %(default)s)",
    )
    parser.add_argument(
        "--window",
        type=int,
        default=128,
        help="Number of tokens that an attention map shows (default: %(default)s)",
    )
    parser.add_argument(
        "--heads",
        type=int,
        default=16,
        help="Number of heads of a layer to show, at most (default: %(default)s)",
    )
    add_plugins(parser)
    return Deferred("analyze", "analyze")
