"""Memory that shows what was never written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside the block new memory is full of NaN, so that what is read unwritten shows."""

    def poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
        def filled(*arguments: Any, **options: Any) -> Any:
            x = make(*arguments, **options)
            return x.fill_(torch.nan) if x.is_floating_point() or x.is_complex() else x

        return filled

    places = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
    before = [getattr(place, name) for place, name in places]
    try:
        for (place, name), make in zip(places, before, strict=True):
            setattr(place, name, poisoned(make))
        yield
    finally:
        for (place, name), make in zip(places, before, strict=True):
            setattr(place, name, make)
