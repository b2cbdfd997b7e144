"""Operations of layers, as records that the kernel table knows: `explain(Convolution(…))`."""

from fastweights.kernels.table import TABLE
from fastweights.ops.convolution import CONVOLUTION_KERNELS, Convolution, convolve
from fastweights.ops.normalization import (
    NORM_KERNELS,
    LayerNorm,
    RMSNorm,
    layer_normalize,
    rms_normalize,
)
from fastweights.ops.product import PRODUCT_KERNELS, Product, ProductGroup, multiply, multiply_each
from fastweights.ops.quantized import (
    QUANTIZED_KERNELS,
    Int4Weight,
    Int8Weight,
    QuantizedProduct,
    multiply_quantized,
)
from fastweights.ops.rotation import ROTATION_KERNELS, Rotation, rotate

TABLE[:0] = [*CONVOLUTION_KERNELS, *NORM_KERNELS, *PRODUCT_KERNELS, *QUANTIZED_KERNELS]
TABLE[:0] = ROTATION_KERNELS

__all__ = [
    "Convolution",
    "Int4Weight",
    "Int8Weight",
    "LayerNorm",
    "Product",
    "ProductGroup",
    "QuantizedProduct",
    "RMSNorm",
    "Rotation",
    "convolve",
    "layer_normalize",
    "multiply",
    "multiply_each",
    "multiply_quantized",
    "rms_normalize",
    "rotate",
]
