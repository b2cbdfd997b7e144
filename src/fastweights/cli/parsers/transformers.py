"""fastweights transformers"""

from __future__ import annotations

from argparse import REMAINDER

from fastweights.cli.parser import INT8, Deferred, Parser


def transformers(parser: Parser) -> Deferred:
    """Run transformers' own server, or its chat, with our models and linearized ones among those
    that it knows.
    """
    parser.usage = "fastweights transformers {serve,chat} [--int8] [ARGUMENT ...]"
    parser.add_argument("program", choices=("serve", "chat"), help="Program of transformers")
    arguments = parser.add_argument(
        "arguments",
        nargs=REMAINDER,
        help=f"What the program is given, options included; of ours, serve takes --int8. {INT8}",
    )
    arguments.required = False  # before Python 3.12 a remainder counts as required
    return Deferred("transformers", "run_transformers")
