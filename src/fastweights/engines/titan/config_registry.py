"""What torchtitan reads with ``--module fastweights.engines.titan --config FLAVOUR``.

A flavour is the name of a preset, such as ``metala-360m`` or ``mesanet-440m``, or the folder of a
model of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from fastweights.engines.titan.names import find_config, flavours
from fastweights.engines.titan.specification import trainer_config

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer


def __getattr__(flavour: str) -> Callable[[], Trainer.Config]:
    if flavour.startswith("_"):
        raise AttributeError(flavour)
    try:
        find_config(flavour)
    except ValueError as error:
        raise AttributeError(str(error)) from error
    return partial(trainer_config, flavour)


def __dir__() -> list[str]:
    return flavours()
