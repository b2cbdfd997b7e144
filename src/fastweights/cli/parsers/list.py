"""fastweights list"""

from __future__ import annotations

from fastweights.cli.argument_types import given
from fastweights.cli.parser import Deferred, Parser


def list_(parser: Parser) -> Deferred:
    """List the mixers with their papers, what they compute and their arguments; or the named
    architectures, the tasks of the benchmarks or the papers' trainings.
    """
    parser.add_argument(
        "names", type=given, nargs="*", metavar="NAME", help="Names of those to list (default: all)"
    )
    parser.add_argument(
        "--presets",
        action="store_true",
        help="List named architectures instead; NAME is then how their names begin",
    )
    parser.add_argument(
        "--tasks",
        action="store_true",
        help="List the benchmarks' tasks instead; NAME is then how their names begin, and a"
        " single task is shown with an example",
    )
    parser.add_argument(
        "--recipes",
        action="store_true",
        help="List the papers' trainings instead, which `fastweights plan` takes; NAME is then how"
        " their names begin",
    )
    return Deferred("list", "list_")
