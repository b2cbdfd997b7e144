"""Kernels of other libraries for NVIDIA GPUs: entries of the kernel table.

None of them is required. Each is imported when it is first taken, and taken only where it is
installed and made for the record. What another library has that no record here can hand over is
left out: FlashKDA normalises queries and keys and activates gates itself, and mamba-ssm's scans
multiply the input by the step that also makes the decay.
"""

from __future__ import annotations

from fastweights.kernels.external.flash_linear_attention import (
    FLA_GATED_DELTA,
    FLA_GLA,
    FLA_KDA,
    FLA_SIMPLE_GLA,
)
from fastweights.kernels.external.qla import FLASH_QLA
from fastweights.kernels.table import Kernel

FASTER: list[Kernel] = [FLASH_QLA]
"""Asked before ours. FlashQLA is warp-specialised, which Triton is not: 0.318 ms forward on an H200
at 8 × 4096 tokens and 16 heads of 128, where fla's Triton takes 0.978 ms (its own
benchmark_results_H200.txt; not measured here).
"""

SLOWER: list[Kernel] = [FLA_SIMPLE_GLA, FLA_GLA, FLA_GATED_DELTA, FLA_KDA]
"""Asked after ours: for those who prefer them."""
