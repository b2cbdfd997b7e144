"""Fast evaluations of recurrences, and the table that chooses among them."""

from fastweights.kernels.chunked import CHUNK_LOOP, STEP
from fastweights.kernels.decay import CHUNKED_DECAY
from fastweights.kernels.native import NATIVE_DECAY, NATIVE_DELTA, NATIVE_SCAN
from fastweights.kernels.table import TABLE, Kernel, explain, only, select

TABLE.extend([NATIVE_SCAN, NATIVE_DECAY, NATIVE_DELTA, STEP, CHUNKED_DECAY, CHUNK_LOOP])

__all__ = ["TABLE", "Kernel", "explain", "only", "select"]
