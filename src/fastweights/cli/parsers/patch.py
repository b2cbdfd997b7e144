"""fastweights patch"""

from __future__ import annotations

from argparse import REMAINDER

from fastweights.cli.argument_types import given
from fastweights.cli.parser import Deferred, Parser


def patch(parser: Parser) -> Deferred:
    """Run a Python script as it is, with transformers' own linear models computed by fastweights'
    kernels.
    """
    parser.usage = "fastweights patch [--quiet] [-m] SCRIPT [ARGUMENT ...]"
    parser.add_argument(
        "-m", dest="module", action="store_true", help="Run a module, as python -m does"
    )
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="Do not say at the end which functions were replaced",
    )
    parser.add_argument(
        "script",
        type=given,
        metavar="SCRIPT",
        help="Script to run, or with -m the name of a module",
    )
    arguments = parser.add_argument(
        "arguments", nargs=REMAINDER, help="What the script is given, options included"
    )
    arguments.required = False  # before Python 3.12 a remainder counts as required
    return Deferred("patch", "run_patched")
