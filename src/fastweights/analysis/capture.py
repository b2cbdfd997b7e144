"""The recurrences that a model evaluates on a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn

from fastweights.mixer import Mixer, Projection


@contextmanager
def capture_projections(model: nn.Module) -> Iterator[dict[str, Projection]]:
    """Inside the block, every mixer of `model` leaves what its last forward evaluated, under its
    path in the model.

    The streams are projected once more, without gradients; the forward itself is not touched.
    """
    found: dict[str, Projection] = {}
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if isinstance(module, Mixer):
                hook = module.register_forward_hook(
                    partial(_store_projection, found, path), with_kwargs=True
                )
                hooks.callback(hook.remove)
        yield found


def _store_projection(
    found: dict[str, Projection], path: str, mixer: Mixer, args: Any, kwargs: Any, _: Any
) -> None:
    given = signature(mixer.project_all).bind(
        *args, **{n: value for n, value in kwargs.items() if n != "method"}
    )
    with torch.no_grad():
        found[path] = mixer.project_all(*given.args, **given.kwargs)
