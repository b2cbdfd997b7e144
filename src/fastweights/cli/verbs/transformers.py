"""fastweights transformers"""

from __future__ import annotations

from argparse import Namespace

from rich.console import Console
from transformers.cli.transformers import app

from fastweights.engines.transformers.serve import serve_int8, serve_ours

OPTION = "--int8"
"""Ours among the arguments of transformers' server, which has none of that name."""


def run_transformers(chosen: Namespace, _: Console) -> None:
    """Run a program of transformers, which ends with an exit status of its own."""
    serve_ours()
    if OPTION in chosen.arguments and chosen.program == "serve":
        serve_int8()
        chosen.arguments.remove(OPTION)
    app([chosen.program, *chosen.arguments], prog_name="fastweights transformers")
