"""The `fastweights` command. A verb is a function that declares its arguments and returns what runs
them.
"""

from __future__ import annotations

import os
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console

from fastweights.cli.analyze import analyze
from fastweights.cli.arguments import Parser
from fastweights.cli.bench import bench
from fastweights.cli.eval import eval_
from fastweights.cli.generate import generate
from fastweights.cli.imports import imports
from fastweights.cli.linearize import linearize
from fastweights.cli.mixers import mixers
from fastweights.cli.reproduce import reproduce_verb
from fastweights.cli.sweep import sweep
from fastweights.cli.table import table
from fastweights.cli.train import train
from fastweights.render.docstrings import first_paragraph

Verb = Callable[[Parser], Callable[[Namespace, Console], None]]
"""Adds arguments to the parser of the verb; the first line of its docstring is the verb's help."""

VERBS: dict[str, Verb] = {
    "train": train,
    "generate": generate,
    "import": imports,
    "list": mixers,
    "table": table,
    "bench": bench,
    "analyze": analyze,
    "eval": eval_,
    "sweep": sweep,
    "reproduce": reproduce_verb,
    "linearize": linearize,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status: 0, 2 for what its user can put right, 130 when
    interrupted.
    """
    chosen = _parser().parse_args(arguments)
    try:
        chosen.run(chosen, Console(highlight=False))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if chosen.debug:
            raise
        sys.stderr.write(f"fastweights: {_explain(error)}\n")
        return 2
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="fastweights", description="Linear-time sequence models: train, decode, compare."
    )
    parser.add_argument("--version", action="version", version=f"fastweights {_version()}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verbs = parser.add_subparsers(metavar="VERB", required=True, parser_class=Parser)
    for name, verb in VERBS.items():
        summary = first_paragraph(verb) or name
        subparser = verbs.add_parser(name, help=summary, description=summary)
        subparser.add_argument("--debug", action="store_true", default=SUPPRESS, help=SUPPRESS)
        subparser.set_defaults(run=verb(subparser))
    return parser


def _explain(error: Exception) -> str:
    """One line; an error that no one foresaw has its type in front."""
    message = " ".join(str(error).split())
    if isinstance(error, ValueError | OSError) and message:
        return message
    return f"{type(error).__name__}: {message} (--debug shows where)"


def _version() -> str:
    try:
        return version("fastweights")
    except PackageNotFoundError:
        return "(not installed)"
