"""Fast evaluations of recurrences, and the table that chooses among them."""

from fastweights.kernels.attention import (
    FUSED_ATTENTION,
    NATIVE_TOKEN_ATTENTION,
    TOKEN_ATTENTION,
    WINDOWED_ATTENTION,
)
from fastweights.kernels.chunked import CHUNK_LOOP, MINIBATCHES, STEP
from fastweights.kernels.composed import (
    AMPLIFIED,
    BESIDE_WINDOW,
    BONUS,
    BONUS_TOKEN,
    HEAD_GROUPS,
    NORMALIZED,
    PRECONDITIONED,
    SELECTIVE,
    SIGNED,
    SLOTS,
    SUBSTEPS,
)
from fastweights.kernels.constant import CONVOLUTION, LONG_CONVOLUTION
from fastweights.kernels.decay import CHUNKED_DECAY
from fastweights.kernels.delta import CHUNKED_DELTA, CHUNKED_DPLR
from fastweights.kernels.external import FASTER, SLOWER
from fastweights.kernels.gemm import probe_products, products
from fastweights.kernels.mesa import BLOCKED_MESA
from fastweights.kernels.native import (
    NATIVE_DECAY,
    NATIVE_DELTA,
    NATIVE_DPLR,
    NATIVE_IN_PAGES,
    NATIVE_SCAN,
    NATIVE_SELECTIVE,
)
from fastweights.kernels.native.bonus import NATIVE_BONUS_TOKEN
from fastweights.kernels.native.library import MissingKernelsWarning
from fastweights.kernels.native.memory import pooling
from fastweights.kernels.native.mesa import NATIVE_MESA
from fastweights.kernels.native.windowed import (
    NATIVE_WINDOW,
    NATIVE_WINDOW_IN_PAGES,
    NATIVE_WINDOWS,
)
from fastweights.kernels.numerics import numerics
from fastweights.kernels.pages import COPIED_PAGES
from fastweights.kernels.rehearsal import rehearse
from fastweights.kernels.scan import BLOCKED_SCAN
from fastweights.kernels.selective import BLOCKED_SELECTIVE
from fastweights.kernels.table import (
    TABLE,
    Kernel,
    explain,
    only,
    prefer,
    register,
    run_fastest,
    select,
    takers,
)
from fastweights.kernels.triton import TRITON
from fastweights.kernels.windowed import BLOCKED_WINDOWS

COMPILED = [NATIVE_SCAN, NATIVE_SELECTIVE, NATIVE_DECAY, NATIVE_DELTA, NATIVE_DPLR, NATIVE_MESA]
COMPILED += [NATIVE_WINDOW, NATIVE_WINDOWS, NATIVE_BONUS_TOKEN]
COMPOSED = [BONUS_TOKEN, AMPLIFIED, NORMALIZED, BLOCKED_SELECTIVE, SELECTIVE, SIGNED]
COMPOSED += [BESIDE_WINDOW, SLOTS, SUBSTEPS, PRECONDITIONED, HEAD_GROUPS]
BLOCKED = [BLOCKED_SCAN, CHUNKED_DECAY, CONVOLUTION, CHUNKED_DELTA, CHUNKED_DPLR]
BLOCKED += [LONG_CONVOLUTION, BLOCKED_MESA, BLOCKED_WINDOWS, MINIBATCHES]
ATTENTION = [WINDOWED_ATTENTION, FUSED_ATTENTION]
IN_PAGES = [NATIVE_WINDOW_IN_PAGES, NATIVE_IN_PAGES, COPIED_PAGES]

# The order in which the kernels of a rule are asked: C, which reads the CPU's streams, and Triton,
# which reads a GPU's, with other libraries' kernels before and behind it; then one token, at last
# by its definition; many tokens in blocks; what is left, chunk after chunk.
TABLE.extend([*COMPILED, *FASTER, *TRITON, *SLOWER])
TABLE.extend(
    [
        *COMPOSED,
        NATIVE_TOKEN_ATTENTION,
        TOKEN_ATTENTION,
        STEP,
        BONUS,
        *BLOCKED,
        *ATTENTION,
        CHUNK_LOOP,
    ]
)
TABLE.extend(IN_PAGES)

__all__ = [
    "TABLE",
    "Kernel",
    "MissingKernelsWarning",
    "explain",
    "numerics",
    "only",
    "pooling",
    "prefer",
    "probe_products",
    "products",
    "register",
    "rehearse",
    "run_fastest",
    "select",
    "takers",
]
