"""fastweights bench"""

from __future__ import annotations

from argparse import SUPPRESS

from fastweights.cli.argument_types import (
    given,
    non_negative_integer,
    own_mixer,
    path,
    positive_number,
    sequence_length,
)
from fastweights.cli.parser import Declare, Deferred, Parser, add_verbs

SECONDS = 2.0
"""Time per contender."""
MESA_PARTS = ("solvers", "lengths", "chunks", "decode")


def bench(parser: Parser) -> Deferred:
    """Measure time, error and memory beside other libraries and beside this machine's limits."""
    for name, (target, measure) in add_verbs(parser, "TARGET", _TARGETS).items():
        target.add_argument(
            "--out",
            type=path,
            help=f"JSON file of the rows (default: runs/bench/{name}-<commit>.json)",
        )
        target.set_defaults(target=name, measure=measure, quick=False)
    return Deferred("bench", "bench")


def _ops(parser: Parser) -> Deferred:
    """Measure every recurrence, forward and with backward, beside other libraries."""
    _add_choice(parser)
    parser.add_argument(
        "--scaling",
        action="store_true",
        help="Measure our time against the length instead, from 512 to 65,536 tokens",
    )
    parser.add_argument(
        "--first", action="store_true", help="Measure only the first of each recurrence's sizes"
    )
    parser.add_argument(
        "--no-memory", action="store_true", help="Do not measure the peak of memory"
    )
    _add_seconds(parser)
    return Deferred("bench", "measure_ops")


def _decode(parser: Parser) -> Deferred:
    """Measure one token of a rule, of a mixer and of a model, and how constant its time stays."""
    _add_choice(parser)
    _add_own_mixer(parser)
    parser.add_argument(
        "--tokens",
        type=non_negative_integer,
        default=0,
        metavar="N",
        help="Number of tokens over which time and state are followed; 0 for none"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="Decode models by torch.compile as well, which takes minutes",
    )
    return Deferred("bench", "measure_decode")


def _train(parser: Parser) -> Deferred:
    """Measure training steps of small models of equal size, eager and compiled."""
    _add_choice(parser)
    _add_own_mixer(parser)
    parser.add_argument(
        "--eager", action="store_true", help="Measure eager steps only, without torch.compile"
    )
    return Deferred("bench", "measure_training")


def _mesa(parser: Parser) -> Deferred:
    """Measure Mesa at fixed numbers of steps and at tolerances: time, steps and error; with a
    checkpoint, its loss by position.
    """
    _add_quick(parser)
    parser.add_argument(
        "--checkpoint",
        type=path,
        help="Folder of a run, a checkpoint or a model with Mesa layers, whose loss is measured",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        default=MESA_PARTS,
        choices=MESA_PARTS,
        help="What to measure where there is no checkpoint (default: all)",
    )
    parser.add_argument(
        "--text",
        type=given,
        default="shakespeare",
        help="Text whose last tenth the checkpoint reads (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=sequence_length,
        default=32768,
        help="Number of tokens of the text to read (default: %(default)s)",
    )
    parser.add_argument(
        "--length",
        type=sequence_length,
        default=1024,
        help="Number of tokens of a sequence (default: %(default)s)",
    )
    _add_seconds(parser)
    return Deferred("bench", "measure_mesa")


_TARGETS: dict[str, Declare] = {
    "ops": _ops,
    "decode": _decode,
    "train": _train,
    "mesa": _mesa,
}


def _add_choice(parser: Parser) -> None:
    _add_quick(parser)
    parser.add_argument(
        "--only",
        type=given,
        default="*",
        metavar="PATTERN",
        help="Measure only what this matches, such as 'decay*' or mesa (default: all)",
    )


def _add_quick(parser: Parser) -> None:
    parser.add_argument(
        "--quick",
        action="store_true",
        help="Use small shapes and short times: a check that it runs, not a measurement",
    )


def _add_seconds(parser: Parser) -> None:
    parser.add_argument(
        "--seconds",
        type=positive_number,
        default=SECONDS,
        help="Seconds for each contender after its warm-up (default: %(default)s)",
    )


def _add_own_mixer(parser: Parser) -> None:
    parser.add_argument(
        "--mixer",
        dest="only",
        type=own_mixer,
        default=SUPPRESS,
        metavar="PACKAGE.MODULE:CLASS",
        help="Measure only this mixer class of your own",
    )
