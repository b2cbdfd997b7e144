"""Capture of the recurrences that a model evaluates on a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastweights.mixer import Mixer, Projection
from fastweights.mixers.mesa import mesa_layers
from fastweights.recurrence import Mesa, Recurrence, Signed


@contextmanager
def capture_projections(model: nn.Module) -> Iterator[dict[str, Projection]]:
    """Store what every mixer of `model` evaluates, under its path in the model, for the length of a
    block.

    The streams are projected a second time, without gradients; the forward itself is not touched.
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
    given = signature(mixer.project_all).bind(*args, **kwargs)
    with torch.no_grad():
        found[path] = mixer.project_all(*given.args, **given.kwargs)


@torch.no_grad()
def mesa_records(model: nn.Module, input_ids: Tensor) -> list[Mesa]:
    """Return the linear systems that every Mesa layer solves while a model reads a text from an
    empty memory.

    They are for `solver_statistics` and `condition_numbers`, by token, head and layer (MesaNet Fig.
    7 and 13).

    Args:
        model: A model of this library.
        input_ids: Token ids ``[b t]``.

    Returns:
        A record per Mesa layer, in order.

    Raises:
        ValueError: If the model has no Mesa layer.
    """
    wanted = mesa_layers(model)
    with capture_projections(model) as found:
        model(input_ids, use_cache=False)
    of = {model.get_submodule(path): projection.recurrence for path, projection in found.items()}
    return [_systems(of[layer]) for layer in wanted]


def _systems(record: Recurrence) -> Mesa:
    """The record of the systems that a Mesa layer's record solves."""
    return cast(Mesa, record.without_signs() if isinstance(record, Signed) else record)
