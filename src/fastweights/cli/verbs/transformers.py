"""fastweights transformers"""

from __future__ import annotations

from argparse import Namespace

from rich.console import Console
from transformers.cli.transformers import app

from fastweights.engines.transformers.serve import serve_ours, serve_rounded

OPTIONS = {"--int8": 8, "--int4": 4}
"""Ours among the arguments of transformers' server, which has none of these names, and bits."""


def run_transformers(chosen: Namespace, _: Console) -> None:
    """Run a program of transformers, which ends with an exit status of its own."""
    serve_ours()
    given = [word for word in chosen.arguments if word in OPTIONS]
    if given and chosen.program == "serve":
        serve_rounded(_only(given))
        chosen.arguments = [word for word in chosen.arguments if word not in OPTIONS]
    app([chosen.program, *chosen.arguments], prog_name="fastweights transformers")


def _only(given: list[str]) -> int:
    """The bits that one of our options asks for."""
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} say how weights are rounded; give one of them")
    return OPTIONS[given[0]]
