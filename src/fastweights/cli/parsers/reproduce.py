"""fastweights reproduce"""

from __future__ import annotations

from fastweights.cli.argument_types import (
    given,
    non_negative_integers,
    path,
    positive_integer,
    positive_numbers,
)
from fastweights.cli.parser import Deferred, Parser, add_device


def reproduce(parser: Parser) -> Deferred:
    """Test a claim of the papers, or all, at a size that this machine can run; without a claim,
    list them.
    """
    parser.add_argument(
        "claim",
        type=given,
        nargs="?",
        metavar="CLAIM|all",
        help="Name of the claim to test; all for every one, the shortest first (default: list"
        " them)",
    )
    parser.add_argument(
        "--size",
        type=given,
        default="cpu",
        metavar="cpu|gpu|paper",
        help="How large the experiment is (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=path,
        help="Folder of the experiment (default: runs/reproduce/CLAIM-SIZE), or of the folders of"
        " all; what was stopped is resumed",
    )
    parser.add_argument("--data", type=path, help="Folder of data files that some sizes need")
    parser.add_argument(
        "--workers",
        type=positive_integer,
        metavar="N",
        help="Number of processes that train independent models (default: one per core)",
    )
    parser.add_argument(
        "--rates",
        type=positive_numbers,
        default=(),
        metavar="R,R,…",
        help="Learning rates to choose from, in place of the claim's own",
    )
    parser.add_argument(
        "--seeds",
        type=non_negative_integers,
        default=(),
        metavar="N,N,…",
        help="Seeds of the models that are judged, in place of the claim's own",
    )
    parser.add_argument(
        "--steps",
        type=positive_integer,
        help="Updates of every training (default: the claim's own)",
    )
    add_device(parser)
    return Deferred("reproduce", "reproduce")
