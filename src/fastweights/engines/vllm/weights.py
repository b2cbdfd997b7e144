"""Weights of a checkpoint, copied to a model some of whose parts are inside others now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

INSIDE = "mixer"
"""The attribute by which a part that took another's place holds it."""


class Replacement(nn.Module):
    """A module that stands where another stood, which is its attribute `INSIDE` now."""


def load_weights(places: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy weights to the parameters and buffers of these names; one with two names needs one.

    Raises:
        ValueError: A weight is of no part, has another shape, or is missing.
    """
    missing = {id(tensor): name for name, tensor in places.items()}
    for name, weight in weights:
        place = places.get(name)
        if place is None or place.shape != weight.shape:
            has = "no such weight" if place is None else f"there {list(place.shape)}"
            raise ValueError(
                f"the checkpoint has a weight {name} {list(weight.shape)}, and the model {has}; its"
                " config.json belongs to another checkpoint"
            )
        with torch.no_grad():
            place.copy_(weight)
        missing.pop(id(place), None)
    if missing:
        raise ValueError(
            f"the checkpoint lacks {len(missing)} weights of this model, among them"
            f" {', '.join(sorted(missing.values())[:3])}"
        )


def original_names(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model as they were called before parts were replaced; not
    what replacements have beside them.
    """
    replaced = [name for name, part in model.named_modules() if isinstance(part, Replacement)]
    names = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        path = next((path for path in replaced if name.startswith(f"{path}.")), None)
        inside = f"{path}.{INSIDE}."
        if path is None:
            names[name] = tensor
        elif name.startswith(inside):
            names[f"{path}.{name.removeprefix(inside)}"] = tensor
    return names
