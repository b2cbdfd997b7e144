"""How a model's recurrences are evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fastweights.methods import Method, set_method
from fastweights.models.hf import FastWeightsForCausalLM, FastWeightsModel


@contextmanager
def use_method(model: nn.Module, method: Method) -> Iterator[None]:
    """Evaluate every mixer of a language model by `method`, for the length of a block.

    Go backward inside the block, where activations are checkpointed.

    Args:
        model: A language model of this library, or a wrapper around one.
        method: Such as ``TimeSharded(group)``, by which the model reads slices of sequences that
            `divide` made; or ``Recurrent()``.

    Raises:
        TypeError: There is no language model in `model`.
    """
    heads = [part for part in model.modules() if isinstance(part, FastWeightsForCausalLM)]
    found = [model] if isinstance(model, FastWeightsModel) else [head.model for head in heads]
    if not found:
        raise TypeError(
            f"a {type(model).__name__} has no FastWeightsForCausalLM in it; the method of other"
            " models cannot be chosen: pass `method` to a mixer's forward"
        )
    with set_method(found, method):
        yield
