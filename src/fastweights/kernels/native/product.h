/* What Python hands over for the product of a few rows with a weight. */
#ifndef FASTWEIGHTS_PRODUCT_H
#define FASTWEIGHTS_PRODUCT_H

#include "problem.h"

/* Outputs that one task computes */
#define PRODUCT_OUTPUTS 64

/* Everything is contiguous: x [rows inputs], weight [outputs inputs], bias [outputs] or NULL, y [rows outputs]. */
typedef struct {
    int64_t rows, inputs, outputs, threads;
    const float *x, *weight, *bias;
    float *y;
} Product;

#endif
