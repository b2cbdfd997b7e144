"""Landmarks that read keys as they were before the rotary positions of their model."""

from __future__ import annotations

from typing import Any

from fastweights.features import Landmarks
from fastweights.linearize import branches
from fastweights.linearize.convert.rotary import find_turnings


def turned(model: Any) -> Any:
    """A linearized model, its landmarks so from now on, if it has any."""
    if any(isinstance(part, Landmarks) for part in model.modules()):
        turnings = find_turnings(model)
        for layer, branch in branches(model).items():
            turnings[layer].write(*(m for m in branch.modules() if isinstance(m, Landmarks)))
    return model
