"""The names by which transformers knows a linearized model's attention."""

from __future__ import annotations

from transformers import PreTrainedModel

from fastweights.linearize.convert.attention_layers import CannotLinearize
from fastweights.linearize.convert.transformers_seams import configurations, set_implementation

PREFIX = "linearized_"
SOFTMAX = ("sdpa", "eager")
"""The softmax attentions that unconverted layers and teachers can use."""


def implementation_name(softmax: str) -> str:
    """Return the name of the attention implementation of a linearized model.

    Args:
        softmax: The implementation that its softmax layers use, one of `SOFTMAX`.
    """
    return PREFIX + softmax


def softmax_name(implementation: str | None) -> str:
    """Return the softmax implementation that a name, with our prefix or without it, stands for.

    Raises:
        CannotLinearize: If it is none of `SOFTMAX`.
    """
    name = str(implementation).removeprefix(PREFIX)
    if name not in SOFTMAX:
        raise CannotLinearize(
            f"attn_implementation={name!r}",
            "softmax layers beside linear ones go through sdpa or eager",
            "load the model with attn_implementation='sdpa', which takes the fused kernels"
            " there are",
        )
    return name


def use_softmax(model: PreTrainedModel, softmax: str) -> None:
    """Let the softmax layers and the teacher of a linearized model use the implementation
    `softmax`."""
    set_implementation(configurations(model), implementation_name(softmax))
