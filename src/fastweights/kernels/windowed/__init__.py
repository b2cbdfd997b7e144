"""`WindowedLinear` in blocks of queries, time and memory linear in T, with a hand-written backward
that recomputes.

A block of c queries sees a strip of w + c keys, its own and the w before them, and S, which holds
all older ones:

    near = e^(s - c)        where the key is in the window        N = near (V ‖ 1)
    far  = φ(Q) φ(K)ᵀ       where it is before it                 F = far (V ‖ 1) + φ(Q) S

and o is what `WindowedLinear.mix_window_and_memory` makes of N and F. Within a row the window
begins at the column after the query's own number, so that one pattern serves all blocks, and the
keys of a block's first c columns are those that S takes up after it. Padding is moved behind the
tokens first. Kept for the backward are the streams and S at time blocks' starts.
"""

from __future__ import annotations

from fastweights.kernels.table import Kernel
from fastweights.kernels.windowed.forward import blockwise_windows
from fastweights.recurrence.windowed import WindowedLinear

BLOCKED_WINDOWS = Kernel(
    "windows and linear memory, block by block (torch)",
    WindowedLinear,
    blockwise_windows,
    opaque=True,
)
