"""fastweights reproduce"""

from __future__ import annotations

from fastweights.cli.argument_types import given, path, positive_integer
from fastweights.cli.parser import Deferred, Parser, add_device


def reproduce(parser: Parser) -> Deferred:
    """Test a claim of the papers at a size that this machine can run; without a claim, list them
    all.
    """
    parser.add_argument(
        "claim",
        type=given,
        nargs="?",
        metavar="CLAIM",
        help="Name of the claim to test (default: list all)",
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
        help="Folder of the experiment (default: runs/reproduce/CLAIM-SIZE); one that was stopped"
        " is resumed",
    )
    parser.add_argument("--data", type=path, help="Folder of data files that some sizes need")
    parser.add_argument(
        "--workers",
        type=positive_integer,
        metavar="N",
        help="Number of processes that train independent models (default: one per core)",
    )
    add_device(parser)
    return Deferred("reproduce", "reproduce")
