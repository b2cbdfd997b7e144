"""fastweights sweep"""

from __future__ import annotations

from fastweights.cli.argument_types import given, mixer_name, non_negative_integer, path
from fastweights.cli.parser import Deferred, Parser, add_device


def sweep(parser: Parser) -> Deferred:
    """Train small models over tasks × mixers × learning rates × seeds; run the same command again
    to resume.
    """
    parser.add_argument(
        "plan", type=path, help="TOML file with the plan of the sweep; docs/sweeps.md explains it"
    )
    parser.add_argument(
        "--out",
        type=path,
        help="Folder of the sweep (default: runs/sweeps/ and the plan's name)",
    )
    parser.add_argument(
        "--mixer",
        action="append",
        type=mixer_name,
        default=[],
        metavar="NAME|PACKAGE.MODULE:CLASS",
        help="A mixer to add to the plan's, of the library or your own; may be given several times",
    )
    parser.add_argument(
        "--workers",
        type=non_negative_integer,
        metavar="N",
        help="Number of processes (default: one per core; 0: everything in this process)",
    )
    parser.add_argument(
        "--ray",
        type=given,
        nargs="?",
        const=True,
        metavar="ADDRESS",
        help="Run on the Ray cluster at ADDRESS, or without it on a Ray of this machine's own",
    )
    add_device(parser)
    return Deferred("sweep", "sweep")
