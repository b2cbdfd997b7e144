"""The `fastweights` command.

What a verb accepts is declared in `parsers`, what it does is written in `verbs`: the first imports
nothing heavy, the second is imported when the verb is used.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from importlib.metadata import PackageNotFoundError, version
from io import StringIO, TextIOWrapper
from typing import TYPE_CHECKING, Any

from fastweights.cli.parser import Parser, Verb, add_verbs
from fastweights.cli.parsers.linearize import LinearizeVerb
from fastweights.cli.parsers.measuring import (
    BenchVerb,
    ListVerb,
    RecipesVerb,
    ReproduceVerb,
    TableVerb,
)
from fastweights.cli.parsers.models import (
    AnalyzeVerb,
    ChatVerb,
    CheckVerb,
    EvalVerb,
    ExportVerb,
    GenerateVerb,
    ImportVerb,
    PatchVerb,
    QuantizeVerb,
    TransformersVerb,
)
from fastweights.cli.parsers.training import PlanVerb, SweepVerb, TrainVerb

if TYPE_CHECKING:
    from rich.console import Console

VERBS: dict[str, type[Verb]] = {
    "train": TrainVerb,
    "plan": PlanVerb,
    "recipes": RecipesVerb,
    "generate": GenerateVerb,
    "chat": ChatVerb,
    "import": ImportVerb,
    "export": ExportVerb,
    "quantize": QuantizeVerb,
    "patch": PatchVerb,
    "transformers": TransformersVerb,
    "list": ListVerb,
    "table": TableVerb,
    "bench": BenchVerb,
    "analyze": AnalyzeVerb,
    "eval": EvalVerb,
    "check": CheckVerb,
    "sweep": SweepVerb,
    "reproduce": ReproduceVerb,
    "linearize": LinearizeVerb,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: the words after ``fastweights``; None for those of this process

    Returns:
        the exit status: 0, 2 for an error that the user can put right, 130 when interrupted, and
        130 or 143 when a signal stopped a run that can be resumed; what `patch` runs ends with a
        status of its own
    """
    with nullcontext() if _is_first("LOCAL_RANK") else redirect_stderr(StringIO()):
        chosen = build_parser().parse_args(arguments)
    if isinstance(sys.stdout, TextIOWrapper):  # names of files need not be UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = chosen.run(chosen, plain_console(quiet=not _is_first("RANK")))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if chosen.debug:
            raise
        if _may_say(error):
            sys.stderr.write(f"fastweights: {_explain(error)}\n")
        return 2
    finally:
        _leave()
    return status or 0


def build_parser() -> ArgumentParser:
    """The parser of the whole command, every verb with its options and their help."""
    parser = Parser(
        prog="fastweights", description="Linear-time sequence models: train, decode, compare."
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"fastweights {_version()}",
        help="Print the version and exit",
    )
    parser.add_argument("--debug", action="store_true", help="Show the whole traceback of an error")
    add_verbs(parser, "VERB", VERBS)
    return parser


def plain_console(**settings: Any) -> Console:
    """A console that prints text as it is: nothing in it is markup, such as square brackets in the
    name of a file."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, **settings)


def _is_first(rank: str) -> bool:
    """Whether a launcher such as torchrun started this process as the first, or nothing did."""
    return os.environ.get(rank, "0") == "0"


def _may_say(error: Exception) -> bool:
    """Whether this process says what went wrong; one does for all of a group.

    Before they have met, all of a machine fail alike, except for who waits for another.
    """
    if "RANK" not in os.environ:
        return True
    from fastweights.errors import LostProcessError, OtherProcessError
    from fastweights.training.loop.processes import has_group, is_first_to_speak

    if isinstance(error, OtherProcessError):
        return False
    if has_group():
        return is_first_to_speak()
    return isinstance(error, LostProcessError) or _is_first("LOCAL_RANK")


def _leave() -> None:
    """End the group of processes, if a verb has joined one."""
    processes = sys.modules.get("fastweights.training.loop.processes")
    if "RANK" in os.environ and processes is not None:
        processes.leave_processes()


def _explain(error: Exception) -> str:
    """An error in one line; one that no code of ours raises has its type in front."""
    message = " ".join(str(error).split())
    if isinstance(error, ValueError | OSError) and message:
        return message
    return f"{type(error).__name__}: {message} (add --debug to see where it was raised)"


def _version() -> str:
    try:
        return version("fastweights")
    except PackageNotFoundError:
        return "(not installed)"
