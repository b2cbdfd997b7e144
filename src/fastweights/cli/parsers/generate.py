"""fastweights generate"""

from __future__ import annotations

from fastweights.cli.argument_types import (
    given,
    non_negative_number,
    positive_integer,
    positive_number,
    utf8,
)
from fastweights.cli.parser import (
    MODEL_SOURCE,
    Deferred,
    Parser,
    add_device,
    add_int8,
    add_plugins,
    add_seed,
)


def generate(parser: Parser) -> Deferred:
    """Continue a text with a model, token by token, in constant memory."""
    parser.add_argument("checkpoint", type=given, help=f"The model: {MODEL_SOURCE}")
    parser.add_argument(
        "--prompt",
        type=utf8,
        default="\n",
        help="Text that the model continues; an empty one begins a text (default: a new line)",
    )
    parser.add_argument(
        "--tokens",
        type=positive_integer,
        default=300,
        help="Number of tokens to generate, fewer where the text ends (default: %(default)s)",
    )
    add_temperature(parser)
    parser.add_argument(
        "--top-k",
        type=positive_integer,
        metavar="K",
        help="Draw each token among the K likeliest only (default: among all)",
    )
    add_seed(parser)
    parser.add_argument(
        "--tol",
        type=positive_number,
        help="Relative residual at which Mesa layers stop solving, such as 1e-4"
        " (default: they use all their steps)",
    )
    add_int8(parser)
    add_plugins(parser)
    add_device(parser)
    return Deferred("generate", "generate")


def add_temperature(parser: Parser) -> None:
    """How tokens are drawn."""
    parser.add_argument(
        "--temperature",
        type=non_negative_number,
        default=0.8,
        help="Divides the logits before a token is drawn; 0 takes the likeliest token"
        " (default: %(default)s)",
    )
