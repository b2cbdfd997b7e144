"""Rates of GPUs, as fractions of their data sheets that programs reach."""

from __future__ import annotations

from typing import NamedTuple

REACHED_BANDWIDTH = 0.9
REACHED_PRODUCTS = 0.8
"""Measured on an H200: a copy moves 4.3 of 4.8 TB/s, a large product makes 790 of 989 TFLOP/s."""

SPECIAL_PER_CLOCK = 16
"""Results of special-function units, per multiprocessor and clock."""

ISSUED_PER_CLOCK = 4
"""Instructions that the schedulers of a multiprocessor issue in a clock, each of one warp."""


class Gpu(NamedTuple):
    """Attributes:
    capability: of the chip in `fastweights.kernels.triton.chips.CHIPS`
    multiprocessors: how many
    sheet_bandwidth: bytes/s of memory
    sheet_products: FLOP/s of 16-bit products, summed in float32, without sparsity
    clock: Hz under load
    """

    capability: int
    multiprocessors: int
    sheet_bandwidth: float
    sheet_products: float
    clock: float

    @property
    def bandwidth(self) -> float:
        """Bytes/s."""
        return REACHED_BANDWIDTH * self.sheet_bandwidth

    @property
    def half_products(self) -> float:
        """FLOP/s."""
        return REACHED_PRODUCTS * self.sheet_products

    @property
    def tf32_products(self) -> float:
        """FLOP/s."""
        return self.half_products / 2

    @property
    def special(self) -> float:
        """Results/s."""
        return self.multiprocessors * SPECIAL_PER_CLOCK * self.clock

    @property
    def issue(self) -> float:
        """Instructions of warps/s."""
        return self.multiprocessors * ISSUED_PER_CLOCK * self.clock


GPUS = {
    "A100": Gpu(80, 108, 2.04e12, 312e12, 1.41e9),
    "RTX 4090": Gpu(89, 128, 1.01e12, 165e12, 2.52e9),
    "H200": Gpu(90, 132, 4.8e12, 989e12, 1.75e9),
    "B200": Gpu(100, 148, 8.0e12, 2250e12, 1.85e9),
}
"""The A100 with 80 GB; an H100 is an H200 with 3.35 TB/s."""
