"""Marks of tests of the compiled extension."""

from __future__ import annotations

import pytest
import torch

from fastweights.kernels.native import library

compiled = pytest.mark.skipif(
    library.library() is None, reason="the compiled extension is not built"
)
_no_avx2 = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="this CPU has no AVX2"
)
every_lesser_isa = pytest.mark.parametrize(
    "isa", ["portable", pytest.param("avx2", marks=_no_avx2)]
)
"""Instruction sets besides the one that is chosen here, as the suffixes of the extension's
functions.
"""
