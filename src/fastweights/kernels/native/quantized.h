/* What Python hands over for the product of a few rows with a weight of bytes. */
#ifndef FASTWEIGHTS_QUANTIZED_H
#define FASTWEIGHTS_QUANTIZED_H

#include "problem.h"

/* Everything is contiguous: x [rows inputs], weight [outputs inputs], scale [outputs], bias
 * [outputs] or NULL, y [rows outputs]. */
typedef struct {
    int64_t rows, inputs, outputs, threads;
    const float *x;
    const int8_t *weight;
    const float *scale, *bias;
    float *y;
} QuantizedProduct;

#endif
