"""Fast evaluations of recurrences, and the table that chooses among them."""

from fastweights.kernels.attention import FUSED_ATTENTION, WINDOWED_ATTENTION
from fastweights.kernels.chunked import CHUNK_LOOP, STEP
from fastweights.kernels.composed import AMPLIFIED, BONUS, NORMALIZED
from fastweights.kernels.decay import CHUNKED_DECAY
from fastweights.kernels.delta import CHUNKED_DELTA
from fastweights.kernels.mesa import BLOCKED_MESA
from fastweights.kernels.native import NATIVE_DECAY, NATIVE_DELTA, NATIVE_SCAN
from fastweights.kernels.native.mesa import NATIVE_MESA
from fastweights.kernels.native.windowed import NATIVE_WINDOW
from fastweights.kernels.scan import BLOCKED_SCAN
from fastweights.kernels.signed import SIGNED
from fastweights.kernels.table import TABLE, Kernel, explain, only, select
from fastweights.kernels.windowed import BLOCKED_WINDOWS

COMPILED = [NATIVE_SCAN, NATIVE_DECAY, NATIVE_DELTA, NATIVE_MESA, NATIVE_WINDOW]
BLOCKED = [BLOCKED_SCAN, CHUNKED_DECAY, CHUNKED_DELTA, BLOCKED_MESA, BLOCKED_WINDOWS]
COMPOSED = [AMPLIFIED, NORMALIZED, SIGNED]
TABLE.extend(
    [*COMPILED, *COMPOSED, STEP, BONUS, *BLOCKED, WINDOWED_ATTENTION, FUSED_ATTENTION, CHUNK_LOOP]
)

__all__ = ["TABLE", "Kernel", "explain", "only", "select"]
