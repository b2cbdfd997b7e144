"""fastweights reproduce"""

from __future__ import annotations

from pathlib import Path

from fastweights.cli.parser import Deferred, Parser, add_device


def reproduce(parser: Parser) -> Deferred:
    """Test a claim of the papers at a size that this machine can run; without a claim, list them
    all.
    """
    parser.add_argument(
        "claim", nargs="?", metavar="CLAIM", help="Name of the claim to test (default: list all)"
    )
    parser.add_argument(
        "--size",
        default="cpu",
        metavar="cpu|gpu|paper",
        help="How large the experiment is (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="Folder of the experiment (default: runs/reproduce/CLAIM-SIZE); one that was stopped"
        " is resumed",
    )
    parser.add_argument("--data", type=Path, help="Folder of data files that some sizes need")
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="Number of processes that train independent models (default: one per core)",
    )
    add_device(parser)
    return Deferred("reproduce", "reproduce")
