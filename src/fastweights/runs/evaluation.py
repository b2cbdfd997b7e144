"""Looking at a model without training it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Inside the block the model is in eval mode and there are no gradients."""
    trained = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(trained)
