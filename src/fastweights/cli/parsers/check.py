"""fastweights check"""

from __future__ import annotations

from fastweights.cli.argument_types import given, path, positive_number, sequence_length
from fastweights.cli.parser import (
    MODEL_SOURCE,
    Deferred,
    Parser,
    add_device,
    add_dtype,
    add_plugins,
)


def check(parser: Parser) -> Deferred:
    """Try on any causal language model what holds whatever its weights are: that padding, packing,
    caches, batches and saving change nothing; ends with status 1 if something does.
    """
    parser.add_argument("checkpoint", type=given, help=f"The model: {MODEL_SOURCE}")
    parser.add_argument(
        "--only",
        type=given,
        metavar="WORDS",
        help="Try only the laws in whose names these words, separated by commas, occur",
    )
    parser.add_argument(
        "--length",
        type=sequence_length,
        default=130,
        metavar="TOKENS",
        help="Leave out examples with longer rows (default: %(default)s; the longest has 300)",
    )
    parser.add_argument(
        "--tolerance",
        type=positive_number,
        metavar="X",
        help="Difference over the largest logit that counts as rounding (default: 1e-9 in float64,"
        " 1e-4 in float32, 0.1 in narrower types)",
    )
    parser.add_argument(
        "--json", type=path, metavar="FILE", help="Write what was found into this file, too"
    )
    add_dtype(parser)
    add_plugins(parser)
    add_device(parser)
    return Deferred("check", "check")
