"""fastweights transformers"""

from __future__ import annotations

from argparse import Namespace

from rich.console import Console
from transformers.cli.transformers import app

from fastweights.engines.transformers.serve import serve_ours


def run_transformers(chosen: Namespace, _: Console) -> None:
    """Run a program of transformers, which ends with an exit status of its own."""
    serve_ours()
    app([chosen.program, *chosen.arguments], prog_name="fastweights transformers")
