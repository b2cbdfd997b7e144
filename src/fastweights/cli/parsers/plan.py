"""fastweights plan"""

from __future__ import annotations

from argparse import _ArgumentGroup

from fastweights.cli.argument_types import (
    given,
    path,
    positive_integer,
    positive_number,
    sequence_length,
)
from fastweights.cli.parser import Deferred, Parser
from fastweights.cli.parsers.train import add_model

UTILIZATION = 0.4
"""Of a device's peak, unless told otherwise: what good training code reaches on dense models."""
DEVICE = "h100"
VOCABULARY = 32_000


def plan(parser: Parser) -> Deferred:
    """Tell what a training takes before it begins, a published one or one of your own: operations,
    memory per device, hours and cost; and the command that starts it.
    """
    parser.add_argument(
        "recipe",
        type=given,
        nargs="?",
        metavar="RECIPE",
        help="A published training, one that `fastweights list --recipes` names; options change it",
    )
    _add_model(parser.add_argument_group("model"))
    _add_work(parser.add_argument_group("training"))
    _add_devices(parser.add_argument_group("devices"))
    parser.add_argument(
        "--json", type=path, metavar="FILE", help="Write the numbers into this file, too"
    )
    return Deferred("plan", "plan")


def _add_model(group: _ArgumentGroup) -> None:
    add_model(group)
    group.add_argument(
        "--from",
        dest="start",
        type=given,
        metavar="MODEL",
        help="A folder of a run, a checkpoint or a model of this library, of which only the"
        " configuration is read",
    )
    group.add_argument(
        "--vocabulary",
        type=positive_integer,
        metavar="N",
        help=f"Number of tokens that there are (default: the model's, or {VOCABULARY})",
    )


def _add_work(group: _ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--tokens",
        type=positive_number,
        metavar="N",
        help="Number of tokens to train on, such as 15e9 (default: the recipe's)",
    )
    add(
        "--length",
        type=sequence_length,
        help="Number of tokens per sequence (default: the recipe's, or 2048)",
    )
    add(
        "--batch",
        type=positive_integer,
        help="Number of sequences per update (default: the recipe's, or 256)",
    )
    add(
        "--accumulate",
        type=positive_integer,
        help="Number of parts that a device's share of a batch is computed in (default: the fewest"
        " that fit)",
    )
    add("--bf16", action="store_true", help="Compute matrix products in bfloat16, as recipes do")


def _add_devices(group: _ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--device",
        type=given,
        metavar="NAME",
        help="Which accelerator: a100, a100-40gb, rtx4090, l40s, h100, h200 or b200 (default: the"
        f" recipe's, or {DEVICE})",
    )
    add(
        "--devices",
        type=positive_integer,
        metavar="N",
        help="Number of them (default: the recipe's, or 1)",
    )
    add(
        "--shard",
        action="store_true",
        help="Divide weights, gradients and the optimiser's numbers among the devices (FSDP2)",
    )
    add(
        "--recompute",
        action="store_true",
        help="Compute the inside of every block again in the backward pass, to save memory",
    )
    add(
        "--mfu",
        type=positive_number,
        default=UTILIZATION,
        metavar="SHARE",
        help="Share of the devices' peak at which operations run, at most 1 (default: %(default)s)",
    )
    add(
        "--price",
        type=positive_number,
        metavar="PRICE",
        help="Price of a device for an hour, in any currency (default: none, and no cost)",
    )
