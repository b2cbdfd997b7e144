"""The settings that decide about the last bits of a result, for the records of runs."""

from __future__ import annotations

from fastweights.kernels.gemm import products_route
from fastweights.kernels.native import library, memory


def numerics() -> dict[str, str | bool]:
    """What besides streams and seeds decides about numbers here, as JSON.

    Returns:
        ``float32_products``, the route of the torch kernels' matrix products on the CPU (see
        `products`); ``compiled_extension``, whether the C kernels are there; ``page_pool``, whether
        large results are written to pages that are used again (see `pooling`; it changes no number)
    """
    return {
        "float32_products": products_route(),
        "compiled_extension": not library.extension_missing(),
        "page_pool": memory.pooling.enabled,
    }
