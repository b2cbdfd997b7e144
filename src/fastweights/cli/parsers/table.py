"""fastweights table"""

from __future__ import annotations

from fastweights.cli.argument_types import given
from fastweights.cli.parser import Deferred, Parser

TABLES = (
    *("metala-1", "metala-2", "metala-a1", "metala-a2", "metala-a3"),
    *("others", "mesanet-3", "mesanet-4", "costs"),
)
"""The tables of `fastweights.analysis.tables`."""


def table(parser: Parser) -> Deferred:
    """Print the papers' tables, computed from the code: parameter functions, groups, conditions,
    states and costs.
    """
    parser.add_argument(
        "tables",
        type=given,
        nargs="*",
        metavar="TABLE",
        help=f"Tables to print (default: all): {', '.join(TABLES)}",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--markdown", action="store_true", help="Print Markdown, as docs/tables.md has it"
    )
    form.add_argument("--json", action="store_true", help="Print JSON, one record per row")
    return Deferred("table", "table")
