"""Who defines the operators LinearAttention and CausalConvWithState."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Domain:
    """A set of ONNX operators that has both.

    Attributes:
        name: as a graph names it; "" is ONNX's own
        version: of the set
        opset: the version of ONNX's own operators that graphs with it use
    """

    name: str
    version: int
    opset: int


DOMAINS = {"com.microsoft": Domain("com.microsoft", 1, 23), "ai.onnx": Domain("", 27, 27)}
"""By the names that the command takes. Those of ONNX itself are in no released version of the
standard yet: ONNX Runtime 1.32 runs them with ``ALLOW_RELEASED_ONNX_OPSET_ONLY=0``."""
