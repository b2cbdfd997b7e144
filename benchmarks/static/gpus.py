"""Rates of GPUs, as fractions of their data sheets that programs reach."""

from __future__ import annotations

from typing import NamedTuple

from fastweights.budget import ACCELERATORS, Accelerator
from fastweights.kernels.triton.chips import Chip

REACHED_BANDWIDTH = 0.9
REACHED_PRODUCTS = 0.8
"""Measured on an H200: a copy moves 4.3 of 4.8 TB/s, a large product makes 790 of 989 TFLOP/s."""

SPECIAL_PER_CLOCK = 16
"""Results of special-function units, per multiprocessor and clock."""

ISSUED_PER_CLOCK = 4
"""Instructions that the schedulers of a multiprocessor issue in a clock, each of one warp."""


class Gpu(NamedTuple):
    """Attributes:
    sheet: what its data sheet says
    clock: Hz under load
    """

    sheet: Accelerator
    clock: float

    @property
    def chip(self) -> Chip:
        """What kernels are configured for."""
        assert self.sheet.chip is not None
        return self.sheet.chip

    @property
    def bandwidth(self) -> float:
        """Bytes/s."""
        return REACHED_BANDWIDTH * self.sheet.bandwidth

    @property
    def half_products(self) -> float:
        """FLOP/s."""
        return REACHED_PRODUCTS * self.sheet.bf16

    @property
    def tf32_products(self) -> float:
        """FLOP/s."""
        return self.half_products / 2

    @property
    def special(self) -> float:
        """Results/s."""
        return self.chip.multiprocessors * SPECIAL_PER_CLOCK * self.clock

    @property
    def issue(self) -> float:
        """Instructions of warps/s."""
        return self.chip.multiprocessors * ISSUED_PER_CLOCK * self.clock


GPUS = {
    "A100": Gpu(ACCELERATORS["a100"], 1.41e9),
    "RTX 4090": Gpu(ACCELERATORS["rtx4090"], 2.52e9),
    "H200": Gpu(ACCELERATORS["h200"], 1.75e9),
    "B200": Gpu(ACCELERATORS["b200"], 1.85e9),
}
"""The A100 with 80 GB; an H100 is an H200 with 3.35 TB/s."""
